"""GRIL beside other sequence models: in context (Fig. 3 C, Fig. 6, Table 3), and on real data.

The commands are those of figures.py: fig3c, nd_comparison, leaving_zero, candidates,
model_comparison; lra, gates, wikitext2. Every model of a table gets the same examples, and where a
rate is chosen, the best of the same few by validation.
"""
import math

import matplotlib.pyplot as plt
import torch

import train
from baselines import state_size
from lra import LRA
from pictures.plots import (BLUE, GREEN, GREY, HUES, ORANGE, RED, band, bars, curves, finish, first,
                            flattened, fresh, last, mean, metrics, minutes, numbers, print_table,
                            seconds, spread, table)
from pictures.trained import runs, seeds

# --------------------------------------------------------------------------------- in-context tasks

RATES = (1e-3, 3e-3, 1e-2, 3e-2)
STEPS = dict(fig3c=3000, nd_comparison=1000, leaving_zero=4000, candidates=30_000,
             model_comparison=400)
BATCH = 64
# Of the sources that print one, for their smallest models: S5's and LRU's for Long Range Arena,
# Mamba's for 130M, GPT-3's 6e-4 for 125M; the nearest of RATES. The rest print none, and get 1e-3.
PUBLISHED = dict(s5=3e-3, lru=1e-3, mamba=3e-3, mamba_lp=3e-3, transformer=1e-3)
TIE = 0.01


def settings(options, name, rate, quick, seed=0):
    """One run with the figure's budget and one rate, of which GRIL's gate gets a tenth."""
    steps = 4 if quick else STEPS[name]
    recurrent = rate / 10 if options["model"] == "gril" else rate
    return dict(options, steps=steps, batch=BATCH, seed=seed, lr=rate, recurrent_lr=recurrent)


def sweep(models, rates, options, loss, quick):
    """label -> the best of the same few rates; and label -> what every rate came to."""
    swept = runs([options(model, rate) for model in models.values() for rate in rates], quick,
                 sweep=True)
    found = [math.inf if "diverged" in r else loss(r) for r in swept]
    found = dict(zip(models, zip(*[iter(found)] * len(rates))))
    return {label: rates[each.index(min(each))] for label, each in found.items()}, found


def tried(quick):
    return RATES[1:2] if quick else RATES


def compare(name, models, quick):
    """label -> results of 5 seeds, each model at its rate; a sweep is as long as the runs."""
    return repeated(name, models, rates_of(name, models, quick), quick, seeds(quick))


def rates_of(name, models, quick):
    """label -> the rate that did best with seed 0 on validation, unless noise would choose.

    Of rates that come within 1% of the best (all four, where none leaves the zero predictor), the
    one nearest to the family's published rate is taken.
    """
    _, found = sweep(models, tried(quick),
                     lambda options, rate: settings(options, name, rate, quick),
                     lambda r: last([r], "loss"), quick)
    rates = {}
    for label, losses in found.items():
        tied = [rate for rate, loss in zip(tried(quick), losses) if loss <= (1 + TIE) * min(losses)]
        published = math.log(PUBLISHED.get(models[label]["model"], 1e-3))
        rates[label] = min(tied, key=lambda rate: abs(math.log(rate) - published))
    return rates


def repeated(name, models, rates, quick, seeds):
    """label -> results, one for each seed."""
    results = iter(runs([settings(options, name, rates[label], quick, seed)
                         for label, options in models.items() for seed in seeds], quick))
    return {label: [next(results) for _ in seeds] for label in models}


def carried(results):
    """Real numbers that a model carries from token to token: its state, GRIL's w - 1 tokens too."""
    task, model, _ = train.load(results[0]["folder"])
    if hasattr(model, "A"):                     # GRIL's, a number for each of its gate's
        size = model.A.numel() + (0 if task.name == "scalar_regression" else 2 * task.f)
    else:
        size = state_size(model, task.sample(1, torch.Generator()).s)
    return f"{size:,}"


