"""Every figure and table of the paper, from runs.

    python figures.py fig2            trains what it needs (5 seeds), prints, writes docs/images
    python figures.py fig2 --quick    in seconds: one seed and hardly any training, to see it run
    python figures.py all
    python figures.py page            docs/index.html, the page to touch, from pictures/page.html

  fig2               one layer is gradient descent: loss, scales, weights       Fig. 2
  fig3               more steps, and sine targets                               Fig. 3 A, B
  fig4               three-class softmax, N = 10                                Fig. 4
  two_layer_weights  what two layers learn                                      Fig. 5 (App. B)
  binary_10, softmax_10, binary_100, softmax_100                                Fig. 7 to 10
  ablations          without window, without read-out                           Tables of App. C
  second_order       Newton's step beside gradient descent                      Table of App. C
  state              the state growing toward W, beside online learners         (not in the paper)
  how                one prompt: window, cross-product, state, read-out         Fig. 1
  forms              what each form of the recurrence keeps, measured           (not in the paper)
  prompt             a moving picture of one prompt (GIF)                       (not in the paper)
  fig3c              the other sequence models, scalar regression               Fig. 3 C
  nd_comparison      the same, multivariate                                     Fig. 6 (App. B)
  model_comparison   Griffin, Mamba and S5 at several sizes                     Table of App. B.3
  lra                Long Range Arena at a laptop's size, four models           (Sec. 5.4)
  gates              real or complex gates, one block or many                   (not in the paper)
  wikitext2          a small language model, seven mixers                       (Sec. 5.4)

Here are the paper's own, and state; pictures/ has the others. Runs are kept under runs/figures and
used again; delete a folder there to run it anew. GRIL_WORKERS (default 2) train at a time.
"""
import argparse
import math
import sys
import traceback
from functools import partial
from itertools import product

from machine.errors import Missing, spoken          # before torch, which takes seconds to load

import matplotlib.pyplot as plt
import torch

import train
from gril import GRIL, construct_multivariate
from pictures import page
from pictures.comparisons import (candidates, fig3c, gates, leaving_zero, lra, model_comparison,
                                  nd_comparison, wikitext2)
from pictures.drawings import forms, how, prompt
from pictures.plots import (BLUE, GREEN, GREY, ORANGE, RED, WINDOW, band, bars, errorbars, finish,
                            first, flattened, fresh, largest, losses, matrix, mean, narrow_legend,
                            numbers, print_table, rows, seconds, spread, table)
from pictures.trained import five, runs
from tasks import (NdRegression, as_learner, as_predictor, closed_form, delta_rule, evaluate,
                   gradient_descent, longhorn, newton, recovered, ridge, tune, zero)


# ---------------------------------------------------------------------- one layer, Fig. 2

def fig2(quick):
    widths = (5, 10) if quick else (5, 10, 20, 35, 50)
    results = {f: five(quick, task="nd_regression", f=f) for f in widths}
    table("One layer, multivariate regression, N = 10, losses on the same "
          f"{fresh(results[10])} (paper, f = 10: trained 0.206 ± 0.001, GD 0.207 ± 0.001)",
          ("f",), results,
          {"GRIL": mean("loss"), "GD": mean("gd_loss"), "closed form": first("optimal_loss", ".4f"),
           "GRIL ÷ GD": mean("loss", "gd_loss"), "cosine": mean("cosine", digits=5),
           "largest |Q - e2 e1ᵀ|": largest("Q_distance"), "|q - e3|": largest("q_distance"),
           "mean |A - 1|": largest("A_distance", 4), "seconds": seconds})

    figure, axes = plt.subplot_mosaic("AAABBBCCDDdd\nEEeeFFffGGgg", figsize=(12, 5.6))
    ours = results[10]
    losses(axes["A"], {"GRIL, trained": ours}, "GD = GRIL, constructed")
    axes["A"].set(title="A  loss on validation tasks", ylabel="½ squared error per coordinate")
    narrow_legend(axes["A"], "center left")
    alignment(axes["B"], ours)
    errorbars(axes["C"], results, {"GRIL": "loss", "GD": "gd_loss"})
    axes["C"].set(title="C  input width", xlabel="f", ylabel="loss")
    scales(axes["D"], ours, "scale", (0.5, 0.75, 1, 1.5, 2))
    axes["D"].set(title="D  inputs scaled", ylabel="loss")
    scales(axes["d"], ours, "weight_scale", (0.5, 1, 2, 3, 4, 5))
    axes["d"].set(title="D  weights scaled")

    task, model, _ = train.load(ours[0]["folder"])
    learned, (e1, e2, e3) = recovered(model, task.N), torch.eye(3)
    A = learned["A"]
    matrix(axes["E"], learned["Q"][0], "E  Q, trained", WINDOW)
    matrix(axes["e"], torch.outer(e2, e1), "E  Q, constructed", WINDOW)
    matrix(axes["F"], A, f"F  A = {A.mean():.3f} ± {A.std():.3f}, trained")
    matrix(axes["f"], torch.ones_like(A), "F  A = 1, constructed")
    matrix(axes["G"], learned["q"], "G  q, trained", WINDOW)
    matrix(axes["g"], e3, "G  q, constructed", WINDOW)
    finish(figure, "fig2", quick)


