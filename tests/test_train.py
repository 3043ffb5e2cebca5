"""The training loop: same bits after any interruption, several processes as one, costs, faults.

Besides in-context tasks, ListOps and a language model it trains Toy, a task that reads files, with
which most faults are shown; `python test_train.py --task toy …` is train.py with it.
"""
import csv
import functools
import gc
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import metrics
from torch.utils._pytree import keystr, tree_flatten_with_path

import lm
import lra
import tasks
import train
from baselines import offered
from files import runs
from gril import Block, GrilMixer
from machine import cost
from machine.devices import Epochs, choose_device
from machine.errors import spoken
from machine.options import Option
from tasks import InContext
from test_lm import Hostile, text_file
from test_lra import ROUNDS, fuzz, write_listops
from test_tasks import Noisy

ROOT = Path(__file__).parent.parent


# ------------------------------------------------------------------------------- a task with files

class Toy(tasks.Task):
    """Are there more ones or more twos in a short sequence?"""
    name, paper_parameters, choose = "toy", 2_000, "accuracy"
    options = dict(layers=Option(1, "layers"), H=Option(16, "width"), P=Option(8, "state size"),
                   J=Option(2, "blocks"), dropout=Option(0.1, "share dropped"),
                   length=Option(12, "tokens"))
    recipes = dict(tiny=dict(steps=40, batch=8, lr=1e-2, recurrent_lr=3e-3, weight_decay=0.01,
                             warmup=5, clip=1.0, evaluate_every=5, checkpoint_every=10, threads=1))

    def __init__(self, data=None, **numbers):
        super().__init__(**numbers)
        self.folder = Path(data or "data")

    def read(self, split):
        tokens = torch.from_numpy(np.load(self.folder / f"{split}.npy"))
        return tokens, ((tokens == 1).sum(1) > (tokens == 2).sum(1)).long()

    def model(self, name="gril"):
        r, H = self.recipe, self.recipe["H"]
        embed = nn.Embedding(4, H)
        if name == "linear":
            return nn.Sequential(embed, nn.Linear(H, 5 * H, bias=False),
                                 nn.Linear(5 * H, 2, bias=False))
        blocks = [Block(GrilMixer(H, r["P"], r["J"]), H, r["dropout"]) for _ in range(r["layers"])]
        return nn.Sequential(embed, *blocks, nn.Linear(H, 2))

    def stream(self, seed, batch, device, rank=0, world=1):
        return ToyStream(self, seed, batch, device, rank, world)

    def example(self, batch):
        tokens = torch.ones(batch, self.recipe["length"], dtype=torch.int64)
        return tokens, torch.ones(batch, dtype=torch.int64)

    def loss(self, model, batch):
        tokens, labels = batch
        return F.cross_entropy(model(tokens).mean(1), labels)

    @torch.no_grad()
    def score(self, model, split):
        tokens, labels = self.read(split)
        logits = model(tokens).mean(1)
        right = (logits.argmax(1) == labels).double().mean()
        return F.cross_entropy(logits, labels).item(), right.item()

    def validate(self, model):
        return dict(zip(("loss", "accuracy"), self.score(model, "val")))

    def report(self, model, seed):
        return dict(zip(("test_loss", "test_accuracy"), self.score(model, "test")))

    def table(self, result):
        return f"accuracy {result['test_accuracy']}, best {result.get('best_test_accuracy')}"


class ToyStream(Epochs):
    def __init__(self, task, seed, batch, device, rank, world):
        self.seed, (self.tokens, self.labels) = seed, task.read("train")
        super().__init__(batch, slice(rank, None, world))

    def ordered(self, epoch):
        rows = np.random.default_rng([self.seed, epoch]).permutation(len(self.labels))
        return rows[:len(rows) // self.batch * self.batch].reshape(-1, self.batch)

    def take(self, rows):
        return self.tokens[rows], self.labels[rows]


train.TASKS["toy"] = Toy
SHORT = ("--task nd_regression --quiet --steps 60 --f 3 --batch 16 --tasks 200 "
         "--checkpoint-every 20")


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """The toy's files, ListOps' and a text's."""
    folder, generator = tmp_path_factory.mktemp("toy"), np.random.default_rng(0)
    for split, rows in (("train", 100), ("val", 40), ("test", 60)):
        np.save(folder / f"{split}.npy", generator.integers(0, 4, (rows, 12)))
    write_listops(folder)
    text_file(folder)
    return str(folder)


@pytest.fixture(scope="session")
def toy(data):
    """The words of a run of the toy."""
    return f"--task toy --quiet --data {data}"


def tiny(task, data, more=""):
    """The words of a tiny run of ListOps or of a language model."""
    return (f"--task {task} --recipe {'bytes' if task == 'text_file' else 'tiny'} --quiet "
            f"--data {data} --threads 1 --layers 1 --H 8 --P 8 --J 2 --dropout 0.1 --batch 4 "
            f"--length 16 --steps 40 --evaluate-every 5 --checkpoint-every 10 "
            f"{'--no-short ' if task == 'listops' else ''}{more}")


def trained(folder, *words):
    """The result of a run in folder."""
    return train.main([*" ".join(words).split(), "--out", str(folder)])


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(message, folder, *words):
    """The run does not begin, or leaves nothing behind: every file is as it was."""
    before = folder.exists(), files(folder)
    with pytest.raises(SystemExit, match=message):
        trained(folder, *words)
    assert (folder.exists(), files(folder)) == before


# ------------------------------------------------------ runs in a process of their own, and faults
# A process that has imported torch is forked for each run: that takes milliseconds, not seconds.

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["test_train", "torch._dynamo"])    # the first step would import it


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(0)                                           # for the handler to run in


kill = functools.partial(send, signal.SIGKILL)
terminate = functools.partial(send, signal.SIGTERM)
interrupt = functools.partial(send, signal.SIGINT)


def fill_disk():
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, resource.RLIM_INFINITY))


def child(words, log, environment, fault):
    signal.signal(signal.SIGINT, signal.default_int_handler)    # which a batch job may ignore
    os.environ.update(environment)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if fault:
        place, number, action = fault
        owner = os if hasattr(os, place) else train.TASKS[words[words.index("--task") + 1]]
        plain, calls = getattr(owner, place), itertools.count(1)

        def faulty(*args):
            if next(calls) == number:
                action()
            return plain(*args)
        setattr(owner, place, faulty)
    train.main(words)


def start(words, log, fault=None, **environment):
    process = FORK.Process(target=child, args=(words, str(log), environment, fault))
    process.start()
    return process


def finish(process, seconds=300):
    process.join(seconds)
    assert process.exitcode is not None, f"still running after {seconds} s"
    return process.exitcode


def run(folder, *words, fault=None):
    """(exit code, what it printed) of one run in folder."""
    log = folder.with_suffix(".log")
    code = finish(start([*" ".join(words).split(), "--out", str(folder)], log, fault))
    return code, log.read_text()


def contents(folder):
    """Everything of a finished run but the clock, by its place."""
    result, last = json.loads((folder / "result.json").read_text()), runs.read(folder / "last.pt")
    del result["seconds"], last["seconds"]
    kept = runs.read(folder / ("best.pt" if last["best"]["weights"] else "weights.pt"))
    metrics = (folder / "metrics.csv").read_text().splitlines()
    return dict(tree_flatten_with_path((result, last, kept, metrics))[0]), metrics


def assert_same(ours, theirs):
    (there, metrics), (there_, _) = contents(ours), contents(theirs)
    assert there.keys() == there_.keys()
    assert not [keystr(place) for place, x in there.items() if not (
        torch.equal(x, there_[place]) if isinstance(x, torch.Tensor) else x == there_[place])]
    steps = [int(row.split(",")[0]) for row in metrics[1:]]
    assert steps == sorted(set(steps))


def goes_on(folder, words, like):
    """Resumed, it ends as the run that nobody interrupted."""
    assert run(folder, words, "--resume")[0] == 0
    assert_same(folder, like)


@pytest.fixture(scope="session")
def whole(toy, data, tmp_path_factory):
    """Uninterrupted runs: (words of the command, folder) by name, trained when first asked for."""
    folder = tmp_path_factory.mktemp("whole")
    commands = dict(toy=toy, turns=f"{toy} --accumulate 2", prompt=SHORT,
                    listops=tiny("listops", data), text=tiny("text_file", data),
                    stateful=tiny("text_file", data, "--stateful"))

    @functools.cache
    def made(name):
        trained(folder / name, commands[name])
        return commands[name], folder / name
    return lambda name="toy": made(name)