def seen(results):
    return f"{results[0]['steps'] * results[0]['batch']:,} tasks"


def budget(results):
    r, count = results[0], len(results)
    return (f"{seen(results)} seen ({r['steps']:,} steps of {r['batch']}), "
            f"{count} seed{'s' if count > 1 else ''}")


def share(results):
    """Tasks seen, in per cent of the paper's 300,000 steps of 64."""
    r = results[0]
    return f"{100 * r['steps'] * r['batch'] / (300_000 * 64):.2g}%"


COMPARISON = {
    "rate": first("lr", "g"), "loss": mean("loss"), "÷ zero predictor": mean("loss", "zero_loss"),
    "÷ GD": mean("loss", "gd_loss"), "parameters": first("parameters", ","), "state": carried,
    "seconds": seconds, "paper": {}, "last tenth": flattened}


def comparison(name, title, models, columns, quick):
    """Table and picture: every model with as many tasks, its curve and where it ends."""
    results = compare(name, models, quick)
    ours = next(iter(results.values()))
    table(f"{title}: f = N = 10; every model: {budget(ours)}, {share(ours)} of the paper's; the\n"
          f"rate the best of {', '.join(f'{rate:g}' for rate in tried(quick))} with seed 0 "
          f"(validation loss), within 1% of the best the published one; loss\non {fresh(ours)}, "
          "the same for all; state in real numbers, seconds of one run on one shared core, last\n"
          "tenth: change of the validation loss over it (the rate goes to 0: flat is not yet "
          "finished)", ("model",), results, {**COMPARISON, **columns})

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.4), width_ratios=(1.1, 1))
    colors = dict(zip(results, plt.get_cmap("tab20").colors))
    for label, rs in results.items():
        band(left, rs, "loss", colors[label], label, per_step=rs[0]["batch"])
    zero, gd = (spread(numbers(ours, key))[0] for key in ("zero_loss", "gd_loss"))
    left.axhline(last(rs, "gd_loss"), color="black", ls="--", lw=1,
                 label="gradient descent, one step")
    left.set(title=f"A  {title}: loss on validation tasks", xscale="log", xlabel="tasks seen",
             ylabel="½ squared error per coordinate", ylim=(0, 1.45 * zero))
    left.legend(fontsize=7, loc="lower left", ncol=2)
    means, stds = across(right, results, "loss", colors)
    edge = 1.03 * max(mean + std for mean, std in zip(means, stds))
    for i, height in enumerate(means):
        right.text(edge, i, f"{height:.3f}", va="center", fontsize=8)
    right.axvline(zero, color="black", ls=":", lw=1, label="zero predictor")
    right.axvline(gd, color="black", ls="--", lw=1, label="gradient descent, one step")
    right.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=2)
    right.set(title=f"B  after {seen(ours)}, {len(ours)} seeds", xlim=(0, 1.12 * edge),
              xlabel="loss on fresh tasks (½ squared error per coordinate)")
    finish(figure, name, quick)


def across(ax, groups, key, colors, over=None):
    """A bar from left to right for each label -> results, the first on top."""
    means, stds = zip(*(spread(numbers(results, key, over)) for results in groups.values()))
    ax.barh(list(groups), means, xerr=stds, color=[colors[label] for label in groups], capsize=2)
    ax.invert_yaxis()
    return means, stds


OTHERS = {
    "S5": dict(model="s5"), "LRU": dict(model="lru"),
    "Mamba": dict(model="mamba"), "Mamba + LP": dict(model="mamba_lp"),
    "Griffin": dict(model="griffin"), "Griffin + LP": dict(model="griffin_lp"),
    "DeltaNet": dict(model="deltanet"), "Longhorn": dict(model="longhorn"),
    "linear attention, 1 layer": dict(model="linear_attention"),
    "linear attention, 2 layers": dict(model="linear_attention", layers=2),
    "transformer, 2 layers": dict(model="transformer")}


def on(task, models):
    return {label: dict(task=task, **options) for label, options in models.items()}


