"""What every picture and table shares: runs that are trained once, tables, curves with their spread, matrices; the picture
of one run, for train.py.

The pictures themselves: figures.py (the paper's, and the command line), comparisons.py (other models), drawings.py (how it
works). Runs are kept under runs/figures and used again; delete a folder there to run it anew. GRIL_WORKERS (default 2) is
how many train at a time, each on one core.
"""
import csv
import json
import math
import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from tqdm import tqdm

import train
from tasks import TASKS, as_learner, as_predictor, recovered

BLUE, ORANGE, GREEN, RED, GREY = "#2f6db3", "#e08214", "#3c9a5f", "#c0392b", "#8a8a8a"
plt.rcParams.update({"figure.dpi": 130, "font.size": 9, "axes.titlesize": 10, "axes.spines.top": False,
                     "axes.spines.right": False, "legend.frameon": False, "image.cmap": "RdBu_r"})


# ---------------------------------------------------------------------------------------------------------------- runs

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


# -------------------------------------------------------------------------------------------------- numbers and tables

def spread(values):
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def pm(values, digits=4):
    mean, std = spread(values)
    return f"{mean:.{digits}f} ± {std:.{digits}f}"


def minutes(result):
    return f"{result['seconds'] / 60:.1f}"


def print_table(title, head, rows):
    rows = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    print(f"\n{title}")
    for i, row in enumerate(rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
        if i == 0:
            print("  ".join("-" * width for width in widths))


def curves(results, column):
    """(steps, mean over seeds, std over seeds) of a column of metrics.csv."""
    tables = []
    for result in results:
        with open(result["folder"] / "metrics.csv", newline="") as file:
            tables.append(list(csv.DictReader(file)))
    steps = [int(row["step"]) for row in tables[0]]
    means, stds = zip(*(spread([float(table[i][column]) for table in tables]) for i in range(len(steps))))
    return np.array(steps), np.array(means), np.array(stds)


def flattened(results):
    """Change of the validation loss over the last tenth of training, in per cent: a flat curve is a finished run."""
    _, loss, _ = curves(results, "loss")
    tenth = max(1, len(loss) // 10)
    return f"{100 * (loss[-1] / loss[-1 - tenth] - 1):+.2f} %"


# ------------------------------------------------------------------------------------------------------------- drawing

def band(ax, results, column, color, label):
    steps, mean, std = curves(results, column)
    ax.plot(steps, mean, color=color, label=label)
    ax.fill_between(steps, mean - std, mean + std, color=color, alpha=0.25, lw=0)


def bars(ax, labels, groups):
    width = 0.8 / len(groups)
    for i, ((name, values), color) in enumerate(zip(groups.items(), (BLUE, ORANGE, GREEN, RED))):
        means, stds = zip(*map(spread, values))
        places = [k + (i - (len(groups) - 1) / 2) * width for k in range(len(labels))]
        ax.bar(places, means, width * 0.9, yerr=stds if any(stds) else None, color=color, label=name, capsize=2)
    ax.set_xticks(range(len(labels)), labels)
    ax.legend()


def legend_right(ax, handles=None):
    """Steps on a logarithmic axis, with room for the legend where the curves have ended."""
    ax.set_xscale("log")
    last = ax.dataLim.x1
    ax.set_xlim(right=last ** 1.9), ax.minorticks_off()
    ax.set_xticks([10 ** i for i in range(int(math.log10(last)) + 1)])
    ax.legend(handles=handles, loc="center right", fontsize=7)


def matrix(ax, M, title, labels=None):
    """A small matrix with its numbers, or a large one as colours; white is zero."""
    M = torch.atleast_2d(M.detach())
    ax.imshow(M.numpy(), vmin=-1.2, vmax=1.2, aspect="equal")
    if M.numel() <= 30:
        for i, j in ((i, j) for i in range(M.shape[0]) for j in range(M.shape[1])):
            ax.text(j, i, f"{M[i, j]:.2f}".replace("-0.00", "0.00"), ha="center", va="center", fontsize=7,
                    color="white" if M[i, j].abs() > 0.7 else "black")
    ax.set_xticks([]), ax.set_yticks([]), ax.spines[:].set_visible(False), ax.tick_params(length=0)
    if labels:
        ax.set_xticks(range(M.shape[1]), labels)
        ax.set_yticks(*((range(M.shape[0]), labels) if M.shape[0] > 1 else ([],)))
    ax.set_title(title)


def place(name, quick):
    """Where a picture goes: images/, or beside the runs if it shows nothing yet."""
    folder = Path("runs/figures" if quick else "images")
    folder.mkdir(parents=True, exist_ok=True)
    stem, ending = name.split(".")
    return folder / f"{stem}{'-quick' * quick}.{ending}"


def finish(figure, name, quick):
    path = place(f"{name}.png", quick)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
    print(f"\nfigure    {path}")


# ---------------------------------------------------------------------------------------------- the picture of one run

WINDOW = ("$x_t$", "$y_t$", "$x_{t+1}$")


def draw_run(folder):
    """The picture of one run: loss onto the gradient-descent line, predictions against it, weights beside theirs."""
    task, model, result = train.load(folder)
    result["folder"] = Path(folder)
    if not hasattr(task, "constructed"):
        return draw_curves(result)
    learned, aims = recovered(model, task.N), recovered(task.constructed(), task.N)
    panels = [key for key in ("Q", "q", "PsiTheta", "A") if key in learned and learned[key].numel() < 1e5]
    one_layer = "Q" in learned and len(learned["Q"]) == 1
    panels = panels if one_layer or "PsiTheta" in learned else []
    figure, axes = plt.subplots(1, 2 + len(panels), figsize=(6.4 + 1.9 * len(panels), 2.9),
                                width_ratios=[1.5, 1.2] + [0.75] * len(panels), layout="constrained")
    steps, loss, _ = curves([result], "loss")
    axes[0].plot(steps, loss, color=BLUE, label=f"trained {result['model']}")
    axes[0].axhline(float(curves([result], "gd_loss")[1][0]), color=ORANGE, ls="--", label=task.reference)
    axes[0].axhline(result["zero_loss"], color=GREY, ls=":", label="zero predictor")
    axes[0].set_xscale("log")
    axes[0].set(xlabel="optimiser step", ylabel="loss", title=f"{result['task']}, f = {task.f}, N = {task.N}")
    axes[0].legend()
    batch = task.sample(200, torch.Generator().manual_seed(7))
    with torch.no_grad():
        ours, gd = as_predictor(task, model)(batch, batch.x[:, -1]), as_learner(task.learner())(batch, batch.x[:, -1])
    limit = max(ours.abs().max(), gd.abs().max()).item()
    axes[1].plot([-limit, limit], [-limit, limit], color=GREY, lw=0.8)
    axes[1].plot(gd.flatten(), ours.flatten(), ".", ms=2, color=BLUE)
    axes[1].set(xlabel=f"prediction of {task.reference}", ylabel="prediction of the model",
                title=f"cosine {result['cosine']:.4f}")
    for ax, key in zip(axes[2:], panels):
        stacked = ax.get_subplotspec().subgridspec(2, 1)
        ax.remove()
        for part, (name, M) in zip(stacked, (("trained", learned[key]), ("constructed", aims.get(key)))):
            sub = figure.add_subplot(part)
            M = torch.ones_like(learned[key]) if M is None else M
            title = f"A {name}\n{M.mean():.3f} ± {M.std():.3f}" if key == "A" else f"{key.replace('PsiTheta', '$Ψ^TΘ$')} {name}"
            matrix(sub, M[0] if M.ndim == 3 else M, title, WINDOW if key in "Qq" else None)
    path = Path(folder) / "figure.png"
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
    return path


def draw_curves(result):
    """The picture of a run without a construction beside it: losses, and the number that chose the weights."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 2.9), layout="constrained")
    for ax, columns in zip(axes, (("train_loss", "loss"), (result["choose"], f"test_{result['choose']}"))):
        for column, color in zip(columns, (BLUE, ORANGE)):
            with open(result["folder"] / "metrics.csv", newline="") as file:
                points = [(int(row["step"]), float(row[column])) for row in csv.DictReader(file) if column in row]
            if points:
                ax.plot(*zip(*points), color=color, label=column.replace("_", " "))
        ax.set(xlabel="optimiser step", title=f"{result['task']}, {result['model']}")
        ax.legend()
    path = result["folder"] / "figure.png"
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
    return path
