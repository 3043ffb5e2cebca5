"""Runs that figures share: trained once, kept under runs/figures and used again; delete a folder there to run it anew.

GRIL_WORKERS (default 2) is how many train at a time, each on one core.
"""
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tqdm import tqdm

import train
from tasks import TASKS

DEFAULTS = dict(f=10, n=10, model="gril", report_tokens=0)      # left out of names, so that figures share runs
QUICK = {True: dict(steps=20, batch=32, tasks=200),             # an in-context task; a task with files
         False: dict(steps=4, batch=2, length=32, warmup=1, evaluate_every=2)}


def runs(settings, quick, sweep=False):
    """Results of several trainings, GRIL_WORKERS at a time; one that is there already is read, not run.

    In a sweep of rates a run may diverge, which its result says; elsewhere that is an error.
    """
    jobs = []
    for options in settings:
        if quick:
            few = QUICK[options["task"] in TASKS]
            options = {**options, **few, "steps": min(few["steps"], options.get("steps", few["steps"]))}
        options = {key: value for key, value in options.items() if DEFAULTS.get(key) != value}
        name = options["task"] + "".join(f"-{key}{value}" for key, value in options.items() if key != "task")
        jobs.append((Path("runs/figures") / name, options))
    missing = [job for job in jobs if not (job[0] / "result.json").exists()]
    if quick:
        list(map(run, missing))
    elif missing:
        with ProcessPoolExecutor(int(os.environ.get("GRIL_WORKERS", 2)), multiprocessing.get_context("spawn")) as pool:
            list(tqdm(pool.map(run, missing), total=len(missing), desc="training", ncols=80))
    results = [dict(json.loads((folder / "result.json").read_text()), folder=folder) for folder, _ in jobs]
    for result in results:
        if "diverged" in result and not sweep:
            raise ValueError(f"{result['folder']}: {result['diverged']}")
    return results


def run(job):
    folder, options = job
    flags = [text for key, value in options.items() for text in (f"--{key.replace('_', '-')}", str(value)) if text != "True"]
    try:
        train.train(train.arguments([*flags, "--threads", "1", "--out", str(folder), "--force", "--quiet"]))
    except FloatingPointError as error:                         # a rate too high, say: the sweep goes on without it
        (folder / "result.json").write_text(json.dumps(dict(diverged=str(error))))


def seeds(quick):
    return range(1 if quick else 5)
