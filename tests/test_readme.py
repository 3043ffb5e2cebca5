"""What README and docs name is there: links, tests, commands, functions; their code runs."""
import argparse
import importlib
import os
import re
import runpy
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import baselines
import train
from gril import GRIL
from lm import LM
from lra import LRA
from tasks import TASKS, gradient_descent

ROOT = Path(__file__).resolve().parent.parent
README, PAPER, FORK = ROOT / "README.md", ROOT / "docs/PAPER.md", ROOT / "docs/FORK.md"
TESTS = {name: file for file in (ROOT / "test_gril.py", *ROOT.glob("tests/test_*.py"))
         for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)}
NUMBERED = [*(f"Eq. {i}" for i in range(1, 17)), "Definition 4.2", "App. A.5", "App. F", "App. G",
            *(f"Proposition {i}" for i in ("4.1", "4.3", "A.1", "A.2")),
            *(f"{kind} {i}" for kind in ("Fig.", "Table") for i in range(1, 12))]
START = "python3 -m venv .venv && .venv/bin/pip install -q -r requirements.txt && .venv/bin/python"


# -------------------------------------------------------------------------------- what a page names

def faults(page, text):
    """Everything that a page names and that is not there, as sentences."""
    for link in re.findall(r"\]\(([^)]+)\)", text):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not (link.startswith("https://") or target.exists() and anchor in anchors(target)):
            yield f"no {link}"
    yield from (f"no test {name}" for name in {*re.findall(r"`(test_\w+)[`[]", text)} - {*TESTS})
    typed = "".join(re.findall(r"```sh\n(.*?)```", text, re.S)).splitlines()
    typed += [words for words in quoted(re.sub(r"```.*?```", "", text, flags=re.S))
              if words.startswith("python ")]
    own = re.findall(r"Save as `(\w+\.py)`", text)
    yield from (f"{line}: {why}" for line in typed
                if not any(file in line for file in own) and (why := refused(line)))
    if page == PAPER:
        yield from broken(text)


def quoted(text):
    return [" ".join(words.split()) for words in re.findall(r"`([^`]+)`", text)]


