"""The folder of a run, in which every file but the picture is written whole or not at all.

It holds config.json, metrics.csv, result.json, figure.png, last.pt to go on from, previous.pt until
the run is over, and the weights that result.json speaks of: best.pt where validation chooses them,
else weights.pt.
"""
import hashlib
import io
import json
import os
import socket
import sys
from contextlib import contextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path

import torch

try:
    import fcntl
except ImportError:                             # Windows: no lock
    fcntl = None

from files.whole import write, write_json
from machine.devices import same
from machine.errors import refuse
from machine.options import LOOP

MACHINE = ("device", "threads", "accumulate", "checkpoint_every")   # a resumed run may change these
NAMED = {"task", "model", "recipe", "seed"}     # config.json of a run has them, another's has not
BEST = dict(score=None, step=0, since=0, weights=None, test=None)
PARTS = dict(model=dict, optimizer=dict, step=int, stream=object, seconds=float, best=dict,
             config=dict)                       # of a checkpoint


def check_out(args, config):
    """Refuses an --out where this run may not go; nothing is touched."""
    folder, resume = args.out, args.resume
    refuse((resume and not folder, "--resume needs --out, the folder of the run to go on with"))
    there = set(os.listdir(folder)) if folder and folder.exists() else set()
    if not there - {"lock", "config.json.part"}:        # of a process killed before it began
        return
    old = read_json(folder / "config.json") if "config.json" in there else {}
    saved = there & {"last.pt", "previous.pt"}
    refuse((not (old.keys() >= NAMED or resume and saved), f"--out {folder} is not empty and holds "
            "no run: choose another, so that nothing in it is overwritten"),
           (not (args.force or resume), f"{folder} already holds a run: choose another --out, "
            "--resume to go on with it, or --force to overwrite it"))
    if resume and not saved:                    # then it begins again, if nothing is lost by that
        compare(f"{folder} holds another run", old, config)
        steps = [step for step, _ in read_metrics(folder / "metrics.csv")[1]]
        lost = "result.json" in there or max(steps, default=0) > old["checkpoint_every"]
        refuse((lost, f"{folder} holds a run whose checkpoint, last.pt, is gone: there is nothing "
                "to go on from. --force trains it anew"))


def compare(what, there, here):
    """Refuses to go on with a run of other numbers, and names them."""
    differs = [f"{name}: {there.get(name)} there, {here.get(name)} here"
               for name in {**here, **there} if there.get(name) != here.get(name)
               and name not in (*MACHINE, "data")]
    refuse((differs, f"{what} ({'; '.join(differs)})"))


@contextmanager
def run_folder(args, config):
    """--out, or a new folder under runs/: this process's alone while the block runs."""
    folder = args.out or new_folder(args, config)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder) if fcntl else nullcontext():
            check_out(args, config)             # another process may just have been here
            try:
                yield folder
            except BaseException:               # a start that failed leaves nothing
                if set(os.listdir(folder)) <= {"lock", "config.json"}:
                    (folder / "config.json").unlink(missing_ok=True)
                raise
    finally:
        with suppress(OSError):
            folder.rmdir()