@pytest.mark.parametrize("name, faults", (
    ("toy", "loss 14, validate 2, fsync 5, fsync 4, replace 4, loss 15"),
    *(pytest.param(*row, marks=pytest.mark.slow) for row in (
        ("stateful", "loss 14, validate 2, fsync 5, replace 4"),
        ("turns", "loss 27, validate 2"), ("prompt", "loss 31, validate 1, fsync 3, replace 3"),
        ("listops", "loss 14, validate 2, fsync 5, replace 4"),
        ("text", "validate 3, fsync 4, loss 12, replace 5")))))
def test_killed_in_a_step_a_validation_a_write(whole, tmp_path, name, faults):
    """SIGKILL before the n-th call: with a file half written, between a checkpoint's renames, …"""
    words, folder = whole(name)
    for fault in faults.split(", "):
        place, number = fault.split()
        code, _ = run(tmp_path / "run", words, "--resume", fault=(place, int(number), kill))
        assert code == -signal.SIGKILL, fault
        assert (tmp_path / "run/lock").exists()                 # and it is no obstacle
    goes_on(tmp_path / "run", words, folder)
    assert not (tmp_path / "run/lock").exists()


def kill_at_random(words, folder, whole, kills, seconds):
    """By the clock or before a random call, until so many met a process; the checkpoints seen."""
    moments, steps, met = random.Random(0), set(), 0
    log, last = folder.with_suffix(".log"), folder / "last.pt"
    for i in range(5 * kills):
        fault = (moments.choice(("loss", "validate", "fsync", "replace")), moments.randint(1, 9),
                 kill)
        process = start([*words.split(), "--resume", "--out", str(folder)], log,
                        fault if i % 2 == 0 else None)
        process.join(moments.uniform(0, seconds) if i % 2 else 60)
        process.kill()
        code = finish(process)
        assert code in (0, -signal.SIGKILL), log.read_text()
        met += code == -signal.SIGKILL
        if met == kills:
            break
        if code == 0:                                           # it came to its end: begin again
            shutil.rmtree(folder)
        elif last.exists():
            steps.add(runs.read(last)["step"])
    assert met == kills
    goes_on(folder, words, whole)
    return len(steps)


RUNS = ("toy", "prompt", "listops", "text", "stateful")


@pytest.mark.parametrize("name", ("toy", "stateful"))                       # all of RUNS: slow
def test_killed_at_random_moments(whole, tmp_path, name):
    kill_at_random(whole(name)[0], tmp_path / "run", whole(name)[1], kills=3, seconds=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_killed_at_twenty_random_moments(whole, tmp_path, name):
    words = (f"{whole(name)[0]} --steps {2000 if name == 'prompt' else 600} "
             "--checkpoint-every 7 --evaluate-every 5")
    begin = time.monotonic()
    assert run(tmp_path / "whole", words)[0] == 0
    seconds = 0.3 * (time.monotonic() - begin)          # the start of a process takes a part of it
    assert kill_at_random(words, tmp_path / "run", tmp_path / "whole", 20, seconds) > 5


@pytest.mark.parametrize("header", ("", "step,train_lo"))
def test_killed_while_the_head_of_the_metrics_is_written(toy, tmp_path, header):
    """There may be a checkpoint before the first row, and of metrics.csv half its first line."""
    words = f"{toy} --evaluate-every 15"
    trained(tmp_path / "whole", words)
    assert run(tmp_path / "run", words, fault=("loss", 13, kill))[0] == -signal.SIGKILL
    (tmp_path / "run/metrics.csv").write_text(header)
    goes_on(tmp_path / "run", words, tmp_path / "whole")


@pytest.mark.parametrize("action, code", ((terminate, 143), (interrupt, 130)))
def test_a_signal_finishes_the_step_and_says_how_to_go_on(whole, tmp_path, action, code):
    words, folder = whole()
    got, said = run(tmp_path / "run", words, "--force", fault=("loss", 13, action))
    assert got == code and "stopped after step 13; go on with" in said
    assert runs.read(tmp_path / "run/last.pt")["step"] == 13
    assert not (tmp_path / "run/result.json").exists()
    command = said.splitlines()[-1].split()
    assert command[:2] == ["python", "train.py"] and "--force" not in command
    assert finish(start(command[2:], tmp_path / "log")) == 0
    assert_same(tmp_path / "run", folder)


@pytest.mark.parametrize("place, there", (("stream", False), ("report", True)))
def test_ctrl_c_while_data_are_loaded_or_the_result_is_reported(whole, tmp_path, place, there):
    words, folder = whole()
    code, said = run(tmp_path / "run", words, fault=(place, 1, interrupt))
    assert code == 130 and "stopped" in said and "Traceback" not in said
    assert (tmp_path / "run").exists() == there == ("go on with" in said)
    goes_on(tmp_path / "run", words, folder)


@pytest.mark.parametrize("name, code", (("train.py", 128 + signal.SIGPIPE), ("lra.py", 0)))
@pytest.mark.parametrize("action", ("print(1)", "raise SystemExit"))
def test_a_run_whose_words_nobody_reads_is_not_over(action, name, code):
    """An answer is; it would be written when Python ends, which is too late to say anything."""
    reader, writer = os.pipe()
    os.close(reader)
    script = ("from machine.errors import spoken\n"
              f"with spoken({name!r}):\n    print(0)\n    {action}")
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=writer,
                           stderr=subprocess.PIPE)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (code, b"")


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGINT))
def test_a_second_signal_leaves_at_once(whole, tmp_path, number):
    fault = ("loss", 13, functools.partial(send, number, number))
    code, said = run(tmp_path / "run", whole()[0], fault=fault)
    assert code == -number and "once more to leave at once" in said
    assert runs.read(tmp_path / "run/last.pt")["step"] == 10


def test_a_full_disk_stops_the_run_and_keeps_the_checkpoint(whole, tmp_path):
    words, folder = whole()
    code, said = run(tmp_path / "run", words, fault=("loss", 13, fill_disk))
    assert code == 1 and ("File too large. What was written before is whole: make room, then "
                          "--resume") in said
    assert runs.read(tmp_path / "run/last.pt")["step"] == 10
    assert not list((tmp_path / "run").glob("*.part"))
    goes_on(tmp_path / "run", words, folder)


# ----------------------------------------------------------------------------- damaged checkpoints

@pytest.fixture(scope="session")
def stopped(whole, tmp_path_factory):
    """A run stopped after step 25, whose checkpoint before is of step 20."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    assert run(folder, whole()[0], fault=("loss", 25, terminate))[0] == 143
    return folder


@pytest.fixture
def halfway(stopped, tmp_path, monkeypatch):
    """A copy of it, to be damaged."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(stopped, tmp_path / "run")


def saved(state):
    runs.save(Path("saved"), state)
    return Path("saved").read_bytes()


def hostile(data):
    """A pickle that would run code, with a checksum that is right."""
    return saved(dict(step=25, config=Hostile()))


def altered(**parts):
    """A checkpoint with other parts, and a checksum that is right."""
    return lambda data: saved(dict(torch.load(io.BytesIO(data)), **parts))