def alignment(ax, results):
    """Cosine and distances along training, two axes."""
    right = ax.twinx()
    right.spines["right"].set_visible(True)
    band(ax, results, "cosine", GREEN, "cosine")
    band(right, results, "prediction_l2", RED, "L2, predictions")
    band(right, results, "sensitivity_l2", ORANGE, "L2, sensitivities")
    ax.set(title="B  against GD", xscale="log", xlabel="optimiser step", ylim=(0, 1.05),
           ylabel="cosine of sensitivities")
    right.set(ylim=(0, None), ylabel="L2 distance")
    narrow_legend(ax, "center right", right)


def scales(ax, results, what, values):
    """Loss on prompts of another scale; GD keeps the step size of scale 1, GD† its weights."""
    label, words = "GD†" if "dagger" in results[0] else "GD", what.replace("_", " ")
    groups = {value: [] for value in values}
    for value, result in product(values, results):
        scores = beside_reference(result, 40_000, 2, **{what: value})
        groups[value].append({name: score["loss"] for name, score in scores.items()})
    table(f"Trained at scale 1, tested at another {words}", (what,), groups,
          {"GRIL": mean("GRIL"), label: mean("GD"), f"GRIL ÷ {label}": mean("GRIL", "GD")})
    errorbars(ax, groups, {"GRIL": "GRIL", label: "GD"})
    ax.set_xlabel(words)
    low, *_, high = (spread(numbers(group, "GRIL"))[0] for group in groups.values())
    if high > 5 * low:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(one_two_five)
        ax.yaxis.set_minor_formatter(one_two_five)


def beside_reference(result, seed, sensitivities=1_000, **changes):
    """Scores of a run and of its reference, GD or its GD†, on tasks changed like this."""
    task, model, _ = train.load(result["folder"])
    both = dict(GRIL=as_predictor(task, model), GD=as_learner(task.learner()))
    if "dagger" in result:
        both["GD"] = as_predictor(task, train.load(result["dagger"]["folder"])[1])
    changed = type(task)(**{**task.recipe, **changes})
    return evaluate(changed, both, task.tasks, seed + result["seed"], sensitivities)


def one_two_five(y, _):
    """The label of a tick on a logarithmic axis."""
    return f"{y:g}" if f"{y:e}"[0] in "125" else ""


# ------------------------------------------------------ several steps, sine targets, Fig. 3, Fig. 5

PAIR = {"GRIL": mean("loss"), "GD†": mean("dagger_loss"),
        "GRIL ÷ GD†": mean("loss", "dagger_loss")}


def paired(quick, ours="gril", theirs="gd_dagger", **options):
    """Results of five seeds, each with that of GD† trained on the same tasks."""
    pair = (five(quick, **options, model=model) for model in (ours, theirs))
    return [dict(x, dagger=y, dagger_loss=y["loss"]) for x, y in zip(*pair)]


def last_tenth(pairs):
    return flattened(numbers(pairs, "dagger"))


def fig3(quick):
    figure, (a, b) = plt.subplots(1, 2, figsize=(10, 3.4))
    several_steps(a, quick)
    sine_targets(b, quick)
    finish(figure, "fig3", quick)


