"""The training loop: same bits after any interruption, several processes as one, costs beforehand, faults and mistakes.

Besides in-context tasks, ListOps and a language model it trains Toy, a task that reads files, with which most faults are
shown; `python test_train.py --task toy …` is train.py with it.
"""
import csv
import functools
import gc
import itertools
import json
import math
import multiprocessing
import os
import random
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

import lm
import lra
import tasks
import train
from baselines import offered
from files import runs
from machine import cost
from gril import Block, GrilMixer
from machine.errors import known
from tasks import Task
from test_lm import Hostile, text_file
from test_lra import ROUNDS, fuzz, write_listops

ROOT = Path(__file__).parent.parent


# -------------------------------------------------------------------------------------------------- a task with files

class Toy:
    """Are there more ones or more twos in a short sequence?"""
    name, paper_parameters = "toy", 2_000
    recipes = {"tiny": dict(steps=40, batch=8, lr=1e-2, recurrent_lr=3e-3, weight_decay=0.01, warmup=5, clip=1.0,
                            evaluate_every=5, checkpoint_every=10, patience=0, choose="accuracy", higher=True, threads=1,
                            layers=1, H=16, P=8, J=2, dropout=0.1, length=12)}

    def __init__(self, recipe, data=None, **options):
        self.recipe, self.folder = {**recipe, **options}, Path(data or "data")

    @staticmethod
    def prepare(folder):
        generator = np.random.default_rng(0)
        for split, rows in (("train", 100), ("val", 40), ("test", 60)):
            np.save(folder / f"{split}.npy", generator.integers(0, 4, (rows, 12)))

    def read(self, split):
        tokens = torch.from_numpy(np.load(self.folder / f"{split}.npy"))
        return tokens, ((tokens == 1).sum(1) > (tokens == 2).sum(1)).long()

    def model(self, name="gril"):
        r = self.recipe
        return known("model", name, {
            "gril": lambda: nn.Sequential(
                nn.Embedding(4, r["H"]), *(Block(GrilMixer(r["H"], r["P"], r["J"]), r["H"], r["dropout"])
                                           for _ in range(r["layers"])), nn.Linear(r["H"], 2)),
            "linear": lambda: nn.Sequential(nn.Embedding(4, r["H"]), nn.Linear(r["H"], 5 * r["H"], bias=False),
                                            nn.Linear(5 * r["H"], 2, bias=False))})()

    def stream(self, seed, batch, device, rank=0, world=1):
        return ToyStream(self, seed, batch, device, rank, world)

    def example(self, batch):
        return torch.ones(batch, self.recipe["length"], dtype=torch.int64), torch.ones(batch, dtype=torch.int64)

    def loss(self, model, batch):
        tokens, labels = batch
        return F.cross_entropy(model(tokens).mean(1), labels)

    @torch.no_grad()
    def score(self, model, split):
        tokens, labels = self.read(split)
        logits = model(tokens).mean(1)
        return F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).double().mean().item()

    def validate(self, model):
        return dict(zip(("loss", "accuracy"), self.score(model, "val")))

    def report(self, model, seed):
        return dict(zip(("test_loss", "test_accuracy"), self.score(model, "test")))

    def table(self, result):
        return f"accuracy {result['test_accuracy']}, best over the run {result.get('best_test_accuracy')}"


class ToyStream:
    def __init__(self, task, seed, batch, device, rank, world):
        self.seed, self.batch, self.rank, self.world = seed, batch, rank, world
        self.tokens, self.labels = task.read("train")
        self.seek((0, 0))

    def seek(self, position):
        self.epoch, self.index = position
        self.order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.labels))

    def position(self):
        return self.epoch, self.index

    def __next__(self):
        if self.index + self.batch > len(self.order):
            self.seek((self.epoch + 1, 0))
        rows = self.order[self.index:self.index + self.batch][self.rank::self.world]
        self.index += self.batch
        return self.tokens[rows], self.labels[rows]


train.TASKS["toy"] = Toy
TOY = ("--task", "toy", "--quiet")
SHORT = ("--task", "nd_regression", "--quiet", "--steps", "60", "--f", "3", "--batch", "16", "--tasks", "200",
         "--checkpoint-every", "20")


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """The toy's files, ListOps' and a text's."""
    folder = tmp_path_factory.mktemp("toy")
    Toy.prepare(folder)
    write_listops(folder)
    text_file(folder)
    return str(folder)


def tiny(task, data, *more):
    """The words of a tiny run of ListOps or of a language model."""
    return ["--task", task, "--recipe", "bytes" if task == "text_file" else "tiny", "--quiet", "--data", data, "--threads", "1",
            *"--layers 1 --H 8 --P 8 --J 2 --dropout 0.1 --batch 4 --length 16 --steps 40 --evaluate-every 5".split(),
            "--checkpoint-every", "10", *more]


# --------------------------------------------------------------------------- runs in a process of their own, and faults
# A process that has imported torch is forked for each run: starting one takes milliseconds, not seconds.

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["test_train", "torch._dynamo"])             # which the first optimiser step would import


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def twice(action):
    action()
    time.sleep(0)                                               # a bytecode for the first handler to run in
    action()


def fill_disk():
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, resource.RLIM_INFINITY))


def child(words, log, environment, fault):
    os.environ.update(environment)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1), os.dup2(out, 2)
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
    process = FORK.Process(target=child, args=([str(word) for word in words], str(log), environment, fault))
    process.start()
    return process


def finish(process, seconds=300):
    process.join(seconds)
    assert process.exitcode is not None, f"still running after {seconds} s"
    return process.exitcode


def run(folder, *words, fault=None):
    """(exit code, what it printed) of one run in folder."""
    log = folder.with_suffix(".log")
    code = finish(start([*words, "--out", folder], log, fault))
    return code, log.read_text()


def contents(folder):
    """Everything of a finished run but the clock: result, metrics, weights, optimiser, best."""
    result = json.loads((folder / "result.json").read_text())
    del result["seconds"]
    last = runs.read(folder / "last.pt")
    tensors = {"last": last["model"], "best": last["best"]["weights"] or {}, "moments": {
        f"{i}.{k}": v for i, state in last["optimizer"]["state"].items() for k, v in state.items()}}
    tensors["kept"] = runs.read(folder / ("best.pt" if last["best"]["weights"] else "weights.pt"))
    return (result, (folder / "metrics.csv").read_text(),
            {(kind, name): value for kind, table in tensors.items() for name, value in table.items()})


def assert_same(ours, theirs):
    (result, metrics, tensors), (result_, metrics_, tensors_) = contents(ours), contents(theirs)
    assert result == result_ and metrics == metrics_ and tensors.keys() == tensors_.keys()
    assert not [name for name, value in tensors.items() if not torch.equal(value, tensors_[name])]
    steps = [int(row.split(",")[0]) for row in metrics.splitlines()[1:]]
    assert steps == sorted(set(steps))


