"""How far a trained layer reaches, and what it costs: reach and parameters of figures.py."""
import matplotlib.pyplot as plt
import torch

import baselines
import train
from gril import GRIL, MultistepGRIL, construct_multivariate
from pictures.plots import BLUE, GREEN, GREY, ORANGE, RED, finish, print_table
from pictures.trained import runs
from tasks import (NdRegression, as_learner, as_predictor, delta_rule, evaluate, gradient_descent,
                   longhorn, tune, zero)


def lines(ax, title, head, found, form, styles):
    """place -> {label: number} as a table, a row for each label, and as a line for each."""
    rows = {label: [there[label] for there in found.values()] for label in found[min(found)]}
    print_table(title, (head, *found),
                [(label, *(format(x, form) for x in row)) for label, row in rows.items()])
    for (label, row), style in zip(rows.items(), styles):
        ax.plot(list(found), row, label=label.replace("_", " "), **style)


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
    tuned = [family(*tune(family, [1.0], NdRegression(tasks=2_000)))
             for family in (delta_rule, longhorn)]

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