def several_steps(ax, quick):
    layers = (1, 2) if quick else (1, 2, 3)
    results = {l: five(quick, task="multistep_regression", layers=l) for l in layers}
    table("Multi-step regression: l layers against l steps of GD, its step sizes tuned together",
          ("layers",), results,
          {"GRIL": mean("loss"), "GD": mean("gd_loss"), "GRIL ÷ GD": mean("loss", "gd_loss"),
           "cosine": mean("cosine", digits=5), "largest head distance": largest("Q_distance"),
           "seconds": seconds})
    steps = dict(zip(("1 step", "2 steps", "3 steps"), results.values()))
    bars(ax, steps, {"GRIL": "loss", "GD, tuned": "gd_loss"})
    ax.axhline(results[1][0]["zero_loss"], color=GREY, ls=":", label="zero predictor")
    ax.legend()
    ax.set(title="A  several steps of gradient descent", ylabel="loss")


def sine_targets(ax, quick):
    sine = partial(paired, quick, task="nonlinear_regression")
    pairs = {"1 layer": sine(layers=1), "2 layers": sine(layers=2),
             "1 layer, ρ(Z)": sine(layers=1, ours="gril_rho", theirs="gd_dagger_rho")}
    task, _, _ = train.load(pairs["1 layer"][0]["folder"])
    learners = {"one GD step on W x": task.learner(), "one GD step on sin(W x)": sine_step(task),
                "zero predictor": zero}
    predictors = {name: as_learner(learner) for name, learner in learners.items()}
    scores = [evaluate(task, predictors, task.tasks, 20_000 + result["seed"], 2)
              for result in pairs["1 layer"]]
    explicit = {name: [score[name] for score in scores] for name in learners}   # the runs' tasks
    blank = dict.fromkeys(learners, "")
    print_table("Sine targets (GRIL and GD† on the same tasks; GD† is trained too: its gated unit "
                "or ρ, and β)", ("", "GRIL, or the learner itself", "GD†", "GRIL ÷ GD†",
                                 "GD† loss, last tenth of training"),
                [*rows(pairs, {**PAIR, "last tenth": last_tenth}),
                 *rows(explicit, {"GRIL": mean("loss"), "GD†": blank, "÷": blank, "tenth": blank})])
    bars(ax, pairs, {"GRIL": "loss", "GD†": "dagger_loss"})
    for name, style, color in zip(explicit, ("--", "-.", ":"), (RED, GREEN, GREY)):
        ax.axhline(spread(numbers(explicit[name], "loss"))[0], ls=style, color=color, lw=1,
                   label=name)
    ax.set(title="B  sine targets", ylabel="loss")
    ax.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 0.92), ncol=2)


def sine_step(task):
    """One step of gradient descent on sin(W x), its step size tuned."""
    family = partial(gradient_descent, link=torch.sin)
    (eta,) = tune(lambda eta: family([eta]), [4.0], task)
    return family([eta])


def two_layer_weights(quick):
    (result,) = runs([dict(task="multistep_regression", layers=2, seed=0)], quick)
    task, model, _ = train.load(result["folder"])
    learned = recovered(model, task.N)
    figure, axes = plt.subplots(2, 5, figsize=(10, 4.4))
    aims = ("$y x^T$", "free, it meets $W_0 = 0$"), ("$y x^T$", "$x x^T$")
    for l, h in ((0, 0), (0, 1), (1, 0), (1, 1)):
        where, A = f"layer {l + 1}, head {h + 1}", learned["A"][l, h]
        matrix(axes[l, h], learned["Q"][2 * l + h], f"Q, {where}\n{aims[l][h]}", WINDOW)
        matrix(axes[l, 2 + h], A, f"A, {where}\n{A.mean():.3f} ± {A.std():.3f}")
    matrix(axes[0, 4], learned["q"], "q", WINDOW)
    # of the two steps only the polynomial W = Σ y xᵀ/N (a - b Σ x xᵀ/N) is determined:
    # a = η₁ + η₂, b = η₁ η₂
    scale = model.Q[1, 1].flatten()[model.Q[1, 1].abs().argmax()].item()
    ours = sum(result["gain"]), result["gain"][0] * task.N * model.beta[1].item() * scale
    gd = sum(result["eta"]), math.prod(result["eta"])
    for place, color, label, values in ((-0.2, BLUE, "GRIL", ours), (0.2, ORANGE, "GD", gd)):
        axes[1, 4].bar([place, 1 + place], values, 0.36, color=color, label=label)
    axes[1, 4].set_xticks(range(2), ["$η_1 + η_2$", "$η_1 η_2$"])
    axes[1, 4].set_title("the two step sizes")
    axes[1, 4].legend(fontsize=7)
    print_table("The two steps as one polynomial", ("", "η1 + η2", "η1 η2"),
                [(label, *(f"{x:.2f}" for x in values))
                 for label, values in (("GRIL", ours), ("GD, tuned", gd))])
    e1, e2, _ = torch.eye(3)
    heads = [torch.outer(e2, e1), torch.outer(e1, e1)] * 2
    print_table("Two layers: heads after dividing by their largest entry",
                ("layer, head", "learned Q", "distance"),
                [(f"{i // 2 + 1}, {i % 2 + 1}", " ".join(f"{x:6.3f}" for x in Q.flatten()),
                  f"{(Q - aim).abs().max():.3f}")
                 for i, (Q, aim) in enumerate(zip(learned["Q"], heads))])
    finish(figure, "two_layer_weights", quick)


