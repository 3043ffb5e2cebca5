"""GRIL beside other sequence models: in context (Fig. 3 C, Fig. 6, Table 3), and on real data.

The commands are those of figures.py: fig3c, leaving_zero, candidates, protocol; lra, wikitext2,
wikitext2_bytes.
Every model of a table gets the same examples, and where a rate is chosen, the best of the same few
by validation or, where noise would choose, the one nearest the published or the preset's.
docs/runs.jsonl keeps what most runs came to.
"""
import math
from functools import partial

import matplotlib.pyplot as plt
import torch

from baselines import state_size
from lm import LM
from lra import LRA
from pictures import trained
from pictures.plots import (BLUE, GREY, HUES, band, bars, curves, finish, first, flattened, fresh,
                            largest, last, mean, minutes, numbers, print_table, seconds,
                            spread, table)
from pictures.trained import seeds
from tasks import TASKS as IN_CONTEXT
from tasks import as_learner, evaluate, zero

runs = partial(trained.runs, keep=True)

# --------------------------------------------------------------------------------- in-context tasks

RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
STEPS = dict(fig3c=3000, leaving_zero=4000, candidates=30_000)
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
    """label -> what each of the same few rates came to."""
    swept = runs([options(model, rate) for model in models.values() for rate in rates], quick,
                 sweep=True)
    found = [math.inf if "diverged" in r or math.isnan(loss(r)) else loss(r) for r in swept]
    return dict(zip(models, zip(*[iter(found)] * len(rates))))


def chosen(rates, losses, slack, aim):
    """The rate of the least loss; of those within slack of it, where noise chooses, aim's next."""
    close = [rate for rate, loss in zip(rates, losses) if loss <= min(losses) + slack]
    return min(close, key=lambda rate: abs(math.log(rate / aim)))


def tried(quick):
    return RATES[2:3] if quick else RATES


def rates_of(name, models, quick):
    """label -> the rate that did best with seed 0 on validation, unless noise would choose.

    Of rates that come within 1% of the best (all, where none leaves the zero predictor), the one
    nearest to the family's published rate is taken. A sweep is as long as the runs.
    """
    found = sweep(models, tried(quick), lambda options, rate: settings(options, name, rate, quick),
                  lambda r: last([r], "loss"), quick)
    return {label: chosen(tried(quick), losses, TIE * min(losses),
                          published(models[label]["model"])) for label, losses in found.items()}


def published(model):
    return PUBLISHED.get(model, 1e-3)


def repeated(name, models, rates, quick, seeds):
    """label -> results, one for each seed."""
    results = iter(runs([settings(options, name, rates[label], quick, seed)
                         for label, options in models.items() for seed in seeds], quick))
    return {label: [next(results) for _ in seeds] for label in models}


def carried(results):
    """Real numbers that a model carries from token to token: its state, GRIL's w - 1 tokens too."""
    task = task_of(results[0])
    model = task.model(results[0]["model"])
    if hasattr(model, "A"):                     # GRIL's, a number for each of its gate's
        size = model.A.numel() + (0 if task.name == "scalar_regression" else 2 * task.f)
    else:
        size = state_size(model, task.sample(1, torch.Generator()).s)
    return f"{size:,}"


def task_of(result):
    Task = IN_CONTEXT[result["task"]]
    return Task(**{name: result[name] for name in Task.numbers("default")})


def seen(results):
    return f"{results[0]['steps'] * results[0]['batch']:,} tasks"


def budget(results):
    r = results[0]
    return f"{seen(results)} seen ({r['steps']:,} steps of {r['batch']}), {counted(results)}"


def counted(results):
    return f"{len(results)} seed{'s' if len(results) > 1 else ''}"


