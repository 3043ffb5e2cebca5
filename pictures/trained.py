"""Runs that figures share: trained once, kept under runs/figures and used again.

Delete a folder there to run it anew. GRIL_WORKERS (default 2) is how many train at a time, each on
one core.
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
from machine.errors import Missing
from machine.options import flag
from tasks import TASKS

DEFAULTS = dict(f=10, n=10, model="gril", report_tokens=0)      # not in names: figures share runs
QUICK = dict(steps=20, batch=32, tasks=200)                     # an in-context task; one with files
QUICK_FILES = dict(steps=4, batch=2, length=32, warmup=1, evaluate_every=2)
CODE = ("gril.py", "baselines.py", "tasks.py", "lra.py", "lm.py", "train.py", "files/*.py",
        "machine/*.py")                         # on which a run depends


def runs(settings, quick, sweep=False):
    """Results of several trainings, GRIL_WORKERS at a time; one that is there is read, not run.

    In a sweep of rates a run may diverge, which its result says; elsewhere that is an error.
    """
    jobs = [job(options, quick) for options in settings]
    kept = {folder: options for folder, options in jobs if (folder / "result.json").exists()}
    missing = {folder: options for folder, options in jobs if folder not in kept}.items()
    check(kept.items())
    if quick:
        list(map(run, missing))
    elif missing:
        workers = int(os.environ.get("GRIL_WORKERS", 2))
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            list(tqdm(pool.map(run, missing), total=len(missing), desc="training", ncols=80))
    results = []
    for folder, _ in jobs:
        results.append(dict(read_json(folder / "result.json"), folder=folder))
        if "diverged" in results[-1] and not sweep:
            raise Missing(f"{folder}: {results[-1]['diverged']}")
    return results


def check(kept):
    """Refuses runs of other numbers than would be trained now; says where the code is newer."""
    code = [path for pattern in CODE for path in Path(train.__file__).parent.glob(pattern)]
    newest = max(code, key=lambda path: path.stat().st_mtime)
    differ, older = [], []
    for folder, options in kept:
        result, (_, now) = folder / "result.json", train.numbers(arguments(folder, options))
        was = read_json(result)
        differ += [f"{folder}: {name} was {was[name]}, is {now[name]} now" for name in now
                   if name not in MACHINE and was.get(name, now[name]) != now[name]]
        if result.stat().st_mtime < newest.stat().st_mtime:
            older.append(str(folder))
    if differ:
        raise Missing("\n".join(["there are runs with other numbers; delete their folders to train "
                                 "them anew", *differ]))
    if older:
        print(f"{newest.name} is newer than these runs, which are used as they are; delete their "
              f"folders to train them anew: {' '.join(older)}", file=sys.stderr)


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
    """A run as words of train.py's command line."""
    words = ["--threads", "1", "--out", str(folder), "--force", "--quiet"]
    for name, value in options.items():
        words += [flag(name)] if value is True else [flag(name), str(value)]
    return train.arguments(words)


def run(job):
    args = arguments(*job)
    try:
        train.train(args)
    except FloatingPointError as error:         # a rate too high, say: the sweep goes on without it
        diverged = dict(train.numbers(args)[1], diverged=str(error))
        (args.out / "result.json").write_text(json.dumps(diverged))
