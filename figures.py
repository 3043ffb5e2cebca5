"""Every figure and table of the paper, from runs.

    python figures.py fig2            trains what the figure needs (5 seeds), prints its table, writes images/fig2.png
    python figures.py fig2 --quick    the same in seconds: one seed and hardly any training, so only to see it run
    python figures.py all

  fig2               one layer is gradient descent: loss, alignment, widths, scales, weights        Fig. 2
  fig3               more steps, and sine targets                                                   Fig. 3 A, B
  fig4               three-class softmax, N = 10                                                    Fig. 4
  two_layer_weights  what two layers learn                                                          Fig. 5 (App. B)
  binary_10, softmax_10, binary_100, softmax_100                                                    Fig. 7 to 10 (App. B)
  ablations          without window, without read-out                                               Tables of App. C
  second_order       Newton's step beside gradient descent                                          Table of App. C
  state              one prompt: the state growing toward W, beside online learners                 (not in the paper)
  how                one prompt through the layer: window, cross-product, state, read-out           Fig. 1
  forms              what each form of the recurrence keeps, drawn and measured                     (not in the paper)
  prompt             a moving picture of one prompt (GIF), example by example                       (not in the paper)
  fig3c              the other sequence models, scalar regression                                   Fig. 3 C
  nd_comparison      the same, multivariate                                                         Fig. 6 (App. B)
  model_comparison   Griffin, Mamba and S5 at several sizes                                         Table of App. B.3
  lra                Long Range Arena at a laptop's size, four models                               (Sec. 5.4)
  gates              real or complex gates, one block or many                                       (not in the paper)
  wikitext2          a small language model, five mixers, GPT-2 tokens and bytes                    (Sec. 5.4)

Runs are kept under runs/figures and used again; delete a folder there to run it anew. GRIL_WORKERS (default 2) is how
many train at a time.
"""
import argparse
import csv
import json
import math
import multiprocessing
import os
import statistics
import weakref
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import matplotlib.ticker
import torch
from matplotlib.animation import PillowWriter
from tqdm import tqdm

import train
from baselines import state_size
from gril import GRIL, GrilMixer, construct_multivariate, states, window
from lra import LRA
from tasks import (TASKS, Task, as_learner, as_predictor, closed_form, delta_rule, evaluate, gradient_descent, longhorn,
                   newton, recovered, ridge, tune, zero)

BLUE, ORANGE, GREEN, RED, GREY = "#2f6db3", "#e08214", "#3c9a5f", "#c0392b", "#8a8a8a"
plt.rcParams.update({"figure.dpi": 130, "font.size": 9, "axes.titlesize": 10, "axes.spines.top": False,
                     "axes.spines.right": False, "legend.frameon": False, "image.cmap": "RdBu_r"})


# ------------------------------------------------------------------------------------------------------------- runs

DEFAULTS = dict(f=10, n=10, model="gril")                        # left out of names, so that figures share runs
QUICK = {True: dict(steps=20, batch=32, tasks=200),             # an in-context task; a task with files
         False: dict(steps=4, batch=2, length=32, warmup=1, evaluate_every=2)}


def runs(settings, quick):
    """Results of several trainings, GRIL_WORKERS at a time; one that is there already is read, not run."""
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
    return [dict(json.loads((folder / "result.json").read_text()), folder=folder) for folder, _ in jobs]


def run(job):
    folder, options = job
    flags = [text for key, value in options.items() for text in (f"--{key.replace('_', '-')}", str(value)) if text != "True"]
    try:
        train.train(train.arguments([*flags, "--threads", "1", "--out", str(folder), "--force", "--quiet"]))
    except FloatingPointError as error:                         # a rate too high, say: the sweep goes on without it
        (folder / "result.json").write_text(json.dumps(dict(diverged=str(error))))


def seeds(quick):
    return range(1 if quick else 5)


def spread(values):
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def pm(values, digits=4):
    mean, std = spread(values)
    return f"{mean:.{digits}f} ± {std:.{digits}f}"


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
    return torch.tensor(steps), torch.tensor(means), torch.tensor(stds)


def band(ax, results, column, color, label):
    steps, mean, std = curves(results, column)
    ax.plot(steps, mean, color=color, label=label)
    ax.fill_between(steps, mean - std, mean + std, color=color, alpha=0.25, lw=0)


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
    ax.imshow(M, vmin=-1.2, vmax=1.2, aspect="equal")
    if M.numel() <= 30:
        for i, j in ((i, j) for i in range(M.shape[0]) for j in range(M.shape[1])):
            ax.text(j, i, f"{M[i, j]:.2f}".replace("-0.00", "0.00"), ha="center", va="center", fontsize=7,
                    color="white" if M[i, j].abs() > 0.7 else "black")
    ax.set_xticks([]), ax.set_yticks([]), ax.spines[:].set_visible(False), ax.tick_params(length=0)
    if labels:
        ax.set_xticks(range(M.shape[1]), labels)
        ax.set_yticks(*((range(M.shape[0]), labels) if M.shape[0] > 1 else ([],)))
    ax.set_title(title)


def finish(figure, name, quick):
    folder = Path("runs/figures" if quick else "images")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}{'-quick' * quick}.png"
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
    print(f"\nfigure    {path}")


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


# ---------------------------------------------------------------------------------------------------------- figures

def fig2(quick):
    widths = (5, 10) if quick else (5, 10, 20, 35, 50)
    results = {f: runs([dict(task="nd_regression", f=f, seed=s) for s in seeds(quick)], quick) for f in widths}
    ours = results[10]
    print_table("One layer, multivariate regression, N = 10, losses on the same 10,000 fresh tasks (paper, f = 10: trained "
                "0.206 ± 0.001, GD 0.207 ± 0.001)", ("f", "GRIL", "GD", "closed form", "GRIL ÷ GD", "cosine", "largest |Q - e2 e1ᵀ|",
                                                    "|q - e3|", "mean |A - 1|", "seconds"),
                [(f, pm([r["loss"] for r in rs]), pm([r["gd_loss"] for r in rs]), f"{rs[0]['optimal_loss']:.4f}",
                  pm([r["loss"] / r["gd_loss"] for r in rs]), pm([r["cosine"] for r in rs], 5),
                  f"{max(r['Q_distance'] for r in rs):.3f}", f"{max(r['q_distance'] for r in rs):.3f}",
                  f"{max(r['A_distance'] for r in rs):.4f}", f"{spread([r['seconds'] for r in rs])[0]:.0f}")
                 for f, rs in results.items()])
    figure = plt.figure(figsize=(12, 5.6), layout="constrained")
    grid = figure.add_gridspec(2, 12)
    a, b, c, d1, d2 = (figure.add_subplot(grid[0, i:j]) for i, j in ((0, 3), (3, 6), (6, 8), (8, 10), (10, 12)))
    band(a, ours, "loss", BLUE, "GRIL, trained")
    a.axhline(float(curves(ours, "gd_loss")[1][0]), color=ORANGE, ls="--", label="GD = GRIL, constructed")
    a.axhline(ours[0]["zero_loss"], color=GREY, ls=":", label="zero predictor")
    a.set(title="A  loss on validation tasks", xlabel="optimiser step", ylabel="½ squared error per coordinate")
    legend_right(a)
    alignment(b, ours, "B  against GD")
    for key, color, label in (("loss", BLUE, "GRIL"), ("gd_loss", ORANGE, "GD")):
        means, stds = zip(*(spread([r[key] for r in results[f]]) for f in widths))
        c.errorbar(widths, means, stds, color=color, label=label, capsize=2, ls="-" if key == "loss" else "--")
    c.set(title="C  input width", xlabel="f", ylabel="loss"), c.legend()
    for ax, what, values in ((d1, "scale", (0.5, 0.75, 1, 1.5, 2)), (d2, "weight_scale", (0.5, 1, 2, 3, 4, 5))):
        scales(ax, ours, what, values, quick)
    d1.set(title="D  inputs scaled", ylabel="loss"), d2.set(title="D  weights scaled")
    task, model, _ = train.load(ours[0]["folder"])
    learned = recovered(model, task.N)
    pairs = (("E  Q", learned["Q"][0], torch.outer(torch.eye(3)[1], torch.eye(3)[0]), WINDOW),
             (f"F  A = {learned['A'].mean():.3f} ± {learned['A'].std():.3f}", learned["A"], None, None), ("G  q", learned["q"], torch.eye(3)[2], WINDOW))
    for i, (title, trained, constructed, labels) in enumerate(pairs):
        for j, (name, M) in enumerate((("trained", trained), ("constructed", constructed))):
            name, M = (f"{title}, {name}", M) if M is not None else ("F  A = 1, constructed", torch.ones_like(trained))
            matrix(figure.add_subplot(grid[1, 4 * i + 2 * j:4 * i + 2 * j + 2]), M, name, labels)
    finish(figure, "fig2", quick)


