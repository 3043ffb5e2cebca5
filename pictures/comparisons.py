"""GRIL beside other sequence models: in context (Fig. 3 C, Fig. 6, Table 3), and on real data at a laptop's size.

The commands are those of figures.py: fig3c, nd_comparison, model_comparison; lra, gates, wikitext2. Every model of a table
gets the same examples, and where a rate is chosen, the best of the same few by validation.
"""
import math

import matplotlib.pyplot as plt
import torch

import train
from baselines import state_size
from lra import LRA
from pictures.plots import (BLUE, GREEN, GREY, ORANGE, RED, bars, curves, finish, flattened, minutes, pm, print_table,
                            spread)
from pictures.trained import runs, seeds

# ---------------------------------------------------------------------------------------------------- in-context tasks

RATES = (1e-3, 3e-3, 1e-2, 3e-2)
STEPS, BATCH = {"fig3c": 3000, "nd_comparison": 1000, "model_comparison": 400}, 64     # the budget of every model


def budget(name, quick, factor=1):
    return dict(steps=4 if quick else int(factor * STEPS[name]), batch=BATCH)


def rated(options, rate):
    """One rate for all parameters; GRIL's gate keeps its tenth, as in its recipe."""
    return dict(options, lr=rate, recurrent_lr=rate / 10 if options["model"] == "gril" else rate)


def sweep(models, rates, options, loss, quick):
    """The best of the same few rates for each model, label -> rate; and what every rate came to, label -> losses."""
    swept = runs([options(model, rate) for model in models.values() for rate in rates], quick, sweep=True)
    found = [math.inf if "diverged" in r else loss(r) for r in swept]
    found = dict(zip(models, zip(*[iter(found)] * len(rates))))
    return {label: rates[losses.index(min(losses))] for label, losses in found.items()}, found


def compare(name, models, quick):
    """label -> results of 5 seeds, each model with the rate that does best with seed 0 on validation tasks.

    The sweep is as long as the runs: after a third of the steps all rates of some models are still at the zero predictor,
    and noise would choose.
    """
    rates, spent = RATES[1:2] if quick else RATES, budget(name, quick)
    picked, _ = sweep(models, rates, lambda options, rate: rated(dict(options, **spent, seed=0), rate),
                      lambda r: float(curves([r], "loss")[1][-1]), quick)
    return repeated(models, picked, spent, seeds(quick), quick)


def repeated(models, rates, spent, seeds, quick):
    results = runs([rated(dict(options, **spent, seed=s), rates[label])
                    for label, options in models.items() for s in seeds], quick)
    return {label: results[i * len(seeds):(i + 1) * len(seeds)] for i, label in enumerate(models)}


def carried(folder):
    """Real numbers that the model of a run carries on from token to token: its state, GRIL's last w - 1 tokens too."""
    task, model, _ = train.load(folder)
    tokens = task.sample(1, torch.Generator()).s
    if hasattr(model, "run"):
        return state_size(model, tokens)
    return model.A.numel() + (0 if task.name == "scalar_regression" else 2 * task.f)


def comparison_row(label, results, paper):
    one = results[0]
    return (label, f"{one['lr']:g}", pm([r["loss"] for r in results]), pm([r["loss"] / r["zero_loss"] for r in results]),
            pm([r["loss"] / r["gd_loss"] for r in results]), f"{one['parameters']:,}", f"{carried(one['folder']):,}",
            f"{spread([r['seconds'] for r in results])[0]:.0f}", paper, flattened(results))


COMPARISON = ("model", "rate", "loss", "÷ zero predictor", "÷ GD", "parameters", "state", "seconds", "paper", "last tenth")


