"""How far a trained layer reaches, example by example and elsewhere, and what it costs.

The commands are those of figures.py: state, reach, parameters.
"""
import matplotlib.pyplot as plt
import torch

import baselines
import train
from gril import GRIL, MultistepGRIL, construct_multivariate
from pictures.plots import BLUE, GREEN, GREY, HUES, ORANGE, RED, finish, matrix, print_table
from pictures.trained import runs
from tasks import (NdRegression, as_learner, as_predictor, closed_form, delta_rule, evaluate,
                   gradient_descent, longhorn, ridge, tune, zero)


def online(n, tasks):
    """The delta rule and Longhorn, their step sizes tuned for prompts of n examples."""
    task = NdRegression(f=10, n=n, tasks=tasks)
    return [family(*tune(family, [1.0], task)) for family in (delta_rule, longhorn)]


def lines(ax, title, head, found, form, styles):
    """place -> {label: number} as a table, a row for each label, and as a line for each."""
    rows = {label: [there[label] for there in found.values()] for label in found[min(found)]}
    print_table(title, (head, *found),
                [(label, *(format(x, form) for x in row)) for label, row in rows.items()])
    for (label, row), style in zip(rows.items(), styles):
        ax.plot(list(found), row, label=label.replace("_", " "), **style)


def state(quick):
    """100 examples: Z_t beside W, the loss after each example beside online learners."""
    f, N, tasks = 10, 20 if quick else 100, 200 if quick else 4_000
    (result,) = runs([dict(task="nd_regression", f=f, n=N, seed=0)], quick)
    task, model, _ = train.load(result["folder"])
    x, y, s = task.sample(tasks, torch.Generator().manual_seed(0))
    constructed, losses = {}, {}                                # by examples seen
    for n in [n for n in (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100) if n <= N]:
        constructed[n] = construct_multivariate(GRIL(f), closed_form(f, n)[0], n)
        rule, implicit = online(n, 1_000)
        tokens, seen = s[:, :2 * n + 1], (x[:, :n], y[:, :n], x[:, n])
        answers = {f"GRIL, trained for N = {N}": model.query(tokens),
                   "GRIL, constructed: GD with η*(t)/t": constructed[n].query(tokens),
                   "ridge 0.01": ridge(0.01)(*seen), "Longhorn, β tuned": implicit(*seen),
                   "delta rule, β tuned": rule(*seen)}
        losses[n] = {name: task.error(o, y[:, n]).item() for name, o in answers.items()}

    figure, shown = plt.figure(figsize=(12, 5)), [n for n in (1, 3, 10, 30, 100) if n <= N]
    grid = figure.add_gridspec(2, len(shown) + 4)
    W = torch.linalg.lstsq(x[0, :f + 1].double(), y[0, :f + 1].double()).solution.mT
    for row, name in enumerate(("trained\n", "constructed\n")):
        for i, n in enumerate(shown):
            matrix(figure.add_subplot(grid[row, i]),
                   implied((model, constructed[n])[row], s[:1, :2 * n]),
                   f"{name if i == 0 else ''}after {n}")
        matrix(figure.add_subplot(grid[row, len(shown)]), W, "W, the task")
    ax = figure.add_subplot(grid[:, len(shown) + 1:])
    lines(ax, "Loss after n examples", "learner", losses, ".4f",
          [dict(color=hue, ls="--" if hue == ORANGE else "-") for hue in HUES])
    ax.set(title="What is learned, example by example", xscale="log", xlabel="examples seen",
           ylabel="loss on the next one", ylim=(0, 0.58))
    ax.legend(fontsize=7, loc="upper right")
    finish(figure, "state", quick)


def implied(layer, s):
    """The W that the state after a prompt s stands for: what it answers to unit vectors."""
    f = s.shape[-1]
    return layer.query(torch.cat([s.expand(f, -1, -1), torch.eye(f)[:, None]], 1)).mT


PLACES = {"scale": (0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2),
          "N": (1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 60, 100)}