DAMAGES = dict(cut=lambda data: data[:len(data) // 2], empty=lambda data: b"",
               flip=lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
               longer=lambda data: data + b"\0")
REFUSED = dict(hostile=hostile, weights=lambda data: saved({"0.weight": torch.ones(4, 16)}),
               number=lambda data: saved(25), beyond=altered(step=41), best=altered(best={}),
               step=altered(step="25"))


@pytest.mark.parametrize("damage", DAMAGES | REFUSED)
def test_a_damaged_checkpoint_is_recognised_and_the_one_before_taken(
        whole, halfway, capsys, damage):
    words, folder = whole()
    last = halfway / "last.pt"
    last.write_bytes((DAMAGES | REFUSED)[damage](last.read_bytes()))
    trained(halfway, words, "--resume")
    said = capsys.readouterr().err
    assert f"last.pt is {'refused' if damage in REFUSED else 'damaged: its checksum'}" in said
    assert "going on from previous.pt, the checkpoint before, at step 20" in said
    assert "weights" not in said.lower().replace("weights.pt", "")  # torch's advice, to trust it
    assert_same(halfway, folder)
    assert not Path("touched").exists()


@ROUNDS
def test_fuzzed_checkpoints_are_read_or_refused(stopped, tmp_path, monkeypatch, rounds):
    (tmp_path / "run").mkdir()
    shutil.copy(stopped / "best.pt", tmp_path / "run")
    fuzz(tmp_path / "run", rounds, lambda: runs.read(tmp_path / "run/best.pt"), monkeypatch)


def test_a_damaged_checkpoint_never_displaces_the_good_one(whole, halfway):
    """After going on from the one before, that one is still there when the next write fails."""
    words, folder = whole()
    (halfway / "last.pt").write_bytes(b"")
    assert run(halfway, words, "--resume", fault=("loss", 3, fill_disk))[0] == 1
    assert runs.read(halfway / "last.pt")["step"] == 20
    goes_on(halfway, words, folder)


@pytest.mark.parametrize("parts", (
    dict(model={"0.weight": torch.ones(4, 16)}), dict(optimizer={"state": {}, "param_groups": []}),
    dict(stream="here")), ids=lambda parts: next(iter(parts)))
def test_a_checkpoint_that_other_code_wrote_is_said(whole, halfway, parts):
    last = halfway / "last.pt"
    last.write_bytes(altered(**parts)(last.read_bytes()))
    refused("last.pt is whole, but not of this code or kind of device", halfway, whole()[0],
            "--resume")


@pytest.mark.parametrize("alter", (
    lambda text: text + "1",                    # of a row of step 1000 its first digit: no step 1
    lambda text: text.replace("\n", "\n\n"), lambda text: "\ufeff" + text),
    ids=("cut short", "blank lines", "byte order mark"))
def test_a_row_cut_short_is_not_taken_for_another(whole, halfway, alter):
    words, folder = whole()
    path = halfway / "metrics.csv"
    path.write_text(alter(path.read_text()))
    trained(halfway, words, "--resume")
    assert_same(halfway, folder)


def test_files_of_a_run_that_are_none_are_named(whole, halfway):
    (halfway / "metrics.csv").write_text("step,loss\nfive,1\n")
    refused("metrics.csv is not what a run writes.*'five'", halfway, whole()[0], "--resume")
    (halfway / "result.json").write_text("{")
    with pytest.raises(ValueError, match="result.json is no JSON"):
        train.load(halfway)


def test_no_whole_checkpoint_is_said(whole, halfway):
    for name in ("last.pt", "previous.pt"):
        (halfway / name).write_bytes(hostile(b""))
    refused("last.pt is refused.*previous.pt is refused.*no whole checkpoint.*--force starts again",
            halfway, whole()[0], "--resume")
    assert not Path("touched").exists()


@pytest.mark.parametrize("more, differs", (
    ("--H 32", "H: 16 there, 32 here"), ("--steps 50", "steps: 40 there, 50 here"),
    ("--seed 1", "seed: 0 there, 1 here"), (SHORT, "task: toy there, nd_regression here")))
def test_a_checkpoint_of_another_run_is_refused_with_what_differs(whole, stopped, more, differs):
    refused(f"is the checkpoint of another run .*{differs}", stopped, whole()[0], more, "--resume")


def test_a_resumed_run_may_change_its_machine_and_no_number(stopped):
    config = runs.read(stopped / "last.pt")["config"]
    may = {"device", "threads", "accumulate", "checkpoint_every"}
    assert config.keys() > {"batch", "lr", "recurrent_lr", "warmup", "clip", "dropout"} | may
    for name in config:
        try:
            path, _ = runs.read_checkpoint(stopped, dict(config, **{name: "another"}))
            refused = path is None
        except ValueError as error:
            refused = f"({name}: {config[name]} there, another here)" in str(error)
        assert refused == (name not in may), name


def test_seconds_count_on_after_a_stop(whole, halfway):
    state = runs.read(halfway / "last.pt")
    runs.save(halfway / "last.pt", dict(state, seconds=state["seconds"] + 5000))
    result = trained(halfway, whole()[0], "--resume")
    for seconds in (result["seconds"], runs.read(halfway / "last.pt")["seconds"]):
        assert state["seconds"] + 5000 < seconds < state["seconds"] + 5000 + 300


def test_force_leaves_nothing_of_the_run_before(whole, tmp_path):
    """A best.pt left over would be loaded for weights.pt, rows of metrics.csv drawn as these."""
    shutil.copytree(whole()[1], tmp_path / "run")
    for name in ("previous.pt", "weights.pt", "figure.png"):
        (tmp_path / "run" / name).touch()
    args = train.arguments([*SHORT.split(), "--force", "--out", str(tmp_path / "run")])
    with runs.run_folder(args, {}) as folder:
        runs.begin(folder, args, dict(task="nd_regression"), None, 0)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]
    assert json.loads((tmp_path / "run/config.json").read_text())["task"] == "nd_regression"


def test_a_run_in_use_is_left_alone(whole, halfway):
    with runs.locked(halfway):
        for word in ("--resume", "--force"):
            refused(f"run is in use by process {os.getpid()} on ", halfway, whole()[0], word)
    assert not (halfway / "lock").exists()


def test_the_same_command_twice_at_once_gets_two_folders(tmp_path, monkeypatch):
    """Before either has written a file."""
    monkeypatch.chdir(tmp_path)
    args = train.arguments(["--task", "multistep_regression", "--layers", "3", "--lr", "0.1"])
    args.recipe = "default"
    first, second = (runs.new_folder(args, dict(f=10, n=10)) for _ in range(2))
    assert first.name == "multistep_regression-gril-f10-n10-lr0.1-layers3-seed0"
    assert second.name == f"{first.name}-2"


def test_a_start_that_fails_leaves_no_folder(toy, tmp_path, monkeypatch):
    def loss(*of):
        raise MemoryError
    monkeypatch.setattr(Toy, "loss", loss)
    refused("too little memory. A smaller --batch, or --accumulate", tmp_path / "run", toy)


def test_a_fault_of_the_code_is_not_told_as_too_little_memory():
    with pytest.raises(RuntimeError, match="single memory location"), spoken("train.py"):
        torch.zeros(1).expand(3).add_(1)
    with pytest.raises(RuntimeError, match="without overflow"), spoken("train.py"):
        torch.zeros(3, dtype=torch.int32).fill_(2 ** 40)
    with pytest.raises(SystemExit, match="^lm.py: too little memory$"), spoken("lm.py"):
        raise MemoryError                                       # no --batch, no --accumulate


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="process 2 of this machine has no GPU: there are 2"):
        choose_device("cuda")


def test_a_split_that_is_missing_is_said_before_the_run(data, tmp_path, monkeypatch):
    plain = lm.read_tokens
    monkeypatch.setattr(lm, "read_tokens", lambda folder, kind, split, *of: (
        None if split == "valid" else plain(folder, kind, split, *of)))
    refused("has no valid tokens", tmp_path / "run", tiny("text_file", data))


def test_a_run_of_more_than_one_checkpoint_never_begins_again_unasked(whole, tmp_path):
    words, folder = whole()
    shutil.copytree(folder, tmp_path / "run")
    for name in ("last.pt", "result.json"):
        (tmp_path / "run" / name).unlink()
    refused("whose checkpoint, last.pt, is gone.*--force trains it", tmp_path / "run", words,
            "--resume")


def test_plain_torch_load_reads_the_files(whole, data):
    weights = torch.load(whole()[1] / "best.pt", weights_only=True)
    task, model, result = train.load(whole()[1])
    task.folder = Path(data)
    assert all(torch.equal(weights[name], x) for name, x in model.state_dict().items())
    assert not model.training and task.report(model, 0).items() <= result.items()
    assert result["best_step"] < result["steps"]                # the last weights are others


# ------------------------------------------------------------------------------- several processes

