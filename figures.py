"""Every figure and table of the paper, from runs.

    python figures.py fig2            trains what the figure needs (5 seeds), prints its table, writes docs/images/fig2.png
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
  wikitext2          a small language model, seven mixers, GPT-2 tokens and bytes                   (Sec. 5.4)

    python figures.py page            builds docs/index.html, the page to touch, from pictures/page.html

Here are the paper's own, and state; comparisons.py has the other models, drawings.py how it works, plots.py what they share. Runs are
kept under runs/figures and used again; delete a folder there to run it anew. GRIL_WORKERS (default 2) is how many train at
a time.
"""
import argparse
import math
import sys

import matplotlib.pyplot as plt
import matplotlib.ticker
import torch

import train
from gril import GRIL, construct_multivariate
from pictures.comparisons import fig3c, gates, lra, model_comparison, nd_comparison, wikitext2
from pictures.drawings import forms, how, prompt
from pictures import page
from pictures.plots import (BLUE, GREEN, GREY, ORANGE, RED, WINDOW, band, bars, curves, finish, flattened, legend_right, matrix,
                            pm, print_table, spread)
from pictures.trained import runs, seeds
from tasks import (TASKS, NdRegression, as_learner, as_predictor, closed_form, delta_rule, evaluate, gradient_descent, longhorn,
                   newton, recovered, ridge, tune, zero)


def fig2(quick):
    widths = (5, 10) if quick else (5, 10, 20, 35, 50)
    results = {f: runs([dict(task="nd_regression", f=f, seed=s) for s in seeds(quick)], quick) for f in widths}
    ours = results[10]
    print_table("One layer, multivariate regression, N = 10, losses on the same 10,000 fresh tasks (paper, f = 10: trained "
                "0.206 ± 0.001, GD 0.207 ± 0.001)",
                ("f", "GRIL", "GD", "closed form", "GRIL ÷ GD", "cosine",
                 "largest |Q - e2 e1ᵀ|", "|q - e3|", "mean |A - 1|", "seconds"),
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
             (f"F  A = {learned['A'].mean():.3f} ± {learned['A'].std():.3f}", learned["A"], None, None),
             ("G  q", learned["q"], torch.eye(3)[2], WINDOW))
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
            other = type(task)(**dict(task.recipe, **{what: value}))
            gd = as_learner(task.learner()) if reference is None else as_predictor(task, train.load(reference(result))[1])
            score = evaluate(other, {"GRIL": as_predictor(task, model), "GD": gd}, 200 if quick else 10_000,
                             seed=40_000 + result["seed"], sensitivities=2)
            ours.append(score["GRIL"]["loss"]), theirs.append(score["GD"]["loss"])
            ratios.append(ours[-1] / theirs[-1])
        rows.append((value, spread(ours), spread(theirs), spread(ratios)))
    label = "GD" if reference is None else "GD†"
    for k, color, name, style in ((1, BLUE, "GRIL", "-"), (2, ORANGE, label, "--")):
        ax.errorbar(values, [row[k][0] for row in rows], [row[k][1] for row in rows],
                    color=color, label=name, capsize=2, ls=style)
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
                [(l, pm([r["loss"] for r in rs]), pm([r["gd_loss"] for r in rs]), pm(ratios[l]),
                  pm([r["cosine"] for r in rs], 5), f"{max(r['Q_distance'] for r in rs):.3f}",
                  f"{spread([r['seconds'] for r in rs])[0]:.0f}")
                 for l, rs in multi.items()])
    bars(a, [f"{l} step{'s' * (l > 1)}" for l in steps], {"GRIL": [[r["loss"] for r in multi[l]] for l in steps],
                                                         "GD, tuned": [[r["gd_loss"] for r in multi[l]] for l in steps]})
    a.axhline(multi[1][0]["zero_loss"], color=GREY, ls=":", label="zero predictor"), a.legend()
    a.set(title="A  several steps of gradient descent", ylabel="loss")

    variants = [(1, "gril", "gd_dagger", "1 layer"), (2, "gril", "gd_dagger", "2 layers"),
                (1, "gril_rho", "gd_dagger_rho", "1 layer, ρ(Z)")]
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
                  f"{(Q - torch.eye(9)[3 if i % 2 == 0 else 0].reshape(3, 3)).abs().max():.3f}")
                 for i, Q in enumerate(learned["Q"])])
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
            rows.append((task, model, pm([r["loss"] for r in results]), pm(to_zero),
                         pm([r["loss"] / r["gd_loss"] for r in results]),
                         paper.get(model, ("0.426 ± 0.002", "0.414 ± 0.002"))[i]))
            labels.append(f"{model}\n({'scalar' if i == 0 else 'multivariate'})"), ratios.append(to_zero)
    print_table("Ablations (App. C), losses on the same 10,000 fresh tasks",
                ("task", "model", "loss", "÷ zero predictor", "÷ GD", "paper"), rows)
    figure, ax = plt.subplots(figsize=(10, 3), layout="constrained")
    bars(ax, labels, {"loss ÷ zero predictor": ratios})
    ax.axhline(1, color=GREY, ls=":"), ax.tick_params(axis="x", labelsize=7)
    ax.set(title="Without window or without multiplicative read-out, zero is the best a layer can do", ylim=(0, 1.25),
           ylabel="loss ÷ zero predictor's"), ax.get_legend().remove()
    finish(figure, "ablations", quick)