# ------------------------------------------------------------- classification, Fig. 4, Fig. 7 to 10

ALIKE = {"cosine": ("cosine of\nsensitivities", GREEN), "prediction_l2": ("L2 of logits", RED),
         "sensitivity_l2": ("L2 of\nsensitivities", ORANGE)}


def classification(name, task, N, quick, widths=()):
    """GRIL beside GD†, whose features are trained too."""
    long = {} if N < 100 else dict(batch=64)                    # ten times the data in every prompt
    pairs = paired(quick, task=task, n=N, **long)
    figure, axes = plt.subplots(1, 4 if widths else 3, figsize=(14 if widths else 11, 3))
    losses(axes[0], {"GRIL": pairs, "GD†": numbers(pairs, "dagger")}, "GD, φ = identity", GREEN)
    axes[0].set(title=f"A  {task.replace('_', ' ')}, N = {N}", ylabel="cross-entropy")
    narrow_legend(axes[0], "center right")
    scores = [beside_reference(result, 20_000)["GD"] for result in pairs]
    alike = [{key: score[key] for key in ALIKE} for score in scores]
    for i, (key, (_, color)) in enumerate(ALIKE.items()):
        height, error = spread(numbers(alike, key))
        axes[1].bar(i, height, yerr=error, color=color, capsize=3)
    axes[1].set_xticks(range(3), [label for label, _ in ALIKE.values()])
    axes[1].set_title("B  GRIL against GD†")
    scales(axes[2], pairs, "scale", (0.5, 1, 1.5, 2))
    axes[2].set(title="C  inputs scaled", ylabel="cross-entropy")
    table(f"{task}, f = 10, N = {N}, cross-entropy on the same {fresh(pairs)}", (),
          {(): [{**result, **scores} for result, scores in zip(pairs, alike)]},
          {**PAIR, "GD, φ = identity": mean("gd_loss"), "zero": mean("zero_loss"),
           **{key: mean(key) for key in ALIKE}, "GD† loss, last tenth": last_tenth})
    if widths:
        sweep = {f: paired(quick, task=task, n=N, f=f) for f in widths[:2 if quick else None]}
        table("Input width", ("f",), sweep, PAIR)
        errorbars(axes[3], sweep, {"GRIL": "loss", "GD†": "dagger_loss"})
        axes[3].set(title="D  input width", xlabel="f", ylabel="cross-entropy")
    finish(figure, name, quick)


# ------------------------------------------------------------------------------- tables of App. C

ABLATIONS = {           # task, model -> the paper's loss
    ("scalar_regression", "gril"): "0.209 ± 0.001",
    ("scalar_regression", "no_input"): "0.426 ± 0.002",
    ("scalar_regression", "no_output"): "0.426 ± 0.002",
    ("scalar_regression", "neither"): "0.426 ± 0.002",
    ("nd_regression", "gril"): "0.206 ± 0.001",
    ("nd_regression", "no_window"): "0.414 ± 0.002",
    ("nd_regression", "no_readout"): "0.414 ± 0.002",
    ("nd_regression", "neither"): "0.414 ± 0.002",
    ("nd_regression", "w2"): "",
}