def together(folder, *words, faults={}, second=""):
    """A run of two processes over gloo, [(exit code, what it printed)]; words for the second alone.

    Once a faulty one is gone, a minute is left.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]),
                     WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    words = [*" ".join(words).split(), "--out", str(folder)]
    logs = [folder.with_suffix(f".{rank}.log") for rank in range(2)]
    processes = [start(words + second.split() * rank, log, faults.get(rank), RANK=str(rank),
                       LOCAL_RANK=str(rank), **where) for rank, log in enumerate(logs)]
    for rank in faults:
        finish(processes[rank])
    codes = [finish(process, 60 if faults else 300) for process in processes]
    return codes, [log.read_text() for log in logs]


def losses(*folders):
    """(steps, 2) of each run, training and validation."""
    for folder in folders:
        rows = csv.DictReader(open(folder / "metrics.csv"))
        yield torch.tensor([[float(row["train_loss"]), float(row["loss"])] for row in rows],
                           dtype=torch.float64)


@pytest.fixture(scope="session")
def exact(toy):
    return f"{toy} --steps 20 --evaluate-every 1 --checkpoint-every 5 --dtype float64"


@pytest.fixture(scope="session")
def pair(exact, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair") / "run"
    codes, said = together(folder, exact)
    assert codes == [0, 0], said
    return folder, said


def test_two_processes_are_one(exact, tmp_path):
    trained(tmp_path / "one", exact, "--dropout 0")
    assert together(tmp_path / "two", exact, "--dropout 0")[0] == [0, 0]
    one, two = losses(tmp_path / "one", tmp_path / "two")
    assert one.shape == (20, 2) and one[:, 0].unique().numel() == 20
    torch.testing.assert_close(one, two, rtol=0, atol=1e-8)


def test_two_turns_are_two_processes_with_dropout_too(exact, pair, tmp_path):
    folder, said = pair
    trained(tmp_path / "turns", exact, "--accumulate 2")
    turns, two = losses(tmp_path / "turns", folder)
    torch.testing.assert_close(turns, two, rtol=0, atol=1e-8)
    assert said[1] == ""                                        # rank 0 alone prints
    assert together(tmp_path / "both", exact, "--accumulate 2")[0] == [0, 0]
    trained(tmp_path / "four", exact, "--accumulate 4")
    both, four = losses(tmp_path / "both", tmp_path / "four")
    torch.testing.assert_close(both, four, rtol=0, atol=1e-8)
    assert (four - two).abs().max() > 1e-4                      # other shares, other dropout


def test_processes_started_with_different_words_do_not_train_together(exact, tmp_path):
    codes, said = together(tmp_path / "run", exact, second="--lr 0.5 --seed 3 --data nowhere")
    assert codes == [1, 1] and not (tmp_path / "run").exists()
    for text in said:
        assert "process 1 was started with other words: " in text and "Traceback" not in text
        for name in ("seed 3 there, 0 in process 0", "lr 0.5 there, 0.01 in ", "data nowhere the"):
            assert name in text


def test_a_port_in_use_is_said(exact, tmp_path):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = start(exact.split(), tmp_path / "log", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                        RANK="0", WORLD_SIZE="2")
        assert finish(process) == 1
    said = (tmp_path / "log").read_text()
    assert f"train.py: the 2 processes do not meet at 127.0.0.1:{port}" in said
    assert "EADDRINUSE" in said and "Traceback" not in said


@pytest.mark.parametrize("environment", ("RANK=1", "WORLD_SIZE=2", "RANK=2 WORLD_SIZE=2",
                                         "RANK=-1 WORLD_SIZE=2", "RANK=0 WORLD_SIZE=two"))
def test_a_rank_outside_the_world_is_refused(toy, tmp_path, monkeypatch, environment):
    for setting in environment.split():
        monkeypatch.setenv(*setting.split("="))
    refused(f"{' and '.join(environment.split())}, which is no proc", tmp_path / "run", toy)


@pytest.mark.parametrize("lost", (0, 1))
def test_a_lost_process_ends_the_other_and_the_run_goes_on(exact, pair, tmp_path, lost):
    codes, said = together(tmp_path / "run", exact, faults={lost: ("loss", 13, kill)})
    assert codes[lost] == -signal.SIGKILL and codes[1 - lost] == 1
    assert f"train.py: process {1 - lost} of 2: " in said[1 - lost]
    assert "start the same command again with --resume" in said[1 - lost]
    assert runs.read(tmp_path / "run/last.pt")["step"] == 10
    assert together(tmp_path / "run", exact, "--resume")[0] == [0, 0]
    assert_same(tmp_path / "run", pair[0])


def test_a_signal_to_one_process_stops_both_at_the_same_step(exact, pair, tmp_path):
    codes, said = together(tmp_path / "run", exact, faults={1: ("loss", 8, terminate)})
    assert codes == [143, 143] and "stopped after step 8" in said[0]
    assert "  torchrun --nproc_per_node 2 train.py --task" in said[0]
    assert together(tmp_path / "run", exact, "--resume")[0] == [0, 0]
    assert_same(tmp_path / "run", pair[0])


@pytest.mark.parametrize("model", ("gril", pytest.param("mamba", marks=pytest.mark.slow)))
def test_each_process_gets_its_carried_state_back(data, tmp_path, model):
    """--stateful on two processes, stopped: two go on to the bit, one alone with both's rows."""
    words = tiny("text_file", data, f"--stateful --model {model} --dtype float64 --dropout 0 "
                                    "--steps 20 --evaluate-every 1")
    assert together(tmp_path / "whole", words)[0] == [0, 0]
    assert together(tmp_path / "run", words, faults={1: ("loss", 8, terminate)})[0] == [143, 143]
    shutil.copytree(tmp_path / "run", tmp_path / "alone")
    assert together(tmp_path / "run", words, "--resume")[0] == [0, 0]
    assert_same(tmp_path / "run", tmp_path / "whole")
    trained(tmp_path / "alone", words, "--resume")
    whole, alone = losses(tmp_path / "whole", tmp_path / "alone")
    torch.testing.assert_close(alone, whole, rtol=0, atol=1e-8)


@pytest.mark.slow
def test_torchrun_loses_a_worker_and_goes_on(exact, pair, tmp_path):
    words = [*exact.split(), "--out", str(tmp_path / "run")]
    command = [sys.executable, *"-m torch.distributed.run --standalone --nproc_per_node 2".split()]
    environment = dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    (tmp_path / "faulty.py").write_text(f"""
import os
import test_train
fault = ("loss", 13, test_train.kill) if os.environ["RANK"] == "1" else None
test_train.child({words!r}, {str(tmp_path)!r} + "/log" + os.environ["RANK"], {{}}, fault)
""")
    lost = subprocess.run([*command, tmp_path / "faulty.py"], capture_output=True, text=True,
                          timeout=300, env=environment)
    assert lost.returncode == 1 and "Signal 9 (SIGKILL)" in lost.stderr
    assert not (tmp_path / "run/result.json").exists()
    assert "train.py: process 0 of 2: " in (tmp_path / "log0").read_text()
    resumed = subprocess.run([*command, __file__, *words, "--resume"], capture_output=True,
                             timeout=300, env=environment)
    assert resumed.returncode == 0
    assert_same(tmp_path / "run", pair[0])


# ------------------------------------------------------------ validation chooses, patience stops

def scripted(monkeypatch, validation, test=None):
    """A toy run whose validations score as listed; the weights at each of them."""
    seen, scores, tests = [], iter(validation), iter(test or [])

    def validate(self, model):
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
        assert not model.training
        return dict(loss=1.0, accuracy=next(scores))
    monkeypatch.setattr(Toy, "validate", validate)
    if test:
        monkeypatch.setattr(Toy, "report", lambda *of: dict(test_accuracy=next(tests)))
    return seen


@pytest.mark.parametrize("higher, validation, chosen", (
    (True, [0.5, 0.7, 0.6, 0.7, 0.9], 2), (False, [0.5, 0.7, 0.4, 0.6, 0.5, 0.1], 3),
    (True, [math.nan, 0.6, 0.5, 0.6, 0.9], 2)))
def test_early_stopping_and_the_best_weights(toy, tmp_path, monkeypatch, higher, validation,
                                             chosen):
    monkeypatch.setattr(Toy, "higher", higher)
    seen = scripted(monkeypatch, validation)
    result = trained(tmp_path / "run", toy, "--patience 2")
    assert len(seen) == chosen + 2 and result["best_step"] == 5 * chosen
    assert result["validation_accuracy"] == validation[chosen - 1]
    best, last = (runs.read(tmp_path / "run" / name) for name in ("best.pt", "last.pt"))
    assert all(torch.equal(best[name], value) for name, value in seen[chosen - 1].items())
    assert last["step"] == 5 * (chosen + 2)
    assert not torch.equal(last["model"]["0.weight"], best["0.weight"])
    again = trained(tmp_path / "run", toy, "--patience 2 --resume")     # over is over
    assert len(seen) == chosen + 2 and again["test_accuracy"] == result["test_accuracy"]


@pytest.mark.parametrize("higher, step, best", ((True, 10, 0.8), (False, 5, 0.1)))
def test_the_test_score_of_the_chosen_weights_and_the_best_one(toy, tmp_path, monkeypatch, higher,
                                                               step, best):
    monkeypatch.setattr(Toy, "higher", higher)
    scripted(monkeypatch, [0.5, 0.9, 0.6, 0.7], [0.3, 0.4, 0.8, 0.1, 0.45])
    result = trained(tmp_path / "run", toy, "--steps 20 --test-every-validation")
    assert result["test_accuracy"] == 0.45 and result["best_test_accuracy"] == best
    assert result["best_step"] == step
    rows = list(csv.DictReader(open(tmp_path / "run/metrics.csv")))
    assert [float(row["test_accuracy"]) for row in rows] == [0.3, 0.4, 0.8, 0.1]