def share(results):
    """Tasks seen, in per cent of the paper's 300,000 steps of 64."""
    r = results[0]
    return f"{100 * r['steps'] * r['batch'] / (300_000 * 64):.2g}%"


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
    """Scalar regression: every model with as many tasks, its curve and where it ends."""
    models = on("scalar_regression", {"GRIL": dict(model="gril"), **OTHERS})
    rates = rates_of("fig3c", models, quick)
    results, raw = (repeated("fig3c", {label: {**options, **tokens}
                                       for label, options in models.items()},
                             rates, quick, seeds(quick)) for tokens in ({}, dict(raw=True)))
    ours = results["GRIL"]
    table(f"Scalar regression on [x_t y_t, x_{{t+1}}], f = N = 10; every model: {budget(ours)}, "
          f"{share(ours)} of the paper's;\nthe rate the best of "
          f"{', '.join(f'{x:g}' for x in tried(quick))} with seed 0 (validation loss), within 1% "
          f"of the best the published one; loss\non {fresh(ours)}, the same for all; raw: at that "
          "rate on [x_t, y_t, x_{t+1}]; state in real numbers,\nseconds of one run on one shared "
          "core, last tenth: change of the validation loss over it (the rate goes to 0:\nflat is "
          "not yet finished)", ("model",), results,
          {"rate": first("lr", "g"), "loss": mean("loss"),
           "÷ zero predictor": mean("loss", "zero_loss"), "÷ GD": mean("loss", "gd_loss"),
           "raw, ÷ GD": {label: mean("loss", "gd_loss")(rs) for label, rs in raw.items()},
           "parameters": first("parameters", ","), "state": carried, "seconds": seconds,
           "last tenth": flattened})

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.4), width_ratios=(1.1, 1))
    colors = dict(zip(results, plt.get_cmap("tab20").colors))
    for label, rs in results.items():
        band(left, rs, "loss", colors[label], label, per_step=rs[0]["batch"])
    zero, gd = (spread(numbers(ours, key))[0] for key in ("zero_loss", "gd_loss"))
    left.axhline(last(rs, "gd_loss"), color="black", ls="--", lw=1,
                 label="gradient descent, one step")
    left.set(title="A  scalar regression: loss on validation tasks", xscale="log",
             xlabel="tasks seen", ylabel="½ squared error per coordinate", ylim=(0, 1.45 * zero))
    left.legend(fontsize=7, loc="lower left", ncol=2)
    means, stds = zip(*(spread(numbers(rs, "loss")) for rs in results.values()))
    right.barh(list(results), means, xerr=stds, color=colors.values(), capsize=2)
    right.invert_yaxis()
    edge = 1.03 * max(mean + std for mean, std in zip(means, stds))
    for i, height in enumerate(means):
        right.text(edge, i, f"{height:.3f}", va="center", fontsize=8)
    right.axvline(zero, color="black", ls=":", lw=1, label="zero predictor")
    right.axvline(gd, color="black", ls="--", lw=1, label="gradient descent, one step")
    right.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=2)
    right.set(title=f"B  after {seen(ours)}, {len(ours)} seeds", xlim=(0, 1.12 * edge),
              xlabel="loss on fresh tasks (½ squared error per coordinate)")
    finish(figure, "fig3c", quick)


def validated(result):
    """Steps, and validation losses of the model and of gradient descent ÷ the zero predictor's."""
    steps, loss, _ = curves([result], "loss")
    answers = evaluate(task_of(result), dict(zero=as_learner(zero)), 1_000, 30_000, 1)
    nothing = answers["zero"]["loss"]                           # on the very tasks that validate
    return steps, loss / nothing, last([result], "gd_loss") / nothing


def leaves(result):
    """The first validated step at which the loss is below 0.95 of the zero predictor's, or —."""
    steps, loss, _ = validated(result)
    return next((f"{step}" for step, x in zip(steps, loss) if x < 0.95), "—")


def leaving_zero(quick, widths=(2, 3, 5, 10)):
    """When, if ever, a model does better than answering zero: f = N from easy to the paper's."""
    pairs = {"linear attention on pairs": dict(model="linear_attention_pairs")}
    models = on("nd_regression", {"GRIL": dict(model="gril"), **OTHERS, **pairs})
    rates = rates_of("leaving_zero", {label: dict(options, f=3, n=3)   # where most leave zero
                                      for label, options in models.items()}, quick)
    found = {f: repeated("leaving_zero", {label: dict(options, f=f, n=f)
                                          for label, options in models.items()},
                         rates, quick, range(1)) for f in widths}
    (r,) = found[widths[0]]["GRIL"]
    cells = [(label, f"{rates[label]:g}",
              *(f"{leaves(found[f][label][0])}  "
                f"{first('loss', '.3f', 'zero_loss')(found[f][label])}" for f in widths))
             for label in models]
    print_table(f"First step with a validation loss below 0.95 of the zero predictor's, of "
                f"{r['steps']:,} steps of {r['batch']} ({share([r])} of the\npaper's), seed 0, and "
                "loss ÷ zero predictor at the end; the rate is chosen at f = 3",
                ("model", "rate", *(f"f = N = {f}" for f in widths)), cells)
    figure, axes = plt.subplots(1, len(widths), figsize=(12, 3.4), sharey=True)
    for ax, f in zip(axes, widths):
        beside_zero(ax, found[f])
        ax.set(title=f"f = N = {f}", xscale="log", ylim=(0, 1.3))
    axes[0].set_ylabel("validation loss ÷ zero predictor's")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncol=7,
                  fontsize=7)
    finish(figure, "leaving_zero", quick)