def fig3c(quick):
    models = on("scalar_regression", {"GRIL": dict(model="gril"), **OTHERS})
    raw = compare("fig3c", {label: dict(options, raw=True) for label, options in models.items()},
                  quick)
    columns = {"rate, raw": first("lr", "g"), "÷ GD, raw": mean("loss", "gd_loss")}
    columns = {name: {label: column(rs) for label, rs in raw.items()}
               for name, column in columns.items()}
    comparison("fig3c", "scalar regression", models,
               {**columns, "paper": {"GRIL": "0.209 ± 0.001"}}, quick)
    print("\nTokens are the paper's [x_t y_t, x_{t+1}]; raw ones [x_t, y_t, x_{t+1}]. The paper "
          "shows the others in a\nfigure, without numbers. Its scalar layer has no version with "
          "two layers: here neither.")


def nd_comparison(quick):
    pairs = {"linear attention on pairs": dict(model="linear_attention_pairs")}
    models = {"GRIL, 1 layer": dict(task="nd_regression", model="gril"),
              "GRIL, 2 layers": dict(task="multistep_regression", model="gril", layers=2),
              **on("nd_regression", {**OTHERS, **pairs})}
    paper = {"GRIL, 1 layer": "0.206 ± 0.001", "S5": "0.426", "Mamba": "0.539", "Griffin": "0.567"}
    comparison("nd_comparison", "multivariate regression", models, {"paper": paper}, quick)
    print("\nThe paper shows the others in a figure, without numbers. GRIL with 2 layers stands "
          "beside two steps of gradient\ndescent (÷ GD is of those). Pairs are tokens (x_i, y_i), "
          "(x_query, 0) instead of x_1, y_1, x_2, …: a window\nmade by hand.")


def leaves(result):
    """The first validated step at which the loss is below 0.95 of the zero predictor's, or None."""
    below = (int(row["step"]) for row in metrics(result)
             if float(row["loss"]) < 0.95 * result["zero_loss"])
    return next(below, None)


def leaving_zero(quick, widths=(2, 3, 5, 10)):
    """When, if ever, a model does better than answering zero: f = N from easy to the paper's."""
    models = on("nd_regression", {"GRIL": dict(model="gril"), **OTHERS})
    rates = rates_of("leaving_zero", {label: dict(options, f=3, n=3)
                                      for label, options in models.items()}, quick)
    found = {f: repeated("leaving_zero", {label: dict(options, f=f, n=f)
                                          for label, options in models.items()},
                         rates, quick, range(1)) for f in widths}
    (r,) = found[widths[0]]["GRIL"]
    cells = [(label, f"{rates[label]:g}",
              *(f"{leaves(found[f][label][0]) or '—'}  "
                f"{first('loss', '.3f', 'zero_loss')(found[f][label])}" for f in widths))
             for label in models]
    print_table(f"First step with a validation loss below 0.95 of the zero predictor's, of "
                f"{r['steps']:,} steps of {r['batch']} ({share([r])} of the\npaper's), seed 0, and "
                "loss ÷ zero predictor at the end; the rate is chosen at f = 3",
                ("model", "rate", *(f"f = N = {f}" for f in widths)), cells)
    figure, axes = plt.subplots(1, len(widths), figsize=(12, 3.4), sharey=True)
    colors = dict(zip(models, plt.get_cmap("tab20").colors))
    for ax, f in zip(axes, widths):
        for label in models:
            (r,) = found[f][label]
            steps, loss, _ = curves([r], "loss")
            ax.plot(steps, loss / r["zero_loss"], color=colors[label], label=label)
        ax.axhline(r["gd_loss"] / r["zero_loss"], color="black", ls="--", lw=1,
                   label="gradient descent, one step")
        ax.set(title=f"f = N = {f}", xscale="log", xlabel="optimiser step", ylim=(0, 1.3))
    axes[0].set_ylabel("validation loss ÷ zero predictor's")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncol=7,
                  fontsize=7)
    finish(figure, "leaving_zero", quick)