STYLES = {              # learner -> how it is drawn; where two are the same, both can be seen
    "GRIL, trained for N = 10": dict(color=BLUE, lw=5, alpha=0.4),
    "GD, fixed step η/10 an example": dict(color=ORANGE, ls="--"),
    "GD, η/N′": dict(color=GREEN, lw=1),
    "GRIL, constructed with β = η/N′": dict(color=GREEN, ls="", marker="o", ms=3.5),
    "delta rule": dict(color=RED), "Longhorn": dict(color="black")}


def reach(quick):
    """A layer trained on 10 examples of scale 1, tested on other scales and other numbers of them.

    Step sizes, of gradient descent and of the online learners, are those tuned where it trained.
    """
    (result,) = runs([dict(task="nd_regression", f=10, n=10, seed=0)], quick)
    task, model, _ = train.load(result["folder"])
    tuned = online(10, 2_000)

    def scores(scale=1.0, N=10):
        """learner -> its loss ÷ the zero predictor's."""
        there, eta = NdRegression(f=10, n=N, scale=scale), task.eta
        layer = construct_multivariate(GRIL(10), eta, N)
        fixed, mean, *others = map(as_learner, (
            gradient_descent([eta * N / 10]), gradient_descent([eta]), *tuned, zero))
        predictors = as_predictor(there, model), fixed, mean, as_predictor(there, layer), *others
        found = evaluate(there, dict(zip((*STYLES, "zero"), predictors)), 200 if quick else 4_000,
                         seed=0, sensitivities=1)
        return {name: found[name]["loss"] / found["zero"]["loss"] for name in STYLES}

    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8))
    for ax, (name, places) in zip(axes, PLACES.items()):
        lines(ax, f"Loss ÷ zero predictor's against {name}", "learner",
              {place: scores(**{name: place}) for place in places}, ".3f", STYLES.values())
        ax.axhline(1, color=GREY, ls=":", label="zero predictor")
        ax.set(yscale="log", ylim=(0.02, 8))
        ax.yaxis.set_major_formatter("{x:g}")
    axes[0].set(title="A  inputs of another scale, N = 10", xlabel="scale",
                ylabel="loss ÷ zero predictor's")
    axes[1].set(title="B  prompts of another length", xlabel="examples in the prompt, N′",
                xscale="log")
    axes[1].xaxis.set_major_formatter("{x:g}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncol=4)
    finish(figure, "reach", quick)


WIDTHS = 2, 4, 8, 16, 32, 64
COUNTED = "s5", "lru", "mamba", "griffin", "deltanet", "linear_attention_pairs", "transformer"


def counted(f):
    """name -> parameters of each model for f × f regression; others are as wide as tokens need."""
    with torch.device("meta"):
        models = {"GRIL": GRIL(f), "GRIL, 2 layers": MultistepGRIL(f, 2),
                  "gated recurrent GD": baselines.GatedRecurrent(f, 1.0, 10)}
        for name in COUNTED:
            sizes = dict(baselines.MODELS[name].in_context["default"])
            width = max(sizes.pop("width"), 2 * f if name.endswith("pairs") else f)
            models[name] = baselines.make(name, f, f, width, **sizes)
    return {name: baselines.parameters(model) for name, model in models.items()}


def parameters(quick):
    """What grows as f² and what as f⁴ (Sec. 4.5)."""
    figure, ax = plt.subplots(figsize=(7, 3.8))
    colors = BLUE, "#7fb2e5", RED, *plt.get_cmap("Dark2").colors
    lines(ax, "Parameters for regression with f inputs and f outputs", "model",
          {f: counted(f) for f in WIDTHS}, ",",
          [dict(marker="o", ms=3, color=color) for color in colors])
    ax.set(xscale="log", yscale="log", xlabel="f", ylabel="parameters",
           title="GRIL grows as f², a gated recurrent network that does the same as f⁴")
    ax.set_xticks(WIDTHS, WIDTHS)
    ax.minorticks_off()
    ax.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    finish(figure, "parameters", quick)