def alignment(ax, results, title):
    """Cosine and distances along training, two axes."""
    band(ax, results, "cosine", GREEN, "cosine")
    ax.set(title=title, xlabel="optimiser step", ylim=(0, 1.05), ylabel="cosine of sensitivities")
    right = ax.twinx()
    right.spines["right"].set_visible(True)
    band(right, results, "prediction_l2", RED, "L2, predictions")
    band(right, results, "sensitivity_l2", ORANGE, "L2, sensitivities")
    right.set(ylim=(0, None), ylabel="L2 distance")
    legend_right(ax, [h for axis in (ax, right) for h in axis.get_legend_handles_labels()[0]])


def scales(ax, results, what, values, quick, reference=None):
    """Loss on prompts of another scale, the reference keeping the step size of scale 1."""
    rows = []
    for value in values:
        ratios, ours, theirs = [], [], []
        for result in results:
            task, model, _ = train.load(result["folder"])
            other = TASKS[task.name](f=task.f, N=task.N, K=task.K, **{what: value})
            gd = as_learner(task.learner()) if reference is None else as_predictor(task, train.load(reference(result))[1])
            score = evaluate(other, {"GRIL": as_predictor(task, model), "GD": gd}, 200 if quick else 10_000,
                             seed=40_000 + result["seed"], sensitivities=2)
            ours.append(score["GRIL"]["loss"]), theirs.append(score["GD"]["loss"])
            ratios.append(ours[-1] / theirs[-1])
        rows.append((value, spread(ours), spread(theirs), spread(ratios)))
    label = "GD" if reference is None else "GD†"
    for k, color, name, style in ((1, BLUE, "GRIL", "-"), (2, ORANGE, label, "--")):
        ax.errorbar(values, [row[k][0] for row in rows], [row[k][1] for row in rows], color=color, label=name, capsize=2, ls=style)
    ax.set(xlabel=what.replace("_", " ")), ax.legend()
    if rows[-1][1][0] > 5 * rows[0][1][0]:
        ax.set_yscale("log")
        for formatter in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
            formatter(matplotlib.ticker.FuncFormatter(lambda y, _: f"{y:g}" if f"{y:e}"[0] in "125" else ""))
    print_table(f"Trained at scale 1, tested at another {what.replace('_', ' ')}", (what, "GRIL", label, f"GRIL ÷ {label}"),
                [(v, *(f"{m:.4f} ± {s:.4f}" for m, s in cells)) for v, *cells in rows])


def fig3(quick):
    figure, (a, b) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    steps = (1, 2) if quick else (1, 2, 3)
    multi = {l: runs([dict(task="multistep_regression", layers=l, seed=s) for s in seeds(quick)], quick) for l in steps}
    ratios = {l: [r["loss"] / r["gd_loss"] for r in rs] for l, rs in multi.items()}
    print_table("Multi-step regression: l layers against l steps of GD, its step sizes tuned together",
                ("layers", "GRIL", "GD", "GRIL ÷ GD", "cosine", "largest head distance", "seconds"),
                [(l, pm([r["loss"] for r in rs]), pm([r["gd_loss"] for r in rs]), pm(ratios[l]), pm([r["cosine"] for r in rs], 5),
                  f"{max(r['Q_distance'] for r in rs):.3f}", f"{spread([r['seconds'] for r in rs])[0]:.0f}") for l, rs in multi.items()])
    bars(a, [f"{l} step{'s' * (l > 1)}" for l in steps], {"GRIL": [[r["loss"] for r in multi[l]] for l in steps],
                                                         "GD, tuned": [[r["gd_loss"] for r in multi[l]] for l in steps]})
    a.axhline(multi[1][0]["zero_loss"], color=GREY, ls=":", label="zero predictor"), a.legend()
    a.set(title="A  several steps of gradient descent", ylabel="loss")

    variants = [(1, "gril", "gd_dagger", "1 layer"), (2, "gril", "gd_dagger", "2 layers"), (1, "gril_rho", "gd_dagger_rho", "1 layer, ρ(Z)")]
    rows, groups = [], {"GRIL": [], "GD†": []}
    for layers, ours, dagger, label in variants:
        pair = [runs([dict(task="nonlinear_regression", layers=layers, model=m, seed=s) for s in seeds(quick)], quick)
                for m in (ours, dagger)]
        ratio = [x["loss"] / y["loss"] for x, y in zip(*pair)]
        rows.append((label, *(pm([r["loss"] for r in rs]) for rs in pair), pm(ratio), flattened(pair[1])))
        for name, rs in zip(groups, pair):
            groups[name].append([r["loss"] for r in rs])
    task = TASKS["nonlinear_regression"](tasks=200 if quick else 10_000)
    learners = {"one GD step on W x": task.learner(), "one GD step on sin(W x)": sine_step(task), "zero predictor": zero}
    scores = [evaluate(task, {name: as_learner(learner) for name, learner in learners.items()}, task.tasks, 20_000 + s, 2)
              for s in seeds(quick)]                                            # the tasks that the runs were tested on
    explicit = {name: [score[name]["loss"] for score in scores] for name in learners}
    rows += [(name, pm(losses), "", "", "") for name, losses in explicit.items()]
    print_table("Sine targets (GRIL and GD† on the same tasks; GD† is trained too: its gated unit or ρ, and β)",
                ("", "GRIL, or the learner itself", "GD†", "GRIL ÷ GD†", "GD† loss, last tenth of training"), rows)
    bars(b, [label for *_, label in variants], groups)
    for (name, losses), style, color in zip(explicit.items(), ("--", "-.", ":"), (RED, GREEN, GREY)):
        b.axhline(spread(losses)[0], ls=style, color=color, lw=1, label=name)
    b.set(title="B  sine targets", ylabel="loss"), b.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 0.92), ncol=2)
    finish(figure, "fig3", quick)


def sine_step(task):
    (eta,) = tune(lambda eta: gradient_descent([eta], link=torch.sin), [4.0], task)
    return gradient_descent([eta], link=torch.sin)


