"""Every figure and table of the paper, from runs.

    python figures.py fig2            trains what it needs (5 seeds), prints, writes docs/images
    python figures.py fig2 --quick    in seconds: one seed and hardly any training, to see it run
    python figures.py all
    python figures.py page            docs/index.html, the page to touch, from pictures/page.html

  fig2               one layer is gradient descent: loss, scales, weights       Fig. 2
  fig3               more steps, and sine targets                               Fig. 3 A, B
  two_layer_weights  what two layers learn                                      Fig. 5 (App. B)
  binary_10, softmax_10, binary_100, softmax_100                                Fig. 4, 7 to 10
  ablations          without window, without read-out                           Tables of App. C
  second_order       Newton's step beside gradient descent                      Table of App. C
  how                one prompt: window, cross-product, state, read-out         Fig. 1
  forms              what each form of the recurrence keeps, measured           (not in the paper)
  prompt             a moving picture of one prompt (GIF)                       (not in the paper)
  fig3c              the other sequence models, scalar regression               Fig. 3 C
  leaving_zero       the same, multivariate: who beats answering zero, and when Fig. 6 (App. B)
  candidates         larger models, a tenth of the paper's steps                Fig. 6, App. B.3
  protocol           the paper's 300,000 steps, whole, for every in-context task
  reach              a trained layer at other scales and prompt lengths         (not in the paper)
  parameters         what grows as f², what as f⁴                               (Sec. 4.5)
  lra                Long Range Arena at a laptop's size, three models          (Sec. 5.4)
  wikitext2          a small language model, eight mixers                       (Sec. 5.4)
  wikitext2_bytes    three of them on bytes, three seeds each                   (Sec. 5.4)

Here are the paper's own; pictures/ has the others. Runs are kept under runs/figures, and those of
comparisons in docs/runs.jsonl, and used again; delete a run's folder and line to run it anew.
GRIL_WORKERS (default 2) train at a time.
"""
import argparse
import math
import sys
import traceback
from functools import partial

from machine.errors import Missing, spoken          # before torch, which takes seconds to load

import matplotlib.pyplot as plt
import torch
from torch.nn.utils import parameters_to_vector

import train
from pictures import page
from pictures.comparisons import (candidates, fig3c, leaving_zero, lra, protocol, wikitext2,
                                  wikitext2_bytes)
from pictures.drawings import forms, how, prompt
from pictures.limits import parameters, reach
from pictures.plots import (BLUE, GREEN, GREY, ORANGE, RED, WINDOW, band, bars, errorbars, finish,
                            first, flattened, fresh, largest, losses, matrix, mean, narrow_legend,
                            numbers, print_table, seconds, spread, table)
from pictures.trained import five, runs
from tasks import (as_learner, as_predictor, evaluate, gradient_descent, newton, recovered, ridge,
                   tune, zero)


# ---------------------------------------------------------------------- one layer, Fig. 2

def beside(reference, key, ours="loss"):
    """Columns: GRIL, what it is compared with, and each seed's ratio."""
    return {"GRIL": mean(ours), reference: mean(key), f"GRIL ÷ {reference}": mean(ours, key)}


def fig2(quick):
    widths = (5, 10) if quick else (5, 10, 20, 35, 50)
    results = {f: five(quick, task="nd_regression", f=f) for f in widths}
    table("One layer, multivariate regression, N = 10, losses on the same "
          f"{fresh(results[10])} (paper: trained 0.206 ± 0.001, GD 0.207 ± 0.001)",
          ("f",), results,
          {**beside("GD", "gd_loss"), "closed form": first("optimal_loss", ".4f"),
           "cosine": mean("cosine", digits=5), "largest |Q - e2 e1ᵀ|": largest("Q_distance"),
           "|q - e3|": largest("q_distance"), "mean |A - 1|": largest("A_distance", 4),
           "seconds": seconds})

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
    groups = {}
    for value in values:
        found = compared(results, beside_reference, 40_000, 2, **{what: value})
        groups[value] = [dict(GRIL=x["loss"], GD=y["loss"]) for x, y in zip(*found.values())]
    table(f"Trained at scale 1, tested at another {words}", (what,), groups,
          beside(label, "GD", "GRIL"))
    errorbars(ax, groups, {"GRIL": "GRIL", label: "GD"})
    ax.set_xlabel(words)
    low, *_, high = (spread(numbers(group, "GRIL"))[0] for group in groups.values())
    if high > 5 * low:
        ax.set_yscale("log", subs=(2, 5))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("{x:g}")


def compared(results, predictors, seed=20_000, sensitivities=1_000, **changes):
    """name -> scores, one for each run on fresh tasks of its own, changed like this."""
    found = {}
    for result in results:
        task, model, _ = train.load(result["folder"])
        changed, named = type(task)(**{**task.recipe, **changes}), predictors(result, task, model)
        scores = evaluate(changed, named, task.tasks, seed + result["seed"], sensitivities)
        for name, score in scores.items():
            found.setdefault(name, []).append(score)
    return found


