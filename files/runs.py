"""The folder of a run, in which every file is written whole or not at all.

It holds config.json, metrics.csv, result.json, figure.png, last.pt to go on from, previous.pt until
the run is over, and the weights that result.json speaks of: best.pt where validation chooses them,
else weights.pt.
"""
import csv
import hashlib
import io
import json
import os
import sys
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

from files.whole import write

MACHINE = ("device", "threads", "accumulate", "checkpoint_every")   # a resumed run may change these
PARTS = {"model", "optimizer", "step", "stream", "seconds", "best", "config"}   # of a checkpoint


def run_folder(args, config):
    """A new folder under runs/, or --out, which must not hold a run unless the words say so."""
    if args.out is None and args.resume:
        raise ValueError("--resume needs --out, the folder of the run to go on with")
    folder = args.out or new_folder(args, config)
    if (folder / "config.json").exists() and not (args.force or args.resume):
        raise ValueError(f"{folder} already holds a run: choose another --out, --resume to go on "
                         "with it, or --force to overwrite it")
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints = [folder / "last.pt", folder / "previous.pt"]
    if not (args.resume and any(path.exists() for path in checkpoints)):
        for name in ("metrics.csv", "last.pt", "previous.pt", "best.pt", "weights.pt",
                     "result.json", "figure.png"):
            (folder / name).unlink(missing_ok=True)
        # for lm.py generate; a resumed run may have moved its data
        data = None if args.data is None else os.path.abspath(args.data)
        text = json.dumps(dict(config, data=data), indent=1) + "\n"
        write(folder / "config.json", text.encode())
    return folder


def new_folder(args, config):
    size = f"f{config['f']}-n{config['n']}" if "f" in config else args.recipe
    first = Path("runs", f"{args.task}-{args.model}-{size}-seed{args.seed}")
    if not first.exists():
        return first
    others = (first.with_name(f"{first.name}-{i}") for i in count(2))
    return next(path for path in others if not path.exists())


def write_metrics(path, rows):
    if not rows:
        return
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        writer.writerows(rows)
        file.flush()
        os.fsync(file.fileno())


def save(path, state, keep=None):
    """A .pt file and its SHA-256 behind it; torch.load reads over that."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write(path, buffer.getbuffer(), hashlib.sha256(buffer.getbuffer()).digest(), keep=keep)


def read(path):
    """What save wrote, or a ValueError that names the file. Nothing in it is ever executed."""
    data = path.read_bytes()
    if hashlib.sha256(memoryview(data)[:-32]).digest() != data[-32:]:
        raise ValueError(f"{path} is damaged: its checksum is not that of its {len(data):,} bytes")
    try:
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:
        raise ValueError(f"{path} is refused: it is no file of tensors and plain values "
                         f"({str(error).splitlines()[0]})")


def read_checkpoint(folder, config, rank=0, world=1):
    """The newest whole checkpoint of this run, or None where there is none yet.

    metrics.csv is cut back to its step.
    """
    path, state, damage = newest(folder)
    step = -1 if state is None else state["step"]
    if world > 1:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        steps = torch.tensor([step, -step], device=device)
        dist.all_reduce(steps, dist.ReduceOp.MAX)
        if steps.sum() != 0:
            raise ValueError(f"the processes found different checkpoints in {folder}: do all see "
                             "the same folder?")
    if state is None:
        if rank == 0:
            print(f"{folder} has no checkpoint yet; starting from the beginning", file=sys.stderr)
        return None
    there = {name: value for name, value in state["config"].items() if name not in MACHINE}
    here = {name: value for name, value in config.items() if name not in MACHINE}
    differs = [f"{name}: {there.get(name)} there, {here.get(name)} here"
               for name in {**here, **there} if there.get(name) != here.get(name)]
    if differs:
        raise ValueError(f"{path} is the checkpoint of another run ({'; '.join(differs)})")
    if rank == 0:
        for text in damage:
            print(f"{text}; going on from {path.name}, the checkpoint before, at step {step:,}",
                  file=sys.stderr)
        if path.name == "previous.pt":
            os.replace(path, folder / "last.pt")
        cut_back(folder / "metrics.csv", step)
    return state


def newest(folder):
    """(path, state, what was found damaged) of the newest whole checkpoint; None where none is."""
    damage = []
    for path in (folder / "last.pt", folder / "previous.pt"):
        try:
            state = read(path)
            if not (isinstance(state, dict) and state.keys() >= PARTS):
                raise ValueError(f"{path} is refused: it is no checkpoint of a run")
            return path, state, damage
        except FileNotFoundError:
            continue
        except ValueError as error:
            damage.append(str(error))
    if damage:
        raise ValueError(f"{'; '.join(damage)}. There is no whole checkpoint to go on from; "
                         "--force starts again")
    return None, None, damage


def cut_back(path, step):
    """Without the rows after this step, and without a last one cut short."""
    if path.exists():
        lines = path.read_text().splitlines(keepends=True)
        head, *rows = [line for line in lines if line.endswith("\n")] or [""]
        rows = [row for row in rows if int(row.split(",")[0]) <= step]
        write(path, "".join([head, *rows]).encode())