def flattened(results):
    """Change of the validation loss over the last tenth of training, in per cent: a flat curve is a finished run."""
    _, loss, _ = curves(results, "loss")
    tenth = max(1, len(loss) // 10)
    return f"{100 * (loss[-1] / loss[-1 - tenth] - 1):+.2f} %"


def bars(ax, labels, groups):
    width = 0.8 / len(groups)
    for i, ((name, values), color) in enumerate(zip(groups.items(), (BLUE, ORANGE, GREEN))):
        means, stds = zip(*map(spread, values))
        places = [k + (i - (len(groups) - 1) / 2) * width for k in range(len(labels))]
        ax.bar(places, means, width * 0.9, yerr=stds, color=color, label=name, capsize=2)
    ax.set_xticks(range(len(labels)), labels)
    ax.legend()


def two_layer_weights(quick):
    (result,) = runs([dict(task="multistep_regression", layers=2, seed=0)], quick)
    task, model, _ = train.load(result["folder"])
    learned = recovered(model, task.N)
    figure, axes = plt.subplots(2, 5, figsize=(10, 4.4), layout="constrained")
    for l in range(2):
        for h, aim in ((0, "$y x^T$"), (1, "$x x^T$")):
            aim = "free, it meets $W_0 = 0$" if (l, h) == (0, 1) else aim
            matrix(axes[l, h], learned["Q"][2 * l + h], f"Q, layer {l + 1}, head {h + 1}\n{aim}", WINDOW)
            A = learned["A"][l, h]
            matrix(axes[l, 2 + h], A, f"A, layer {l + 1}, head {h + 1}\n{A.mean():.3f} ± {A.std():.3f}")
    matrix(axes[0, 4], learned["q"], "q", WINDOW)
    # of the two steps only the polynomial W = Σ y xᵀ/N (a - b Σ x xᵀ/N) is determined: a = η₁ + η₂, b = η₁ η₂
    scale = model.Q[1, 1].flatten()[model.Q[1, 1].abs().argmax()].item()
    ours = sum(result["gain"]), result["gain"][0] * task.N * model.beta[1].item() * scale
    gd = sum(result["eta"]), math.prod(result["eta"])
    for i, (color, label, values) in enumerate(((BLUE, "GRIL", ours), (ORANGE, "GD", gd))):
        axes[1, 4].bar([i * 0.4 - 0.2, 1 + i * 0.4 - 0.2], values, 0.36, color=color, label=label)
    axes[1, 4].set_xticks(range(2), ["$η_1 + η_2$", "$η_1 η_2$"]), axes[1, 4].legend(fontsize=7)
    axes[1, 4].set(title="the two step sizes")
    print_table("The two steps as one polynomial", ("", "η1 + η2", "η1 η2"),
                [("GRIL", *(f"{x:.2f}" for x in ours)), ("GD, tuned", *(f"{x:.2f}" for x in gd))])
    print_table("Two layers: heads after dividing by their largest entry", ("layer, head", "learned Q", "distance"),
                [(f"{i // 2 + 1}, {i % 2 + 1}", " ".join(f"{x:6.3f}" for x in Q.flatten()),
                  f"{(Q - torch.eye(9)[3 if i % 2 == 0 else 0].reshape(3, 3)).abs().max():.3f}") for i, Q in enumerate(learned["Q"])])
    finish(figure, "two_layer_weights", quick)


def classification(name, task_name, N, quick, widths=()):
    long = {} if N < 100 else dict(batch=64)                                    # ten times the data in every prompt
    pair = {model: runs([dict(task=task_name, n=N, model=model, **long, seed=s) for s in seeds(quick)], quick)
            for model in ("gril", "gd_dagger")}
    ours, dagger = pair.values()
    figure, axes = plt.subplots(1, 3 + bool(widths), figsize=(11 + 3 * bool(widths), 3), layout="constrained")
    for rs, color, label in ((ours, BLUE, "GRIL"), (dagger, ORANGE, "GD†")):
        band(axes[0], rs, "loss", color, label)
    axes[0].axhline(float(curves(ours, "gd_loss")[1][0]), color=GREEN, ls="--", label="GD, φ = identity")
    axes[0].axhline(ours[0]["zero_loss"], color=GREY, ls=":", label="zero predictor")
    axes[0].set(title=f"A  {task_name.replace('_', ' ')}, N = {N}", xlabel="optimiser step", ylabel="cross-entropy")
    legend_right(axes[0])
    alike = []
    for x, y in zip(ours, dagger):
        task, model, _ = train.load(x["folder"])
        alike.append(evaluate(task, {"GRIL": as_predictor(task, model), "GD†": as_predictor(task, train.load(y["folder"])[1])},
                              200 if quick else 10_000, seed=20_000 + x["seed"])["GD†"])
    keys = ("cosine", "prediction_l2", "sensitivity_l2")
    for i, (key, color) in enumerate(zip(keys, (GREEN, RED, ORANGE))):
        mean, std = spread([a[key] for a in alike])
        axes[1].bar(i, mean, yerr=std, color=color, capsize=3)
    axes[1].set_xticks(range(3), ("cosine of\nsensitivities", "L2 of logits", "L2 of\nsensitivities"))
    axes[1].set(title="B  GRIL against GD†")
    partner = {x["folder"]: y["folder"] for x, y in zip(ours, dagger)}
    scales(axes[2], ours, "scale", (0.5, 1, 1.5, 2), quick, lambda result: partner[result["folder"]])
    axes[2].set(title="C  inputs scaled", ylabel="cross-entropy")
    ratio = [x["loss"] / y["loss"] for x, y in zip(ours, dagger)]
    print_table(f"{task_name}, f = 10, N = {N}, cross-entropy on the same 10,000 fresh tasks",
                ("GRIL", "GD†", "GRIL ÷ GD†", "GD, φ = identity", "zero", *keys, "GD† loss, last tenth"),
                [(pm([r["loss"] for r in ours]), pm([r["loss"] for r in dagger]), pm(ratio), pm([r["gd_loss"] for r in ours]),
                  pm([r["zero_loss"] for r in ours]), *(pm([a[k] for a in alike]) for k in keys), flattened(dagger))])
    if widths:
        sweep = {f: [runs([dict(task=task_name, n=N, f=f, model=m, seed=s) for s in seeds(quick)], quick) for m in pair]
                 for f in widths}
        for k, (color, label) in enumerate(((BLUE, "GRIL"), (ORANGE, "GD†"))):
            means, stds = zip(*(spread([r["loss"] for r in sweep[f][k]]) for f in widths))
            axes[3].errorbar(widths, means, stds, color=color, label=label, capsize=2)
        axes[3].set(title="D  input width", xlabel="f", ylabel="cross-entropy"), axes[3].legend()
        print_table("Input width", ("f", "GRIL", "GD†", "GRIL ÷ GD†"),
                    [(f, *(pm([r["loss"] for r in rs]) for rs in sweep[f]),
                      pm([x["loss"] / y["loss"] for x, y in zip(*sweep[f])])) for f in widths])
    finish(figure, name, quick)


def ablations(quick):
    paper = {"gril": ("0.209 ± 0.001", "0.206 ± 0.001"), "w2": ("", "")}
    rows, labels, ratios = [], [], []
    for i, (task, models) in enumerate((("scalar_regression", ("gril", "no_input", "no_output", "neither")),
                                        ("nd_regression", ("gril", "no_window", "no_readout", "neither", "w2")))):
        for model in models:
            results = runs([dict(task=task, model=model, seed=s) for s in seeds(quick)], quick)
            to_zero = [r["loss"] / r["zero_loss"] for r in results]
            rows.append((task, model, pm([r["loss"] for r in results]), pm(to_zero), pm([r["loss"] / r["gd_loss"] for r in results]),
                         paper.get(model, ("0.426 ± 0.002", "0.414 ± 0.002"))[i]))
            labels.append(f"{model}\n({'scalar' if i == 0 else 'multivariate'})"), ratios.append(to_zero)
    print_table("Ablations (App. C), losses on the same 10,000 fresh tasks", ("task", "model", "loss", "÷ zero predictor", "÷ GD", "paper"), rows)
    figure, ax = plt.subplots(figsize=(10, 3), layout="constrained")
    bars(ax, labels, {"loss ÷ zero predictor": ratios})
    ax.axhline(1, color=GREY, ls=":"), ax.tick_params(axis="x", labelsize=7)
    ax.set(title="Without window or without multiplicative read-out, zero is the best a layer can do", ylim=(0, 1.25),
           ylabel="loss ÷ zero predictor's"), ax.get_legend().remove()
    finish(figure, "ablations", quick)


def second_order(quick):
    task = Task()
    results = runs([dict(task="nd_regression", f=10, seed=s) for s in seeds(quick)], quick)
    columns = {}
    for result in results:
        _, model, _ = train.load(result["folder"])
        predictors = {"trained GRIL": as_predictor(task, model), "gradient descent, one step": as_learner(task.learner()),
                      "GRIL, constructed": as_predictor(task, task.constructed()),
                      "Newton, exact": as_learner(newton),
                      "Newton, step length 0.48": as_learner(lambda *prompt: newton(*prompt, step=0.48)),
                      "Newton, Hessian + 0.026 I": as_learner(ridge(0.026)), "zero predictor": as_learner(zero)}
        for name, score in evaluate(task, predictors, 200 if quick else 10_000, seed=20_000 + result["seed"]).items():
            columns.setdefault(name, []).append(score)
    paper = {"trained GRIL": "0.206 ± 0.001", "gradient descent, one step": "0.207 ± 0.001", "GRIL, constructed": "0.206 ± 0.002",
             "Newton, exact": "0.114 ± 0.001"}
    print_table("Second-order methods (App. C.3)", ("method", "loss", "cosine with trained GRIL", "paper"),
                [(name, pm([s["loss"] for s in scores]), pm([s["cosine"] for s in scores]), paper.get(name, ""))
                 for name, scores in columns.items()])
    print("\nWithout noise and with N = f, an exact Newton step solves the task (its loss here is"
          "\nrounding, in float64); the paper's 0.114 fits a damped one: a step length of 0.48 or a ridge of 0.026.")
    figure, ax = plt.subplots(figsize=(8, 3), layout="constrained")
    names = list(columns)
    ax.barh(names, [spread([s["loss"] for s in columns[n]])[0] for n in names], color=[BLUE, ORANGE, BLUE, GREEN, GREEN, GREEN, GREY])
    ax.axvline(0.114, color=RED, ls="--", label="the paper's Newton-Raphson"), ax.legend(), ax.invert_yaxis()
    ax.set(xlabel="loss", title="The trained layer is a first-order learner")
    finish(figure, "second_order", quick)


def state(quick):
    """One prompt of 100 examples: Z_t beside W, and the loss after each example beside the online learners."""
    N, f, tasks = (20 if quick else 100), 10, 200 if quick else 4_000
    (result,) = runs([dict(task="nd_regression", f=f, n=N, seed=0)], quick)
    task, model, _ = train.load(result["folder"])
    shown = [t for t in (1, 3, 10, 30, 100) if t <= N]
    t = torch.arange(1, N + 1)
    etas = torch.tensor([closed_form(f, int(n))[0] for n in t])
    constructed = construct_multivariate(GRIL(f), etas, t)
    generator = torch.Generator().manual_seed(0)
    batch = task.sample(tasks, generator)
    W = torch.linalg.lstsq(batch.x[:1, :f + 1].double(), batch.y[:1, :f + 1].double()).solution[0].mT.float()

    def predictors(n):
        short = Task(f=f, N=n, tasks=1_000)
        (beta,), (rule,) = (tune(family, [1.0], short) for family in (longhorn, delta_rule))
        return {"ridge 0.01": ridge(0.01), "Longhorn, β tuned": longhorn(beta), "delta rule, β tuned": delta_rule(rule)}
    every = [n for n in (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100) if n <= N]
    lines = {}
    with torch.no_grad():
        for name, layer in (("GRIL, trained for N = %d" % N, model), ("GRIL, constructed: GD with η*(t)/t", constructed)):
            o = layer(batch.s)                                                      # (B, N, f): the prediction for x_{t+1}
            lines[name] = [(n, 0.5 * (o[:, n - 1] - batch.y[:, n]).square().mean().item()) for n in range(1, N + 1)]
    for n in every:
        for name, learner in predictors(n).items():
            with torch.no_grad():
                o = learner(batch.x[:, :n], batch.y[:, :n], batch.x[:, n])
            lines.setdefault(name, []).append((n, 0.5 * (o - batch.y[:, n]).square().mean().item()))
    print_table("Loss after n examples", ("learner", *every), [(name, *(f"{dict(line)[n]:.4f}" for n in every)) for name, line in lines.items()])

    figure = plt.figure(figsize=(12, 5), layout="constrained")
    grid = figure.add_gridspec(2, len(shown) + 4)
    for row, (name, layer) in enumerate((("trained", model), ("constructed", constructed))):
        for i, n in enumerate(shown):
            probe = torch.cat([batch.s[:1, :2 * n].expand(f, -1, -1), torch.eye(f)[:, None]], 1)      # query: unit vectors
            at_n = layer if layer is model else construct_multivariate(GRIL(f), etas[n - 1], n)
            with torch.no_grad():
                implied = at_n.query(probe).mT                                      # the W that the state stands for
            matrix(figure.add_subplot(grid[row, i]), implied, f"{name}\nafter {n}" if i == 0 else f"after {n}")
        matrix(figure.add_subplot(grid[row, len(shown)]), W, "W, the task")
    ax = figure.add_subplot(grid[:, len(shown) + 1:])
    for (name, line), color, style in zip(lines.items(), (BLUE, ORANGE, GREEN, RED, GREY), ("-", "--", "-", "-", "-")):
        ax.plot(*zip(*line), color=color, ls=style, label=name)
    ax.set(xlabel="examples seen", ylabel="loss on the next one", title="What is learned, example by example", ylim=(0, 0.58))
    ax.set_xscale("log"), ax.legend(fontsize=7, loc="upper right")
    finish(figure, "state", quick)


# ---------------------------------------------------------------------------------------------- other sequence models

RATES = (1e-3, 3e-3, 1e-2, 3e-2)
STEPS, BATCH = {"fig3c": 3000, "nd_comparison": 1000, "model_comparison": 600}, 64     # the budget of every model


def budget(name, quick, factor=1):
    return dict(steps=4 if quick else int(factor * STEPS[name]), batch=BATCH)


def rated(options, rate):
    """One rate for all parameters; GRIL's gate keeps its tenth, as in its recipe."""
    return dict(options, lr=rate, recurrent_lr=rate / 10 if options["model"] == "gril" else rate)


def compare(name, models, quick):
    """label -> results of 5 seeds, each model with the rate that does best with seed 0 on validation tasks.

    The sweep is as long as the runs: after a third of the steps all rates of some models are still at the zero predictor,
    and noise would choose.
    """
    rates, spent = RATES[1:2] if quick else RATES, budget(name, quick)
    swept = runs([rated(dict(options, **spent, seed=0), rate) for options in models.values() for rate in rates], quick)
    picked = {}
    for i, label in enumerate(models):
        losses = [math.inf if "diverged" in r else float(curves([r], "loss")[1][-1])
                  for r in swept[i * len(rates):(i + 1) * len(rates)]]
        picked[label] = rates[losses.index(min(losses))]
    return repeated(models, picked, spent, seeds(quick), quick)


def repeated(models, rates, spent, seeds, quick):
    results = runs([rated(dict(options, **spent, seed=s), rates[label]) for label, options in models.items() for s in seeds], quick)
    for result in results:
        if "diverged" in result:
            raise FloatingPointError(f"{result['folder']}: {result['diverged']}")
    return {label: results[i * len(seeds):(i + 1) * len(seeds)] for i, label in enumerate(models)}


def carried(folder):
    """Real numbers that the model of a run carries on from token to token: its state, GRIL's last w - 1 tokens too."""
    task, model, _ = train.load(folder)
    tokens = task.sample(1, torch.Generator()).s
    if hasattr(model, "run"):
        return state_size(model, tokens)
    return model.A.numel() + (0 if task.name == "scalar_regression" else 2 * task.f)


def comparison_row(label, results, paper):
    ratio = [r["loss"] / r["zero_loss"] for r in results]
    return (label, f"{results[0]['lr']:g}", pm([r["loss"] for r in results]), pm(ratio), pm([r["loss"] / r["gd_loss"] for r in results]),
            f"{results[0]['parameters']:,}", f"{carried(results[0]['folder']):,}", f"{spread([r['seconds'] for r in results])[0]:.0f}",
            paper, flattened(results))


COMPARISON = ("model", "rate", "loss", "÷ zero predictor", "÷ GD", "parameters", "state", "seconds", "paper", "last tenth")


def comparison(name, title, models, paper, longer, quick):
    """Table and picture: every model with the same number of tasks, its curve and where it ends."""
    results = compare(name, models, quick)
    seen = STEPS[name] * BATCH
    sweep = ", ".join(f"{rate:g}" for rate in RATES)
    print_table(f"{title}: f = N = 10, {seen:,} tasks seen by every model ({STEPS[name]:,} steps of {BATCH}), the rate the best of {sweep}\n"
                "with seed 0 (validation loss), then 5 seeds; loss on 10,000 fresh tasks, the same for all;\n"
                "state in real numbers, seconds of one run on one shared core, last tenth: change of the validation loss over it "
                "(the rate goes to 0, so flat is not yet finished: see the table below)", COMPARISON,
                [comparison_row(label, rs, paper.get(label, "")) for label, rs in results.items()])
    more = repeated({label: models[label] for label in longer}, {label: results[label][0]["lr"] for label in longer},
                    budget(name, quick, 4), range(1), quick)
    print_table(f"4 times the tasks ({4 * seen:,}), one seed, the same rate: what the budget hides",
                ("model", "loss", "÷ zero predictor", "with the budget above", "÷ GD", "seconds"),
                [(label, f"{r['loss']:.4f}", f"{r['loss'] / r['zero_loss']:.4f}",
                  f"{results[label][0]['loss'] / results[label][0]['zero_loss']:.4f}", f"{r['loss'] / r['gd_loss']:.4f}",
                  f"{r['seconds']:.0f}") for label, (r,) in more.items()])

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.4), width_ratios=(1.1, 1), layout="constrained")
    colors = dict(zip(results, plt.get_cmap("tab20").colors))
    zero_loss, gd_loss = (spread([r[key] for r in next(iter(results.values()))])[0] for key in ("zero_loss", "gd_loss"))
    for label, rs in results.items():
        steps, mean, std = curves(rs, "loss")
        tasks = steps * rs[0]["batch"]
        left.plot(tasks, mean, color=colors[label], label=label)
        left.fill_between(tasks, mean - std, mean + std, color=colors[label], alpha=0.2, lw=0)
    left.axhline(float(curves(rs, "gd_loss")[1][-1]), color="black", ls="--", lw=1, label="gradient descent, one step")
    left.set(title=f"A  {title}: loss on validation tasks", xlabel="tasks seen", ylabel="½ squared error per coordinate",
             ylim=(0, 1.45 * zero_loss))
    left.set_xscale("log"), left.legend(fontsize=7, loc="lower left", ncol=2)
    labels = list(results)
    means, stds = zip(*(spread([r["loss"] for r in results[label]]) for label in labels))
    right.barh(labels, means, xerr=stds, color=[colors[label] for label in labels], capsize=2)
    edge = 1.03 * max(mean + std for mean, std in zip(means, stds))
    for i, mean in enumerate(means):
        right.text(edge, i, f"{mean:.3f}", va="center", fontsize=8)
    for x, style, text in ((zero_loss, ":", "zero predictor"), (gd_loss, "--", "gradient descent, one step")):
        right.axvline(x, color="black", ls=style, lw=1, label=text)
    right.invert_yaxis(), right.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=2)
    right.set(title=f"B  after {seen:,} tasks, {len(next(iter(results.values())))} seeds", xlim=(0, 1.12 * edge),
              xlabel="loss on fresh tasks (½ squared error per coordinate)")
    finish(figure, name, quick)


