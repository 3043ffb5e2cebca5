"""What the README says is there: the names in its table "Paper to code", the recipes of "Fork it", the exercises."""
import importlib
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import baselines
import figures
import train
from gril import GRIL
from tasks import Task, gradient_descent

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


def section(path, heading):
    """The text under a heading of second order, up to the next one."""
    _, found, text = Path(path).read_text().partition(f"\n## {heading}\n")
    assert found, f"{path} has no section {heading!r}"
    return text.partition("\n## ")[0]


# ---------------------------------------------------------------------------------------------------- paper to code

NUMBERED = [*(f"Eq. {i}" for i in range(1, 17)), "Proposition 4.1", "Definition 4.2", "Proposition 4.3", "Proposition A.1",
            "Proposition A.2", *(f"Fig. {i}" for i in range(1, 12)), *(f"Table {i}" for i in range(1, 12))]


def rows(path):
    """Rows of the table: (paper, what, function, file, test, command)."""
    lines = [line for line in section(path, "Paper to code").splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def quoted(cell):
    return re.findall(r"`([^`]+)`", cell)


def broken(path):
    """Everything in the table that does not exist, as sentences."""
    wrong, seen = [], []
    tests = {name for file in (ROOT / "test_gril.py", *ROOT.glob("tests/test_*.py")) for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)}
    for paper, _, function, file, test, command in rows(path):
        seen += [f"{kind} {number}" for kind, numbers in re.findall(r"(Eq\.|Proposition|Definition|Fig\.|Table) ([^;]+)", paper)
                 for number in spread(numbers)]
        modules = []
        for name in quoted(file):
            if (ROOT / name).exists():
                modules.append(importlib.import_module(name.removesuffix(".py").replace("/", ".")))
            else:
                wrong.append(f"{paper}: no file {name}")
        for name in quoted(function):
            if not any(has(module, name) for module in modules):
                wrong.append(f"{paper}: no {name} in {file}")
        wrong += [f"{paper}: no test {name}" for name in quoted(test) if name not in tests]
        wrong += [f"{paper}: {line}: {why}" for line in quoted(command) if (why := fault(line))]
        if not (quoted(function) and modules and (quoted(test) or quoted(command))):
            wrong.append(f"{paper}: a row needs a function, its file, and a test or a command")
    wrong += [f"{name} is missing" for name in NUMBERED if name not in seen]
    return wrong


def spread(numbers):
    """"3, 5 to 7" -> 3, 5, 6, 7."""
    for part in numbers.split(","):
        first, _, last = part.strip().partition(" to ")
        yield from map(str, range(int(first), int(last) + 1)) if last else [first]


def has(module, name):
    for part in name.split("."):
        if not hasattr(module, part):
            return False
        module = getattr(module, part)
    return True


def fault(command):
    """Why a command cannot be typed, or None: its script, its task, its figure, its options."""
    python, script, *words = command.split()
    if python != "python" or not (ROOT / script).exists():
        return f"no script {script}"
    if script == "figures.py":
        return None if words[0] in figures.FIGURES else f"no figure {words[0]}"
    if script == "train.py":
        try:
            args = train.arguments(words)
            task = train.known("task", args.task, train.TASKS)
            recipe = train.known("recipe", args.recipe or next(iter(task.recipes)), task.recipes)
            task = task(recipe)
            if hasattr(task, "models"):                                         # of an in-context task
                train.known("model", args.model, {**task.models(), **task.others()})
            else:
                with torch.device("meta"):
                    task.model(args.model)
            return None
        except (SystemExit, ValueError) as error:
            return f"it is refused: {error}"
    return f"how is {script} called? Teach this test"


def test_paper_to_code():
    assert not (wrong := broken(README)), "\n".join(wrong)


@pytest.mark.parametrize("old, new, said", (
    ("`gril_loop`", "`gril_lop`", "no gril_lop"), ("`gril.py`", "`grill.py`", "no file grill.py"),
    ("`test_windows`", "`test_w`", "no test test_w"), ("figures.py fig2", "figures.py fig22", "no figure fig22"),
    ("python figures.py", "python figure.py", "no script figure.py"),
    ("--task text ", "--task texts ", "unknown task 'texts'"), ("--size paper", "--size papers", "unknown recipe 'papers'"),
    ("--model gd_dagger", "--model gd", "unknown model"), ("Eq. 9 ", "Eq. 90 ", "Eq. 9 is missing")))