def new_folder(args, config):
    """Made here: of two commands at the same moment each gets its own."""
    size = [f"f{config['f']}", f"n{config['n']}"] if "f" in config else []
    if args.recipe != "default":
        size.insert(0, args.recipe)
    differs = [f"{name}{value}" for name, value in args.overrides.items()
               if name not in ("f", "n", *MACHINE)]
    name = "-".join([args.task, args.model, *size, *differs])[:200] + f"-seed{args.seed}"
    for i in count(1):
        folder = Path("runs", name if i == 1 else f"{name}-{i}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


@contextmanager
def locked(folder):
    """No other process may write here. The system itself unlocks what a killed one held."""
    path, ours = folder / "lock", False
    while not ours:
        file = open(path, "a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(f"{folder} is in use by {file.read() or 'another process'}: wait for "
                             "its end, stop it, or choose another --out") from None
        except OSError:
            pass                                # a file system that has no locks
        # else: the one before us unlocked and removed it in between
        ours = path.exists() and os.path.samefile(path, file.fileno())
    with file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def begin(folder, args, config, path, step):
    """The folder as a run begins or goes on: nothing in it from after the checkpoint at `path`."""
    if path is None:
        for name in ("metrics.csv", "last.pt", "previous.pt", "best.pt", "weights.pt",
                     "result.json", "figure.png"):
            (folder / name).unlink(missing_ok=True)
    elif path.name == "previous.pt":
        os.replace(path, folder / "last.pt")
    write_metrics(folder / "metrics.csv", step)
    if path is None or not (folder / "config.json").exists():
        # for lm.py generate; a resumed run may have moved its data
        data = args.data and os.path.abspath(args.data)
        write_json(folder / "config.json", dict(config, data=data))


def read_metrics(path):
    """(head, [(step, line)]) of metrics.csv, without blank lines or a last one cut short."""
    text = path.read_text(encoding="utf-8-sig") if path.exists() else ""
    lines = [line for line in text.splitlines(True) if line.endswith("\n") and line.strip()]
    head, *others = lines or [""]
    try:
        return head, [(int(line.split(",")[0]), line) for line in others]
    except ValueError as error:
        raise ValueError(f"{path} is not what a run writes, a row a step: {error}") from None


def write_metrics(path, step, rows=()):
    """Without the rows after this step; new ones at the end."""
    head, lines = read_metrics(path)
    lines = [line for at, line in lines if at <= step]
    lines += [",".join(map(str, row.values())) + "\n" for row in rows]
    if rows:
        head = ",".join(rows[0]) + "\n"
    if head:
        write(path, "".join([head, *lines]).encode())


def read_json(path):
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    refuse((not isinstance(value, dict),
            f"{path} is not what a run writes: {str(value)[:40]!r} is no object"))
    return value


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
    except Exception:               # whose words advise to load it all the same
        raise ValueError(f"{path} is refused: it is no file of tensors and plain values") from None


def read_checkpoint(folder, config, rank=0, world=1):
    """(path, state) of the newest whole checkpoint of this run, or None, None."""
    found, said = (None, None), []
    for path in filter(Path.exists, (folder / "last.pt", folder / "previous.pt")):
        try:
            found = path, checked(path)
            break
        except ValueError as error:
            said.append(str(error))
    path, state = found
    step = state and state["step"]
    same(dict(step=step), world, f"found another checkpoint in {folder}, which all should see")
    if state:
        compare(f"{path} is the checkpoint of another run", state["config"], config)
        said = [f"{damage}; going on from {path.name}, the checkpoint before, at step {step:,}"
                for damage in said]
    else:
        refuse((said, f"{'; '.join(said)}. There is no whole checkpoint to go on from; --force "
                "starts again"))
        said = [f"{folder} has no checkpoint yet; starting from the beginning"]
    for sentence in said if rank == 0 else ():
        print(sentence, file=sys.stderr)
    return found


def checked(path):
    """What a checkpoint holds, or a ValueError that names it."""
    state = read(path)
    whole = (isinstance(state, dict) and state.keys() >= PARTS.keys()
             and all(isinstance(state[name], kind) for name, kind in PARTS.items())
             and state["best"].keys() >= BEST.keys()
             and 0 <= state["step"] <= state["config"].get("steps", 0))
    refuse((not whole, f"{path} is refused: it is no checkpoint of a run"))
    return state


def load(folder, tasks, kind, file):
    """(task, model, what the file says) of a run, with the best weights that it has."""
    folder = Path(folder)
    try:
        said = read_json(folder / file)
        if Task := tasks.get(said["task"]):
            options = {**LOOP, **Task.options}
            task = Task(said.get("data"), **{name: said[name] for name in options if name in said})
            model = task.model(said["model"])
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder} is not the folder of a run: it has no {file}. `python "
                                "train.py --task wikitext2` makes one under runs/") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder / file} is not as train.py wrote it ({type(error).__name__}: "
                         f"{error})") from None
    refuse((not Task, f"{folder} is a run of {said['task']}, not of {kind}: {', '.join(tasks)}"))
    paths = [folder / name for name in ("best.pt", "weights.pt", "last.pt")]
    path = next(filter(Path.exists, paths), None)
    if path is None:
        raise FileNotFoundError(f"{folder} has no weights yet (best.pt, weights.pt or last.pt): "
                                "let it reach its first checkpoint, or finish it with --resume")
    state = read(path)
    try:
        model.load_state_dict(state.get("model", state))
    except (RuntimeError, AttributeError, TypeError):
        raise ValueError(f"{path} does not fit the model of {file} beside it: they are of "
                         "different runs") from None
    return task, model.eval(), said