def beside_zero(ax, results):
    """Validation losses ÷ the zero predictor's, of label -> [result], and gradient descent's."""
    for (label, (r,)), color in zip(results.items(), plt.get_cmap("tab20").colors):
        steps, loss, gd = validated(r)
        ax.plot(steps, loss, color=color, label=label)
    ax.axhline(gd, color="black", ls="--", lw=1, label="gradient descent, one step")
    ax.set_xlabel("optimiser step")


CANDIDATES = {          # those of four layers are App. B.3's, at its sizes
    "transformer, 2 layers of 128": dict(model="transformer", width=128),
    "transformer, 2 of 128, rate 0.0001": dict(model="transformer", width=128, lr=1e-4),
    "transformer, 2 layers of 256": dict(model="transformer", width=256),
    "Mamba + LP, 2 layers of 64": dict(model="mamba_lp", width=64, layers=2),
    "Mamba + LP, 4 layers of 128": dict(model="mamba_lp", width=128, layers=4),
    "Mamba + LP, 4 of 128, rate 0.0001": dict(model="mamba_lp", width=128, layers=4, lr=1e-4),
    "Griffin + LP, 4 patterns of 96": dict(model="griffin_lp", width=96, layers=4, heads=4)}


def candidates(quick):
    """f = N = 10, larger models, a tenth of the paper's steps: at published rates, or at 1e-4."""
    models = on("nd_regression", CANDIDATES)
    jobs = [settings(dict(options, evaluate_every=500), "candidates",
                     options.get("lr", published(options["model"])), quick)
            for options in models.values()]
    results = {label: [r] for label, r in zip(CANDIDATES, runs(jobs, quick))}
    ours = next(iter(results.values()))
    table(f"Multivariate regression, f = N = 10, {budget(ours)}, {share(ours)} of the paper's",
          ("model",), results,
          {"rate": first("lr", "g"), "parameters": first("parameters", ","),
           "÷ zero predictor": first("loss", ".4f", "zero_loss"),
           "÷ GD": first("loss", ".4f", "gd_loss"),
           "leaves zero at step": lambda results: leaves(results[0]),
           "minutes": minutes})
    figure, ax = plt.subplots(figsize=(8, 3.6))
    beside_zero(ax, results)
    ax.axhline(1, color=GREY, ls=":", label="zero predictor")
    ax.legend(fontsize=7, loc="lower left", ncol=2)
    ax.set(ylabel="validation loss ÷ zero predictor's", ylim=(0, 1.2),
           title=f"Multivariate regression, f = N = 10, {seen(ours)} seen")
    finish(figure, "candidates", quick)


def protocol(quick):
    """The paper's 300,000 steps of 64, beside the default recipe of the same seeds."""
    results = {}
    for name in IN_CONTEXT:
        each = seeds(quick or name != "nd_regression")
        for recipe, options in (("paper", dict(recipe="paper")), ("default", {})):
            results[name, recipe] = runs([dict(task=name, **options, seed=s) for s in each], quick)

    def distance(*keys):
        return lambda results: next(
            (largest(key, 4)(results) for key in keys if key in results[0]), "")
    table("The paper's recipe whole and the default one: loss ÷ that of explicit gradient descent "
          "(classification: with\nφ = identity; sine targets: on W x) on the same "
          f"{fresh(results['nd_regression', 'paper'])}; seed 0, or five seeds where there is a ±",
          ("task", "recipe"), results,
          {"steps": first("steps", ","), "batch": first("batch", ","), "loss": mean("loss"),
           "÷ GD": mean("loss", "gd_loss", 5), "cosine": mean("cosine", digits=6),
           "largest distance of Q or ΨᵀΘ": distance("Q_distance", "PsiTheta_distance"),
           "of q": distance("q_distance"), "mean |A - 1|": largest("A_distance", 4),
           "minutes": minutes})
    figure, ax = plt.subplots(figsize=(8, 3.6))
    for name, color in zip(IN_CONTEXT, (*HUES, "black")):
        steps, loss, _ = curves(results[name, "paper"], "loss")
        _, gd, _ = curves(results[name, "paper"], "gd_loss")
        ax.plot(steps, loss / gd, color=color, label=name.replace("_", " "))
    ax.axhline(1, color=GREY, ls=":", lw=1)
    ax.set(xscale="log", ylim=(0.9, 2.3), xlabel="optimiser step",
           ylabel="validation loss ÷ gradient descent's", title="The paper's recipe, whole")
    ax.legend(fontsize=8)
    finish(figure, "protocol", quick)