OTHERS = {"S5": dict(model="s5"), "LRU": dict(model="lru"), "Mamba": dict(model="mamba"), "Mamba + LP": dict(model="mamba_lp"),
          "Griffin": dict(model="griffin"), "Griffin + LP": dict(model="griffin_lp"),
          "linear attention, 1 layer": dict(model="linear_attention"),
          "linear attention, 2 layers": dict(model="linear_attention", layers=2),
          "transformer, 2 layers": dict(model="transformer")}


def fig3c(quick):
    models = {"GRIL": dict(model="gril"), **OTHERS}
    comparison("fig3c", "scalar regression", {label: dict(task="scalar_regression", **options) for label, options in models.items()},
               {"GRIL": "0.209 ± 0.001"},
               ("GRIL", "S5", "Griffin", "linear attention, 2 layers", "transformer, 2 layers"), quick)
    print("\nThe paper shows the others in a figure, without numbers. Its scalar layer has no version with two layers: here neither.")


def nd_comparison(quick):
    models = {"GRIL, 1 layer": dict(task="nd_regression", model="gril"),
              "GRIL, 2 layers": dict(task="multistep_regression", model="gril", layers=2),
              **{label: dict(task="nd_regression", **options) for label, options in OTHERS.items()},
              "linear attention on pairs": dict(task="nd_regression", model="linear_attention_pairs")}
    comparison("nd_comparison", "multivariate regression", models,
               {"GRIL, 1 layer": "0.206 ± 0.001", "S5": "0.426", "Mamba": "0.539", "Griffin": "0.567"},
               ("GRIL, 1 layer", "GRIL, 2 layers", "S5", "transformer, 2 layers", "linear attention on pairs"), quick)
    print("\nThe paper shows the others in a figure, without numbers. GRIL with 2 layers stands beside two steps of gradient descent"
          "\n(÷ GD is of those). Pairs are tokens (x_i, y_i), (x_query, 0) instead of x_1, y_1, x_2, …: a window made by hand.")