def anchors(page):
    """The page itself, and each of its headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M) if page.suffix == ".md" else []
    return ["", *(re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles)]


@cache
def refused(command):
    """Why a command cannot be typed, or None: its script, its task, its model, its options."""
    command = command.replace("TASK", "text").replace("MODEL", "gril")
    words = shlex.split(command.split('--wrap "')[-1].rstrip('"'), comments=True)
    if "pytest" in words:
        known = words[-1] in ("-q", "loadfile", "slow", "exercises")
        return None if known else f"what is {words[-1]}?"
    script, *words = words[next(i for i, word in enumerate(words) if word.endswith(".py")):]
    if not (ROOT / script).exists():
        return f"no script {script}"
    if "/" in script:                                           # it takes no words
        return None

    def parse(self, *argv, real=argparse.ArgumentParser.parse_args):
        real(self, *argv)
        raise StopIteration                                     # where its work would begin
    main = importlib.import_module(script.removesuffix(".py")).main
    try:
        if script == "train.py":                                # all that comes before a run
            with mock.patch("train.dry_run", lambda args, task, *_: task.model(args.model)):
                with torch.device("meta"):
                    main([*words, "--dry-run"])
        else:
            with mock.patch.object(argparse.ArgumentParser, "parse_args", parse):
                main(words)
    except StopIteration:
        return f"no task {words[1]}" if script == "lra.py" and words[1] not in LRA else None
    except SystemExit as error:
        return f"refused: {error}"


def rows(text):
    """Rows of "Paper to code": paper, what; functions, files, tests and commands as lists."""
    table = text.partition("\n## Paper to code\n")[2].partition("\n## ")[0]
    for row in re.findall(r"^\|(.*)\|$", table, re.M)[2:]:
        paper, what, *cells = (cell.strip() for cell in row.split("|"))
        yield paper, what, *map(quoted, cells)


def broken(text):
    seen = []
    for paper, _, functions, files, tests, _ in rows(text):
        kind, numbers = paper.split(" ", 1)
        first, _, last = numbers.partition(" to ")
        span = range(int(first), int(last) + 1) if last else numbers.split(", ")
        seen += [f"{kind} {i}" for i in span]
        yield from (f"no file {name}" for name in files if not (ROOT / name).exists())
        yield from (f"no {name} in {files}" for name in functions if find(name, files) is None)
        if not (functions and files and tests):
            yield f"{paper}: a row needs a function, its file and a test"
    yield from (f"{name} is missing" for name in NUMBERED if name not in seen)


def find(name, files):
    """What a dotted name is in one of these files, or None."""
    for file in files:
        if (ROOT / file).exists():
            found = importlib.import_module(file.removesuffix(".py").replace("/", "."))
            for part in name.split("."):
                found = getattr(found, part, None)
            if found is not None:
                return found


@pytest.mark.parametrize("page", (README, *ROOT.glob("docs/*.md")), ids=lambda page: page.name)
def test_what_a_page_names_is_there(page):
    assert not list(faults(page, page.read_text()))


@pytest.mark.parametrize("old, new, said", (
    ("`gril_loop`", "`gril_lop`", "no gril_lop"), ("`gril.py`", "`grill.py`", "no file grill.py"),
    ("`test_windows`", "`test_w`", "no test test_w"), ("images/forms", "forms", "no forms.png"),
    ("figures.py fig2", "figures.py fig22", "fig22: refused"), ("(#departures)", "(#d)", "no #d"),
    ("python figures.py", "python figure.py", "no script figure.py"),
    ("--task text ", "--task texts ", "unknown task 'texts'"),
    ("--size paper", "--size papers", "unknown recipe 'papers'"),
    ("--model gd_dagger", "--model gd", "unknown model"), ("--layers 3", "--lairs 3", "3: refused"),
    ("| Eq. 9 ", "| Eq. 90 ", "Eq. 9 is missing")))
def test_a_name_that_is_gone_is_noticed(old, new, said):
    assert old in PAPER.read_text()
    assert said in "\n".join(faults(PAPER, PAPER.read_text().replace(old, new)))


def named():
    """(paper, file, function, the tests of its row) of every function in "Paper to code"."""
    for paper, _, functions, files, tests, _ in rows(PAPER.read_text()):
        for name in functions:
            file = next(file for file in files if find(name, [file]) is not None)
            yield paper, file, name, [f"{TESTS[test]}::{test}" for test in tests]


@pytest.mark.slow
@pytest.mark.parametrize("paper, file, name, tests", [
    pytest.param(*row, id=f"{row[0]}-{row[2]}") for row in named()])
def test_a_rows_tests_fail_when_its_function_is_spoiled(paper, file, name, tests):
    run = subprocess.run([sys.executable, "tests/spoil.py", file, name, *tests], cwd=ROOT,
                         env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
                         text=True)
    assert run.returncode == 1, run.stdout[-2000:] + run.stderr[-2000:]      # a test failed


# ---------------------------------------------------------------------------------- what it prints

def code(page, heading):
    """The Python under a heading of second order."""
    text = page.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```python\n(.*?)```", text, re.S)
    return block


def test_the_readme_is_read_in_one_sitting_and_holds_both_set_up_commands():
    text = README.read_text()
    assert len(text.encode()) <= 16 * 1024
    assert f"\n{START} train.py --task nd_regression\n" in text
    assert re.search(r"^.*-m pytest.*$", text, re.M)[0] == (         # .ci/run's
        f"{START} -m pytest -q -n 2 --dist loadfile")


def test_the_loop_of_three_lines_is_the_layer():
    names, generator = {}, torch.Generator().manual_seed(0)
    exec(code(README, "How it works"), names)
    layer, s = GRIL(4).double(), torch.randn(11, 4, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        got = names["gril"](s, layer.Q, layer.q, layer.A, layer.beta)
        assert (got - layer(s[None])[0, -1]).abs().max() < 1e-12


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(recipe, words) as a person does, in an empty folder: task, model and result."""
    for module, table in ((train, "TASKS"), (baselines, "MODELS")):
        monkeypatch.setattr(module, table, dict(getattr(module, table)))    # its row goes again
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GRIL_DATA", raising=False)

    def typed(recipe, words):
        assert len(recipe.strip().splitlines()) <= 30, "no longer about 20 lines"
        Path("recipe.py").write_text(recipe)
        monkeypatch.setattr(sys, "argv", f"recipe.py {words} --out run --threads 1".split())
        runpy.run_path("recipe.py")
        return train.load("run")
    return typed