def ablations(quick):
    tokens = {"scalar_regression": dict(raw=True), "nd_regression": {}}     # who forms x y is the question
    results = {(task, model): five(quick, task=task, model=model, **tokens[task])
               for task, model in ABLATIONS}
    counted = fresh(results["nd_regression", "gril"])
    table(f"Ablations (App. C), losses on the same {counted}", ("task", "model"), results,
          {"loss": mean("loss"), "÷ zero predictor": mean("loss", "zero_loss"),
           "÷ GD": mean("loss", "gd_loss"), "paper": ABLATIONS})
    kinds = {"scalar_regression": "scalar", "nd_regression": "multivariate"}
    ratios = {f"{model}\n({kinds[task]})": [dict(ratio=x) for x in numbers(rs, "loss", "zero_loss")]
              for (task, model), rs in results.items()}
    figure, ax = plt.subplots(figsize=(10, 3))
    bars(ax, ratios, {"loss ÷ zero predictor": "ratio"})
    ax.axhline(1, color=GREY, ls=":")
    ax.tick_params(axis="x", labelsize=7)
    ax.set(ylim=(0, 1.25), ylabel="loss ÷ zero predictor's", title="Without window or without "
           "multiplicative read-out, zero is the best a layer can do")
    ax.get_legend().remove()
    finish(figure, "ablations", quick)


def second_order(quick):
    paper = {"trained GRIL": "0.206 ± 0.001", "gradient descent, one step": "0.207 ± 0.001",
             "GRIL, constructed": "0.206 ± 0.002", "Newton, exact": "0.114 ± 0.001"}
    scores = []
    for result in five(quick, task="nd_regression", f=10):
        task, model, _ = train.load(result["folder"])
        predictors = {"trained GRIL": as_predictor(task, model),
                      "gradient descent, one step": as_learner(task.learner()),
                      "GRIL, constructed": as_predictor(task, task.constructed()),
                      "Newton, exact": as_learner(newton),
                      "Newton, step length 0.48": as_learner(partial(newton, step=0.48)),
                      "Newton, Hessian + 0.026 I": as_learner(ridge(0.026)),
                      "zero predictor": as_learner(zero)}
        scores.append(evaluate(task, predictors, task.tasks, 20_000 + result["seed"]))
    methods = {name: [score[name] for score in scores] for name in predictors}
    table("Second-order methods (App. C.3)", ("method",), methods,
          {"loss": mean("loss"), "cosine with trained GRIL": mean("cosine"), "paper": paper})
    print("\nWithout noise and with N = f, an exact Newton step solves the task (its loss here is"
          "\nrounding, in float64); the paper's 0.114 fits a damped one: a step length of 0.48 or "
          "a ridge of 0.026.")
    figure, ax = plt.subplots(figsize=(8, 3))
    ax.barh(list(methods), [spread(numbers(found, "loss"))[0] for found in methods.values()],
            color=[BLUE, ORANGE, BLUE, GREEN, GREEN, GREEN, GREY])
    ax.axvline(0.114, color=RED, ls="--", label="the paper's Newton-Raphson")
    ax.legend()
    ax.invert_yaxis()
    ax.set(xlabel="loss", title="The trained layer is a first-order learner")
    finish(figure, "second_order", quick)


# ------------------------------------------------------------------------------- one prompt