GRID = {        # label -> (options, the paper's loss); Griffin's width is not given: 10, the tokens' own, has all these heads
    **{f"Mamba, dim {H}, {l} layer{'s' * (l > 1)}": (dict(model="mamba", width=H, layers=l), loss)
       for H, l, loss in ((32, 1, 0.5388), (64, 1, 0.4126), (64, 2, 0.4179), (128, 4, 0.4157))},
    **{f"Griffin, {heads} head{'s' * (heads > 1)}, {l} layer{'s' * (l > 1)}": (dict(model="griffin", width=10, heads=heads, layers=l), loss)
       for heads, l, loss in ((1, 1, 0.7490), (2, 1, 0.5665), (2, 2, 0.4114), (5, 1, 0.6047))},
    **{f"S5, {l} layer{'s' * (l > 1)}": (dict(model="s5", layers=l), 0.426) for l in (1, 2, 4, 6)},
    **{f"S5, size {H}": (dict(model="s5", width=H), 0.426) for H in (10, 64, 128, 256)},
}


def model_comparison(quick):
    """Sizes of three families. They are many, and large: fewer tasks, 3 seeds, the family's rate of nd_comparison."""
    families = {"Mamba": dict(model="mamba"), "Griffin": dict(model="griffin"), "S5": dict(model="s5")}
    base = compare("nd_comparison", {name: dict(task="nd_regression", **options) for name, options in families.items()}, quick)
    models = {label: dict(task="nd_regression", **options) for label, (options, _) in GRID.items()
              if not quick or options.get("width", 0) < 64 and options.get("layers", 0) < 4}
    rates = {label: base[label.split(",")[0]][0]["lr"] for label in GRID}
    spent = budget("model_comparison", quick)
    tasks = f"{spent['steps'] * spent['batch']:,} tasks seen"
    large = {label for label, options in models.items() if options["model"] == "mamba" and options["layers"] > 1}
    results = {}
    for label, options in models.items():
        results |= repeated({label: options}, rates, spent, range(1 if quick or label in large else 3), quick)
    print_table(f"Sizes, multivariate regression: {tasks} ({spent['steps']:,} steps of {spent['batch']}), "
                "the rate of the family in nd_comparison, 3 seeds (± 0.0000: one seed)", COMPARISON,
                [comparison_row(label, rs, f"{GRID[label][1]:.4f}") for label, rs in results.items()])
    figure, ax = plt.subplots(figsize=(9, 4.8), layout="constrained")
    labels = list(results)
    means, stds = zip(*(spread([r["loss"] / r["zero_loss"] for r in results[label]]) for label in labels))
    colors = {"Mamba": GREEN, "Griffin": RED, "S5": BLUE}
    ax.barh(labels, means, xerr=stds, color=[colors[label.split(",")[0]] for label in labels], capsize=2)
    ax.plot([GRID[label][1] / (10 / 24) for label in labels], range(len(labels)), "D", color="black", ms=4, ls="none",
            label="the paper's loss ÷ 10/24")
    ax.axvline(1, color=GREY, ls=":", label="zero predictor")
    ax.axvline(spread([r["gd_loss"] / r["zero_loss"] for r in results[labels[0]]])[0], color=ORANGE, ls="--", label="gradient descent, one step")
    ax.invert_yaxis(), ax.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.4, -0.1), ncol=3)
    ax.set(xlabel="loss ÷ zero predictor's", xlim=(0, 1.9),
           title=f"Sizes without a projection, multivariate regression, {tasks}")
    finish(figure, "model_comparison", quick)


# ---------------------------------------------------------------------------------------- real data, a laptop's size

ARENA = {"GRIL": "gril", "linear attention (w = 1)": "linear_attention", "LRU": "lru", "transformer": "transformer"}
COLORS = dict(zip((*ARENA, "Mamba"), (BLUE, ORANGE, GREEN, RED, GREY)))


def minutes(result):
    return f"{result['seconds'] / 60:.1f}"