def beside_reference(result, task, model):
    """A run and its reference, GD or its GD†."""
    reference = as_learner(task.learner())
    if "dagger" in result:
        reference = as_predictor(task, train.load(result["dagger"]["folder"])[1])
    return dict(GRIL=as_predictor(task, model), GD=reference)


# ------------------------------------------------------ several steps, sine targets, Fig. 3, Fig. 5

def paired(quick, ours="gril", theirs="gd_dagger", **options):
    """Results of five seeds, each with that of GD† trained on the same tasks."""
    pair = (five(quick, **options, model=model) for model in (ours, theirs))
    return [dict(x, dagger=y, dagger_loss=y["loss"]) for x, y in zip(*pair)]


def last_tenth(pairs):
    return flattened(numbers(pairs, "dagger")) if "dagger" in pairs[0] else ""


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
          {**beside("GD", "gd_loss"), "cosine": mean("cosine", digits=5),
           "largest head distance": largest("Q_distance"), "seconds": seconds})
    steps = dict(zip(("1 step", "2 steps", "3 steps"), results.values()))
    bars(ax, steps, {"GRIL": "loss", "GD, tuned": "gd_loss"})
    ax.axhline(results[1][0]["zero_loss"], color=GREY, ls=":", label="zero predictor")
    ax.legend()
    ax.set(title="A  several steps of gradient descent", ylabel="loss")


def sine_targets(ax, quick):
    def sine_step(eta):
        return gradient_descent([eta], link=torch.sin)
    sine = partial(paired, quick, task="nonlinear_regression")
    pairs = {"1 layer": sine(layers=1), "2 layers": sine(layers=2),
             "1 layer, ρ(Z)": sine(layers=1, ours="gril_rho", theirs="gd_dagger_rho")}
    task, _, _ = train.load(pairs["1 layer"][0]["folder"])
    learners = {"one GD step on W x": as_learner(task.learner()),
                "one GD step on sin(W x)": as_learner(sine_step(*tune(sine_step, [4.0], task))),
                "zero predictor": as_learner(zero)}
    explicit = compared(pairs["1 layer"], lambda *_: learners, sensitivities=2)
    table("Sine targets (GRIL and GD† on the same tasks; GD† is trained too: its gated unit or ρ, "
          "and β)", ("",), {**pairs, **explicit},
          {"GRIL, or the learner itself": mean("loss"), "GD†": mean("dagger_loss"),
           "GRIL ÷ GD†": mean("loss", "dagger_loss"),
           "GD† loss, last tenth of training": last_tenth})
    bars(ax, pairs, {"GRIL": "loss", "GD†": "dagger_loss"})
    for name, style, color in zip(explicit, ("--", "-.", ":"), (RED, GREEN, GREY)):
        height, _ = spread(numbers(explicit[name], "loss"))
        ax.axhline(height, ls=style, color=color, lw=1, label=name)
    ax.set(title="B  sine targets", ylabel="loss")
    ax.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 0.92), ncol=2)


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
    product = result["gain"][0] * task.N * model.beta[1].item() * scale
    steps = {"$η_1 + η_2$": [dict(GRIL=sum(result["gain"]), GD=sum(result["eta"]))],
             "$η_1 η_2$": [dict(GRIL=product, GD=math.prod(result["eta"]))]}
    bars(axes[1, 4], steps, dict(GRIL="GRIL", GD="GD"))
    axes[1, 4].set_title("the two step sizes")
    axes[1, 4].legend(fontsize=7)
    print_table("The two steps as one polynomial", ("", "η1 + η2", "η1 η2"),
                [(label, *(f"{pair[name]:.2f}" for (pair,) in steps.values()))
                 for label, name in (("GRIL", "GRIL"), ("GD, tuned", "GD"))])
    finish(figure, "two_layer_weights", quick)


# ------------------------------------------------------------- classification, Fig. 4, Fig. 7 to 10

ALIKE = {"cosine": "cosine of\nsensitivities", "prediction_l2": "L2 of logits",
         "sensitivity_l2": "L2 of\nsensitivities"}