# ----------------------------------------------------------------------- real data, a laptop's size

ARENA = {"GRIL": "gril", "filter + w = 1": "filtered", "LRU": "lru"}
FACTORS = 0.3, 1, 3                                     # of the preset's rates
SEEDS = 3                                               # of a row on which a sentence rests
ROUNDS = {"text": (200, {}, SEEDS), "image": (150, dict(steps=400), SEEDS),
          "listops": (1500, {}, 1)}                     # steps of a rate; the last runs', seeds
NOISE = 1.5                                             # per cent, a standard error of 1,000 rows


def lra(quick):
    """Three tasks at their tiny size: the same rows, steps and choice of rates for all."""
    results = {name: arena(name, quick) for name in ROUNDS}
    table("Long Range Arena, tiny size: accuracy in per cent on the test rows, of the weights that "
          f"did best on validation;\n{counted(results['text']['GRIL'])} where there is a ±; floor: "
          "always the most frequent class, in listops that of the\noutermost operator; minutes of "
          "one core",
          ("task", "model"),
          {(name, label): rs for name, each in results.items() for label, rs in each.items()},
          {"rate": first("lr", "g"), "parameters": first("parameters", ","),
           "steps": first("steps", ","), "test": mean("test_accuracy", digits=1),
           "floor": lambda rs: f"{floor(rs[0]):.1f}", "minutes": minutes,
           "paper's GRIL": {(name, "GRIL"): LRA[name].paper_accuracy for name in results
                            if name != "listops"}})             # shorter rows than the paper's
    figure, axes = plt.subplots(1, 1 + len(ROUNDS), figsize=(13, 3))
    for ax, (name, each) in zip(axes, results.items()):
        for (label, rs), color in zip(each.items(), HUES):
            band(ax, rs, "accuracy", color, label)
        ax.axhline(floor(rs[0]), color="black", ls=":", lw=1, label="floor")
        ax.set(title=name, xlabel="optimiser step", xlim=(0, None))
    axes[0].set_ylabel("validation accuracy, %")
    tests = {name: [dict(zip(each, scores)) for scores in
                    zip(*(numbers(rs, "test_accuracy") for rs in each.values()))]
             for name, each in results.items()}
    bars(axes[-1], tests, {label: label for label in ARENA})
    axes[-1].get_legend().remove()
    axes[-1].set(title="test, weights chosen by validation", ylabel="test accuracy, %")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncol=4)
    finish(figure, "lra", quick)


def floor(result):
    """What always the most frequent class scores, in listops that of the outermost operator."""
    return result.get("outermost", result["most_frequent"])


