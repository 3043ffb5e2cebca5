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
  fig3c              the other sequence models, scalar regression                                   Fig. 3 C
  nd_comparison      the same, multivariate                                                         Fig. 6 (App. B)
  model_comparison   Griffin, Mamba and S5 at several sizes                                         Table of App. B.3

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
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import matplotlib.ticker
import torch
from tqdm import tqdm

import train
from baselines import state_size
from gril import GRIL, construct_multivariate
from lra import LRA
from tasks import (TASKS, Task, as_learner, as_predictor, closed_form, delta_rule, evaluate, gradient_descent, longhorn,
                   newton, recovered, ridge, tune, zero)

BLUE, ORANGE, GREEN, RED, GREY = "#2f6db3", "#e08214", "#3c9a5f", "#c0392b", "#8a8a8a"
plt.rcParams.update({"figure.dpi": 130, "font.size": 9, "axes.titlesize": 10, "axes.spines.top": False,
                     "axes.spines.right": False, "legend.frameon": False, "image.cmap": "RdBu_r"})


# ------------------------------------------------------------------------------------------------------------- runs

DEFAULTS = dict(f=10, n=10, model="gril")                        # left out of names, so that figures share runs
QUICK = {True: dict(batch=32, tasks=200),                       # an in-context task; a task with files
         False: dict(batch=2, length=32, warmup=1, evaluate_every=10)}


def runs(settings, quick):
    """Results of several trainings, GRIL_WORKERS at a time; one that is there already is read, not run."""
    jobs = []
    for options in settings:
        if quick:
            options = {**options, **QUICK[options["task"] in TASKS], "steps": min(20, options.get("steps", 20))}
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
    flags = [text for key, value in options.items() for text in (f"--{key.replace('_', '-')}", str(value))]
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
    names, steps = ("listops",) if quick else ("listops", "image"), {"listops": 300, "image": 300}
    rows = []
    for name in names:
        settings = {label: dict(gate=LRA[name].recipes["tiny"]["gate"]) | change for label, change in GATES.items()}
        for label, r in zip(settings, runs([dict(task=name, steps=steps[name], **change, seed=0) for change in settings.values()], quick)):
            _, loss, _ = curves([r], "loss")
            rows.append((name, label, r["gate"], r["J"], r["P"] // r["J"], f"{r['parameters']:,}", f"{r['validation_accuracy']:.1f}",
                         f"{loss[-1]:.3f}", f"{r['test_accuracy']:.1f}", minutes(r)))
    print_table(f"Gates and blocks at tiny size, {steps['image']} steps, seed 0",
                ("task", "", "gate", "J", "P / J", "parameters", "best validation accuracy", "last validation loss", "test accuracy", "minutes"), rows)


FIGURES = {
    "fig2": fig2, "fig3": fig3, "fig4": lambda quick: classification("fig4", "softmax_classification", 10, quick),
    "two_layer_weights": two_layer_weights,
    "binary_10": lambda quick: classification("binary_10", "binary_classification", 10, quick, (5, 10) if quick else (5, 10, 20)),
    "softmax_10": lambda quick: classification("softmax_10", "softmax_classification", 10, quick),
    "binary_100": lambda quick: classification("binary_100", "binary_classification", 100, quick),
    "softmax_100": lambda quick: classification("softmax_100", "softmax_classification", 100, quick),
    "ablations": ablations, "second_order": second_order, "state": state,
    "fig3c": fig3c, "nd_comparison": nd_comparison, "model_comparison": model_comparison,
    "lra": lra, "gates": gates,
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