CANDIDATES = {          # the paper's own sizes; 30,000 steps of 64
    "Mamba + LP, 4 layers of 128": dict(model="mamba_lp", width=128, layers=4),
    "Griffin + LP, 4 layers of 96": dict(model="griffin_lp", width=96, layers=4, heads=4),
    "transformer, 2 layers of 32": dict(model="transformer")}


def candidates(quick):
    """The paper's strong ones on f = N = 10, for a tenth of its steps, at their published rates."""
    jobs = [settings(dict(task="nd_regression", **options), "candidates",
                     PUBLISHED.get(options["model"], 1e-3), quick)
            for options in CANDIDATES.values()]
    results = {label: [r] for label, r in zip(CANDIDATES, runs(jobs, quick))}
    ours = next(iter(results.values()))
    table(f"Multivariate regression, f = N = 10, {budget(ours)}, {share(ours)} of the paper's",
          ("model",), results,
          {"rate": first("lr", "g"), "parameters": first("parameters", ","),
           "÷ zero predictor": first("loss", ".4f", "zero_loss"),
           "÷ GD": first("loss", ".4f", "gd_loss"),
           "leaves zero at step": lambda results: f"{leaves(results[0]) or '—'}",
           "minutes": minutes})
    figure, ax = plt.subplots(figsize=(8, 3.6))
    for (label, rs), color in zip(results.items(), (GREEN, RED, BLUE)):
        steps, loss, _ = curves(rs, "loss")
        ax.plot(steps, loss / rs[0]["zero_loss"], color=color, label=label)
    ax.axhline(1, color=GREY, ls=":", label="zero predictor")
    ax.axhline(rs[0]["gd_loss"] / rs[0]["zero_loss"], color="black", ls="--", lw=1,
               label="gradient descent, one step")
    ax.legend(fontsize=7, loc="lower left")
    ax.set(xlabel="optimiser step", ylabel="validation loss ÷ zero predictor's", ylim=(0, 1.2),
           title=f"The paper's sizes, multivariate regression, {seen(ours)} seen")
    finish(figure, "candidates", quick)


GRID = {        # sizes, and the paper's loss; Griffin's width is not given: 10, the tokens' own
    "Mamba, dim 32, 1 layer": dict(model="mamba", width=32, layers=1, paper=0.5388),
    "Mamba, dim 64, 1 layer": dict(model="mamba", width=64, layers=1, paper=0.4126),
    "Mamba, dim 64, 2 layers": dict(model="mamba", width=64, layers=2, paper=0.4179),
    "Mamba, dim 128, 4 layers": dict(model="mamba", width=128, layers=4, paper=0.4157),
    "Griffin, 1 head, 1 layer": dict(model="griffin", width=10, heads=1, layers=1, paper=0.7490),
    "Griffin, 2 heads, 1 layer": dict(model="griffin", width=10, heads=2, layers=1, paper=0.5665),
    "Griffin, 2 heads, 2 layers": dict(model="griffin", width=10, heads=2, layers=2, paper=0.4114),
    "Griffin, 5 heads, 1 layer": dict(model="griffin", width=10, heads=5, layers=1, paper=0.6047),
    "S5, 1 layer": dict(model="s5", layers=1, paper=0.426),
    **{f"S5, {l} layers": dict(model="s5", layers=l, paper=0.426) for l in (2, 4, 6)},
    **{f"S5, size {H}": dict(model="s5", width=H, paper=0.426) for H in (10, 64, 128, 256)},
}