@pytest.mark.parametrize("seed", (0, 1, 2))
def test_the_toy_is_learned(toy, tmp_path, seed):
    result = trained(tmp_path / "run", toy, f"--seed {seed} --model linear --lr 0.03 --steps 200",
                     "--evaluate-every 50")
    assert result["test_accuracy"] > 0.85 and result["best_step"] % 50 == 0


def test_turns_share_one_task_and_its_data(data, tmp_path, monkeypatch):
    read, collect = [], lra.arena.collect
    monkeypatch.setattr(lra.arena, "collect",
                        lambda rows, sources: read.append(sources) or collect(rows, sources))
    trained(tmp_path / "run", tiny("listops", data, "--accumulate 2 --steps 2"))
    assert len(read) == 1


@pytest.mark.parametrize("seed, turns, clip", ((0, 1, 0.5), (5, 2, 0.5), (5, 1, 0)))
def test_a_run_is_adamw_on_fresh_clipped_gradients(toy, data, tmp_path, monkeypatch, seed, turns,
                                                   clip):
    """The same weights and losses from a loop without train.py, one parameter after another."""
    decay, warmup, steps, seeds, stream = 0.3, 3, 12, [], Toy.stream
    monkeypatch.setattr(Toy, "stream",
                        lambda self, *args: seeds.append(args[0]) or stream(self, *args))
    trained(tmp_path / "run", toy, f"--seed {seed} --clip {clip} --weight-decay {decay}",
            f"--warmup {warmup} --steps {steps} --dtype float64 --dropout 0 --evaluate-every 1",
            f"--accumulate {turns}")
    monkeypatch.undo()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(seed)
        task = Toy(data, dropout=0.0)
        model = task.model()
    finally:
        torch.set_default_dtype(torch.float32)
    stream = task.stream(seeds[0], 8, "cpu")
    rows = list(csv.DictReader(open(tmp_path / "run/metrics.csv")))
    named, norms = dict(model.named_parameters()), []
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in named.items()}
    for step in range(steps):
        loss = task.loss(model, next(stream))
        gradients = torch.autograd.grad(loss, list(named.values()))
        norms.append(math.sqrt(sum(g.square().sum().item() for g in gradients)))
        share = min((step + 1) / warmup, (1 + math.cos(math.pi * step / steps)) / 2)
        for (name, p), g in zip(named.items(), gradients):
            recurrent = name in {f"1.mixer.{last}" for last in ("nu", "theta", "Q", "q", "beta")}
            rate, shrink = (3e-3, 0) if recurrent else (1e-2, decay)
            g = g * min(1, (clip or math.inf) / norms[-1])
            m, v = moments[name]
            m, v = moments[name] = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g.square()
            m, v = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.999 ** (step + 1))
            p.data = p.data - share * rate * (shrink * p.data + m / (v.sqrt() + 1e-8))
        assert float(rows[step]["train_loss"]) == pytest.approx(loss.item(), abs=1e-6)
        assert float(rows[step]["lr"]) == pytest.approx(share * 1e-2)
        assert float(rows[step]["loss"]) == pytest.approx(task.score(model, "val")[0], abs=1e-6)
    assert min(norms) < (clip or 1) < max(norms)                # some were clipped, some left alone
    weights = runs.read(tmp_path / "run/last.pt")["model"]
    for name, p in named.items():
        torch.testing.assert_close(weights[name], p.data, rtol=0, atol=1e-5)


def test_every_step_share_and_seed_has_dropout_of_its_own(toy, tmp_path, monkeypatch):
    seen, plain = [], Toy.loss

    def loss(self, model, batch):
        assert model.training                                   # also after a validation
        seen.append(torch.initial_seed())
        return plain(self, model, batch)
    monkeypatch.setattr(Toy, "loss", loss)
    for seed in range(3):
        trained(tmp_path / str(seed), toy, f"--seed {seed} --steps 3 --evaluate-every 1",
                "--accumulate 2")
    assert len(set(seen)) == len(seen) == 3 * 3 * 2


LOWER = {       # what trains at the lower rate, undecayed, by family
    "gril": "nu theta Q q beta", "s5": "Lambda_re Lambda_im B log_Delta",
    "lru": "nu theta log_gamma B", "mamba": "A_log D", "longhorn": "D", "deltanet": "",
    "griffin": "Lambda", "transformer": "",
    "in context": "A", "attention in context": ""}


@pytest.mark.parametrize("task", ("image", "wikitext2", *train.IN_CONTEXT))
def test_exactly_these_parameters_train_at_the_lower_rate(task):
    made = train.TASKS[task](**(dict(raw=True) if task == "scalar_regression" else {}))
    if task in train.IN_CONTEXT:
        names = dict.fromkeys(made.models(), "in context") | {
            name: "attention in context" if "attention" in name else name
            for name in offered("in_context")
            if (task, name) != ("scalar_regression", "linear_attention_pairs")}
    else:
        grils = ("gril_w1", "gril_alone", "linear_attention", "filtered")
        table = offered("lra") if task in lra.LRA else lm.models()
        names = {name: "gril" if name in grils else name for name in table}
    for name, family in names.items():
        with torch.device("meta"):
            model = made.model(name)
        groups = {group["name"]: group for group in train.parameter_groups(
            model, dict(lr=1.0, recurrent_lr=0.25, weight_decay=0.5))}
        listed = sorted(id(p) for group in groups.values() for p in group["params"])
        assert listed == sorted(id(p) for p in model.parameters() if p.requires_grad), name
        lower, other = ({path.split(".")[-1] for path in groups.get(key, dict(names=[]))["names"]}
                        for key in ("recurrent", "other"))
        expected = set(LOWER[family.removesuffix("_lp")].split())
        if "dagger" in name:                                    # A is frozen
            expected = set()
        assert lower == expected and not other & expected, name
        assert {key: (g["peak"], g["weight_decay"]) for key, g in groups.items()}.items() <= {
            "recurrent": (0.25, 0.0), "other": (1.0, 0.5)}.items(), name


def test_bfloat16_autocast_keeps_float32_weights(toy, tmp_path):
    with torch.backends.mkldnn.flags(enabled=False):        # it needs CPUs with bf16 instructions
        for dtype in ("bfloat16", "float32"):
            trained(tmp_path / dtype, toy, f"--dtype {dtype} --steps 5 --dropout 0")
    low, full = losses(tmp_path / "bfloat16", tmp_path / "float32")
    assert not torch.equal(low, full) and (low - full).abs().max() < 0.05
    weights = runs.read(tmp_path / "bfloat16/last.pt")["model"]
    assert {value.dtype for value in weights.values()} == {torch.float32}


# ------------------------------------------------------------------------------ numbers gone wrong

def poisoned(monkeypatch, owner, number, poison):
    calls, plain = itertools.count(), owner.loss

    def loss(self, model, batch):
        value = plain(self, model, batch)
        return poison(value) if next(calls) == number else value
    monkeypatch.setattr(owner, "loss", loss)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_good_weights(tmp_path, monkeypatch):
    poisoned(monkeypatch, InContext, 7, lambda loss: loss * float("nan"))
    with pytest.raises(SystemExit, match=(
            r"step 7: the loss is nan.*first not finite in A \(group recurrent\).*"
            r"batch is number 7 of seed 0\..*weights\.pt")):
        trained(tmp_path / "run", "--task nd_regression --steps 50 --quiet")
    weights = runs.read(tmp_path / "run/weights.pt")
    assert all(w.isfinite().all() for w in weights.values())
    assert not (tmp_path / "run/result.json").exists()


def overflow(loss):
    """The loss, with a gradient that is infinite."""
    loss = loss.clone()
    loss.register_hook(lambda gradient: gradient / 0)
    return loss