def classification(kind, N, quick):
    """GRIL beside GD†, whose features are trained too."""
    name, task = f"{kind}_{N}", f"{kind}_classification"
    widths = (5, 10, 20) if name == "binary_10" else ()
    long = {} if N < 100 else dict(batch=64)                    # ten times the data in every prompt
    pairs = paired(quick, task=task, n=N, **long)
    figure, axes = plt.subplots(1, 4 if widths else 3, figsize=(14 if widths else 11, 3))
    losses(axes[0], {"GRIL": pairs, "GD†": numbers(pairs, "dagger")}, "GD, φ = identity", GREEN)
    axes[0].set(title=f"A  {kind} classification, N = {N}", ylabel="cross-entropy")
    narrow_legend(axes[0], "center right")
    plain = five(quick, task=task, n=N, model="gril_identity", **long)
    for pair, score, identity in zip(pairs, compared(pairs, beside_reference)["GD"], plain):
        pair |= {key: score[key] for key in ALIKE}
        pair["plain_loss"] = identity["loss"]
        pair["model_diff"] = parameter_distance(pair["folder"], pair["dagger"]["folder"])
    heights, errors = zip(*(spread(numbers(pairs, key)) for key in ALIKE))
    axes[1].bar(ALIKE.values(), heights, yerr=errors, color=(GREEN, RED, ORANGE), capsize=3)
    axes[1].set_title("B  GRIL against GD†")
    scales(axes[2], pairs, "scale", (0.5, 1, 1.5, 2))
    axes[2].set(title="C  inputs scaled", ylabel="cross-entropy")
    table(f"{task}, f = 10, N = {N}, cross-entropy on the same {fresh(pairs)}", (),
          {(): pairs},
          {**beside("GD†", "dagger_loss"), "GD, φ = identity": mean("gd_loss"),
           "GRIL, φ = identity": mean("plain_loss"), "zero": mean("zero_loss"),
           **{key: mean(key) for key in ALIKE}, "model diff": mean("model_diff"),
           "GD† loss, last tenth": last_tenth})
    if widths:
        sweep = {f: paired(quick, task=task, n=N, f=f) for f in widths[:2 if quick else None]}
        table("Input width", ("f",), sweep, beside("GD†", "dagger_loss"))
        errorbars(axes[3], sweep, {"GRIL": "loss", "GD†": "dagger_loss"})
        axes[3].set(title="D  input width", xlabel="f", ylabel="cross-entropy")
    finish(figure, name, quick)


def parameter_distance(*folders):
    """App. B.6's "Model diff": the L2 distance of all weights, large by symmetries alone."""
    ours, theirs = (parameters_to_vector(train.load(folder)[1].parameters()) for folder in folders)
    return (ours - theirs).norm().item()


# ------------------------------------------------------------------------------- tables of App. C

ABLATIONS = {           # task -> model -> the paper's loss
    "scalar_regression": dict(gril="0.209 ± 0.001", no_input="0.426 ± 0.002",
                              no_output="0.426 ± 0.002", neither="0.426 ± 0.002"),
    "nd_regression": dict(gril="0.206 ± 0.001", no_window="0.414 ± 0.002",
                          no_readout="0.414 ± 0.002", neither="0.414 ± 0.002", w2=""),
}


def ablations(quick):
    paper = {(task, model): loss for task in ABLATIONS for model, loss in ABLATIONS[task].items()}
    tokens = {"scalar_regression": dict(raw=True), "nd_regression": {}}
    results = {(task, model): five(quick, task=task, model=model, **tokens[task])
               for task, model in paper}
    counted = fresh(results["nd_regression", "gril"])
    table(f"Ablations (App. C), losses on the same {counted}", ("task", "model"), results,
          {"loss": mean("loss"), "÷ zero predictor": mean("loss", "zero_loss"),
           "÷ GD": mean("loss", "gd_loss"), "paper": paper})
    kinds = {"scalar_regression": "scalar", "nd_regression": "multivariate"}
    ratios = {f"{model}\n({kinds[task]})": [dict(ratio=x) for x in numbers(rs, "loss", "zero_loss")]
              for (task, model), rs in results.items()}
    figure, ax = plt.subplots(figsize=(10, 3))
    bars(ax, ratios, {"loss ÷ zero predictor": "ratio"})
    ax.axhline(1, color=GREY, ls=":")
    ax.tick_params(axis="x", labelsize=7)
    ax.set(ylim=(0, 1.25), ylabel="loss ÷ zero predictor's", title="Without window or without "
           "multiplicative read-out, zero is the best a layer can do")
    finish(figure, "ablations", quick)


def second_order(quick):
    paper = {"trained GRIL": "0.206 ± 0.001", "gradient descent, one step": "0.207 ± 0.001",
             "GRIL, constructed": "0.206 ± 0.002", "Newton, exact": "0.114 ± 0.001"}

    def predictors(result, task, model):
        learners = {"Newton, exact": newton, "Newton, step length 0.48": partial(newton, step=0.48),
                    "Newton, Hessian + 0.026 I": ridge(0.026), "zero predictor": zero}
        return {"trained GRIL": as_predictor(task, model),
                "gradient descent, one step": as_learner(task.learner()),
                "GRIL, constructed": as_predictor(task, task.constructed()),
                **{name: as_learner(learner) for name, learner in learners.items()}}
    methods = compared(five(quick, task="nd_regression", f=10), predictors)
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


FIGURES = {figure.__name__: figure for figure in (
    how, forms, prompt, fig2, fig3, two_layer_weights, ablations, second_order, fig3c,
    leaving_zero, candidates, protocol, reach, parameters, lra, wikitext2, wikitext2_bytes)}
FIGURES |= {f"{kind}_{N}": partial(classification, kind, N)
            for N in (10, 100) for kind in ("binary", "softmax")}


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
                failed.append(f"{name}: {error}. A run with a file gone: delete its folder, and "
                              "its line in docs/runs.jsonl, to train it anew")
            except OSError as error:
                failed.append(f"{name}: {error}")
            except ValueError:                                  # a mistake in the figure itself
                traceback.print_exc()
                failed.append(f"{name} failed, as shown above")
    if failed:
        sys.exit("figures.py: " + "\n".join(failed))


if __name__ == "__main__":
    main()