def second_order(quick):
    task = NdRegression()
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
    paper = {"trained GRIL": "0.206 ± 0.001", "gradient descent, one step": "0.207 ± 0.001",
             "GRIL, constructed": "0.206 ± 0.002", "Newton, exact": "0.114 ± 0.001"}
    print_table("Second-order methods (App. C.3)", ("method", "loss", "cosine with trained GRIL", "paper"),
                [(name, pm([s["loss"] for s in scores]), pm([s["cosine"] for s in scores]), paper.get(name, ""))
                 for name, scores in columns.items()])
    print("\nWithout noise and with N = f, an exact Newton step solves the task (its loss here is"
          "\nrounding, in float64); the paper's 0.114 fits a damped one: a step length of 0.48 or a ridge of 0.026.")
    figure, ax = plt.subplots(figsize=(8, 3), layout="constrained")
    names = list(columns)
    ax.barh(names, [spread([s["loss"] for s in columns[n]])[0] for n in names],
            color=[BLUE, ORANGE, BLUE, GREEN, GREEN, GREEN, GREY])
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
        short = NdRegression(f=f, n=n, tasks=1_000)
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
    print_table("Loss after n examples", ("learner", *every),
                [(name, *(f"{dict(line)[n]:.4f}" for n in every)) for name, line in lines.items()])

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


FIGURES = {
    "how": how, "forms": forms, "prompt": prompt,
    "fig2": fig2, "fig3": fig3, "fig4": lambda quick: classification("fig4", "softmax_classification", 10, quick),
    "two_layer_weights": two_layer_weights,
    "binary_10": lambda quick: classification("binary_10", "binary_classification", 10, quick,
                                              (5, 10) if quick else (5, 10, 20)),
    "softmax_10": lambda quick: classification("softmax_10", "softmax_classification", 10, quick),
    "binary_100": lambda quick: classification("binary_100", "binary_classification", 100, quick),
    "softmax_100": lambda quick: classification("softmax_100", "softmax_classification", 100, quick),
    "ablations": ablations, "second_order": second_order, "state": state,
    "fig3c": fig3c, "nd_comparison": nd_comparison, "model_comparison": model_comparison,
    "lra": lra, "gates": gates, "wikitext2": wikitext2,
}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=(*FIGURES, "page", "all"))
    parser.add_argument("--quick", action="store_true", help="one seed, a few steps: does it run, not what it shows")
    args = parser.parse_args(argv)
    left_out = []
    for name in FIGURES if args.figure == "all" else [args.figure]:
        try:
            {**FIGURES, "page": page.write}[name](args.quick)
        except ValueError as error:                             # no data, and what to do about it
            left_out.append(f"{name} is left out: {error}")
    if left_out:
        sys.exit("figures.py: " + "\n".join(left_out))


if __name__ == "__main__":
    main()