def test_a_gradient_that_is_not_finite_names_the_batch(toy, tmp_path, monkeypatch):
    poisoned(monkeypatch, Toy, 14, overflow)
    with pytest.raises(SystemExit, match=(
            r"step 14: the loss is 0\.\d+, the gradient norm (nan|inf); its gradient is first not "
            r"finite in 1\.mixer\.\w+ \(group recurrent\).*"
            r"number 14 of seed 0, ending at \[1, 3\] of the data")):
        trained(tmp_path / "run", toy)
    good, last = (runs.read(tmp_path / "run" / name) for name in ("weights.pt", "last.pt"))
    assert last["step"] == 10 and all(value.isfinite().all() for value in good.values())
    assert not torch.equal(good["0.weight"], last["model"]["0.weight"])     # good is of step 14
    assert run(tmp_path / "stopped", toy, fault=("loss", 14, terminate))[0] == 143
    stopped = runs.read(tmp_path / "stopped/last.pt")
    assert stopped["step"] == 14
    assert all(torch.equal(value, stopped["model"][name]) for name, value in good.items())


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
@pytest.mark.parametrize("clip", (0, 1))
def test_the_parameter_that_went_wrong_is_named_and_no_other(toy, tmp_path, monkeypatch, value,
                                                             clip):
    """One gradient of the last group; clipping by its norm would have spread the NaN over all."""
    plain = Toy.loss

    def loss(self, model, batch):
        model[-1].weight.register_hook(lambda gradient: gradient * value)
        return plain(self, model, batch)
    monkeypatch.setattr(Toy, "loss", loss)
    help = "--dtype float64: float32 ends at 3e38" if value == math.inf else "may help$"
    with pytest.raises(SystemExit, match=(
            r"step 0: the loss is 0\.\d+, .*first not finite in 2\.weight \(group other\).*"
            rf"number 0 of seed 0.*{help}")):
        trained(tmp_path / "run", toy, f"--clip {clip}")
    assert all(w.isfinite().all() for w in runs.read(tmp_path / "run/weights.pt").values())


# -------------------------------------------------------------------------------------- compiling

@pytest.mark.parametrize("task, device, flag, expected", (
    ("text", "cuda", None, True), ("nd_regression", "cuda", None, False),
    ("text", "cpu", None, False), ("text", "cuda", False, False),
    ("nd_regression", "cpu", True, True)))
def test_what_is_compiled_unasked(task, device, flag, expected):
    assert train.compiles(flag, torch.device(device), train.TASKS[task]) is expected


def no_compiler(graph, inputs):
    raise RuntimeError("no compiler here")


@pytest.mark.parametrize("backend", ("eager", no_compiler))
def test_a_compiled_run_learns_the_same_and_goes_on_where_compiling_fails(
        monkeypatch, toy, tmp_path, capsys, backend):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch.compiler.reset()
    plain, compiled = (trained(tmp_path / name, toy, words)["test_loss"]
                       for name, words in (("plain", ""), ("compiled", "--compile")))
    said = capsys.readouterr().err
    failed = backend is no_compiler
    assert said.count("torch.compile failed, going on without it") == failed
    assert ("no compiler here" in said) == failed
    assert compiled == pytest.approx(plain, rel=0 if failed else 1e-5, abs=0)


# ------------------------------------------------------------------------------------- the dry run

def test_the_dry_run_counts_what_can_be_counted_by_hand(capsys):
    words = "--task toy --model linear --dry-run --batch 24 --steps 1000 --data nowhere".split()
    r = train.main(words)
    B, T, H = 24, 12, 16
    assert r["parameters"] == 4 * H + 5 * H * H + 2 * 5 * H and r["tokens"] == B * T
    assert r["flops"] == 3 * 2 * B * T * (5 * H * H + 2 * 5 * H)    # forward, two products backward
    small = 8 * B * T + 4 * B * T * (H + 5 * H)                 # tokens; inputs of the two products
    assert small <= r["activations"] <= small + 8 * B * 8       # logits, labels
    assert r["optimiser"] == 16 * r["parameters"] and r["traffic"] > 3 * small
    seconds = dict(products=r["flops"] / (0.3 * 312e12), traffic=r["traffic"] / 2.04e12,
                   launches=r["kernels"] * 5e-6)
    hours = {name: value * 1000 / 3600 for name, value in seconds.items()}
    one, four = r["hours"]["one H100"], r["hours"]["four H100"]
    assert {name: r["hours"]["one A100"][name] for name in hours} == pytest.approx(hours)
    assert r["hours"]["one A100"]["eager"] == pytest.approx(max(hours.values()))
    assert four["launches"] == one["launches"]                  # each GPU launches all its kernels
    assert four["traffic"] == pytest.approx(one["traffic"] / 4) and r["compiled"] is None
    said = capsys.readouterr().out
    share = r["parameters"] / 2000 - 1
    for text in (f"parameters   {r['parameters']:,}, the paper's 2,000 ({share:+.1%})",
                 "24, 288 tokens", "activations 0.", "one A100", "one H100", "four H100",
                 "at 30% of the bf16 peak", "launches (compiled)    traffic   products    largest"):
        assert text in said
    shared = train.main([*words, "--world", "4", "--accumulate", "2"])
    assert shared["flops"] == r["flops"] and shared["tokens"] == r["tokens"]
    assert abs(8 * shared["activations"] / r["activations"] - 1) < 0.01
    assert not Path("runs").exists() or not list(Path("runs").glob("toy*"))


def test_the_dry_run_counts_kernels_but_no_views_and_allocations():
    with cost.OneDevice() as device:
        x = torch.empty(4, 6, device="meta")
        y = x.mT.flatten()[1:].view(23)                         # one copy, made by flatten
        z = y * 2
        z.add_(1)
        torch.promote_types(z.dtype, torch.float64)             # a question, no kernel
        assert z.is_meta and device.kernels == 3
        assert device.traffic == (24 + 24 + 23 + 23 + 23 + 23) * 4


def test_the_dry_run_takes_inductors_count_for_each_layers_recurrence():
    """Two layers more: twice a layer's kernels more, of which compiling leaves inductor's."""
    few, many = (train.main(["--task", "wikitext2", "--layers", str(n), "--dry-run"])
                 for n in (2, 4))
    with torch.device("meta"):
        mixer = GrilMixer(128, 64, 16)
    inside = cost.recurrence_kernels(mixer, (8, 256))
    assert many["kernels"] - few["kernels"] > 2 * inside > 2 * cost.FUSED["complex"]
    assert few["kernels"] - few["compiled"] == 2 * (inside - cost.FUSED["complex"])
    shared = train.main("--task wikitext2 --layers 2 --accumulate 2 --dry-run".split())
    assert shared["kernels"] == 2 * few["kernels"]              # each turn launches all of them


@pytest.mark.slow
@pytest.mark.parametrize("gate", cost.FUSED)
def test_inductor_makes_as_few_kernels_as_the_dry_run_says(gate):
    mixer = GrilMixer(64, 128, 32, gate=gate)
    v, k, u = torch.randn(3, 4, 1024, 32, 4, requires_grad=True).unbind()

    def recur(v, k, u):
        log_rho, theta, _ = mixer.gates()
        return mixer.recur(v, k, u, log_rho, theta, mixer.start(v))[0]
    torch.compiler.reset()
    metrics.reset()
    with torch._inductor.utils.fresh_inductor_cache():
        o = torch.compile(recur, fullgraph=True, dynamic=False)(v, k, u)
        o.backward(torch.randn_like(o))
    assert metrics.generated_kernel_count == cost.FUSED[gate] <= 110


PAPER_KERNELS = dict.fromkeys(lra.LRA, 5_000) | dict(wikitext103=12_000)


@pytest.mark.parametrize("task", ("listops", "text", *(
    pytest.param(task, marks=pytest.mark.slow) for task in PAPER_KERNELS
    if task not in ("listops", "text"))))
def test_a_step_of_the_papers_size_is_not_thousands_of_small_kernels(task):
    r = train.main(["--task", task, "--size", "paper", "--world", "4", "--dry-run"])
    assert r["compiled"] < r["kernels"] <= PAPER_KERNELS[task]


@pytest.mark.parametrize("task", train.TASKS)
def test_the_dry_run_of_every_task(task, capsys):
    r = train.main(["--task", task, "--dry-run"])
    if task == "nd_regression":
        assert r["tokens"] == 256 * (2 * 10 + 1)
    if task == "nonlinear_regression":                          # its line search needs numbers
        words = "--model gd_dagger --layers 2 --tasks 50 --dry-run".split()
        assert train.main(["--task", task, *words])["flops"] > 0
    assert r["flops"] > 0 and r["activations"] > 0
    in_context = task in train.IN_CONTEXT
    assert ("recurrence   gril_chunk" in capsys.readouterr().out) == (not in_context)
    assert r["parameters"] == sum(p.numel() for p in train.TASKS[task]().model().parameters())