def comparison(name, title, models, paper, longer, quick):
    """Table and picture: every model with the same number of tasks, its curve and where it ends."""
    results = compare(name, models, quick)
    seen = STEPS[name] * BATCH
    sweep = ", ".join(f"{rate:g}" for rate in RATES)
    print_table(f"{title}: f = N = 10, {seen:,} tasks seen by every model ({STEPS[name]:,} steps of {BATCH}), the rate the\n"
                f"best of {sweep} with seed 0 (validation loss), then 5 seeds; loss on 10,000 fresh tasks, the same\n"
                "for all; state in real numbers, seconds of one run on one shared core, last tenth: change of the validation\n"
                "loss over it (the rate goes to 0, so flat is not yet finished: see the table below)", COMPARISON,
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
    models = {label: dict(task="scalar_regression", **options) for label, options in models.items()}
    comparison("fig3c", "scalar regression", models, {"GRIL": "0.209 ± 0.001"},
               ("GRIL", "S5", "Griffin", "linear attention, 2 layers", "transformer, 2 layers"), quick)
    print("\nThe paper shows the others in a figure, without numbers. Its scalar layer has no version with two layers:"
          "\nhere neither.")


def nd_comparison(quick):
    models = {"GRIL, 1 layer": dict(task="nd_regression", model="gril"),
              "GRIL, 2 layers": dict(task="multistep_regression", model="gril", layers=2),
              **{label: dict(task="nd_regression", **options) for label, options in OTHERS.items()},
              "linear attention on pairs": dict(task="nd_regression", model="linear_attention_pairs")}
    comparison("nd_comparison", "multivariate regression", models,
               {"GRIL, 1 layer": "0.206 ± 0.001", "S5": "0.426", "Mamba": "0.539", "Griffin": "0.567"},
               ("GRIL, 1 layer", "GRIL, 2 layers", "S5", "transformer, 2 layers", "linear attention on pairs"), quick)
    print("\nThe paper shows the others in a figure, without numbers. GRIL with 2 layers stands beside two steps of gradient"
          "\ndescent (÷ GD is of those). Pairs are tokens (x_i, y_i), (x_query, 0) instead of x_1, y_1, x_2, …: a window"
          "\nmade by hand.")


GRID = {        # label -> (options, the paper's loss); Griffin's width is not given: 10, the tokens' own, has all these heads
    **{f"Mamba, dim {H}, {l} layer{'s' * (l > 1)}": (dict(model="mamba", width=H, layers=l), loss)
       for H, l, loss in ((32, 1, 0.5388), (64, 1, 0.4126), (64, 2, 0.4179), (128, 4, 0.4157))},
    **{f"Griffin, {heads} head{'s' * (heads > 1)}, {l} layer{'s' * (l > 1)}":
       (dict(model="griffin", width=10, heads=heads, layers=l), loss)
       for heads, l, loss in ((1, 1, 0.7490), (2, 1, 0.5665), (2, 2, 0.4114), (5, 1, 0.6047))},
    **{f"S5, {l} layer{'s' * (l > 1)}": (dict(model="s5", layers=l), 0.426) for l in (1, 2, 4, 6)},
    **{f"S5, size {H}": (dict(model="s5", width=H), 0.426) for H in (10, 64, 128, 256)},
}


def model_comparison(quick):
    """Sizes of three families. They are many, and large: fewer tasks, the family's rate of nd_comparison."""
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
        results |= repeated({label: options}, rates, spent, range(1) if label in large else seeds(quick), quick)
    print_table(f"Sizes, multivariate regression: {tasks} ({spent['steps']:,} steps of {spent['batch']}), "
                "the rate of the family in nd_comparison, 5 seeds (± 0.0000: one seed)", COMPARISON,
                [comparison_row(label, rs, f"{GRID[label][1]:.4f}") for label, rs in results.items()])
    figure, ax = plt.subplots(figsize=(9, 4.8), layout="constrained")
    labels = list(results)
    means, stds = zip(*(spread([r["loss"] / r["zero_loss"] for r in results[label]]) for label in labels))
    colors = {"Mamba": GREEN, "Griffin": RED, "S5": BLUE}
    ax.barh(labels, means, xerr=stds, color=[colors[label.split(",")[0]] for label in labels], capsize=2)
    ax.plot([GRID[label][1] / (10 / 24) for label in labels], range(len(labels)), "D", color="black", ms=4, ls="none",
            label="the paper's loss ÷ 10/24")
    ax.axvline(1, color=GREY, ls=":", label="zero predictor")
    ax.axvline(spread([r["gd_loss"] / r["zero_loss"] for r in results[labels[0]]])[0], color=ORANGE, ls="--",
               label="gradient descent, one step")
    ax.invert_yaxis(), ax.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.4, -0.1), ncol=3)
    ax.set(xlabel="loss ÷ zero predictor's", xlim=(0, 1.9),
           title=f"Sizes without a projection, multivariate regression, {tasks}")
    finish(figure, "model_comparison", quick)


# ------------------------------------------------------------------------------------------ real data, a laptop's size

ARENA = {"GRIL": "gril", "linear attention (w = 1)": "linear_attention", "LRU": "lru", "transformer": "transformer"}
COLORS = dict(zip(ARENA, (BLUE, ORANGE, GREEN, RED)))
FACTORS = 0.3, 1, 3                                             # of the preset's rates