def model_comparison(quick):
    """Sizes of three families. They are many, and large: fewer tasks, the rate of nd_comparison."""
    families = {name: OTHERS[name] for name in ("Mamba", "Griffin", "S5")}
    base = compare("nd_comparison", on("nd_regression", families), quick)
    rates = {label: base[label.split(",")[0]][0]["lr"] for label in GRID}
    paper = {label: sizes["paper"] for label, sizes in GRID.items()}
    results = {}
    for label, sizes in GRID.items():
        if quick and (sizes.get("width", 0) >= 64 or sizes.get("layers", 0) >= 4):
            continue
        options = {key: value for key, value in sizes.items() if key != "paper"}
        once = sizes["model"] == "mamba" and sizes["layers"] > 1        # large
        results |= repeated("model_comparison", on("nd_regression", {label: options}), rates, quick,
                            range(1) if once else seeds(quick))
    s5 = results["S5, 1 layer"]
    table(f"Sizes, multivariate regression: {budget(s5)} (1 where there is no ±), the rate of the "
          "family in nd_comparison", ("model",), results,
          {**COMPARISON, "paper": {label: f"{loss:.4f}" for label, loss in paper.items()}})
    figure, ax = plt.subplots(figsize=(9, 4.8))
    hues = {"Mamba": GREEN, "Griffin": RED, "S5": BLUE}
    across(ax, results, "loss", {label: hues[label.split(",")[0]] for label in GRID}, "zero_loss")
    ax.plot([paper[label] / (10 / 24) for label in results], range(len(results)), "kD", ms=4,
            label="the paper's loss ÷ 10/24")
    ax.axvline(1, color=GREY, ls=":", label="zero predictor")
    gd = spread(numbers(next(iter(results.values())), "gd_loss", "zero_loss"))[0]
    ax.axvline(gd, color=ORANGE, ls="--", label="gradient descent, one step")
    ax.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.4, -0.1), ncol=3)
    ax.set(xlabel="loss ÷ zero predictor's", xlim=(0, 1.9),
           title=f"Sizes without a projection, multivariate regression, {seen(s5)} seen")
    finish(figure, "model_comparison", quick)


# ----------------------------------------------------------------------- real data, a laptop's size

ARENA = {"GRIL": "gril", "filter + w = 1": "filtered",
         "linear attention (w = 1)": "linear_attention", "LRU": "lru", "transformer": "transformer"}
FACTORS = 0.3, 1, 3                                     # of the preset's rates
SWEEP = {"text": 200, "retrieval": 100, "image": 300}   # steps of a rate; elsewhere all end alike


def lra(quick):
    """Five tasks at their tiny size: the same rows, steps and choice of rates for every model."""
    names = ("listops",) if quick else tuple(LRA)
    results = {name: arena(name, quick) for name in names}
    table("Long Range Arena, tiny size, one seed, or three where there is a ±: accuracy in per "
          "cent on the test rows, of\nthe weights that did best on validation; beside it the best "
          "over the run on (at most 1,000) test rows, as the\npaper reports; minutes of one core",
          ("task", "model"),
          {(name, label): rs for name in names for label, rs in results[name].items()},
          {"rate": first("lr", "g"), "parameters": first("parameters", ","),
           "steps": first("steps", ","), "test": mean("test_accuracy", digits=1),
           "best on test": mean("best_test_accuracy", digits=1),
           "most frequent class": first("most_frequent", ".1f"), "minutes": minutes,
           "paper's GRIL": {(name, "GRIL"): LRA[name].paper_accuracy for name in names}})

    several = [name for name in names if len(curves(results[name]["GRIL"], "accuracy")[0]) > 1]
    figure, axes = plt.subplots(1, len(several) + 1, figsize=(2.7 * len(several) + 4.5, 3),
                                width_ratios=[1] * len(several) + [1.7])
    for ax, name in zip(axes, several):
        for rs, color in zip(results[name].values(), HUES):
            band(ax, rs, "accuracy", color, None)
        ax.axhline(rs[0]["most_frequent"], color="black", ls=":", lw=1)
        ax.set(title=name, xlabel="optimiser step", xlim=(0, None))
    axes[0].set_ylabel("validation accuracy, %")
    tests = {name: [{label: spread(numbers(rs, "test_accuracy"))[0]
                     for label, rs in results[name].items()}] for name in names}
    bars(axes[-1], tests, {label: label for label in ARENA})
    for k, name in enumerate(names):
        height = results[name]["GRIL"][0]["most_frequent"]
        axes[-1].plot([k - 0.42, k + 0.42], [height, height], "k:", lw=1,
                      label="most frequent class" if k == 0 else None)
    axes[-1].set(title="test, weights chosen by validation", ylabel="test accuracy, %")
    axes[-1].get_legend().remove()
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside lower center", ncol=5)
    finish(figure, "lra", quick)