def lra(quick):
    """The five tasks at their tiny size: the same rows in the same order, steps and rates for every model."""
    names = ("listops",) if quick else tuple(LRA)
    results = {name: dict(zip(ARENA, runs([dict(task=name, model=model, seed=0) for model in ARENA.values()], quick)))
               for name in names}
    print_table("Long Range Arena, tiny size, seed 0: accuracy in per cent on the test rows, of the weights that did best on validation\n"
                "(beside it the best on test over the run, as the paper reports); minutes of one core. The paper's models are\n"
                "20 to 130 times as large and see all of the data 10 to 300 times",
                ("task", "model", "parameters", "steps", "test", "best on test", "most frequent class", "minutes", "paper's GRIL"),
                [(name, label, f"{r['parameters']:,}", f"{r['steps']:,}", f"{r['test_accuracy']:.1f}", f"{r['best_test_accuracy']:.1f}",
                  f"{r['most_frequent']:.1f}", minutes(r), LRA[name].paper_accuracy if label == "GRIL" else "")
                 for name, rows in results.items() for label, r in rows.items()])
    figure, axes = plt.subplots(1, len(names), figsize=(2.7 * len(names), 2.9), layout="constrained", squeeze=False)
    for ax, (name, rows) in zip(axes[0], results.items()):
        for label, r in rows.items():
            steps, accuracy, _ = curves([r], "accuracy")
            ax.plot(steps, accuracy, "o-", ms=2.5, color=COLORS[label], label=label)
        ax.axhline(r["most_frequent"], color="black", ls=":", lw=1, label="most frequent class")
        ax.set(title=name, xlabel="optimiser step", xlim=(0, None))
    axes[0, 0].set_ylabel("validation accuracy, %")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncol=5)
    finish(figure, "lra", quick)


GATES = {"real, J = 8": dict(gate="real"), "complex, J = 8": dict(gate="complex"), "J = 1": dict(J=1), "J = 32": dict(J=32)}


def gates(quick):
    """What the paper leaves open: real or complex gates, one block or many."""
    names, steps = ("listops",) if quick else ("listops", "image"), {"listops": 1000, "image": 300}
    rows, accuracies = [], {name: [] for name in names}
    for name in names:
        settings = {label: dict(gate=LRA[name].recipes["tiny"]["gate"]) | change for label, change in GATES.items()}
        for label, r in zip(settings, runs([dict(task=name, steps=steps[name], **change, seed=0) for change in settings.values()], quick)):
            _, loss, _ = curves([r], "loss")
            rows.append((name, label, r["gate"], r["J"], r["P"] // r["J"], f"{r['parameters']:,}", f"{r['validation_accuracy']:.1f}",
                         f"{loss[-1]:.3f}", f"{r['test_accuracy']:.1f}", minutes(r)))
            accuracies[name].append([r["validation_accuracy"]])
    print_table(f"Gates and blocks at tiny size, steps {steps}, seed 0",
                ("task", "", "gate", "J", "P / J", "parameters", "best validation accuracy", "last validation loss", "test accuracy", "minutes"), rows)
    figure, ax = plt.subplots(figsize=(7, 3), layout="constrained")
    bars(ax, list(GATES), accuracies)
    ax.set(ylabel="best validation accuracy, %", title="Gates and blocks at tiny size")
    finish(figure, "gates", quick)

LANGUAGE = {**ARENA, "Mamba": "mamba"}
TEXTS = {"bytes": ("bytes", "bits", "bits a byte", 500), "tiny": ("GPT-2 tokens", "perplexity", "perplexity", 200)}     # and steps
TEXT_RATES = (1e-3, 3e-3, 1e-2)