@pytest.mark.parametrize("forget", ("product", "embedding", "plain attribute"))
def test_the_dry_run_catches_a_tensor_left_on_the_cpu(monkeypatch, forget):
    loss, build = Toy.loss, Toy.model
    torch.ones(2, 3) @ torch.ones(3, 4, device="meta")          # the meta device lets it pass

    def faulty(self, model, batch):
        W, rows = model[0].weight, torch.zeros(3, dtype=torch.int64)
        left = W @ torch.ones(16, 2) if forget == "product" else F.embedding(rows, W)
        return loss(self, model, batch) + left.sum()

    def attribute(self, name):
        model = build(self, name)
        model[0].table = torch.ones(3)
        return model
    message = "mixes tensors of cpu and meta"
    if forget == "plain attribute":
        message = "Embedding.table is a plain tensor"
        monkeypatch.setattr(Toy, "model", attribute)
    else:
        monkeypatch.setattr(Toy, "loss", faulty)
    with pytest.raises(SystemExit, match=message):
        train.main(["--task", "toy", "--dry-run"])


# ------------------------------------------------------------------------------------ growth, size

@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="counts open files in /proc")
@pytest.mark.parametrize("task, steps", (
    ("nd_regression", 300), ("listops", 100),
    pytest.param("text_file", 100, marks=pytest.mark.slow),
    pytest.param("nd_regression", 100_000, marks=pytest.mark.slow)))
def test_nothing_grows_with_the_steps(data, tmp_path, monkeypatch, task, steps):
    words = "--task nd_regression --f 2 --n 2 --batch 2 --tasks 100 --quiet"
    if task != "nd_regression":
        words = tiny(task, data)
    owner = train.TASKS[task]
    seen, validate = [], owner.validate

    def watch(self, model):
        scores = validate(self, model)
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        seen.append((len(gc.get_objects()), len(os.listdir("/proc/self/fd")),
                     pages * resource.getpagesize() / 1e6))
        return scores
    monkeypatch.setattr(owner, "validate", watch)
    trained(tmp_path / "run", words, f"--steps {steps} --evaluate-every {steps // 10}",
            f"--checkpoint-every {steps // 20}")
    objects, opened, megabytes = (max(of) - of[0] for of in zip(*seen[-9:]))    # then it is warm
    assert objects < 100 and opened == 0 and megabytes < 10


@pytest.mark.parametrize("task", train.IN_CONTEXT)
@pytest.mark.parametrize("sizes", ("--f 1 --n 1 --batch 1",
                                   "--weight-scale 0 --f 2 --n 3 --batch 4"))
def test_the_smallest_tasks_and_targets_all_equal(tmp_path, monkeypatch, capsys, task, sizes):
    """One feature, example, task a step; targets all 0, so that gradient descent is right."""
    monkeypatch.setattr("train.draw_run", lambda *run: "none")
    result = trained(tmp_path / "run", f"--task {task} {sizes} --steps 5 --tasks 50")
    assert all(math.isfinite(value) for value in result.values() if isinstance(value, float))
    said = capsys.readouterr().out
    assert "zero predictor" in said
    assert ("only the sum and the products of" in said) == (task == "multistep_regression")
    if "weight" in sizes and "regression" in task:
        assert result["gd_loss"] == result["zero_loss"] == 0 < result["loss"]


@pytest.mark.parametrize("task, more", (("listops", ""), ("text_file", ""),
                                        ("text_file", "--stateful")))
def test_one_token_at_a_time_of_data_without_variety(tmp_path, task, more):
    """Length, batch, state of one; all labels or tokens the same: learned, no division by zero."""
    write_listops(tmp_path)
    for path in (tmp_path / "listops").iterdir():
        path.write_text("Source\tTarget\r\n" + "( ( ( [MAX 3 ) 7 ) ] )\t7\r\n" * 12, newline="")
    text_file(tmp_path, "a" * 1000)
    result = trained(tmp_path / "run", tiny(task, tmp_path, more),
                     "--length 1 --batch 1 --P 1 --J 1 --lr 0.1 --steps 100 --evaluate-every 50")
    assert all(math.isfinite(value) for value in result.values() if isinstance(value, float))
    assert result.get("test_accuracy") == 100 or result["test_loss"] < 0.1


@pytest.mark.parametrize("scale", ("1e10", "1e-10"))
def test_scales_beyond_float32_are_said_and_float64_holds_them(tmp_path, scale):
    words = f"--task nd_regression --scale {scale} --f 3 --n 5 --steps 3 --tasks 100 --quiet"
    refused(f"--scale {scale.replace('1e10', '1e.10')} .*beyond float32.*"
            "--dtype float64 holds more", tmp_path / "run", words)
    result = trained(tmp_path / "run", words, "--dtype float64")
    assert result["constructed_loss"] == pytest.approx(result["gd_loss"], rel=1e-10)
    assert math.isfinite(result["loss"]) and 0 < result["gd_loss"] < result["zero_loss"]
    assert result["optimal_loss"] == pytest.approx(0.0375 * float(scale) ** 2, rel=0.2)


# ----------------------------------------------------------------------------------- the same bits

def test_same_seed_same_bits(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        trained(tmp_path / name, SHORT, f"--seed {seed}")
    assert_same(tmp_path / "a", tmp_path / "b")
    a, c = (runs.read(tmp_path / name / "weights.pt")["Q"] for name in ("a", "c"))
    assert not torch.equal(a, c)


@pytest.mark.parametrize("task, forms", [
    *((task, ("query", "loop", "scan")) for task in train.IN_CONTEXT),
    *((task, ("chunk", "loop", "scan")) for task in ("listops", "text_file"))])
def test_every_form_of_the_recurrence_trains_to_the_same_losses(data, tmp_path, task, forms):
    words = f"--task {task} --quiet --f 3 --n 4 --batch 8 --tasks 100"
    if task not in train.IN_CONTEXT:
        words = tiny(task, data)
    for form in forms:
        trained(tmp_path / form, words, f"--form {form} --steps 10 --evaluate-every 1",
                "--dtype float64")
    first, *others = losses(*(tmp_path / form for form in forms))
    assert len(first) == 10
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-9, atol=0)


def test_no_two_uses_share_a_seed(tmp_path, monkeypatch):
    """Training, validation, tuning and report; the first and the last anew for each --seed."""
    used, roles = {}, []

    class Recording(torch.Generator):
        def manual_seed(self, seed):
            used.setdefault(roles[-1], {}).setdefault(run, set()).add(seed)
            return super().manual_seed(seed)

    def as_role(role, plain):
        def call(*args, **options):
            roles.append(role)
            try:
                return plain(*args, **options)
            finally:
                roles.pop()
        return call
    monkeypatch.setattr(torch, "Generator", Recording)
    for owner, name, role in ((InContext, "stream", "training"), (InContext, "report", "report"),
                              (InContext, "validate", "validation"), (tasks, "tune", "tuning")):
        monkeypatch.setattr(owner, name, as_role(role, getattr(owner, name)))
    starts, model = [], InContext.model
    monkeypatch.setattr(InContext, "model",
                        lambda self, name: starts.append(torch.initial_seed()) or model(self, name))
    settings = list(itertools.product((0, 1, 2, 9999), ("", "--calibrate 2")))
    for run, (seed, more) in enumerate(settings):
        trained(tmp_path / str(run), f"--task multistep_regression --seed {seed} {more}",
                "--f 2 --n 3 --steps 1 --tasks 20 --batch 4 --quiet")
    assert used.keys() == {"training", "validation", "tuning", "report"}
    seeds = {role: [of[run] for run in range(len(settings))] for role, of in used.items()}
    for a, b in itertools.combinations(seeds, 2):
        assert not set.union(*seeds[a]) & set.union(*seeds[b]), (a, b)
    for role, count in (("training", 4), ("report", 4), ("validation", 1), ("tuning", 1)):
        assert all(len(of) == 1 for of in seeds[role]), role
        assert len(set.union(*seeds[role])) == count, role
    assert len(set(starts)) == 4                                # and weights


# ---------------------------------------------------------------------- the command line, as typed