@pytest.fixture(scope="session")
def whole(data, tmp_path_factory):
    """Uninterrupted runs: (words of the command, folder) by name, trained when first asked for."""
    folder = tmp_path_factory.mktemp("whole")
    toy = [*TOY, "--data", data]
    commands = dict(toy=toy, turns=[*toy, "--accumulate", "2"], prompt=list(SHORT),
                    listops=tiny("listops", data), text=tiny("text_file", data),
                    stateful=tiny("text_file", data, "--stateful"))

    class Runs(dict):
        def __missing__(self, name):
            train.main([*commands[name], "--out", str(folder / name)])
            self[name] = commands[name], folder / name
            return self[name]
    return Runs()


@pytest.mark.parametrize("name, faults", (
    ("toy", [("loss", 14), ("validate", 2), ("fsync", 5), ("fsync", 4), ("replace", 4), ("loss", 15)]),
    ("turns", [("loss", 27), ("validate", 2)]),
    ("prompt", [("loss", 31), ("validate", 1), ("fsync", 3), ("replace", 3)]),
    ("listops", [("loss", 14), ("validate", 2), ("fsync", 5), ("replace", 4)]),
    ("text", [("validate", 3), ("fsync", 4), ("loss", 12), ("replace", 5)]),
    ("stateful", [("loss", 14), ("validate", 2), ("fsync", 5), ("replace", 4)])))
def test_killed_in_a_step_a_validation_a_write(whole, tmp_path, name, faults):
    """SIGKILL before the n-th call of each: with metrics.csv or a checkpoint half written, between its two renames, …"""
    words, folder = whole[name]
    for place, number in faults:
        assert run(tmp_path / "run", *words, "--resume", fault=(place, number, kill))[0] == -signal.SIGKILL, (place, number)
    assert run(tmp_path / "run", *words, "--resume")[0] == 0
    assert_same(tmp_path / "run", folder)


def kill_at_random(words, folder, whole, kills, seconds):
    """By the clock or before a random call, until so many met a process; the checkpoints seen."""
    moments, steps, met = random.Random(0), set(), 0
    for i in range(5 * kills):
        place = (moments.choice(("loss", "validate", "fsync", "replace")), moments.randint(1, 9), kill)
        process = start([*words, "--resume", "--out", folder], folder.with_suffix(".log"),
                        place if i % 2 == 0 else None)
        process.join(moments.uniform(0, seconds) if i % 2 else 60)
        process.kill()
        code = finish(process)
        assert code in (0, -signal.SIGKILL), folder.with_suffix(".log").read_text()
        met += code == -signal.SIGKILL
        if met == kills:
            break
        if code == 0:                                           # it came to its end: begin again
            shutil.rmtree(folder)
        steps.update(runs.read(path)["step"] for path in [folder / "last.pt"] if path.exists())
    assert met == kills
    assert run(folder, *words, "--resume")[0] == 0
    assert_same(folder, whole)
    return len(steps)


RUNS = ("toy", "prompt", "listops", "text", "stateful")