def arena(name, quick):
    """label -> results on one task, at the rate of a short sweep; within NOISE the preset's."""
    recipe, (tried, steps, seeds) = LRA[name].numbers("tiny"), ROUNDS[name]
    tried, seeds = (4, 1) if quick else (tried, seeds)

    def options(model, factor, seed=0, **more):
        rates = {key: round(factor * recipe[key], 6) for key in ("lr", "recurrent_lr")}
        return dict(task=name, model=model, **({} if factor == 1 else rates), **more, seed=seed)
    short = dict(steps=tried, warmup=tried // 6, evaluate_every=tried)
    found = sweep(ARENA, FACTORS, lambda model, factor: options(model, factor, **short),
                  lambda r: -r["validation_accuracy"], quick)
    print_table(f"{name}: validation accuracy in per cent after {tried} steps, by the rate",
                ("model", *(f"{factor * recipe['lr']:g}" for factor in FACTORS)),
                [(label, *(f"{-x:.1f}" for x in losses)) for label, losses in found.items()])
    return {label: runs([options(model, chosen(FACTORS, found[label], NOISE, 1), seed, **steps)
                         for seed in range(seeds)], quick)
            for label, model in ARENA.items()}


LANGUAGE = {"GRIL": "gril", "filter + w = 1 in GRIL's frame": "filtered",
            "w = 1 in GRIL's frame": "gril_w1", "linear attention": "linear_attention",
            "LRU": "lru", "transformer": "transformer", "Mamba": "mamba",
            "GRIL without the frame": "gril_alone"}
TEXTS = {       # sweep, steps: of the sweep's runs, of the last ones; scored: tokens, 0 for all
    "bytes": dict(kind="bytes", score="bits", unit="bits a byte", rates=RATES[1:], sweep=100,
                  steps=500, scored=0),
    "tiny": dict(kind="GPT-2 tokens", score="perplexity", unit="perplexity", rates=RATES[2:4],
                 sweep=60, steps=160, scored=65_536),   # bytes chose among these two rates alone
}


def wikitext2(quick):
    """Small language models: as many parameters and the same tokens, each with its best rate."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.4))
    for ax, recipe in zip(axes, ["bytes"] if quick else TEXTS):
        language(ax, recipe, LANGUAGE, 1, quick)
    axes[0].legend(fontsize=8)
    finish(figure, "wikitext2", quick)


def wikitext2_bytes(quick):
    """The rows on which a sentence rests, all in GRIL's frame, with several seeds."""
    figure, ax = plt.subplots(figsize=(6, 3.4))
    language(ax, "bytes", ARENA, 1 if quick else SEEDS, quick)
    ax.legend(fontsize=8)
    finish(figure, "wikitext2_bytes", quick)


def language(ax, recipe, models, seeds, quick):
    text = TEXTS[recipe]
    score, unit, title = text["score"], text["unit"], f"WikiText-2, {text['kind']}"
    rates = text["rates"][1:2] if quick else text["rates"]
    swept, steps = (4, 4) if quick else (text["sweep"], text["steps"])

    def options(model, steps, rate, tokens, validations=5, seed=0, **more):
        more |= dict(validate_tokens=1000) if quick else {}
        return dict(task="wikitext2", recipe=recipe, model=model, steps=steps, warmup=steps // 8,
                    report_tokens=1000 if quick else tokens, **more, seed=seed,
                    evaluate_every=steps // validations, lr=rate, recurrent_lr=rate / 4)
    found = sweep(models, rates, lambda model, rate: options(model, swept, rate, 1000, 1),
                  lambda r: r[f"validation_{score}"], quick)
    preset = LM["wikitext2"].numbers(recipe)["lr"]
    best = {label: chosen(rates, scores, TIE * min(scores), preset)
            for label, scores in found.items()}
    print_table(f"{title}: the sweep, {swept} steps each, validation {unit}",
                ("model", *rates),
                [(label, *(f"{x:.4g}" for x in scores)) for label, scores in found.items()])

    results = {label: runs([options(model, steps, best[label], text["scored"], seed=seed)
                            for seed in range(seeds)], quick)
               for label, model in models.items()}
    if models is LANGUAGE:
        results["GRIL, --stateful"] = runs([options("gril", steps, best["GRIL"], text["scored"],
                                                    stateful=True)], quick)

    def carried_on(results):
        key = f"stateful_{score}"
        return mean(key, digits=digits)(results) if key in results[0] else "(grows)"

    def tokens_a_second(results):
        r, seconds = results[0], spread(numbers(results, "seconds"))[0]
        return f"{r['steps'] * r['batch'] * r['length'] / seconds:,.0f}"
    r, digits = results["GRIL"][0], 3 if score == "bits" else 1
    table(f"{title}: {steps} steps of {r['batch']} blocks of {r['length']}, "
          f"{counted(results['GRIL'])}, the\nrate the best of {', '.join(map(str, rates))} in a "
          f"sweep of {swept} steps, within 1% the one\nnext to the preset's; {unit} of "
          f"{r['tokens']:,} tokens of the {r['split']} file, in blocks as in the\npaper, and with "
          "the state carried from block to block; tokens a second in training on one core,\n"
          "validations included", ("model",), results,
          {"rate": first("lr", "g"), "parameters": first("parameters", ","),
           f"{unit}, blocks": mean(f"{r['split']}_{score}", digits=digits),
           "state carried on": carried_on,
           "last training loss": lambda results: f"{last(results, 'train_loss'):.3f}",
           "tokens a second": tokens_a_second, "minutes": minutes})
    for label, color in zip(results, (*HUES, "black", "#7fb2e5", "#b07aa1", BLUE)):
        style = "--" if "stateful" in label else "-"
        band(ax, results[label], score, color, label, style=style)
    ax.set(title=title, xlabel="optimiser step", ylabel=f"validation {unit}",
           yscale="log" if score == "perplexity" else "linear")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("{x:g}")
