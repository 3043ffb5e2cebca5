"""How far a trained layer reaches, and what it costs: the commands reach and parameters."""
import matplotlib.pyplot as plt
import torch

import baselines
import train
from gril import GRIL, MultistepGRIL, construct_multivariate
from pictures.plots import BLUE, GREEN, GREY, ORANGE, RED, finish, print_table
from pictures.trained import runs
from tasks import (NdRegression, as_learner, as_predictor, delta_rule, evaluate, gradient_descent,
                   longhorn, tune)

SCALES = 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2
LENGTHS = 1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 60, 100
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
    fewer = NdRegression(f=10, n=10, tasks=2_000)
    (rule,), (beta,) = (tune(family, [1.0], fewer) for family in (delta_rule, longhorn))

    def scores(scale=1.0, N=10):
        """Losses ÷ the zero predictor's, in the order of STYLES."""
        there, eta = NdRegression(f=10, n=N, scale=scale), task.eta
        learners = (gradient_descent([eta * N / 10]), gradient_descent([eta]), delta_rule(rule),
                    longhorn(beta))
        fixed, mean, *online = map(as_learner, learners)
        layer = construct_multivariate(GRIL(10), eta, N)
        predictors = dict(zip(STYLES, (as_predictor(there, model), fixed, mean,
                                       as_predictor(there, layer), *online)))
        predictors["zero"] = there.references()["zero"]
        found = evaluate(there, predictors, 200 if quick else 4_000, seed=0, sensitivities=1)
        return [found[name]["loss"] / found["zero"]["loss"] for name in STYLES]

    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8))
    for ax, name, places in ((axes[0], "scale", SCALES), (axes[1], "N", LENGTHS)):
        lines = list(zip(*(scores(**{name: place}) for place in places)))
        print_table(f"Loss ÷ zero predictor's against {name}", ("learner", *places),
                    [(label, *(f"{x:.3f}" for x in line)) for label, line in zip(STYLES, lines)])
        for (label, style), line in zip(STYLES.items(), lines):
            ax.plot(places, line, label=label, **style)
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
    counts = {f: counted(f) for f in WIDTHS}
    names = list(counts[WIDTHS[0]])
    print_table("Parameters for regression with f inputs and f outputs", ("model", *WIDTHS),
                [(name, *(f"{counts[f][name]:,}" for f in WIDTHS)) for name in names])
    figure, ax = plt.subplots(figsize=(7, 3.8))
    colors = [BLUE, "#7fb2e5", RED, *plt.get_cmap("Dark2").colors]
    for name, color in zip(names, colors):
        line = [counts[f][name] for f in WIDTHS]
        ax.plot(WIDTHS, line, "o-", ms=3, color=color, label=name.replace("_", " "))
    ax.set(xscale="log", yscale="log", xlabel="f", ylabel="parameters",
           title="GRIL grows as f², a gated recurrent network that does the same as f⁴")
    ax.set_xticks(WIDTHS, WIDTHS)
    ax.minorticks_off()
    ax.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    finish(figure, "parameters", quick)