SWEEP = {"text": 200, "retrieval": 100, "image": 300}           # steps of each rate tried; elsewhere all models end alike


def lra(quick):
    """The five tasks at their tiny size: the same rows in the same order, steps and choice of rates for every model."""
    names = ("listops",) if quick else tuple(LRA)
    results = {}
    for name in names:
        recipe = LRA[name].recipes["tiny"]

        def options(model, factor, **more):
            rates = {key: round(factor * recipe[key], 6) for key in ("lr", "recurrent_lr")} if factor != 1 else {}
            return dict(task=name, model=model, **rates, **more, seed=0)
        best = dict.fromkeys(ARENA, 1)
        if name in SWEEP:
            steps = SWEEP[name]
            best, found = sweep(ARENA, FACTORS, lambda model, factor: options(model, factor, steps=steps, warmup=steps // 6,
                                evaluate_every=steps), lambda r: -r["validation_accuracy"], quick)
            print_table(f"{name}: validation accuracy in per cent after {steps} steps, by the rate",
                        ("model", *(f"{factor * recipe['lr']:g}" for factor in FACTORS)),
                        [(label, *(f"{-x:.1f}" for x in losses)) for label, losses in found.items()])
        results[name] = dict(zip(ARENA, runs([options(model, best[label]) for label, model in ARENA.items()], quick)))
    print_table("Long Range Arena, tiny size, seed 0: accuracy in per cent on the test rows, of the weights that did best on\n"
                "validation; beside it the best over the run on (at most 1,000) test rows, as the paper reports; minutes of\n"
                "one core", ("task", "model", "rate", "parameters", "steps", "test", "best on test", "most frequent class",
                             "minutes", "paper's GRIL"),
                [(name, label, f"{r['lr']:g}", f"{r['parameters']:,}", f"{r['steps']:,}", f"{r['test_accuracy']:.1f}",
                  f"{r['best_test_accuracy']:.1f}", f"{r['most_frequent']:.1f}", minutes(r),
                  LRA[name].paper_accuracy if label == "GRIL" else "")
                 for name, rows in results.items() for label, r in rows.items()])
    several = [name for name in names if len(curves([results[name]["GRIL"]], "accuracy")[0]) > 1]
    figure, axes = plt.subplots(1, len(several) + 1, figsize=(2.7 * len(several) + 4.5, 3), layout="constrained",
                                width_ratios=[1] * len(several) + [1.7])
    for ax, name in zip(axes, several):
        for label, r in results[name].items():
            steps, accuracy, _ = curves([r], "accuracy")
            ax.plot(steps, accuracy, "o-", ms=2.5, color=COLORS[label])
        ax.axhline(r["most_frequent"], color="black", ls=":", lw=1)
        ax.set(title=name, xlabel="optimiser step", xlim=(0, None))
    axes[0].set_ylabel("validation accuracy, %")
    bars(axes[-1], names, {label: [[results[name][label]["test_accuracy"]] for name in names] for label in ARENA})
    for k, name in enumerate(names):
        axes[-1].plot([k - 0.42, k + 0.42], [results[name]["GRIL"]["most_frequent"]] * 2, "k:", lw=1,
                      label="most frequent class" if k == 0 else None)
    axes[-1].set(title="test, weights chosen by validation", ylabel="test accuracy, %"), axes[-1].get_legend().remove()
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside lower center", ncol=5)
    finish(figure, "lra", quick)


GATES = {"real, J = 8": dict(gate="real"), "complex, J = 8": dict(gate="complex"), "J = 1": dict(J=1), "J = 32": dict(J=32)}


def gates(quick):
    """What the paper leaves open: real or complex gates, one block or many. Short runs, so that eight of them can be paid."""
    short = {"listops": dict(steps=1000), "image": dict(steps=400, batch=16, lr=4e-3, max_phase=2 * math.pi)}
    names = list(short)[:1] if quick else list(short)
    rows, accuracies = [], {name: [] for name in names}
    for name in names:
        settings = [dict(gate=LRA[name].recipes["tiny"]["gate"]) | change for change in GATES.values()]
        for r in runs([dict(task=name, **short[name], **change, seed=0) for change in settings], quick):
            _, loss, _ = curves([r], "loss")
            rows.append((name, r["gate"], r["J"], r["P"] // r["J"], f"{r['parameters']:,}", f"{r['validation_accuracy']:.1f}",
                         f"{loss[-1]:.3f}", f"{r['test_accuracy']:.1f}", minutes(r)))
            accuracies[name].append([r["validation_accuracy"]])
    print_table("Gates and blocks at tiny size, seed 0; ListOps 1,000 steps of 32 rows, Image 400 steps of 16,\n"
                "rate 0.004, angles up to 2π",
                ("task", "gate", "J", "P / J", "parameters", "best validation accuracy", "last validation loss",
                 "test accuracy", "minutes"), rows)
    figure, ax = plt.subplots(figsize=(7, 3), layout="constrained")
    bars(ax, list(GATES), accuracies)
    ax.set(ylabel="best validation accuracy, %", title="Gates and blocks at tiny size")
    finish(figure, "gates", quick)