@pytest.mark.parametrize("scales", ("", " --scale 2 --weight-scale 0.4"))
def test_the_recipe_for_a_task(run, capsys, scales):
    words = "--task noisy_regression --steps 20 --tasks 20000 --noise 0.4" + scales
    task, _, result = run(code(README, "Fork it"), words)
    assert "trained gril" in capsys.readouterr().out and Path("run/figure.png").exists()
    assert result["gd_loss"] == pytest.approx(result["optimal_loss"], rel=0.03)
    x, y, _ = task.sample(50_000, torch.Generator().manual_seed(0))
    p = gradient_descent([1.0])(x[:, :-1], y[:, :-1], x[:, -1])     # the loss is a parabola in η
    best = (p * y[:, -1]).sum() / p.square().sum()
    assert task.eta == pytest.approx(best.item(), rel=0.02)
    noiseless = TASKS["nd_regression"](scale=task.scale, weight_scale=task.weight_scale)
    assert task.noise == 0.4 and task.eta < 0.93 * noiseless.eta
    with torch.device("meta"):                                      # the generator's device counts
        assert task.sample(2, torch.Generator()).s.device.type == "cpu"
    stopped = dict(args=train.arguments(), rank=0, world=1, step=7, folder=Path("run"))
    train.say_how_to_go_on(SimpleNamespace(**stopped))
    assert "\n  python recipe.py --task noisy" in capsys.readouterr().err


def test_the_recipe_for_a_baseline(run, capsys):
    words = "--task nd_regression --model gru --steps 20 --tasks 200"
    task, model, result = run(code(FORK, "A new baseline"), words)
    s, state, streamed = task.sample(2, torch.Generator()).s, None, []
    with torch.no_grad():
        for token in s.unbind(1):
            y, state = model.step(token, state)
            streamed.append(y)
        assert (torch.stack(streamed, 1) - model(s)).abs().max() < 1e-5
    assert result["model"] == "gru" and "trained gru" in capsys.readouterr().out
    for elsewhere in (LRA["image"], LM["wikitext2"]):               # as the page says of its row
        elsewhere = elsewhere(layers=1, H=8, P=8, J=2, length=16)
        assert elsewhere.loss(elsewhere.model("gru"), elsewhere.example(2)).isfinite()


def test_the_recipe_for_a_dataset(run, capsys):
    Path("data/reviews").mkdir(parents=True)
    for split, count in (("train", 40), ("val", 8), ("test", 8)):
        lines = (f"{i % 2}\t{5 * ('bad ', 'good ')[i % 2]}film, number {i}" for i in range(count))
        Path(f"data/reviews/{split}.tsv").write_text("\n".join(lines))
    words = "--task reviews --steps 20 --batch 8 --warmup 5"
    _, _, result = run(code(FORK, "A new dataset"), words)
    assert result["test_rows"] == 8 and result["test_accuracy"] == 100      # easily told apart
    assert "reviews: accuracy" in capsys.readouterr().out


@pytest.mark.parametrize("number", (1, 2, 3))
def test_an_exercise_fails_before_and_passes_after_its_solution(monkeypatch, number):
    monkeypatch.syspath_prepend(str(ROOT / "exercises"))
    proofs = importlib.import_module("test_exercises")
    (proof,) = (test for name, test in vars(proofs).items() if name.startswith(f"test_{number}_"))
    with pytest.raises(NotImplementedError):
        proof(proofs.exercises)
    proof(proofs.solutions)