def test_a_name_that_is_gone_is_noticed(tmp_path, old, new, said):
    text = README.read_text()
    place = text.index("\n## Paper to code\n")
    assert old in text[place:], f"{old} is not in the table"
    (tmp_path / "README.md").write_text(text[:place] + text[place:].replace(old, new))
    assert said in "\n".join(broken(tmp_path / "README.md"))


# ------------------------------------------------------------------------------------------------------ how it works

def test_the_loop_of_three_lines_is_the_layer():
    (code,) = re.findall(r"```python\n(.*?)```", section(README, "How it works"), re.S)
    names = {}
    exec(code, names)
    layer, s = GRIL(4).double(), torch.randn(11, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        got = names["gril"](s, layer.Q, layer.q, layer.A, layer.beta)
        assert (got - layer(s[None])[0, -1]).abs().max() < 1e-12


# ----------------------------------------------------------------------------------------------------------- fork it

def recipe(name):
    """The code under "### name" in "Fork it"."""
    text = section(README, "Fork it").partition(f"\n### {name}\n")[2].partition("\n### ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(code.strip().splitlines()) <= 30, f"{name}: no longer about 20 lines"
    return code


def run(tmp_path, monkeypatch, code, words):
    """A recipe as a person runs it, in an empty folder: task, model and result of its run."""
    for module, table in ((train, "TASKS"), (baselines, "MODELS")):
        monkeypatch.setattr(module, table, dict(getattr(module, table)))        # a row added here is gone afterwards
    (tmp_path / "recipe.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["recipe.py", *words.split(), "--out", "run", "--threads", "1"])
    runpy.run_path("recipe.py")
    return train.load("run")


def test_the_recipe_for_a_task(tmp_path, monkeypatch, capsys):
    task, _, result = run(tmp_path, monkeypatch, recipe("A new task"), "--task noisy_regression --steps 20 --tasks 20000")
    assert "trained gril" in capsys.readouterr().out and (tmp_path / "run/figure.png").exists()
    assert result["gd_loss"] == pytest.approx(result["optimal_loss"], rel=0.03)
    x, y, _ = task.sample(50_000, torch.Generator().manual_seed(0))
    p = gradient_descent([1.0])(x[:, :-1], y[:, :-1], x[:, -1])                 # the loss is a parabola in η
    assert task.eta == pytest.approx(((p * y[:, -1]).sum() / p.square().sum()).item(), rel=0.02)
    assert task.eta < 0.9 * Task().eta


def test_the_recipe_for_a_baseline(tmp_path, monkeypatch, capsys):
    words = "--task nd_regression --model gru --steps 20 --tasks 200"
    task, model, result = run(tmp_path, monkeypatch, recipe("A new baseline"), words)
    s, state, streamed = task.sample(2, torch.Generator()).s, None, []
    with torch.no_grad():
        for token in s.unbind(1):
            y, state = model.step(token, state)
            streamed.append(y)
        assert (torch.stack(streamed, 1) - model(s)).abs().max() < 1e-5
    assert result["model"] == "gru" and "trained gru" in capsys.readouterr().out


def test_the_recipe_for_a_dataset(tmp_path, monkeypatch, capsys):
    (tmp_path / "data/reviews").mkdir(parents=True)
    monkeypatch.delenv("GRIL_DATA", raising=False)
    for split, count in (("train", 40), ("val", 8), ("test", 8)):
        lines = (f"{i % 2}\t{5 * ('bad ', 'good ')[i % 2]}film, number {i}" for i in range(count))
        (tmp_path / f"data/reviews/{split}.tsv").write_text("\n".join(lines))
    words = "--task reviews --steps 20 --batch 8 --warmup 5"
    _, _, result = run(tmp_path, monkeypatch, recipe("A new dataset"), words)
    assert result["test_rows"] == 8 and result["test_accuracy"] == 100                      # good or bad is easily told
    assert "reviews: accuracy" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------------- exercises

@pytest.fixture
def proofs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "exercises"))
    return importlib.import_module("test_exercises")


@pytest.mark.parametrize("number", (1, 2, 3))
def test_an_exercise_fails_before_and_passes_after_its_solution(proofs, number):
    (proof,) = (test for name, test in vars(proofs).items() if name.startswith(f"test_{number}_"))
    with pytest.raises(NotImplementedError):
        proof(proofs.exercises)
    proof(proofs.solutions)