LANGUAGE = {"GRIL": "gril", "w = 1 in GRIL's frame": "gril_w1", "linear attention": "linear_attention", "LRU": "lru",
            "transformer": "transformer", "Mamba": "mamba", "GRIL without the frame": "gril_alone"}
TEXTS = {       # recipe -> tokens, score, rates, steps of the sweep and of the run, tokens scored (0: all)
    "bytes": dict(kind="bytes", score="bits", unit="bits a byte", rates=RATES, sweep=100, steps=500, scored=0),
    "tiny":  dict(kind="GPT-2 tokens", score="perplexity", unit="perplexity", sweep=60, steps=160, scored=65_536,
                  rates=RATES[1:3]),                            # bytes chose among these two alone
}


def wikitext2(quick):
    """A small language model: every mixer with GRIL's number of parameters, the same tokens, the best of the same rates."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for ax, (recipe, text) in zip(axes, list(TEXTS.items())[:1 if quick else 2]):
        score, unit, rates = text["score"], text["unit"], text["rates"][1:2] if quick else text["rates"]

        def options(model, steps, rate, tokens, validations=5, **more):
            more |= dict(validate_tokens=1000) if quick else {}
            return dict(task="wikitext2", recipe=recipe, model=model, steps=steps, warmup=steps // 8,
                        report_tokens=1000 if quick else tokens, **more, seed=0, evaluate_every=steps // validations,
                        lr=rate, recurrent_lr=rate / 4)
        best, found = sweep(LANGUAGE, rates, lambda model, rate: options(model, text["sweep"], rate, 1000, validations=1),
                            lambda r: r[f"validation_{score}"], quick)
        print_table(f"WikiText-2, {text['kind']}: the sweep, {text['sweep']} steps each, validation {unit}",
                    ("model", *rates), [(label, *(f"{x:.4g}" for x in scores)) for label, scores in found.items()])

        jobs = {label: options(model, text["steps"], best[label], text["scored"]) for label, model in LANGUAGE.items()}
        jobs["GRIL, --stateful"] = options("gril", text["steps"], best["GRIL"], text["scored"], stateful=True)
        results = dict(zip(jobs, runs(jobs.values(), quick)))
        for label, color in zip(results, (BLUE, "black", ORANGE, GREEN, RED, GREY, "#7fb2e5", BLUE)):
            steps, scores, _ = curves([results[label]], score)
            ax.plot(steps, scores, "--" if "stateful" in label else "o-", ms=2.5, color=color, label=label)
        ax.set(title=f"WikiText-2, {text['kind']}", xlabel="optimiser step", ylabel=f"validation {unit}",
               yscale="log" if score == "perplexity" else "linear")
        ax.yaxis.set_major_formatter("{x:g}"), ax.yaxis.set_minor_formatter("{x:g}")
        r = results["GRIL"]
        print_table(f"WikiText-2, {text['kind']}: {text['steps']} steps of {r['batch']} blocks of {r['length']}, seed 0, the "
                    f"rate the best of\n{', '.join(map(str, rates))} in a sweep of {text['sweep']} steps; {unit} of "
                    f"{r['tokens']:,} tokens of the {r['split']} file, in blocks as in\nthe paper, and with the state carried "
                    "from block to block; tokens a second in training on one core, validations included",
                    ("model", "rate", "parameters", f"{unit}, blocks", "state carried on", "last training loss",
                     "tokens a second", "minutes"),
                    [(label, f"{r['lr']:g}", f"{r['parameters']:,}", f"{r[r['split'] + '_' + score]:.4g}",
                      f"{r[f'stateful_{score}']:.4g}" if f"stateful_{score}" in r else "(grows)",
                      f"{curves([r], 'train_loss')[1][-1]:.3f}", f"{r['steps'] * r['batch'] * r['length'] / r['seconds']:,.0f}",
                      minutes(r)) for label, r in results.items()])
    axes[0].legend(fontsize=8)
    finish(figure, "wikitext2", quick)