def state(quick):
    """100 examples: Z_t beside W, the loss after each example beside online learners."""
    f, N, tasks = 10, 20 if quick else 100, 200 if quick else 4_000
    (result,) = runs([dict(task="nd_regression", f=f, n=N, seed=0)], quick)
    task, model, _ = train.load(result["folder"])
    batch = task.sample(tasks, torch.Generator().manual_seed(0))
    etas = [closed_form(f, n)[0] for n in range(1, N + 1)]
    constructed = construct_multivariate(GRIL(f), torch.tensor(etas), torch.arange(1, N + 1))

    lines = {}                                                  # learner -> {examples seen: loss}
    for name, layer in ((f"GRIL, trained for N = {N}", model),
                        ("GRIL, constructed: GD with η*(t)/t", constructed)):
        with torch.no_grad():
            o = layer(batch.s)                          # (B, N, f): the predictions for x_{t+1}
        loss = 0.5 * (o - batch.y[:, 1:]).square().mean((0, 2))
        lines[name] = dict(enumerate(loss.tolist(), 1))
    every = [n for n in (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100) if n <= N]
    for n in every:
        for name, learner in online(f, n).items():
            o = learner(batch.x[:, :n], batch.y[:, :n], batch.x[:, n])
            loss = 0.5 * (o - batch.y[:, n]).square().mean().item()
            lines.setdefault(name, {})[n] = loss
    print_table("Loss after n examples", ("learner", *every),
                [(name, *(f"{line[n]:.4f}" for n in every)) for name, line in lines.items()])

    shown = [n for n in (1, 3, 10, 30, 100) if n <= N]
    W = torch.linalg.lstsq(batch.x[0, :f + 1].double(), batch.y[0, :f + 1].double()).solution.mT
    figure = plt.figure(figsize=(12, 5))
    grid = figure.add_gridspec(2, len(shown) + 4)
    for row, name in enumerate(("trained", "constructed")):
        for i, n in enumerate(shown):
            layer = model if row == 0 else construct_multivariate(GRIL(f), etas[n - 1], n)
            matrix(figure.add_subplot(grid[row, i]), implied(layer, batch.s[:1, :2 * n]),
                   f"{name}\nafter {n}" if i == 0 else f"after {n}")
        matrix(figure.add_subplot(grid[row, len(shown)]), W.float(), "W, the task")
    ax = figure.add_subplot(grid[:, len(shown) + 1:])
    for (name, line), color in zip(lines.items(), (BLUE, ORANGE, GREEN, RED, GREY)):
        ax.plot(*zip(*line.items()), color=color, ls="--" if "constructed" in name else "-",
                label=name)
    ax.set(title="What is learned, example by example", xscale="log", xlabel="examples seen",
           ylabel="loss on the next one", ylim=(0, 0.58))
    ax.legend(fontsize=7, loc="upper right")
    finish(figure, "state", quick)


def online(f, n):
    """Learners for n examples, the step sizes of two of them tuned for that."""
    short = NdRegression(f=f, n=n, tasks=1_000)
    (beta,), (rule,) = (tune(family, [1.0], short) for family in (longhorn, delta_rule))
    return {"ridge 0.01": ridge(0.01), "Longhorn, β tuned": longhorn(beta),
            "delta rule, β tuned": delta_rule(rule)}


@torch.no_grad()
def implied(layer, s):
    """The W that the state after a prompt s stands for: what it answers to unit vectors."""
    f = s.shape[-1]
    return layer.query(torch.cat([s.expand(f, -1, -1), torch.eye(f)[:, None]], 1)).mT


FIGURES = {
    "how": how, "forms": forms, "prompt": prompt, "fig2": fig2, "fig3": fig3,
    "fig4": partial(classification, "fig4", "softmax_classification", 10),
    "two_layer_weights": two_layer_weights,
    "binary_10": partial(classification, "binary_10", "binary_classification", 10,
                         widths=(5, 10, 20)),
    "softmax_10": partial(classification, "softmax_10", "softmax_classification", 10),
    "binary_100": partial(classification, "binary_100", "binary_classification", 100),
    "softmax_100": partial(classification, "softmax_100", "softmax_classification", 100),
    "ablations": ablations, "second_order": second_order, "state": state,
    "fig3c": fig3c, "nd_comparison": nd_comparison, "leaving_zero": leaving_zero,
    "candidates": candidates, "model_comparison": model_comparison,
    "lra": lra, "gates": gates, "wikitext2": wikitext2,
}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=(*FIGURES, "page", "all"))
    parser.add_argument("--quick", action="store_true",
                        help="one seed, a few steps: does it run, not what it shows")
    args = parser.parse_args(argv)
    failed = []
    with spoken("figures.py"):
        for name in FIGURES if args.figure == "all" else [args.figure]:
            if args.quick:
                print(f"\n{name} --quick: hardly trained, one seed. Its numbers show that it runs, "
                      "and nothing else; do not set them beside the paper's.")
            try:
                {**FIGURES, "page": page.write}[name](args.quick)
            except Missing as error:
                failed.append(f"{name} is left out: {error}")
            except BrokenPipeError:                             # … | head: nobody reads the others
                raise
            except FileNotFoundError as error:
                failed.append(f"{name}: {error}. A run with a file gone: delete its folder, and it "
                              "is trained anew")
            except OSError as error:
                failed.append(f"{name}: {error}")
            except ValueError:                                  # a mistake in the figure itself
                traceback.print_exc()
                failed.append(f"{name} failed, as shown above")
    if failed:
        sys.exit("figures.py: " + "\n".join(failed))


if __name__ == "__main__":
    main()