@pytest.mark.parametrize("name", RUNS)
def test_killed_at_random_moments(whole, tmp_path, name):
    kill_at_random(whole[name][0], tmp_path / "run", whole[name][1], kills=3, seconds=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_killed_at_twenty_random_moments(whole, tmp_path, name):
    words = [*whole[name][0], "--steps", "2000" if name == "prompt" else "600",
             "--checkpoint-every", "7", "--evaluate-every", "5"]
    begin = time.monotonic()
    assert run(tmp_path / "whole", *words)[0] == 0
    seconds = 0.1 * (time.monotonic() - begin)
    assert kill_at_random(words, tmp_path / "run", tmp_path / "whole", 20, seconds) > 5


@pytest.mark.parametrize("header", ("", "step,train_lo"))
def test_killed_while_the_head_of_the_metrics_is_written(data, tmp_path, header):
    """Before the first row there may be a checkpoint, and of metrics.csv the name or half its first line."""
    words = [*TOY, "--data", data, "--evaluate-every", "15"]
    train.main([*words, "--out", str(tmp_path / "whole")])
    assert run(tmp_path / "run", *words, fault=("loss", 13, kill))[0] == -signal.SIGKILL
    (tmp_path / "run/metrics.csv").write_text(header)
    assert run(tmp_path / "run", *words, "--resume")[0] == 0
    assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("action, code", ((terminate, 143), (interrupt, 130)))
def test_a_signal_finishes_the_step_and_says_how_to_go_on(whole, tmp_path, action, code):
    words, folder = whole["toy"]
    got, said = run(tmp_path / "run", *words, "--force", fault=("loss", 13, action))
    assert got == code and "stopped after step 13; go on with" in said
    assert runs.read(tmp_path / "run/last.pt")["step"] == 13 and not (tmp_path / "run/result.json").exists()
    command = said.splitlines()[-1].split()
    assert command[:2] == ["python", "train.py"] and "--force" not in command
    assert finish(start(command[2:], tmp_path / "log")) == 0
    assert_same(tmp_path / "run", folder)


@pytest.mark.parametrize("action, number", ((terminate, signal.SIGTERM), (interrupt, signal.SIGINT)))
def test_a_second_signal_leaves_at_once(whole, tmp_path, action, number):
    code, said = run(tmp_path / "run", *whole["toy"][0], fault=("loss", 13, functools.partial(twice, action)))
    assert code == -number and "once more to leave at once" in said
    assert runs.read(tmp_path / "run/last.pt")["step"] == 10


def test_a_full_disk_stops_the_run_and_keeps_the_checkpoint(whole, tmp_path):
    words, folder = whole["toy"]
    code, said = run(tmp_path / "run", *words, fault=("loss", 13, fill_disk))
    assert code == 1 and "File too large. What was written before is whole: make room, then --resume" in said
    assert runs.read(tmp_path / "run/last.pt")["step"] == 10 and not list((tmp_path / "run").glob("*.part"))
    assert run(tmp_path / "run", *words, "--resume")[0] == 0
    assert_same(tmp_path / "run", folder)


# -------------------------------------------------------------------------------------------------- damaged checkpoints

@pytest.fixture(scope="session")
def stopped(whole, tmp_path_factory):
    """A run stopped after step 25, whose checkpoint before is of step 20."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    assert run(folder, *whole["toy"][0], fault=("loss", 25, terminate))[0] == 143
    return folder


def cut(data):
    return data[:len(data) // 2]


def flip(data):
    return data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]


def saved(state):
    runs.save(Path("saved"), state)
    return Path("saved").read_bytes()


def hostile(data):
    """A pickle that would run code, with a checksum that is right."""
    return saved(dict(step=25, config=Hostile()))


DAMAGES = dict(cut=cut, empty=lambda data: b"", flip=flip, longer=lambda data: data + b"\0", hostile=hostile,
               weights=lambda data: saved({"0.weight": torch.ones(4, 16)}), number=lambda data: saved(25))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_recognised_and_the_one_before_taken(whole, stopped, tmp_path, monkeypatch, capsys, damage):
    monkeypatch.chdir(tmp_path)
    words, folder = whole["toy"]
    shutil.copytree(stopped, "run")
    Path("run/last.pt").write_bytes(DAMAGES[damage](Path("run/last.pt").read_bytes()))
    train.main([*words, "--out", "run", "--resume"])
    said = capsys.readouterr().err
    assert ("last.pt is refused" if damage in ("hostile", "weights", "number") else "last.pt is damaged: its checksum") in said
    assert "going on from previous.pt, the checkpoint before, at step 20" in said
    assert_same(Path("run"), folder)
    assert not Path("touched").exists()


@ROUNDS
def test_fuzzed_checkpoints_are_read_or_refused(stopped, tmp_path, monkeypatch, rounds):
    (tmp_path / "run").mkdir()
    shutil.copy(stopped / "best.pt", tmp_path / "run")
    fuzz(tmp_path / "run", rounds, lambda: runs.read(tmp_path / "run/best.pt"), monkeypatch)


def test_a_damaged_checkpoint_never_displaces_the_good_one(whole, stopped, tmp_path):
    """After going on from the one before, that one is still there when the next write fails."""
    words, folder = whole["toy"]
    shutil.copytree(stopped, tmp_path / "run")
    (tmp_path / "run/last.pt").write_bytes(b"")
    assert run(tmp_path / "run", *words, "--resume", fault=("loss", 3, fill_disk))[0] == 1
    assert runs.read(tmp_path / "run/last.pt")["step"] == 20
    assert run(tmp_path / "run", *words, "--resume")[0] == 0
    assert_same(tmp_path / "run", folder)


def test_a_row_cut_short_is_not_taken_for_another(whole, stopped, tmp_path):
    """A row of step 1000 that ends after its first digit reads like step 1."""
    words, folder = whole["toy"]
    shutil.copytree(stopped, tmp_path / "run")
    with open(tmp_path / "run/metrics.csv", "a") as file:
        file.write("1")
    train.main([*words, "--out", str(tmp_path / "run"), "--resume"])
    assert_same(tmp_path / "run", folder)


def test_no_whole_checkpoint_is_said(whole, stopped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(stopped, "run")
    for name in ("last.pt", "previous.pt"):
        Path("run", name).write_bytes(hostile(b""))
    with pytest.raises(SystemExit, match="last.pt is refused.*previous.pt is refused.*"
                                         "no whole checkpoint.*--force starts again"):
        train.main([*whole["toy"][0], "--out", "run", "--resume"])
    assert not Path("touched").exists()


@pytest.mark.parametrize("more, differs", (
    (("--H", "32"), "H: 16 there, 32 here"), (("--steps", "50"), "steps: 40 there, 50 here"),
    (("--seed", "1"), "seed: 0 there, 1 here"), (SHORT, "task: toy there, nd_regression here")))
def test_a_checkpoint_of_another_run_is_refused_with_what_differs(whole, stopped, more, differs):
    before = (stopped / "last.pt").read_bytes()
    with pytest.raises(SystemExit) as stop:
        train.main([*whole["toy"][0], *more, "--out", str(stopped), "--resume"])
    assert "is the checkpoint of another run" in str(stop.value) and differs in str(stop.value)
    assert (stopped / "last.pt").read_bytes() == before


def test_a_resumed_run_may_change_its_machine_and_no_number(stopped):
    config = runs.read(stopped / "last.pt")["config"]
    may = {"device", "threads", "accumulate", "checkpoint_every"}
    assert config.keys() > {"batch", "lr", "recurrent_lr", "warmup", "clip", "dropout"} | may
    for name in config:
        try:
            refused = not runs.read_checkpoint(stopped, dict(config, **{name: "another"}))
        except ValueError as error:
            refused = f"({name}: {config[name]} there, another here)" in str(error)
        assert refused == (name not in may), name


def test_seconds_count_on_after_a_stop(whole, stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "run")
    state = runs.read(stopped / "last.pt")
    runs.save(tmp_path / "run/last.pt", dict(state, seconds=state["seconds"] + 5000))
    result = train.main([*whole["toy"][0], "--out", str(tmp_path / "run"), "--resume"])
    for seconds in (result["seconds"], runs.read(tmp_path / "run/last.pt")["seconds"]):
        assert state["seconds"] + 5000 < seconds < state["seconds"] + 5000 + 300


def test_force_leaves_nothing_of_the_run_before(whole, tmp_path):
    """A best.pt left over would be loaded for weights.pt, rows of metrics.csv drawn as these."""
    shutil.copytree(whole["toy"][1], tmp_path / "run")
    for name in ("previous.pt", "weights.pt", "figure.png"):
        (tmp_path / "run" / name).touch()
    args = train.arguments([*SHORT, "--force", "--out", str(tmp_path / "run")])
    runs.run_folder(args, dict(task="nd_regression"))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]
    assert json.loads((tmp_path / "run/config.json").read_text())["task"] == "nd_regression"


def test_plain_torch_load_reads_the_files(whole):
    weights = torch.load(whole["toy"][1] / "best.pt", weights_only=True)
    task, model, result = train.load(whole["toy"][1])
    task.folder = Path(whole["toy"][0][-1])
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert task.report(model.eval(), 0).items() <= result.items()
    assert result["best_step"] < result["steps"]                # the last weights are others


# ----------------------------------------------------------------------------------------------------- several processes

def together(folder, words, world=2, faults={}):
    """A run of several processes over gloo, [(exit code, what it printed)]; once a faulty one is gone, a minute is left."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    logs = [folder.with_suffix(f".{rank}.log") for rank in range(world)]
    processes = [start([*words, "--out", folder], log, faults.get(rank), RANK=str(rank), LOCAL_RANK=str(rank),
                       WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
                 for rank, log in enumerate(logs)]
    for rank in faults:
        finish(processes[rank])
    return [(finish(process, 60 if faults else 300), log.read_text()) for process, log in zip(processes, logs)]


def losses(folder):
    return [[float(row[name]) for name in ("train_loss", "loss")] for row in csv.DictReader(open(folder / "metrics.csv"))]


@pytest.fixture(scope="session")
def exact(data):
    return [*TOY, "--data", data, "--steps", "20", "--evaluate-every", "1", "--checkpoint-every", "5", "--dtype", "float64"]


@pytest.fixture(scope="session")
def pair(exact, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair") / "run"
    ended = together(folder, exact)
    assert [code for code, _ in ended] == [0, 0], ended
    return folder, ended


def test_two_processes_are_one(exact, pair, tmp_path):
    train.main([*exact, "--dropout", "0", "--out", str(tmp_path / "one")])
    assert [code for code, _ in together(tmp_path / "two", [*exact, "--dropout", "0"])] == [0, 0]
    one, two = (torch.tensor(losses(tmp_path / name), dtype=torch.float64) for name in ("one", "two"))
    assert one.shape == (20, 2) and one[:, 0].unique().numel() == 20
    torch.testing.assert_close(one, two, rtol=0, atol=1e-8)


def test_two_turns_are_two_processes_with_dropout_too(exact, pair, tmp_path):
    folder, ended = pair
    train.main([*exact, "--accumulate", "2", "--out", str(tmp_path / "turns")])
    turns, two = (torch.tensor(losses(name), dtype=torch.float64) for name in (tmp_path / "turns", folder))
    torch.testing.assert_close(turns, two, rtol=0, atol=1e-8)
    assert ended[1][1] == ""                                            # rank 0 alone prints
    assert [code for code, _ in together(tmp_path / "both", [*exact, "--accumulate", "2"])] == [0, 0]
    train.main([*exact, "--accumulate", "4", "--out", str(tmp_path / "four")])
    both, four = (torch.tensor(losses(tmp_path / name), dtype=torch.float64) for name in ("both", "four"))
    torch.testing.assert_close(both, four, rtol=0, atol=1e-8)
    assert (four - two).abs().max() > 1e-4                              # other shares, other dropout


@pytest.mark.parametrize("lost", (0, 1))
def test_a_lost_process_ends_the_other_and_the_run_goes_on(exact, pair, tmp_path, lost):
    ended = together(tmp_path / "run", exact, faults={lost: ("loss", 13, kill)})
    code, said = ended[1 - lost]
    assert ended[lost][0] == -signal.SIGKILL and code == 1
    assert f"train.py: process {1 - lost} of 2: " in said and "start the same command again with --resume" in said
    assert runs.read(tmp_path / "run/last.pt")["step"] == 10
    assert [code for code, _ in together(tmp_path / "run", [*exact, "--resume"])] == [0, 0]
    assert_same(tmp_path / "run", pair[0])


def test_a_signal_to_one_process_stops_both_at_the_same_step(exact, pair, tmp_path):
    ended = together(tmp_path / "run", exact, faults={1: ("loss", 8, terminate)})
    assert [code for code, _ in ended] == [143, 143] and "stopped after step 8" in ended[0][1]
    assert "  torchrun --nproc_per_node 2 train.py --task" in ended[0][1]
    assert [code for code, _ in together(tmp_path / "run", [*exact, "--resume"])] == [0, 0]
    assert_same(tmp_path / "run", pair[0])


@pytest.mark.parametrize("model", ("gril", "mamba"))
def test_each_process_gets_its_carried_state_back(data, tmp_path, model):
    """--stateful on two processes, stopped: two go on to the bit, and so does one alone, with the rows of both."""
    words = [*tiny("text_file", data, "--stateful", "--model", model, "--dtype", "float64", "--dropout", "0"), "--steps", "20",
             "--evaluate-every", "1"]
    assert [code for code, _ in together(tmp_path / "whole", words)] == [0, 0]
    assert [code for code, _ in together(tmp_path / "run", words, faults={1: ("loss", 8, terminate)})] == [143, 143]
    shutil.copytree(tmp_path / "run", tmp_path / "alone")
    assert [code for code, _ in together(tmp_path / "run", [*words, "--resume"])] == [0, 0]
    assert_same(tmp_path / "run", tmp_path / "whole")
    train.main([*words, "--out", str(tmp_path / "alone"), "--resume"])
    whole, alone = (torch.tensor(losses(tmp_path / name), dtype=torch.float64) for name in ("whole", "alone"))
    torch.testing.assert_close(alone, whole, rtol=0, atol=1e-8)


@pytest.mark.slow
def test_torchrun_loses_a_worker_and_goes_on(exact, pair, tmp_path):
    words = [*exact, "--out", str(tmp_path / "run")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    (tmp_path / "faulty.py").write_text(f"""
import os, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]
import test_train
fault = ("loss", 13, test_train.kill) if os.environ["RANK"] == "1" else None
test_train.child({words!r}, {str(tmp_path)!r} + "/log" + os.environ["RANK"], {{}}, fault)
""")
    lost = subprocess.run([*command, tmp_path / "faulty.py"], capture_output=True, text=True, timeout=300)
    assert lost.returncode == 1 and "Signal 9 (SIGKILL)" in lost.stderr and not (tmp_path / "run/result.json").exists()
    assert "train.py: process 0 of 2: " in (tmp_path / "log0").read_text()
    resumed = subprocess.run([*command, __file__, *words, "--resume"], capture_output=True, timeout=300)
    assert resumed.returncode == 0
    assert_same(tmp_path / "run", pair[0])


def test_a_batch_is_shared_equally_or_not_at_all():
    with pytest.raises(SystemExit, match="a batch of 8 is not divisible by 3"):
        train.main([*TOY, "--accumulate", "3"])


# ------------------------------------------------------------------------------------ validation chooses, patience stops

def scripted(monkeypatch, validation, test=None):
    """A toy run whose validations score as listed; the weights at each of them."""
    seen, scores, tests = [], iter(validation), iter(test or [])

    def validate(self, model):
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
        assert not model.training
        return dict(loss=1.0, accuracy=next(scores))
    monkeypatch.setattr(Toy, "validate", validate)
    if test:
        monkeypatch.setattr(Toy, "report", lambda self, model, seed: dict(test_accuracy=next(tests)))
    return seen


@pytest.mark.parametrize("higher, validation, chosen", ((True, [0.5, 0.7, 0.6, 0.7, 0.9], 2),
                                                        (False, [0.5, 0.7, 0.4, 0.6, 0.5, 0.1], 3),
                                                        (True, [math.nan, 0.6, 0.5, 0.6, 0.9], 2)))
def test_early_stopping_and_the_best_weights(data, tmp_path, monkeypatch, higher, validation, chosen):
    monkeypatch.setitem(Toy.recipes, "tiny", dict(Toy.recipes["tiny"], higher=higher, patience=2))
    seen = scripted(monkeypatch, validation)
    result = train.main([*TOY, "--data", data, "--out", str(tmp_path / "run")])
    assert (len(seen) == chosen + 2 and result["best_step"] == 5 * chosen
            and result["validation_accuracy"] == validation[chosen - 1])
    best = runs.read(tmp_path / "run/best.pt")
    assert all(torch.equal(best[name], value) for name, value in seen[chosen - 1].items())
    last = runs.read(tmp_path / "run/last.pt")
    assert last["step"] == 5 * (chosen + 2) and not torch.equal(last["model"]["0.weight"], best["0.weight"])
    again = train.main([*TOY, "--data", data, "--out", str(tmp_path / "run"), "--resume"])      # over is over
    assert len(seen) == chosen + 2 and again["test_accuracy"] == result["test_accuracy"]


@pytest.mark.parametrize("higher, step, best", ((True, 10, 0.8), (False, 5, 0.1)))
def test_the_test_score_of_the_chosen_weights_and_the_best_one(data, tmp_path, monkeypatch, higher,
                                                               step, best):
    monkeypatch.setitem(Toy.recipes, "tiny", dict(Toy.recipes["tiny"], higher=higher))
    scripted(monkeypatch, [0.5, 0.9, 0.6, 0.7], [0.3, 0.4, 0.8, 0.1, 0.45])
    result = train.main([*TOY, "--data", data, "--steps", "20", "--test-every-validation",
                         "--out", str(tmp_path / "run")])
    assert result["test_accuracy"] == 0.45 and result["best_test_accuracy"] == best
    assert result["best_step"] == step
    rows = list(csv.DictReader(open(tmp_path / "run/metrics.csv")))
    assert [float(row["test_accuracy"]) for row in rows] == [0.3, 0.4, 0.8, 0.1]


@pytest.mark.parametrize("seed", ("0", "1", "2"))
def test_the_toy_is_learned(data, tmp_path, seed):
    result = train.main([*TOY, "--data", data, "--seed", seed, "--out", str(tmp_path / "run"),
                         *"--model linear --lr 0.03 --steps 200 --evaluate-every 50".split()])
    assert result["test_accuracy"] > 0.85 and result["best_step"] % 50 == 0


@pytest.mark.parametrize("seed, turns, clip", ((0, 1, 0.5), (5, 2, 0.5), (5, 1, 0)))
def test_a_run_is_adamw_on_fresh_clipped_gradients(data, tmp_path, monkeypatch, seed, turns, clip):
    """The same weights and losses from a loop without train.py, one parameter after another."""
    decay, warmup, steps, seeds, stream = 0.3, 3, 12, [], Toy.stream
    monkeypatch.setattr(Toy, "stream",
                        lambda self, *args: seeds.append(args[0]) or stream(self, *args))
    train.main([*TOY, "--data", data, "--seed", str(seed), "--out", str(tmp_path / "run"),
                *f"--clip {clip} --weight-decay {decay} --warmup {warmup} --steps {steps}".split(),
                *f"--dtype float64 --dropout 0 --evaluate-every 1 --accumulate {turns}".split()])
    monkeypatch.undo()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(seed)
        task = Toy(dict(Toy.recipes["tiny"], dropout=0.0), data)
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


def test_every_step_share_and_seed_has_dropout_of_its_own(data, tmp_path, monkeypatch):
    seen, plain = [], Toy.loss

    def loss(self, model, batch):
        assert model.training                                   # also after a validation
        seen.append(torch.initial_seed())
        return plain(self, model, batch)
    monkeypatch.setattr(Toy, "loss", loss)
    for seed in ("0", "1", "2"):
        train.main([*TOY, "--data", data, "--seed", seed, "--out", str(tmp_path / seed),
                    *"--steps 3 --evaluate-every 1 --accumulate 2".split()])
    assert len(set(seen)) == len(seen) == 3 * 3 * 2


def test_the_last_step_is_validated_too(data, tmp_path):
    train.main([*TOY, "--data", data, "--steps", "7", "--out", str(tmp_path / "run")])
    assert [row["step"] for row in csv.DictReader(open(tmp_path / "run/metrics.csv"))] == ["5", "7"]


LOWER = {       # what trains at the lower rate, undecayed, by family
    "gril": "nu theta Q q beta", "s5": "Lambda_re Lambda_im B log_Delta",
    "lru": "nu theta log_gamma B", "mamba": "A_log D", "griffin": "Lambda", "transformer": "",
    "in context": "A", "attention in context": ""}


@pytest.mark.parametrize("task", ("image", "wikitext2", *train.IN_CONTEXT))
def test_exactly_these_parameters_train_at_the_lower_rate(task):
    kind = train.TASKS[task]
    made = kind(next(iter(kind.recipes.values())))
    if task in train.IN_CONTEXT:
        names = dict.fromkeys(made.models(), "in context") | {
            name: "attention in context" if "attention" in name else name for name in offered("in_context")
            if (task, name) != ("scalar_regression", "linear_attention_pairs")}
    else:
        grils = ("gril_w1", "gril_alone", "linear_attention")
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


def test_two_rates_warm_up_and_cosine(data, tmp_path, monkeypatch):
    rates, plain = [], torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: (
        rates.append({g["name"]: (g["lr"], g["weight_decay"], g["names"]) for g in self.param_groups}), plain(self))[1])
    train.main([*TOY, "--data", data, "--out", str(tmp_path / "run")])
    recurrent, other = ([rate[name][0] for rate in rates] for name in ("recurrent", "other"))
    assert (other[:5] == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.01 * 0.5 * (1 + np.cos(np.pi * 4 / 40))])
            and other[-1] < 1e-4)
    assert recurrent == pytest.approx([0.3 * rate for rate in other])
    assert rates[0]["recurrent"][1] == 0 and rates[0]["other"][1] == 0.01
    assert {name.split(".")[-1] for name in rates[0]["recurrent"][2]} == {"nu", "theta", "Q", "q", "beta"}


def test_bfloat16_autocast_keeps_float32_weights(data, tmp_path):
    with torch.backends.mkldnn.flags(enabled=False):                    # CPUs without bf16 instructions have them there
        train.main([*TOY, "--data", data, "--dtype", "bfloat16", "--out", str(tmp_path / "low"),
                    "--steps", "5", "--dropout", "0"])
        train.main([*TOY, "--data", data, "--dtype", "float32", "--out", str(tmp_path / "full"),
                    "--steps", "5", "--dropout", "0"])
    low, full = (torch.tensor(losses(tmp_path / name)) for name in ("low", "full"))
    assert not torch.equal(low, full) and (low - full).abs().max() < 0.05
    assert {value.dtype for value in runs.read(tmp_path / "low/last.pt")["model"].values()} == {torch.float32}


# --------------------------------------------------------------------------------------------------- numbers gone wrong

def poisoned(monkeypatch, owner, number, poison):
    calls, loss = itertools.count(), owner.loss
    monkeypatch.setattr(owner, "loss", lambda self, model, batch: poison(loss(self, model, batch)) if next(calls) == number
                        else loss(self, model, batch))


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_good_weights(tmp_path, monkeypatch):
    poisoned(monkeypatch, Task, 7, lambda loss: loss * float("nan"))
    with pytest.raises(SystemExit, match=r"step 7: the loss is nan.*first not finite in A \(group recurrent\).*"
                                         r"batch is number 7 of seed 0\..*weights\.pt"):
        train.main(["--task", "nd_regression", "--steps", "50", "--quiet", "--out", str(tmp_path / "run")])
    weights = runs.read(tmp_path / "run/weights.pt")
    assert all(w.isfinite().all() for w in weights.values()) and not (tmp_path / "run/result.json").exists()


class Overflow(torch.autograd.Function):
    """The identity, with a gradient that is infinite."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 0


def test_a_gradient_that_is_not_finite_names_the_batch(data, tmp_path, monkeypatch):
    poisoned(monkeypatch, Toy, 14, Overflow.apply)
    with pytest.raises(SystemExit, match=r"step 14: the loss is 0\.\d+, the gradient norm (nan|inf); "
                                         r"its gradient is first not finite in 1\.mixer\.\w+ \(group recurrent\).*"
                                         r"number 14 of seed 0, ending at \[1, 24\] of the data"):
        train.main([*TOY, "--data", data, "--out", str(tmp_path / "run")])
    good, last = runs.read(tmp_path / "run/weights.pt"), runs.read(tmp_path / "run/last.pt")
    assert last["step"] == 10 and all(value.isfinite().all() for value in good.values())
    assert not torch.equal(good["0.weight"], last["model"]["0.weight"])         # of step 14, not of the checkpoint
    assert run(tmp_path / "stopped", *TOY, "--data", data, fault=("loss", 14, terminate))[0] == 143
    stopped = runs.read(tmp_path / "stopped/last.pt")
    assert stopped["step"] == 14 and all(torch.equal(value, stopped["model"][name]) for name, value in good.items())


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
@pytest.mark.parametrize("clip", ("0", "1"))
def test_the_parameter_that_went_wrong_is_named_and_no_other(data, tmp_path, monkeypatch, value, clip):
    """One gradient of the group that comes last; clipping by its norm would have spread the NaN over all."""
    plain = Toy.loss

    def loss(self, model, batch):
        model[-1].weight.register_hook(lambda gradient: gradient * value)
        return plain(self, model, batch)
    monkeypatch.setattr(Toy, "loss", loss)
    with pytest.raises(SystemExit, match=r"step 0: the loss is 0\.\d+, .*first not finite in 2\.weight \(group other\).*"
                                         r"number 0 of seed 0"):
        train.main([*TOY, "--data", data, "--clip", clip, "--out", str(tmp_path / "run")])
    assert all(w.isfinite().all() for w in runs.read(tmp_path / "run/weights.pt").values())
    with pytest.raises(SystemExit, match=r"--dtype float64: float32 ends at 3e38" if value == math.inf else r"may help$"):
        train.main([*TOY, "--data", data, "--clip", clip, "--out", str(tmp_path / "run"), "--force"])


# ------------------------------------------------------------------------------------------------------------ compiling

@pytest.mark.parametrize("task, device, flag, expected", (
    ("text", "cuda", None, True), ("nd_regression", "cuda", None, False), ("text", "cpu", None, False),
    ("text", "cuda", False, False), ("nd_regression", "cpu", True, True)))
def test_what_is_compiled_unasked(task, device, flag, expected):
    assert train.compiles(flag, torch.device(device), task) is expected


def test_a_compiled_run_learns_the_same(monkeypatch, data, tmp_path):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    plain, compiled = (train.main([*TOY, "--data", data, "--out", str(tmp_path / name), *words])
                       for name, words in (("plain", []), ("compiled", ["--compile"])))
    assert compiled["test_loss"] == pytest.approx(plain["test_loss"], rel=1e-5)


def test_where_compiling_fails_the_run_goes_on_without(monkeypatch, data, tmp_path, capsys):
    def broken(graph, inputs):
        raise RuntimeError("no compiler here")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=broken))
    torch.compiler.reset()
    plain, compiled = (train.main([*TOY, "--data", data, "--out", str(tmp_path / name), *words])
                       for name, words in (("plain", []), ("compiled", ["--compile"])))
    said = capsys.readouterr().err
    assert said.count("torch.compile failed, going on without it") == 1 and "no compiler here" in said
    assert compiled["test_loss"] == plain["test_loss"]


# ---------------------------------------------------------------------------------------------------------- the dry run

def test_the_dry_run_counts_what_can_be_counted_by_hand(capsys):
    words = ["--task", "toy", "--model", "linear", "--dry-run", "--batch", "24", "--steps", "1000", "--data", "nowhere"]
    r = train.main(words)
    B, T, H = 24, 12, 16
    assert r["parameters"] == 4 * H + 5 * H * H + 2 * 5 * H and r["tokens"] == B * T
    assert r["flops"] == 3 * 2 * B * T * (5 * H * H + 2 * 5 * H)               # forward, and two products backward
    small = 8 * B * T + 4 * B * T * (H + 5 * H)                                 # tokens; inputs of the two products
    assert small <= r["activations"] <= small + 8 * B * 8                       # logits, labels
    assert r["optimiser"] == 16 * r["parameters"]
    hours = dict(products=r["flops"] / (0.3 * 312e12), traffic=r["traffic"] / 2.04e12, launches=r["kernels"] * 5e-6)
    hours = {name: seconds * 1000 / 3600 for name, seconds in hours.items()}
    assert {name: r["hours"]["one A100"][name] for name in hours} == pytest.approx(hours)
    assert r["hours"]["one A100"]["eager"] == pytest.approx(max(hours.values())) and r["compiled"] is None
    one, four = r["hours"]["one H100"], r["hours"]["four H100"]                 # each GPU launches all of its kernels
    assert four["launches"] == one["launches"] and four["traffic"] == pytest.approx(one["traffic"] / 4)
    assert r["traffic"] > 3 * small
    said = capsys.readouterr().out
    assert f"parameters   {r['parameters']:,}, the paper's 2,000 ({r['parameters'] / 2000 - 1:+.1%})" in said
    for text in ("24, 288 tokens", "activations 0.", "one A100", "one H100", "four H100", "at 30% of the bf16 peak"):
        assert text in said
    shared = train.main([*words, "--world", "4", "--accumulate", "2"])
    assert (shared["flops"] == r["flops"] and shared["tokens"] == r["tokens"]
            and abs(8 * shared["activations"] / r["activations"] - 1) < 0.01)
    assert not Path("runs").exists() or not list(Path("runs").glob("toy*"))


def test_the_dry_run_counts_kernels_but_no_views_and_allocations():
    with cost.OneDevice() as device:
        x = torch.empty(4, 6, device="meta")
        y = x.mT.flatten()[1:].view(23)                                         # one copy, made by flatten
        z = y * 2
        z.add_(1)
        torch.promote_types(z.dtype, torch.float64)                             # a question, no kernel
        assert z.is_meta and device.kernels == 3
        assert device.traffic == (24 + 24 + 23 + 23 + 23 + 23) * 4


def test_the_dry_run_takes_inductors_count_for_each_layers_recurrence():
    """Two layers more: twice a layer's kernels more, of which compiling leaves inductor's and what is outside."""
    few, many = (train.main(["--task", "wikitext2", "--layers", str(n), "--dry-run"]) for n in (2, 4))
    with torch.device("meta"):
        mixer = train.GrilMixer(128, 64, 16)
    inside = cost.recurrence_kernels(mixer, (8, 256))
    assert many["kernels"] - few["kernels"] > 2 * inside > 2 * cost.FUSED["complex"]
    assert few["kernels"] - few["compiled"] == 2 * (inside - cost.FUSED["complex"])
    shared = train.main(["--task", "wikitext2", "--layers", "2", "--accumulate", "2", "--dry-run"])
    assert shared["kernels"] == 2 * few["kernels"]                              # each turn launches all of them


@pytest.mark.slow
@pytest.mark.parametrize("gate", cost.FUSED)
def test_inductor_makes_as_few_kernels_as_the_dry_run_says(gate):
    mixer, (v, k, u) = GrilMixer(64, 128, 32, gate=gate), torch.randn(3, 4, 1024, 32, 4, requires_grad=True).unbind()

    def recur(v, k, u):
        log_rho, theta, _ = mixer.gates()
        return mixer.recur(v, k, u, log_rho, theta, mixer.start(v))[0]
    torch.compiler.reset()
    metrics.reset()
    with torch._inductor.utils.fresh_inductor_cache():
        o = torch.compile(recur, fullgraph=True, dynamic=False)(v, k, u)
        o.backward(torch.randn_like(o))
    assert metrics.generated_kernel_count <= cost.FUSED[gate] <= 110


PAPER_KERNELS = dict(wikitext103=12_000, listops=5_000, text=5_000, retrieval=5_000, image=5_000, pathfinder=5_000)


@pytest.mark.parametrize("task", PAPER_KERNELS)
def test_a_step_of_the_papers_size_is_not_thousands_of_small_kernels(task):
    r = train.main(["--task", task, "--size", "paper", "--world", "4", "--dry-run"])
    assert r["compiled"] < r["kernels"] <= PAPER_KERNELS[task]


def test_the_dry_run_in_context():
    assert train.main(["--task", "nd_regression", "--batch", "4", "--dry-run"])["tokens"] == 4 * (2 * 10 + 1)
    r = train.main(["--task", "nonlinear_regression", "--model", "gd_dagger", "--layers", "2", "--tasks", "50", "--dry-run"])
    assert r["flops"] > 0                                       # its start is a line search, which needs numbers


@pytest.mark.parametrize("task", train.TASKS)
def test_the_dry_run_of_every_task(task, capsys):
    r = train.main(["--task", task, "--dry-run"])
    assert r["flops"] > 0 and r["activations"] > 0
    assert ("recurrence   gril_chunk" in capsys.readouterr().out) == (task not in train.IN_CONTEXT)
    model = train.TASKS[task](train.TASKS[task].recipes[next(iter(train.TASKS[task].recipes))]).model()
    assert r["parameters"] == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("forget", ("product", "embedding", "plain attribute"))
def test_the_dry_run_catches_a_tensor_left_on_the_cpu(monkeypatch, forget):
    loss, build = Toy.loss, Toy.model
    torch.ones(2, 3) @ torch.ones(3, 4, device="meta")                          # the meta device alone lets it pass

    def product(self, model, batch):
        return loss(self, model, batch) + (model[0].weight @ torch.ones(16, 2)).sum()

    def embedding(self, model, batch):
        return loss(self, model, batch) + F.embedding(torch.zeros(3, dtype=torch.int64), model[0].weight).sum()

    def attribute(self, name):
        model = build(self, name)
        model[0].table = torch.ones(3)
        return model
    if forget == "plain attribute":
        monkeypatch.setattr(Toy, "model", attribute)
    else:
        monkeypatch.setattr(Toy, "loss", dict(product=product, embedding=embedding)[forget])
    message = "Embedding.table is a plain tensor" if forget == "plain attribute" else "mixes tensors of cpu and meta"
    with pytest.raises(SystemExit, match=message):
        train.main(["--task", "toy", "--dry-run"])


# ------------------------------------------------------------------------------------------------------------------ load

def grows(words, tmp_path, monkeypatch, steps):
    """(objects, open files, megabytes) at each validation of a tiny run."""
    task = train.TASKS[words[1]]
    seen, validate = [], task.validate

    def watch(self, model):
        scores = validate(self, model)
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        seen.append((len(gc.get_objects()), len(os.listdir("/proc/self/fd")), pages * resource.getpagesize() / 1e6))
        return scores
    monkeypatch.setattr(task, "validate", watch)
    train.main([*words, "--steps", str(steps), "--evaluate-every", str(steps // 10), "--checkpoint-every", str(steps // 20),
                "--out", str(tmp_path / "run")])
    return seen[-9:]                                                            # the first tenth warms up


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="counts open files in /proc")
@pytest.mark.parametrize("task, steps", (("nd_regression", 1_000), ("listops", 100), ("text_file", 100),
                                         pytest.param("nd_regression", 100_000, marks=pytest.mark.slow)))
def test_nothing_grows_with_the_steps(data, tmp_path, monkeypatch, task, steps):
    words = (tiny(task, data) if task != "nd_regression"
             else ["--task", task, *"--f 2 --n 2 --batch 2 --tasks 100 --quiet".split()])
    objects, files, megabytes = zip(*grows(words, tmp_path, monkeypatch, steps))
    print("more objects, open files, megabytes:", *(max(seen) - seen[0] for seen in (objects, files, megabytes)))
    assert max(files) == files[0] and max(objects) - objects[0] < 100 and max(megabytes) - megabytes[0] < 10


# ------------------------------------------------------------------------------------------------------------ extremes

@pytest.mark.parametrize("task", train.IN_CONTEXT)
@pytest.mark.parametrize("sizes", ("--f 1 --n 1 --batch 1", "--weight-scale 0 --f 2 --n 3 --batch 4"))
def test_the_smallest_tasks_and_targets_all_equal(tmp_path, monkeypatch, capsys, task, sizes):
    """One feature, one example, one task a step; targets that are all 0, so that gradient descent is right from the start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("train.draw_run", lambda *run: "none")
    result = train.main(["--task", task, *sizes.split(), "--steps", "5", "--tasks", "50", "--out", "run"])
    assert all(math.isfinite(value) for value in result.values() if isinstance(value, float))
    assert "zero predictor" in capsys.readouterr().out
    if "weight" in sizes and "regression" in task:
        assert result["gd_loss"] == result["zero_loss"] == 0 < result["loss"]


@pytest.mark.parametrize("task, more", (("listops", ()), ("text_file", ()), ("text_file", ("--stateful",))))
def test_one_token_at_a_time_of_data_without_variety(tmp_path, task, more):
    """Length 1, batch 1, a state of one number, and every label or token the same: learned, and nothing divides by zero."""
    write_listops(tmp_path)
    for path in (tmp_path / "listops").iterdir():
        path.write_text("Source\tTarget\r\n" + "( ( ( [MAX 3 ) 7 ) ] )\t7\r\n" * 12, newline="")
    text_file(tmp_path, "a" * 1000)
    result = train.main([*tiny(task, str(tmp_path), *more),
                         *"--length 1 --batch 1 --P 1 --J 1 --lr 0.1 --steps 100 --evaluate-every 50".split(),
                         "--out", str(tmp_path / "run")])
    assert all(math.isfinite(value) for value in result.values() if isinstance(value, float))
    assert result.get("test_accuracy") == 100 or result["test_loss"] < 0.1


@pytest.mark.parametrize("scale", ("1e10", "1e-10"))
def test_scales_beyond_float32_are_said_and_float64_holds_them(tmp_path, scale):
    words = ["--task", "nd_regression", "--scale", scale, *"--f 3 --n 5 --steps 3 --tasks 100 --quiet".split(),
             "--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit, match=rf"--scale {scale.replace('1e10', '1e.10')} .*"
                                         r"beyond what float32 holds.*--dtype float64"):
        train.main(words)
    assert not (tmp_path / "run").exists()
    result = train.main([*words, "--dtype", "float64"])
    assert (result["constructed_loss"] == pytest.approx(result["gd_loss"], rel=1e-10)
            and 0 < result["gd_loss"] < result["zero_loss"])
    assert math.isfinite(result["loss"]) and result["optimal_loss"] == pytest.approx(0.0375 * float(scale) ** 2, rel=0.2)


# ------------------------------------------------------------------------------------------------------- the same bits

def test_same_seed_same_bits(tmp_path):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        train.main([*SHORT, "--seed", seed, "--out", str(tmp_path / name)])
    assert_same(tmp_path / "a", tmp_path / "b")
    assert not torch.equal(runs.read(tmp_path / "a/weights.pt")["Q"], runs.read(tmp_path / "c/weights.pt")["Q"])


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
    for owner, name, role in ((Task, "stream", "training"), (Task, "validate", "validation"),
                              (Task, "report", "report"), (tasks, "tune", "tuning")):
        monkeypatch.setattr(owner, name, as_role(role, getattr(owner, name)))
    starts, model = [], Task.model
    monkeypatch.setattr(Task, "model",
                        lambda self, name: starts.append(torch.initial_seed()) or model(self, name))
    settings = list(itertools.product((0, 1, 2, 77), ((), ("--calibrate", "2"))))
    for run, (seed, more) in enumerate(settings):
        monkeypatch.setattr(tasks, "_TUNED", {})
        train.main(["--task", "multistep_regression", "--seed", str(seed), *more,
                    *"--f 2 --n 3 --steps 1 --tasks 20 --batch 4 --quiet".split(),
                    "--out", str(tmp_path / str(run))])
    assert used.keys() == {"training", "validation", "tuning", "report"}
    seeds = {role: [of[run] for run in range(len(settings))] for role, of in used.items()}
    for a, b in itertools.combinations(seeds, 2):
        assert not set.union(*seeds[a]) & set.union(*seeds[b]), (a, b)
    for role, count in (("training", 4), ("report", 4), ("validation", 1), ("tuning", 1)):
        assert all(len(of) == 1 for of in seeds[role]), role
        assert len(set.union(*seeds[role])) == count, role
    assert len(set(starts)) == 4                                # and weights


# --------------------------------------------------------------------------------------- the command line, as typed

def typed(tmp_path, *words):
    return subprocess.run([sys.executable, ROOT / "train.py", *words], cwd=tmp_path, capture_output=True, text=True)


def test_the_front_door(tmp_path, monkeypatch):
    """Twice the same command: two folders, a table, a figure, and the same numbers."""
    command = ("--task", "nd_regression", "--steps", "20", "--tasks", "200")
    first = typed(tmp_path, *command)
    assert first.returncode == 0, first.stderr
    monkeypatch.chdir(tmp_path)
    train.main(command)
    for text in ("recurrent    100 parameters", "other         13 parameters", "device    cpu", "constructed GRIL",
                 "zero predictor", "closed form", "largest distance from the construction", "figure.png"):
        assert text in first.stdout
    folders = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert folders == ["nd_regression-gril-f10-n10-seed0", "nd_regression-gril-f10-n10-seed0-2"]
    for folder in folders:
        names = {path.name for path in (tmp_path / "runs" / folder).iterdir()}
        assert names == {"config.json", "metrics.csv", "result.json", "weights.pt", "last.pt", "figure.png"}
    rows = list(csv.DictReader(open(tmp_path / "runs" / folders[0] / "metrics.csv")))
    assert [int(row["step"]) for row in rows] == [1, 2, 5, 10, 20]
    task, model, result = train.load(tmp_path / "runs" / folders[0])
    assert task.report(model, 20_000)["loss"] == result["loss"]


def test_a_run_remembers_its_data_folder(data, tmp_path):
    """So that lm.py generate finds the vocabulary; a resumed run may have another."""
    train.main([*TOY, "--data", data, "--steps", "2", "--out", str(tmp_path / "run")])
    assert json.loads((tmp_path / "run/config.json").read_text())["data"] == os.path.abspath(data)


@pytest.mark.parametrize("model", ("gril", "looped"))
def test_a_run_in_float64_loads(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    try:
        train.main(["--task", "multistep_regression", "--model", model, "--f", "3", "--n", "3", "--steps", "2", "--tasks", "20",
                    "--dtype", "float64", "--quiet", "--out", "run"])
    finally:
        torch.set_default_dtype(torch.float32)
    task, net, _ = train.load("run")
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert net(task.sample(2, torch.Generator()).s).isfinite().all()


@pytest.mark.parametrize("words, answer", (
    (("--task", "nd_regresion"), "did you mean nd_regression?"),
    (("--task", "nd_regresion"), "There are: scalar_regression, nd_regression, multistep"),
    (("--task", "nd_regression", "--model", "s6"), "There are: gril, no_window"),
    (("--task", "nd_regression", "--recipe", "quick"), "There are: default, paper"),
    (("--task", "nd_regression", "--f", "0"), "f (input width) must be at least 1, got 0"),
    (("--task", "nd_regression", "--n", "0"), "N (examples in the prompt) must be at least 1, got 0"),
    (("--task", "nd_regression", "--steps", "0"), "--steps must be at least 1, got 0"),
    (("--task", "nd_regression", "--tasks", "0"), "--tasks must be at least 1, got 0"),
    (("--task", "nd_regression", "--threads", "-1"), "--threads must be 0 or more, got -1"),
    (("--task", "nd_regression", "--world", "-2", "--dry-run"), "--world must be 0 or more, got -2"),
    (("--task", "nd_regression", "--patience", "3"), "--patience: nd_regression keeps its last weights"),
    (("--task", "nd_regression", "--layers", "3"), "gril of nd_regression has one layer; multistep_regression has several"),
    (("--task", "nonlinear_regression", "--model", "gd_dagger_rho", "--layers", "2"), "has one layer"),
    (("--task", "listops", "--J", "0"), "listops: J must be at least 1, got 0"),
    (("--task", "nd_regression", "--clip", "-1"), "--clip must be 0 or more, got -1"),
    (("--task", "text", "--patience", "-1"), "--patience must be 0 or more, got -1"),
    (("--task", "text", "--f", "10"), "clip, evaluate_rows"),
    (("--task", "nd_regression", "--seed", str(10 ** 20)), "--seed must be 0 to 4294967295"),
    (("--task", "nd_regression", "--scale", "nan"), "--scale must be a number other than 0, got nan"),
    (("--task", "nd_regression", "--hidden", "7"), "--hidden is for scalar_regression"),
    (("--task", "wikitext2", "--size", "bytes", "--tokenizer", "gpt2"), "choose --size tiny"),
    (("--task", "wikitext2", "--validate-tokens", "1"), "--validate-tokens must be 0 (all) or at least 2"),
    (("--task", "nd_regression", "--resume"), "--resume needs --out"),
    (("--task", "nd_regression", "--out", "old"), "already holds a run: choose another --out, --resume"),
))
def test_mistakes_are_answered(tmp_path, monkeypatch, words, answer):
    monkeypatch.chdir(tmp_path)
    Path("old").mkdir()
    Path("old/config.json").write_text("{}")
    with pytest.raises(SystemExit) as stop:
        train.main([*words, "--quiet"])
    assert answer in str(stop.value) and "Traceback" not in str(stop.value)
    assert not Path("runs").exists()


def test_help_fits_80_columns_and_says_what_everything_is(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    for option in ("--task", "--size", "--resume", "--dry-run", "--recurrent-lr", "--evaluate-every", "--accumulate",
                   "--H", "--J"):
        assert f"  {option} " in said or f", {option} " in said


def test_a_file_task_has_table_and_figure(data, tmp_path, capsys):
    train.main(["--task", "toy", "--data", data, "--steps", "10", "--out", str(tmp_path / "run")])
    said = capsys.readouterr().out
    for text in ("task      toy, recipe tiny: ", "H=16", "device    cpu, float32, 1 thread, 1 process", "recurrent ",
                 "accuracy 0."):
        assert text in said
    assert (tmp_path / "run/figure.png").stat().st_size > 10_000


if __name__ == "__main__":
    train.main()