def arena(name, quick):
    """label -> results on one task, with the model's best rate where rates are tried."""
    recipe = LRA[name].numbers("tiny")

    def options(model, factor, seed=0, **more):
        rates = {key: round(factor * recipe[key], 6) for key in ("lr", "recurrent_lr")}
        return dict(task=name, model=model, **({} if factor == 1 else rates), **more, seed=seed)
    best = dict.fromkeys(ARENA, 1)
    if name in SWEEP:
        short = dict(steps=SWEEP[name], warmup=SWEEP[name] // 6, evaluate_every=SWEEP[name])
        best, found = sweep(ARENA, FACTORS, lambda model, factor: options(model, factor, **short),
                            lambda r: -r["validation_accuracy"], quick)
        print_table(f"{name}: validation accuracy in per cent after {SWEEP[name]} steps, by the "
                    "rate", ("model", *(f"{factor * recipe['lr']:g}" for factor in FACTORS)),
                    [(label, *(f"{-x:.1f}" for x in losses)) for label, losses in found.items()])
    return {label: runs([options(model, best[label], seed)
                         for seed in headline(name in ("text", "image"), model, quick)], quick)
            for label, model in ARENA.items()}


def headline(place, model, quick):
    """Three seeds where a sentence of the README rests on a row, one elsewhere."""
    return range(3 if place and model in ("gril", "filtered", "lru") and not quick else 1)


GATES = {"real, J = 8": dict(gate="real"), "complex, J = 8": dict(gate="complex"),
         "J = 1": dict(J=1), "J = 32": dict(J=32)}
SHORT = {"listops": dict(steps=1000),           # so that eight runs can be paid
         "image": dict(steps=400, batch=16, lr=4e-3, max_phase=2 * math.pi)}


def gates(quick):
    """What the paper leaves open: real or complex gates, one block or many."""
    results, budgets, accuracies = {}, [], {label: [{}] for label in GATES}
    names = list(SHORT)[:1] if quick else list(SHORT)
    for name in names:
        own = LRA[name].numbers("tiny")["gate"]
        found = runs([dict(task=name, **SHORT[name], **{"gate": own, **change}, seed=0)
                      for change in GATES.values()], quick)
        for label, r in zip(GATES, found):
            results[name, r["gate"], r["J"], r["P"] // r["J"]] = [r]
            accuracies[label][0][name] = r["validation_accuracy"]
        budgets.append(f"{name} {r['steps']:,} steps of {r['batch']} rows, rate {r['lr']:g}, "
                       f"angles up to {r['max_phase']:.4g}")
    table("\n".join(["Gates and blocks at tiny size, seed 0", *budgets]),
          ("task", "gate", "J", "P / J"), results,
          {"parameters": first("parameters", ","),
           "best validation accuracy": first("validation_accuracy", ".1f"),
           "last validation loss": lambda results: f"{last(results, 'loss'):.3f}",
           "test accuracy": first("test_accuracy", ".1f"), "minutes": minutes})
    figure, ax = plt.subplots(figsize=(7, 3))
    bars(ax, accuracies, {name: name for name in names})
    ax.set(ylabel="best validation accuracy, %", title="Gates and blocks at tiny size")
    finish(figure, "gates", quick)


LANGUAGE = {"GRIL": "gril", "filter + w = 1 in GRIL's frame": "filtered",
            "w = 1 in GRIL's frame": "gril_w1", "linear attention": "linear_attention",
            "LRU": "lru", "transformer": "transformer", "Mamba": "mamba",
            "GRIL without the frame": "gril_alone"}
TEXTS = {       # sweep, steps: of the sweep's runs, of the last ones; scored: tokens, 0 for all
    "bytes": dict(kind="bytes", score="bits", unit="bits a byte", rates=RATES, sweep=100,
                  steps=500, scored=0),
    "tiny": dict(kind="GPT-2 tokens", score="perplexity", unit="perplexity", rates=RATES[1:3],
                 sweep=60, steps=160, scored=65_536),   # bytes chose among these two rates alone
}


def wikitext2(quick):
    """Small language models: as many parameters and the same tokens, each with its best rate."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.4))
    for ax, recipe in zip(axes, ["bytes"] if quick else TEXTS):
        language(ax, recipe, TEXTS[recipe], quick)
    axes[0].legend(fontsize=8)
    finish(figure, "wikitext2", quick)


def language(ax, recipe, text, quick):
    score, unit, title = text["score"], text["unit"], f"WikiText-2, {text['kind']}"
    rates = text["rates"][1:2] if quick else text["rates"]
    swept, steps = (4, 4) if quick else (text["sweep"], text["steps"])

    def options(model, steps, rate, tokens, validations=5, seed=0, **more):
        more |= dict(validate_tokens=1000) if quick else {}
        return dict(task="wikitext2", recipe=recipe, model=model, steps=steps, warmup=steps // 8,
                    report_tokens=1000 if quick else tokens, **more, seed=seed,
                    evaluate_every=steps // validations, lr=rate, recurrent_lr=rate / 4)
    best, found = sweep(LANGUAGE, rates,
                        lambda model, rate: options(model, swept, rate, 1000, 1),
                        lambda r: r[f"validation_{score}"], quick)
    print_table(f"{title}: the sweep, {swept} steps each, validation {unit}",
                ("model", *rates),
                [(label, *(f"{x:.4g}" for x in scores)) for label, scores in found.items()])
    results = {label: runs([options(model, steps, best[label], text["scored"], seed=seed)
                            for seed in headline(recipe == "bytes", model, quick)], quick)
               for label, model in LANGUAGE.items()}
    results["GRIL, --stateful"] = runs([options("gril", steps, best["GRIL"], text["scored"],
                                                stateful=True)], quick)

    def carried_on(results):
        key = f"stateful_{score}"
        return mean(key, digits=digits)(results) if key in results[0] else "(grows)"

    def tokens_a_second(results):
        r = results[0]
        return f"{r['steps'] * r['batch'] * r['length'] / r['seconds']:,.0f}"
    r, digits = results["GRIL"][0], 3 if score == "bits" else 1
    table(f"{title}: {steps} steps of {r['batch']} blocks of {r['length']}, one seed, or three "
          f"where there is a ±, the\nrate the best of {', '.join(map(str, rates))} in a sweep of "
          f"{swept} steps; {unit} of\n{r['tokens']:,} tokens of the {r['split']} file, in blocks "
          "as in the paper, and with the state carried from block to block; tokens a second in\n"
          "training on one core, validations included", ("model",), results,
          {"rate": first("lr", "g"), "parameters": first("parameters", ","),
           f"{unit}, blocks": mean(f"{r['split']}_{score}", digits=digits),
           "state carried on": carried_on,
           "last training loss": lambda results: f"{last(results, 'train_loss'):.3f}",
           "tokens a second": tokens_a_second, "minutes": minutes})
    for label, color in zip(results, (*HUES, "black", "#7fb2e5", "#b07aa1", BLUE)):
        steps, scores, _ = curves(results[label], score)
        ax.plot(steps, scores, "--" if "stateful" in label else "o-", ms=2.5, color=color,
                label=label)
    ax.set(title=title, xlabel="optimiser step", ylabel=f"validation {unit}",
           yscale="log" if score == "perplexity" else "linear")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("{x:g}")
