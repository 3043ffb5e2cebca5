"""What every picture and table shares: runs that are trained once, tables, curves with their spread, matrices; the picture
of one run, for train.py.

The pictures themselves: figures.py (the paper's, and the command line), comparisons.py (other models), drawings.py (how it
works). Runs are kept under runs/figures and used again; delete a folder there to run it anew. GRIL_WORKERS (default 2) is
how many train at a time, each on one core.
"""
import csv
import math
import statistics
from pathlib import Path

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

BLUE, ORANGE, GREEN, RED, GREY = "#2f6db3", "#e08214", "#3c9a5f", "#c0392b", "#8a8a8a"
plt.rcParams.update({"figure.dpi": 130, "font.size": 9, "axes.titlesize": 10, "axes.spines.top": False,
                     "axes.spines.right": False, "legend.frameon": False, "image.cmap": "RdBu_r"})


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
    """Where a picture goes: docs/images/, or beside the runs if it shows nothing yet."""
    folder = Path("runs/figures" if quick else "docs/images")
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


