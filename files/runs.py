"""The folder of a run: config.json, metrics.csv, result.json, weights and checkpoints, each written whole or not at all."""
import csv
import hashlib
import io
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from files.whole import write

MACHINE = ("device", "threads", "accumulate", "checkpoint_every")       # a resumed run may change these


def run_folder(args, config):
    """A new folder under runs/, or --out, which must not hold a run unless --force or --resume says what to do."""
    if args.out is None:
        if args.resume:
            raise ValueError("--resume needs --out, the folder of the run to go on with")
        size = f"f{config['f']}-n{config['n']}" if "f" in config else args.recipe
        name = f"{args.task}-{args.model}-{size}-seed{args.seed}"
        numbers = (name if i == 1 else f"{name}-{i}" for i in range(1, sys.maxsize))
        folder = next(path for path in (Path("runs") / name for name in numbers) if not path.exists())
    else:
        folder = args.out
        if (folder / "config.json").exists() and not (args.force or args.resume):
            raise ValueError(f"{folder} already holds a run: choose another --out, --resume to go on with it, or --force "
                             "to overwrite it")
    folder.mkdir(parents=True, exist_ok=True)
    if not (args.resume and any((folder / name).exists() for name in ("last.pt", "previous.pt"))):
        for name in ("metrics.csv", "last.pt", "previous.pt", "best.pt", "weights.pt", "result.json", "figure.png"):
            (folder / name).unlink(missing_ok=True)
        data = None if args.data is None else os.path.abspath(args.data)        # for lm.py generate; a resumed run may move
        write(folder / "config.json", (json.dumps(dict(config, data=data), indent=1) + "\n").encode())
    return folder


def write_metrics(path, rows):
    if rows:
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
        raise ValueError(f"{path} is refused: it is no file of tensors and plain values ({str(error).splitlines()[0]})")


def read_checkpoint(folder, config, rank=0, world=1):
    """The newest whole checkpoint of this run, or None where there is none yet; metrics.csv is cut back to its step."""
    state, damage = None, []
    for path in (folder / "last.pt", folder / "previous.pt"):
        try:
            found = read(path)
            if not (isinstance(found, dict) and found.keys() >= {"model", "optimizer", "step", "stream", "seconds", "best",
                                                                         "config"}):
                raise ValueError(f"{path} is refused: it is no checkpoint of a run")
            state = found
            break
        except FileNotFoundError:
            continue
        except ValueError as error:
            damage.append(str(error))
    if state is None and damage:
        raise ValueError(f"{'; '.join(damage)}. There is no whole checkpoint to go on from; --force starts again")
    step = -1 if state is None else state["step"]
    if world > 1:
        steps = torch.tensor([step, -step], device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(steps, dist.ReduceOp.MAX)
        if steps.sum() != 0:
            raise ValueError(f"the processes found different checkpoints in {folder}: do all see the same folder?")
    if state is None:
        if rank == 0:
            print(f"{folder} has no checkpoint yet; starting from the beginning", file=sys.stderr)
        return None
    there, here = ({k: v for k, v in c.items() if k not in MACHINE} for c in (state["config"], config))
    differs = [f"{k}: {there.get(k)} there, {here.get(k)} here" for k in {**here, **there} if there.get(k) != here.get(k)]
    if differs:
        raise ValueError(f"{path} is the checkpoint of another run ({'; '.join(differs)})")
    if rank == 0:
        for text in damage:
            print(f"{text}; going on from {path.name}, the checkpoint before, at step {step:,}", file=sys.stderr)
        if path.name == "previous.pt":
            os.replace(path, folder / "last.pt")
        if (folder / "metrics.csv").exists():
            lines = (folder / "metrics.csv").read_text().splitlines(keepends=True)
            head, *rows = [line for line in lines if line.endswith("\n")] or [""]
            whole = [row for row in rows if int(row.split(",")[0]) <= step]
            write(folder / "metrics.csv", "".join([head, *whole]).encode())
    return state