def test_the_front_door(tmp_path, monkeypatch):
    """Twice the same command: two folders, a table, a figure, and the same numbers."""
    command = ["--task", "nd_regression", "--steps", "20", "--tasks", "200"]
    first = subprocess.run([sys.executable, ROOT / "train.py", *command], cwd=tmp_path,
                           capture_output=True, text=True,
                           env=dict(os.environ, PYTHONIOENCODING="ascii"))
    assert first.returncode == 0, first.stderr
    assert re.search(r"train 0\.\d+", first.stderr)             # on the progress bar
    monkeypatch.chdir(tmp_path)
    train.main(command)
    for text in ("recurrent    100 parameters", "other         13 parameters", "device    cpu",
                 "constructed GRIL", "zero predictor", "closed form",
                 "largest distance from the construction", "figure.png",
                 "schedule  the warm-up, 100 steps, does not end within 20: the rates come to 15%"):
        assert text in first.stdout
    folders = sorted(Path("runs").iterdir())
    name = "nd_regression-gril-f10-n10-steps20-tasks200-seed0"
    assert [folder.name for folder in folders] == [name, f"{name}-2"]
    for folder in folders:
        assert {path.name for path in folder.iterdir()} == {
            "config.json", "metrics.csv", "result.json", "weights.pt", "last.pt", "figure.png"}
    rows = list(csv.DictReader(open(folders[0] / "metrics.csv")))
    assert [int(row["step"]) for row in rows] == [1, 2, 5, 10, 20]
    task, model, result = train.load(folders[0])
    assert task.report(model, 20_000)["loss"] == result["loss"]


def test_a_run_validates_its_last_step_and_remembers_its_data_folder(toy, data, tmp_path):
    """So that lm.py generate finds the vocabulary; a resumed run may have another."""
    trained(tmp_path / "run", toy, "--steps 7")
    assert [row["step"] for row in csv.DictReader(open(tmp_path / "run/metrics.csv"))] == ["5", "7"]
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["data"] == os.path.abspath(data)


@pytest.mark.parametrize("model", ("gril", "looped"))
def test_a_run_in_float64_loads(tmp_path, model):
    trained(tmp_path / "run", f"--task multistep_regression --model {model} --f 3 --n 3 --steps 2",
            "--tasks 20 --dtype float64 --quiet")
    task, net, _ = train.load(tmp_path / "run")
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert net(task.sample(2, torch.Generator()).s).isfinite().all()


@pytest.mark.parametrize("words, answer", (
    ("nd_regresion", "did you mean nd_regression?"),
    ("nd_regresion --f 3", "There are: scalar_regression, nd_regression, multistep"),
    ("nd_regression --model s6", "There are: gril, no_window"),
    ("nd_regression --recipe quick", "There are: default, paper"),
    ("nd_regression --f 0", "--f must be at least 1, got 0"),
    ("nd_regression --steps 0", "--steps must be at least 1, got 0"),
    ("nd_regression --threads -1", "--threads must be 0 or more, got -1"),
    ("nd_regression --world -2 --dry-run", "--world must be 0 or more, got -2"),
    ("nd_regression --patience 3", "--patience: nd_regression keeps its last weights"),
    ("nd_regression --layers 3",
     "gril of nd_regression has one layer; multistep_regression has several"),
    ("nonlinear_regression --model gd_dagger_rho --layers 2", "has one layer"),
    ("text --f 10", "--f is for scalar_regression, nd_regression, "),
    ("text --f=10", "; text takes --layers --H "),
    ("nd_regression --hidden 7", "--hidden is for scalar_regression; nd_regression takes --f"),
    ("nd_regression --form chunk", "unknown form 'chunk'. There are: query, loop, scan"),
    ("text --form query", "unknown form 'query'. There are: loop, scan, chunk"),
    ("nd_regression --seed 10000", "--seed must be 0 to 9999"),
    ("nd_regression --scale nan", "--scale must be a finite number, got nan"),
    ("nd_regression --scale 0", "--scale must be a number other than 0, got 0"),
    ("wikitext2 --validate-tokens 1", "--validate-tokens must be 0 (all) or at least 2"),
    ("toy --accumulate 3", "a batch of 8 is not divisible by 3"),
    ("nd_regression --resume", "--resume needs --out"),
    ("nd_regression --out old", "already holds a run: choose another --out, --resume"),
    ("nd_regression --out old --resume", "old holds a run whose checkpoint, last.pt, is gone"),
    ("nd_regression --out old --resume --lr 1", "holds another run (lr: 0.02 there, 1.0 here)"),
    ("nd_regression --out old --force --lr -1", "--lr must be more than 0, got -1.0"),
    ("nd_regression --out old --force --model s6", "unknown model"),
    ("nd_regression --out old --force --f 10000000", "too little memory"),
    ("nd_regression --f 100000000000000000000", "--f must be less than 2^63, got 1000"),
    ("text --out old --force --data nowhere", "text: no data. Looked for nowhere"),
    ("wikitext2 --out new --data nowhere", "there is no nowhere"),
    ("nd_regression --out mine", "--out mine is not empty and holds no run"),
    ("nd_regression --out mine --force", "--out mine is not empty and holds no run"),
    ("nd_regression --out mine --resume", "--out mine is not empty and holds no run"),
    ("nd_regression --out=", "--out . is not empty and holds no run"),
    ("nd_regression --out broken --force", "broken/config.json is no JSON"),
    ("multistep", "did you mean multistep_regression?"),
    ("wikitext", "did you mean wikitext103 or wikitext2?"),
    ("nd_regression --threads 1000000", "--threads must be at most 1024"),
    ("nd_regression --lr inf", "--lr must be a finite number, got inf"),
))
def test_mistakes_are_answered(tmp_path, monkeypatch, words, answer):
    """And nothing is touched, neither an old run nor what is no run."""
    monkeypatch.chdir(tmp_path)
    for folder in ("old", "mine", "broken"):
        Path(folder).mkdir()
        for name in "figure.png best.pt weights.pt metrics.csv result.json".split():
            Path(folder, name).touch()
    config = dict(task="nd_regression", model="gril", recipe="default", seed=0,
                  test_every_validation=False, **tasks.NdRegression.numbers("default"))
    Path("old/config.json").write_text(json.dumps(config))
    Path("broken/config.json").write_text("{")
    before = files(tmp_path)
    with pytest.raises(SystemExit) as stop:
        train.main(["--task", *words.split(), "--quiet"])
    assert answer in str(stop.value) and "Traceback" not in str(stop.value)
    assert files(tmp_path) == before and not Path("runs").exists() and not Path("new").exists()


@pytest.mark.parametrize("task", train.TASKS)
def test_every_number_has_its_range_and_not_a_number_is_in_none(task):
    for name, option in {**train.LOOP, **train.TASKS[task].options}.items():
        if task == "toy" or option.type not in (int, float):
            continue
        wrong = [] if option.type is int else [math.nan, math.inf, -math.inf]
        if name not in ("scale", "weight_scale"):               # of which any sign will do
            bound = option.least if option.least is not None else option.above
            wrong.append(bound - 1)
        for value in wrong:
            with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} must be "):
                train.TASKS[task](**{name: value})


@pytest.mark.parametrize("task", ("", *train.TASKS))
def test_help_fits_80_columns_and_offers_what_the_task_takes(capsys, task):
    with pytest.raises(SystemExit):
        train.main(["--task", task, "--help"] if task else ["--help"])
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert ", --size " in said and all(name in said for name in train.TASKS)
    offered = {line.split()[0].strip("-,").replace("-", "_")
               for line in said.splitlines() if line.startswith("  --")}
    common = set("task model recipe seed data out force resume quiet compile world dry_run "
                 "test_every_validation".split())
    assert offered == common | {*train.LOOP, *(train.TASKS[task].options if task else ())}


def test_a_task_brings_its_options_and_its_references(tmp_path, monkeypatch, capsys):
    """On the command line, in --help and in a loaded run; a row more in the table."""
    monkeypatch.setitem(train.TASKS, "noisy", Noisy)
    with pytest.raises(SystemExit):
        train.main(["--task", "noisy", "--help"])
    assert "--noise FLOAT             noise of the targets (0.1)" in capsys.readouterr().out
    monkeypatch.setattr("train.draw_run", lambda *run: "none")
    result = trained(tmp_path / "run", "--task noisy --noise 0.5 --f 3 --steps 2 --tasks 100")
    said = capsys.readouterr().out
    assert "noise=0.5" in said and f"{'ridge':36s}{result['ridge_loss']:10.5f}" in said
    assert result["noise"] == train.load(tmp_path / "run")[0].noise == 0.5


def test_a_file_task_has_table_and_figure(toy, tmp_path, capsys):
    trained(tmp_path / "run", toy.replace("--quiet", ""), "--steps 10")
    said = capsys.readouterr().out
    for text in ("task      toy, recipe tiny: ", "H=16", "recurrent ", "accuracy 0.",
                 "device    cpu, float32, 1 thread, 1 process"):
        assert text in said
    assert (tmp_path / "run/figure.png").stat().st_size > 10_000


if __name__ == "__main__":
    train.main()