def wikitext2(quick):
    """A small language model: every mixer with GRIL's number of parameters, the same tokens, the best of the same rates."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for ax, (recipe, (kind, key, unit, steps)) in zip(axes, list(TEXTS.items())[:1 if quick else 2]):
        def trained(model, rates, **more):
            settings = dict(task="wikitext2", recipe=recipe, model=model, steps=steps, **more, seed=0)
            results = runs([dict(settings, lr=rate, recurrent_lr=rate / 4) for rate in rates], quick)
            return min((r for r in results if "diverged" not in r), key=lambda r: r[f"validation_{key}"])
        results = {label: trained(model, TEXT_RATES[1:2] if quick else TEXT_RATES) for label, model in LANGUAGE.items()}
        carried_on = {"GRIL, --stateful": trained("gril", [results["GRIL"]["lr"]], stateful=True)}
        print_table(f"WikiText-2, {kind}: {steps} steps of {results['GRIL']['batch']} blocks of {results['GRIL']['length']}, seed 0, the rate the best "
                    f"of {', '.join(f'{rate:g}' for rate in TEXT_RATES)} by validation;\n{unit} of the whole validation file, in blocks "
                    "as in the paper and with the state carried from block to block; tokens a second of training on one core",
                    ("model", "rate", "parameters", f"{unit}, blocks", "state carried on", "last training loss", "tokens a second", "minutes"),
                    [(label, f"{r['lr']:g}", f"{r['parameters']:,}", f"{r[f'valid_{key}']:.4g}",
                      f"{r[f'stateful_{key}']:.4g}" if f"stateful_{key}" in r else "(grows)", f"{curves([r], 'train_loss')[1][-1]:.3f}",
                      f"{r['steps'] * r['batch'] * r['length'] / r['seconds']:,.0f}", minutes(r)) for label, r in {**results, **carried_on}.items()])
        for label, r in results.items():
            ax.plot(*curves([r], key)[:2], "o-", ms=2.5, color=COLORS[label], label=label)
        ax.set(title=f"WikiText-2, {kind}", xlabel="optimiser step", ylabel=f"validation {unit}", yscale="log" if key == "perplexity" else "linear")
    axes[0].legend(fontsize=8)
    finish(figure, "wikitext2", quick)



# --------------------------------------------------------------------------------------------------- how it works

def cells(ax, M, x, y, limit, label="", color="black", edge=None):
    """A matrix as coloured unit cells with its upper left corner at (x, y); red is positive, blue negative."""
    M = torch.atleast_2d(M.detach())
    rows, columns = M.shape
    ax.imshow(M, extent=(x, x + columns, y - rows, y), vmin=-limit, vmax=limit, zorder=2)
    ax.add_patch(plt.Rectangle((x, y - rows), columns, rows, fill=False, ec=edge or GREY, lw=2 if edge else 0.6, zorder=3))
    ax.text(x + columns / 2, y + 0.35, label, ha="center", va="bottom", color=color)


def blank(ax, width, height):
    ax.set(xlim=(-0.3, width), ylim=(-height, 0.3), aspect="equal")
    ax.axis("off")


def how(quick):
    """One prompt through the constructed layer, step by step: window, cross-product, state, read-out."""
    f, N, shown = 4, 5, 2
    task = Task(f=f, N=N)
    x, y, s = (z[0] for z in task.sample(1, torch.Generator().manual_seed(3)))
    layer = task.constructed()
    C = window(s[None], 3, 2, causal=False)[0]                                  # (N, f, 3)
    Z = (C @ layer.Q @ C.mT).detach().cumsum(0)                                 # (N, f, f), the state
    with torch.no_grad():
        o = layer(s[None])[0]                                                   # (N, f), the prediction for x_{t+1}
    gd = torch.stack([gradient_descent([task.eta * t / N])(x[None, :t], y[None, :t], x[None, t])[0]
                      for t in range(1, N + 1)])
    print_table("One prompt, f = 4, N = 5: the state is the sum of y xᵀ, its read-out is gradient descent",
                ("t", "largest |Z_t - Σ y xᵀ|", "|o_t - GD|", "o_t", "GD, step η t/N", "y_{t+1}"),
                [(t, f"{(Z[t - 1] - y[:t].mT @ x[:t]).abs().max():.1e}", f"{(o[t - 1] - gd[t - 1]).abs().max():.1e}",
                  *(" ".join(f"{v:5.2f}" for v in row) for row in (o[t - 1], gd[t - 1], y[t]))) for t in range(1, N + 1)])

    figure, ax = plt.subplots(figsize=(11, 10.6))
    blank(ax, 32.5, 31)
    limit, big = 0.9, Z.abs().max().item()

    def heading(y, text, more):
        ax.text(0, y, text, fontsize=11, weight="bold", va="center")
        ax.text(5.6, y, more, fontsize=9, va="center", color="#444444")
    heading(0, "1  window", "tokens arrive one after the other; each step sees three of them, and moves on by two")
    top = -1.9
    for i in range(2 * N + 1):
        name = ("x", "y")[i % 2] + f"_{i // 2 + 1}"
        cells(ax, s[i][:, None], 1.9 * i, top, limit, f"${name}$", ORANGE if i % 2 else BLUE)
    ax.text(1.9 * 2 * N + 1.5, top - 2, f"the query: its\n$y_{N + 1}$ is asked for", va="center", color=BLUE)
    ax.text(26.6, top - 2, "red is positive, blue\nnegative, white zero;\nstates and products\nhave their own scale",
            va="center", fontsize=8, color="#444444")
    for t in range(1, N + 1):
        left, right, low = 3.8 * (t - 1), 3.8 * (t - 1) + 4.8, top - 4.35 - 0.55 * (t % 2)
        color = RED if t == shown else GREY
        ax.plot([left, left, right, right], [low + 0.25, low, low, low + 0.25], color=color, lw=1.8 if t == shown else 1)
        ax.text((left + right) / 2, low - 0.15, f"$C_{t}$", ha="center", va="top", color=color)

    heading(-8.7, "2  cross-product", "   $C_t \\, Q \\, C_t^T$ with $Q = e_2 e_1^T$ takes out one product of the nine: $y_t$ with "
            f"$x_t$ (here t = {shown})")
    top = -10.6
    cells(ax, C[shown - 1], 0, top, limit, f"$C_{shown}$", RED, RED)
    cells(ax, layer.Q, 4.6, top - 0.5, limit, "$Q$")
    for i, j in ((i, j) for i in range(3) for j in range(3)):
        ax.text(5.1 + j, top - 1 - i, f"{layer.Q[i, j]:.0f}", ha="center", va="center", zorder=4,
                color="white" if layer.Q[i, j] else "black")
    cells(ax, C[shown - 1].mT, 9.2, top - 0.5, limit, f"$C_{shown}^T$", RED, RED)
    ax.text(14.3, top - 2, "=", ha="center", va="center", fontsize=14)
    cells(ax, y[shown - 1][:, None], 15.4, top, limit, f"$y_{shown}$", ORANGE)
    cells(ax, x[shown - 1][None], 17, top - 1.5, limit, f"$x_{shown}^T$", BLUE)
    ax.text(22.1, top - 2, "=", ha="center", va="center", fontsize=14)
    cells(ax, torch.outer(y[shown - 1], x[shown - 1]), 23.2, top, big, f"$y_{shown} x_{shown}^T$")
    ax.text(28, top - 2, "minus the\ngradient of one\nexample's loss\nat $W = 0$", va="center", fontsize=9,
            color="#444444")

    heading(-16.6, "3  state", "$Z_t = Z_{t-1} + C_t \\, Q \\, C_t^T$: the sum of the products so far, minus the gradient of the "
            "first t examples' loss")
    top = -18.5
    for t in range(1, N + 1):
        left, mark = 6.5 * (t - 1), t == shown
        cells(ax, Z[t - 1], left, top, big, f"$Z_{t}$", RED if mark else "black", RED if mark else None)
        if t < N:
            ax.annotate("", (left + 6.3, top - 2), (left + 4.2, top - 2), arrowprops=dict(arrowstyle="->", color=GREY))
            ax.text(left + 5.25, top - 2.3, f"$+ y_{t + 1} x_{t + 1}^T$", ha="center", va="top", fontsize=8,
                    color=RED if t + 1 == shown else "#444444")

    heading(-24.5, "4  read-out", "$o_t = β \\, Z_t \\, C_t \\, q$ with $q = e_3$ and $β = η/N$: the gradient step's W, applied "
            "to the window's last token")
    top = -26.4
    ax.text(0, top - 2, "$β$", va="center", fontsize=13)
    cells(ax, Z[-1], 1.2, top, big, f"$Z_{N}$")
    cells(ax, C[-1, :, 2:], 6.3, top, limit, f"$x_{N + 1}$", BLUE)
    ax.text(8.6, top - 2, "=", ha="center", va="center", fontsize=14)
    for left, vector, label in ((9.9, o[-1], f"$o_{N}$"), (13.9, gd[-1], "GD"),
                                (18.6, y[-1], f"$y_{N + 1}$, held out")):
        cells(ax, vector[:, None], left, top, limit, label)
        for i, v in enumerate(vector):
            ax.text(left + 1.2, top - 0.5 - i, f"{v:.2f}", va="center", fontsize=7)
    ax.text(23, top - 2, f"$o_{N}$ and explicit gradient descent (GD)\nare the same numbers; $y_{N + 1}$ is not reached:\n"
            "it was one step, on five examples", va="center", fontsize=9, color="#444444")
    finish(figure, "how", quick)


class Held:
    """A tensor that autograd keeps; gone when autograd lets it go."""
    every = weakref.WeakSet()

    def __init__(self, x):
        self.x = x
        self.every.add(self)


def kept(h, T, form):
    """Numbers that a head of width h keeps for its backward pass over T tokens, measured; for a stream, its state."""
    mixer = GrilMixer(h, h, 1, gate="real", form="auto" if form == "step" else form)
    v, k, u = (torch.randn(1, T, 1, h, requires_grad=True) for _ in range(3))
    state = mixer.start(v[:, 0])
    if form == "step":
        return sum(part.numel() for part in state)
    Held.every.clear()
    with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.x):
        result = mixer.recur(v, k, u, state, final=False)                       # noqa: F841, alive while its parts are counted
    return sum({held.x.untyped_storage()._cdata: held.x.untyped_storage().nbytes() // held.x.element_size()
                for held in Held.every}.values())


def forms(quick):
    """What each form of the recurrence keeps: drawn for eight steps, and measured."""
    T, widths = 64 if quick else 1024, (4, 16) if quick else (4, 16, 64)
    names = ("loop", "scan", "chunk", "tokens", "step")
    numbers = {form: [kept(h, T, form) for h in widths] for form in names}
    print_table(f"Numbers kept by one head of width h over {T:,} tokens (w = 3, real gate), measured; by step whatever the length",
                ("form", *(f"h = {h}" for h in widths), *(f"a token, h = {h}" for h in widths)),
                [(form, *(f"{n:,}" for n in row), *(f"{n / T:.1f}" if form != "step" else "" for n in row))
                 for form, row in numbers.items()])

    figure, axes = plt.subplots(1, 6, figsize=(13, 3.3), width_ratios=(1, 1, 1, 1, 1, 1.5), layout="constrained")
    for ax, form in zip(axes, names):
        blank(ax, 8.5, 9)
        ax.set_title(f"gril_{form}")
        used = range(8) if form != "step" else range(6, 8)
        for t in range(8):                                                      # the tokens of eight steps
            here = t in used
            ax.add_patch(plt.Rectangle((t + 0.2, -8.3), 0.5, 1.6, fc=ORANGE if here else "none", lw=0.6,
                                       ec=ORANGE if here else GREY, ls="-" if here else ":"))
        ax.annotate("", (8.2, -8.75), (0, -8.75), arrowprops=dict(arrowstyle="->", color=GREY, lw=0.8))
        ax.text(8.3, -8.75, "t", va="center", fontsize=8, color=GREY)
        if form in ("loop", "scan"):
            for t in range(8):
                square(ax, t * 0.72 + 0.1, -1.2 - 0.35 * t, 2.2, hollow=form == "loop" and t < 7)
        if form == "chunk":
            for left in (0.05, 4.05):
                square(ax, left, -0.6, 2.2)
                for t in range(4):
                    ax.add_patch(plt.Rectangle((left + 0.15, -4.3 - 0.7 * t), 0.9 * (t + 1), 0.7, fc=GREEN, alpha=0.5, ec="white"))
        if form == "step":
            square(ax, 5.6, -2.6, 2.2)
    texts = ("one state after the other;\nfor a gradient, all of them", "all T states at once",
             "a state per chunk, and\nproducts inside it", "the tokens alone; the rest is\nmade again, tile by tile",
             "one state and the last\nw - 1 tokens, for ever")
    for ax, text in zip(axes, texts):
        ax.text(4.2, -9.6, text, ha="center", va="top", fontsize=8)
    ax = axes[-1]
    for form, color, size in zip(names[:-1], (GREY, BLUE, GREEN, ORANGE), (9, 4, 4, 4)):        # loop and scan keep the same
        ax.plot(widths, [n / T for n in numbers[form]], "o-", ms=size, color=color, label=f"gril_{form}")
    ax.set_xscale("log", base=2), ax.set_yscale("log"), ax.set_xticks(widths, widths), ax.minorticks_off()
    ax.set(xlabel="width h of a head", ylabel="numbers kept a token", title="measured, for a backward pass")
    ax.legend(fontsize=7)
    marks = {"a state, d × m": dict(fc=BLUE), "a state kept only for a gradient": dict(fc="white", ec=BLUE, ls=":"),
             "products of keys and read-outs": dict(fc=GREEN, alpha=0.5), "a token: v, k, u": dict(fc=ORANGE)}
    figure.legend([plt.Rectangle((0, 0), 1, 1, **style) for style in marks.values()], marks, loc="outside lower center", ncol=4,
                  fontsize=8)
    finish(figure, "forms", quick)


def square(ax, x, y, size, hollow=False):
    style = dict(fc="white", ec=BLUE, ls=":") if hollow else dict(fc=BLUE, ec="white", alpha=0.85)
    ax.add_patch(plt.Rectangle((x, y - size), size, size, lw=0.8, **style))


def prompt(quick):
    """One prompt, example by example: the state fills, the prediction for a fixed query nears the truth, GD beside it."""
    f, N, tasks = 5, 6 if quick else 30, 1_000
    (result,) = runs([dict(task="nd_regression", f=f, n=N, seed=0)], quick)
    task, model, _ = train.load(result["folder"])
    x, y, s = task.sample(tasks, torch.Generator().manual_seed(4))
    query, truth = s[:, -1:], y[:, -1]
    W = torch.linalg.lstsq(x[0].double(), y[0].double()).solution.mT.float()
    ours, gd = [torch.zeros_like(truth)], [torch.zeros_like(truth)]             # after t examples, (tasks, f)
    with torch.no_grad():
        for t in range(1, N + 1):
            ours.append(model.query(torch.cat([s[:, :2 * t], query], 1)))
            gd.append(gradient_descent([task.eta * t / N])(x[:, :t], y[:, :t], x[:, -1]))       # each example its N-th part
        V, K, r, A = model.operands(s[:1])
        Z = states(V, K, A, torch.zeros(1, 1, f, f))[0, :, 0] * model.beta * model.q[2]
    Z = torch.cat([torch.zeros(1, f, f), Z])                                    # β q₃ Z_t: the W that is read, (N+1, f, f)
    loss = {name: 0.5 * (torch.stack(o) - truth).square().mean(-1)                # (N+1, tasks)
            for name, o in (("GRIL, trained", ours), ("GD, explicit", gd))}
    colors = dict(zip(loss, (BLUE, ORANGE)))
    print_table(f"The fixed query's loss after t examples, f = {f}, N = {N}; GD's step is η t/N, as a sum over examples has it",
                ("t", *(f"{name}, {what}" for name in loss for what in ("this prompt", f"mean of {tasks:,}")),
                 "largest difference of predictions"),
                [(t, *(f"{v:.4f}" for l in loss.values() for v in (l[t, 0], l[t].mean())),
                  f"{(ours[t][0] - gd[t][0]).abs().max():.4f}") for t in range(N + 1) if t in (0, 1, 2, 5, 10, 20, N)])

    figure = plt.figure(figsize=(9.6, 4.8))
    grid = figure.add_gridspec(2, 4, height_ratios=(1, 2.6), width_ratios=(1, 1, 1.5, 1.6), left=0.03, right=0.98, top=0.84,
                               bottom=0.12, hspace=0.62, wspace=0.3)
    strip, state_ax, W_ax, bar_ax, loss_ax = map(figure.add_subplot, (grid[0, :], *(grid[1, i] for i in range(4))))
    tokens = torch.zeros(f, 2 * N + 1)
    seen = strip.imshow(tokens, vmin=-1.2, vmax=1.2, aspect="auto")
    frame = strip.add_patch(plt.Rectangle((-0.5, -0.5), 2, f, fill=False, ec="black", lw=2))
    strip.add_patch(plt.Rectangle((2 * N - 0.5, -0.5), 1, f, fill=False, ec="black", lw=2, clip_on=False))
    every = [i for i in range(N - 1) if i == 0 or i % 5 == 4]
    strip.set_xticks([2 * i + 0.5 for i in every] + [2 * N],
                     [f"$x_{{{i + 1}}}, y_{{{i + 1}}}$" for i in every] + ["query"], fontsize=8)
    strip.set_yticks([]), strip.set_title("the prompt; framed, what step t sees: $x_t$, $y_t$ and the query")
    heat = state_ax.imshow(Z[0], vmin=-2, vmax=2)
    W_ax.imshow(W, vmin=-2, vmax=2)
    for ax, title in ((state_ax, "the state, $β q_3 Z_t$"), (W_ax, "the task's W")):
        ax.set_xticks([]), ax.set_yticks([]), ax.set_title(title)
    places = torch.arange(f)
    both = [bar_ax.bar(places + shift, torch.zeros(f), 0.36, color=color, label=name)
            for shift, (name, color) in zip((-0.19, 0.19), colors.items())]
    bar_ax.hlines(truth[0], places - 0.42, places + 0.42, color="black", lw=2, label="truth")
    bar_ax.axhline(0, color=GREY, lw=0.6)
    bound = 1.25 * max(z[0].abs().max().item() for z in (truth, *ours, *gd))
    bar_ax.set(title="prediction for the query", ylim=(-bound, 1.45 * bound), xlabel="coordinate of y")
    bar_ax.set_xticks(places.tolist(), range(1, f + 1))
    bar_ax.legend(fontsize=7, loc="upper left", ncol=2, columnspacing=0.8, handlelength=1.2)
    lines = {}
    for (name, l), style in zip(loss.items(), ("-", "--")):
        lines[name] = [loss_ax.plot([], [], color=colors[name], ls=style, lw=width, label=name if width > 1 else None)[0]
                       for width in (2.2, 0.9)]
    highest = max(max(l[:, 0].max(), l.mean(1).max()).item() for l in loss.values())
    loss_ax.set(title="loss on the query", xlabel="examples seen", xlim=(0, N), ylim=(0, 1.6 * highest))
    loss_ax.legend(fontsize=7, loc="upper right", title=f"thin: mean of {tasks:,} prompts", title_fontsize=7)
    title = figure.suptitle("", fontsize=11)

    def draw(t):
        tokens[:, :2 * t] = s[0, :2 * t].mT
        tokens[:, -1] = s[0, -1]
        seen.set_data(tokens), frame.set_x(2 * t - 2.5), frame.set_visible(t > 0), heat.set_data(Z[t])
        for bars, o in zip(both, (ours, gd)):
            for bar, height in zip(bars, o[t][0].tolist()):
                bar.set_height(height)
        for name, (this, mean) in lines.items():
            this.set_data(range(t + 1), loss[name][:t + 1, 0]), mean.set_data(range(t + 1), loss[name][:t + 1].mean(1))
        title.set_text(f"after {t} of {N} examples")
    folder = Path("runs/figures" if quick else "images")
    folder.mkdir(parents=True, exist_ok=True)
    path, writer = folder / f"prompt{'-quick' * quick}.gif", PillowWriter(fps=4)
    with writer.saving(figure, path, dpi=100):
        for t in [*range(N + 1)] + [N] * (0 if quick else 10):                  # the end is held
            draw(t)
            writer.grab_frame()
    print(f"\nmoving    {path}, {path.stat().st_size / 1e6:.2f} MB")
    finish(figure, "prompt", quick)                                             # its last frame, as a still


FIGURES = {
    "how": how, "forms": forms, "prompt": prompt,
    "fig2": fig2, "fig3": fig3, "fig4": lambda quick: classification("fig4", "softmax_classification", 10, quick),
    "two_layer_weights": two_layer_weights,
    "binary_10": lambda quick: classification("binary_10", "binary_classification", 10, quick, (5, 10) if quick else (5, 10, 20)),
    "softmax_10": lambda quick: classification("softmax_10", "softmax_classification", 10, quick),
    "binary_100": lambda quick: classification("binary_100", "binary_classification", 100, quick),
    "softmax_100": lambda quick: classification("softmax_100", "softmax_classification", 100, quick),
    "ablations": ablations, "second_order": second_order, "state": state,
    "fig3c": fig3c, "nd_comparison": nd_comparison, "model_comparison": model_comparison,
    "lra": lra, "gates": gates, "wikitext2": wikitext2,
}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=(*FIGURES, "all"))
    parser.add_argument("--quick", action="store_true", help="one seed, 20 steps: does it run, not what it shows")
    args = parser.parse_args(argv)
    for name in FIGURES if args.figure == "all" else [args.figure]:
        FIGURES[name](args.quick)


if __name__ == "__main__":
    main()
