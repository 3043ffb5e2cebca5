"""What pictures and tables share: numbers with their spread, tables of results, curves, matrices.

The pictures themselves: figures.py (the paper's, and the command line), comparisons.py (other
models), limits.py (how far, how large), drawings.py (how it works), run.py (one run). A result is a
run's result.json, with its folder.
"""
import csv
import os
import statistics
from pathlib import Path

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

IMAGES = Path(__file__).resolve().parents[1] / "docs/images"
HUES = BLUE, ORANGE, GREEN, RED, GREY = "#2f6db3", "#e08214", "#3c9a5f", "#c0392b", "#8a8a8a"
WINDOW = ("$x_t$", "$y_t$", "$x_{t+1}$")
plt.rcParams.update({
    "figure.dpi": 130, "font.size": 9, "axes.titlesize": 10, "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "image.cmap": "RdBu_r"})


# ------------------------------------------------------------------------------- numbers and tables

def spread(values):
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def pm(values, digits=4):
    """Mean ± standard deviation; of one value itself, which has no spread."""
    mean, std = spread(values)
    return f"{mean:.{digits}f} ± {std:.{digits}f}" if len(values) > 1 else f"{mean:.{digits}f}"


def numbers(results, key, over=None):
    """A number of each result, or its ratio to another of the same result."""
    return [r[key] / r[over] if over else r[key] for r in results]


def print_table(title, head, rows):
    rows = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, ["-" * width for width in widths])
    print(f"\n{title}")
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())


def table(title, labels, groups, columns):
    """A row for each group of results, label -> results.

    A column is a function from a group to its cell, or the cells themselves by label.
    """
    print_table(title, (*labels, *columns), [
        (*(label if isinstance(label, tuple) else (label,)),
         *(column.get(label, "") if isinstance(column, dict) else column(results)
           for column in columns.values()))
        for label, results in groups.items()])


def mean(key, over=None, digits=4):
    """A column: mean ± standard deviation of a number, or of its ratio to another, where it is."""
    return lambda results: (
        pm(numbers(results, key, over), digits) if (over or key) in results[0] else "")


def largest(key, digits=3):
    return lambda results: f"{max(numbers(results, key)):.{digits}f}"


def first(key, form, over=None):
    """A column: a number of the group's first result, or its ratio to another."""
    return lambda results: format(numbers(results, key, over)[0], form)


def fresh(results):
    """On how many tasks the results were scored, for a title."""
    return f"{results[0]['tasks']:,} fresh tasks"


def seconds(results):
    return f"{spread(numbers(results, 'seconds'))[0]:.0f}"


def minutes(results):
    return f"{spread(numbers(results, 'seconds'))[0] / 60:.1f}"


def metrics(result):
    """The rows of a run's metrics.csv, or of its line in docs/runs.jsonl."""
    if "curves" in result:
        return [dict(zip(result["curves"], row)) for row in zip(*result["curves"].values())]
    with open(result["folder"] / "metrics.csv", newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


def curves(results, column):
    """(steps, mean over seeds, std over seeds) of a column of metrics.csv."""
    points = [(int(at[0]["step"]), *spread([float(row[column]) for row in at]))
              for at in zip(*map(metrics, results))]
    return tuple(map(np.array, zip(*points)))


def last(results, column):
    return float(curves(results, column)[1][-1])


def flattened(results):
    """Change of the validation loss over the last tenth of training: flat is finished."""
    _, loss, _ = curves(results, "loss")
    tenth = max(1, len(loss) // 10)
    return f"{100 * (loss[-1] / loss[-1 - tenth] - 1):+.2f} %"


# ------------------------------------------------------------------------------------------ drawing

def band(ax, results, column, color, label, per_step=1, style="-"):
    """A curve along training and one standard deviation on either side."""
    steps, mean, std = curves(results, column)
    ax.plot(per_step * steps, mean, style, color=color, label=label)
    ax.fill_between(per_step * steps, mean - std, mean + std, color=color, alpha=0.25, lw=0)


def losses(ax, groups, reference, color=ORANGE):
    """Losses along training, label -> results; gradient descent's, the zero predictor's."""
    for (label, results), hue in zip(groups.items(), (BLUE, ORANGE)):
        band(ax, results, "loss", hue, label)
    ours = next(iter(groups.values()))
    ax.axhline(float(curves(ours, "gd_loss")[1][0]), color=color, ls="--", label=reference)
    ax.axhline(ours[0]["zero_loss"], color=GREY, ls=":", label="zero predictor")
    ax.set(xscale="log", xlabel="optimiser step")


def narrow_legend(ax, loc, *others):
    """A legend that fits beside curves which bend in the middle; others: axes on the same place."""
    handles = [h for axes in (ax, *others) for h in axes.get_legend_handles_labels()[0]]
    ax.legend(handles, [h.get_label().replace(", ", ",\n") for h in handles], loc=loc, fontsize=7,
              handlelength=1.6, handletextpad=0.5, borderaxespad=0.3)


def bars(ax, groups, keys):
    """Over each label of the groups (label -> results) a bar for each of the keys (name -> key)."""
    width = 0.8 / len(keys)
    for i, ((name, key), color) in enumerate(zip(keys.items(), HUES)):
        means, stds = zip(*(spread(numbers(results, key)) for results in groups.values()))
        places = np.arange(len(groups)) + (i - (len(keys) - 1) / 2) * width
        ax.bar(places, means, width * 0.9, yerr=stds if any(stds) else None, color=color,
               label=name, capsize=2)
    ax.set_xticks(range(len(groups)), list(groups))
    if len(keys) > 1:
        ax.legend()


def errorbars(ax, groups, keys):
    """The groups (x -> results) as a line with error bars for each of the keys (name -> key)."""
    for (name, key), color, style in zip(keys.items(), (BLUE, ORANGE), ("-", "--")):
        means, stds = zip(*(spread(numbers(results, key)) for results in groups.values()))
        ax.errorbar(list(groups), means, stds, color=color, label=name, capsize=2, ls=style)
    ax.legend()


def matrix(ax, M, title, labels=None):
    """A small matrix with its numbers, or a large one as colours; white is zero."""
    M = torch.atleast_2d(M.detach())
    ax.imshow(M.numpy(), vmin=-1.2, vmax=1.2, aspect="equal")
    if M.numel() <= 30:
        for (i, j), x in np.ndenumerate(M.numpy()):
            ax.text(j, i, f"{x:.2f}".replace("-0.00", "0.00"), ha="center", va="center",
                    fontsize=7, color="white" if abs(x) > 0.7 else "black")
    ax.set(title=title, xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    if labels:
        ax.set_xticks(range(M.shape[1]), labels)
    if labels and len(M) > 1:
        ax.set_yticks(range(len(M)), labels)


def place(name, quick):
    """Where a picture goes: docs/images, or beside the runs if it shows nothing yet."""
    folder = Path("runs/figures") if quick else IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    return folder / (name.replace(".", "-quick.") if quick else name)


def save(figure, path, layout="constrained"):
    figure.set_layout_engine(layout)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
    return path


def finish(figure, name, quick=False, layout="constrained"):
    path = save(figure, place(f"{name}.png", quick), layout)
    print(f"\nfigure    {os.path.relpath(path)}")
