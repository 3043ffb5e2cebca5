"""Runs that figures share: trained once, kept under runs/figures and used again.

Delete a folder there to run it anew. GRIL_WORKERS (default 2) is how many train at a time, each on
one core.
"""
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tqdm import tqdm

import train
from tasks import TASKS

DEFAULTS = dict(f=10, n=10, model="gril", report_tokens=0)      # not in names: figures share runs
QUICK = dict(steps=20, batch=32, tasks=200)                     # an in-context task; one with files
QUICK_FILES = dict(steps=4, batch=2, length=32, warmup=1, evaluate_every=2)


def runs(settings, quick, sweep=False):
    """Results of several trainings, GRIL_WORKERS at a time; one that is there is read, not run.

    In a sweep of rates a run may diverge, which its result says; elsewhere that is an error.
    """
    jobs = [job(options, quick) for options in settings]
    missing = {folder: options for folder, options in jobs
               if not (folder / "result.json").exists()}.items()
    if quick:
        list(map(run, missing))
    elif missing:
        workers = int(os.environ.get("GRIL_WORKERS", 2))
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            list(tqdm(pool.map(run, missing), total=len(missing), desc="training", ncols=80))
    results = []
    for folder, _ in jobs:
        results.append(dict(json.loads((folder / "result.json").read_text()), folder=folder))
        if "diverged" in results[-1] and not sweep:
            raise ValueError(f"{folder}: {results[-1]['diverged']}")
    return results


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


def run(job):
    """Train one, as train.py's command line would."""
    folder, options = job
    flags = ["--threads", "1", "--out", str(folder), "--force", "--quiet"]
    for key, value in options.items():
        flags += [f"--{key.replace('_', '-')}"] + ([] if value is True else [str(value)])
    try:
        train.train(train.arguments(flags))
    except FloatingPointError as error:         # a rate too high, say: the sweep goes on without it
        (folder / "result.json").write_text(json.dumps(dict(diverged=str(error))))
