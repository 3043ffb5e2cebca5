"""Runs that figures share: trained once, kept under runs/figures and used again.

Delete a folder there to run it anew. GRIL_WORKERS (default 2) is how many train at a time, each on
one core. Of the comparisons, which take hours, docs/runs.jsonl keeps what every run came to and its
curves, without the weights, so that their tables and pictures can be made again at once; without a
run's line there, and its folder, it is trained anew.
"""
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tqdm import tqdm

import train
from files.runs import MACHINE, read_json
from files.whole import write_json
from machine.errors import Missing
from machine.options import flag
from pictures.plots import IMAGES, metrics
from tasks import TASKS

DEFAULTS = dict(f=10, n=10, model="gril", report_tokens=0)      # not in names: figures share runs
QUICK = dict(steps=20, batch=32, tasks=200)                     # an in-context task; one with files
QUICK_FILES = dict(steps=4, batch=2, length=32, warmup=1, evaluate_every=2)
KEPT = IMAGES.parent / "runs.jsonl"
CURVES = "step", "train_loss", "loss", "gd_loss", "accuracy", "bits", "perplexity"
CODE = ("gril.py", "baselines.py", "tasks.py", "lra.py", "lm.py", "train.py", "files/*.py",
        "machine/*.py")                         # on which a run depends


def runs(settings, quick, sweep=False, keep=False):
    """Results of several trainings, GRIL_WORKERS at a time; one that is there is read, not run.

    In a sweep of rates a run may diverge, which its result says; elsewhere that is an error.
    """
    jobs = dict(job(options, quick) for options in settings)
    lines = kept() if keep else {}
    there = {folder: found for folder in jobs
             if (found := result(folder) or lines.get(folder.name))}
    check(jobs, there)
    keep_lines(there.values() if keep and not quick else ())
    missing = [(folder, options) for folder, options in jobs.items() if folder not in there]
    if quick:
        list(map(run, missing))
    elif missing:
        workers = os.environ.get("GRIL_WORKERS", "2")
        if not workers.isdecimal() or int(workers) < 1:
            raise Missing(f"GRIL_WORKERS must be 1 or more, got {workers}")
        with ProcessPoolExecutor(int(workers), multiprocessing.get_context("spawn")) as pool:
            ended = tqdm(pool.map(run, missing), total=len(missing), desc="training", ncols=80)
            for folder, _ in zip(dict(missing), ended):
                keep_lines([result(folder)] if keep else ())    # a sweep that is stopped keeps it
    there |= {folder: result(folder) for folder, _ in missing}
    for folder in jobs:
        if "diverged" in there[folder] and not sweep:
            raise Missing(f"{folder}: {there[folder]['diverged']}")
    return [there[job(options, quick)[0]] for options in settings]


def result(folder):
    """What a run came to, or None if it has not come to its end."""
    path = folder / "result.json"
    return dict(read_json(path), folder=folder) if path.exists() else None


def kept():
    """name -> result of the runs in docs, the curves in it."""
    lines = KEPT.read_text(encoding="utf-8").splitlines() if KEPT.exists() else []
    return {r["folder"]: dict(r, folder=Path("runs/figures", r["folder"]))
            for r in map(json.loads, lines)}


def keep_lines(results):
    """A line for each new run at the end of docs/runs.jsonl, the curves with five digits."""
    there = kept() if results else {}                           # read once, not for each
    for r in (r for r in results if r["folder"].name not in there):
        with open(KEPT, "a", encoding="utf-8") as file:
            rows = [] if "diverged" in r else metrics(r)
            curves = {name: [float(f"{float(row[name]):.5g}") for row in rows]
                      for name in CURVES if rows and name in rows[0]}
            file.write(json.dumps(dict(r, folder=r["folder"].name, curves=curves)) + "\n")


def check(jobs, there):
    """Refuses runs of other numbers than would be trained now; says where the code is newer."""
    code = [path for pattern in CODE for path in Path(train.__file__).parent.glob(pattern)]
    newest = max(code, key=lambda path: path.stat().st_mtime)
    differ, older = [], []
    for folder, was in there.items():
        path, (_, now) = folder / "result.json", train.numbers(arguments(folder, jobs[folder]))
        differ += [f"{folder}: {name} was {was[name]}, is {now[name]} now" for name in now
                   if name not in MACHINE and was.get(name, now[name]) != now[name]]
        if path.exists() and path.stat().st_mtime < newest.stat().st_mtime:
            older.append(str(folder))
    if differ:
        raise Missing("\n".join(["there are runs with other numbers; delete their folders, and "
                                 f"their lines in {KEPT.name}, to train them anew", *differ]))
    if older:
        print(f"{newest.name} is newer than these runs, which are used as they are; delete their "
              f"folders, and lines in {KEPT.name}, to train them anew: {' '.join(older)}",
              file=sys.stderr)


def five(quick, **options):
    """Results of five seeds (quick: of one)."""
    return runs([dict(options, seed=s) for s in seeds(quick)], quick)


def seeds(quick):
    return range(1 if quick else 5)


def job(options, quick):
    """A run's folder, named by its settings, and these; quick ones are cut short."""
    if quick:
        few = QUICK if options["task"] in TASKS else QUICK_FILES
        options = {**options, **few, "steps": min(few["steps"], options.get("steps", few["steps"]))}
    options = {key: value for key, value in options.items() if DEFAULTS.get(key) != value}
    name = "-".join([options["task"], *(f"{key}{value}" for key, value in options.items()
                                        if key != "task")])
    return Path("runs/figures") / name, options


def arguments(folder, options):
    """A run as words of train.py's command line; compiled where that takes less than it saves."""
    words = ["--threads", "1", "--out", str(folder), "--force", "--quiet"]
    steps = options.get("steps", 1000)
    image = options["task"] == "image" and options.get("model") != "lru"    # complex: not compiled
    long = image or options.get("recipe") == "paper" or steps >= 30_000
    words += ["--compile"] if long and steps >= 100 else []
    for name, value in options.items():
        words += [flag(name)] if value is True else [flag(name), str(value)]
    return train.arguments(words)


def run(job):
    args = arguments(*job)
    try:
        train.train(args)
    except FloatingPointError as error:         # a rate too high, say: the sweep goes on without it
        diverged = dict(train.numbers(args)[1], diverged=str(error))
        write_json(args.out / "result.json", diverged)
    except ValueError as error:                 # what train.py would say in one sentence
        raise Missing(str(error)) from None
