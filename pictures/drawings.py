"""How it works, in pictures: one prompt through the layer, what each form keeps, a prompt moving.

The commands are those of figures.py: how, forms, prompt.
"""
import os
import weakref

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.animation import PillowWriter

import train
from gril import GrilMixer, window
from machine.scan import scan
from pictures.plots import (BLUE, GREEN, GREY, HUES, ORANGE, RED, bars, finish, place,
                            print_table)
from pictures.trained import runs
from tasks import NdRegression, gradient_descent


def partial_descent(task, x, y, x_query):
    """One step on the first of a prompt's N examples: each has its N-th part of the step."""
    return gradient_descent([task.eta * x.shape[1] / task.N])(x, y, x_query)


# ------------------------------------------------------------------------------------- how it works

DARK = "#444444"
PARTS = [               # top, name, what it says; what is written beside: left, text, colour, size
    (0, "1  window", "tokens arrive one after the other; each step sees three of them, and moves "
     "on by two",
     [(20.5, "the query: its\n$y_6$ is asked for", BLUE, 9),
      (26.6, "red is positive, blue\nnegative, white zero;\nstates and products\nhave their own "
       "scale", DARK, 8)]),
    (-8.7, "2  cross-product", r"   $C_t \, Q \, C_t^T$ with $Q = e_2 e_1^T$ takes out one product "
     "of the nine: $y_t$ with $x_t$ (here t = 2)",
     [(14, "=", "black", 14), (21.8, "=", "black", 14),
      (28, "minus the\ngradient of one\nexample's loss\nat $W = 0$", DARK, 9)]),
    (-16.6, "3  state", r"$Z_t = Z_{t-1} + C_t \, Q \, C_t^T$: the sum of the products so far, "
     "minus the gradient of the first t examples' loss", []),
    (-24.5, "4  read-out", r"$o_t = β \, Z_t \, C_t \, q$ with $q = e_3$ and $β = η/N$: the "
     "gradient step's W, applied to the window's last token",
     [(0, "$β$", "black", 13), (8.3, "=", "black", 14),
      (23, "$o_5$ and explicit gradient descent (GD)\nare the same numbers; $y_6$ is not reached:\n"
       "it was one step, on five examples", DARK, 9)])]


@torch.no_grad()
def how(quick):
    """One prompt through the constructed layer: window, cross-product, state, read-out."""
    task = NdRegression(f=4, n=5)
    x, y, s = (z[0] for z in task.sample(1, torch.Generator().manual_seed(3)))
    layer = task.constructed()
    C = window(s[None], 3, 2, causal=False)[0]                  # (N, f, 3)
    Z = (C @ layer.Q @ C.mT).cumsum(0)                          # (N, f, f), the state
    o = layer(s[None])[0]                                       # (N, f), the prediction for x_{t+1}
    gd = torch.cat([partial_descent(task, x[None, :t], y[None, :t], x[None, t])
                    for t in range(1, 6)])
    errors = Z - torch.stack([y[:t].mT @ x[:t] for t in range(1, 6)]), o - gd
    print_table("One prompt, f = 4, N = 5: the state is the sum of y xᵀ, its read-out is gradient "
                "descent", ("t", "largest |Z_t - Σ y xᵀ|", "|o_t - GD|", "o_t", "GD, step η t/N",
                            "y_{t+1}"),
                [(t + 1, *(f"{error[t].abs().max():.1e}" for error in errors),
                  *(" ".join(f"{v:5.2f}" for v in z[t]) for z in (o, gd, y[1:])))
                 for t in range(5)])

    figure, ax = plt.subplots(figsize=(11, 10.6))
    blank(ax, 32.5, 31)
    tokens = [(z, 1.9 * i, f"${'xy'[i % 2]}_{i // 2 + 1}$", HUES[i % 2]) for i, z in enumerate(s)]
    product = [(C[1], 0, "$C_2$", RED), (layer.Q, 4.6, "$Q$"), (C[1].mT, 9.2, "$C_2^T$", RED),
               (y[1], 15.4, "$y_2$", ORANGE), (x[None, 1], 17, "$x_2^T$", BLUE),
               (torch.outer(y[1], x[1]), 23.2, "$y_2 x_2^T$")]
    states = [(Z_t, 6.5 * i, f"$Z_{i + 1}$", RED if i == 1 else "black") for i, Z_t in enumerate(Z)]
    answers = [(o[4], 9.9, "$o_5$"), (gd[4], 13.9, "GD"), (y[5], 18.6, "$y_6$, held out")]
    read = [(Z[4], 1.2, "$Z_5$"), (x[5], 6.3, "$x_6$", BLUE), *answers]
    for (top, name, text, beside), matrices in zip(PARTS, (tokens, product, states, read)):
        ax.text(0, top, name, fontsize=11, weight="bold", va="center")
        ax.text(5.6, top, text, fontsize=9, va="center", color=DARK)
        for left, words, color, size in beside:
            ax.text(left, top - 3.9, words, fontsize=size, va="center", color=color)
        for M, *where in matrices:
            cells(ax, M, Z.abs().max() if M.shape == (4, 4) else 0.9, top - 3.9, *where)
    for (i, j), v in np.ndenumerate(layer.Q.numpy()):
        ax.text(5.1 + j, -11.6 - i, f"{v:.0f}", ha="center", va="center", zorder=4,
                color="white" if v else "black")
    for v, left, _ in answers:
        for i, number in enumerate(v):
            ax.text(left + 1.2, -26.9 - i, f"{number:.2f}", va="center", fontsize=7)
    for i in range(5):                                          # brackets of the windows
        left, low, color = 3.8 * i, -6.8 + 0.55 * (i % 2), RED if i == 1 else GREY
        ax.plot([left, left, left + 4.8, left + 4.8], [low + 0.25, low, low, low + 0.25],
                color=color, lw=1.8 if i == 1 else 1)
        ax.text(left + 2.4, low - 0.15, f"$C_{i + 1}$", ha="center", va="top", color=color)
    for i in range(1, 5):
        arrow(ax, (6.5 * i - 2.3, -20.5), (6.5 * i - 0.2, -20.5))
        ax.text(6.5 * i - 1.25, -20.8, f"$+ y_{i + 1} x_{i + 1}^T$", ha="center", va="top",
                fontsize=8, color=RED if i == 1 else DARK)
    finish(figure, "how", quick, layout="none")


def arrow(ax, start, end):
    ax.annotate("", end, start, arrowprops=dict(arrowstyle="->", color=GREY))


def cells(ax, M, limit, middle, left, label, color="black"):
    """A matrix, or a vector as a column, in unit cells around the height of its middle."""
    M = M[:, None] if M.ndim == 1 else M
    rows, columns = M.shape
    low, high, right = middle - rows / 2, middle + rows / 2, left + columns
    ax.imshow(M.numpy(), extent=(left, right, low, high), vmin=-limit, vmax=limit, zorder=2)
    edge = dict(ec=RED, lw=2) if color == RED else dict(ec=GREY, lw=0.6)
    ax.add_patch(plt.Rectangle((left, low), columns, rows, fill=False, zorder=3, **edge))
    ax.text(left + columns / 2, high + 0.35, label, ha="center", va="bottom", color=color)


def blank(ax, width, height):
    ax.set(xlim=(-0.3, width), ylim=(-height, 0.3), aspect="equal")
    ax.axis("off")


# ----------------------------------------------------------------------------- what each form keeps

def held_numbers(h, T, form):
    """Numbers a head of width h keeps for its backward pass over T tokens; a stream's state."""
    mixer = GrilMixer(h, h, 1, gate="real", form="chunk" if form == "step" else form)
    v, k, u = (torch.randn(1, T, 1, h, requires_grad=True) for _ in range(3))
    state = mixer.start(v[:, 0])
    if form == "step":
        return sum(part.numel() for part in state)
    held = weakref.WeakSet()                    # what autograd keeps; gone when it lets it go

    def hold(x):
        def give():
            return x
        held.add(give)
        return give
    with torch.autograd.graph.saved_tensors_hooks(hold, lambda give: give()):
        log_rho, theta, _ = mixer.gates()
        result = mixer.recur(v, k, u, log_rho, theta, state)    # noqa: F841, alive while counted
    storages = {give().untyped_storage()._cdata: give() for give in held}
    return sum(x.untyped_storage().nbytes() // x.element_size() for x in storages.values())


FORMS = dict(loop="one state after the other;\nfor a gradient, all of them",
             scan="all T states at once", chunk="a state per chunk, and\nproducts inside it",
             step="one state and the last\nw - 1 tokens, for ever")
MARKS = {"a state, d × m": dict(fc=BLUE, ec="white", alpha=0.85),
         "a state kept only for a gradient": dict(fc="white", ec=BLUE, ls=":"),
         "products of keys and read-outs": dict(fc=GREEN, ec="white", alpha=0.5),
         "a token: v, k, u": dict(fc=ORANGE, ec=ORANGE)}


def forms(quick):
    """What each form of the recurrence keeps: drawn for eight steps, and measured."""
    T, widths = 64 if quick else 1024, (4, 16) if quick else (4, 16, 64)
    numbers = {form: [held_numbers(h, T, form) for h in widths] for form in FORMS}
    print_table(f"Numbers kept by one head of width h over {T:,} tokens (w = 3, real gate), "
                "measured; by step whatever the length",
                ("form", *(f"h = {h}" for h in widths), *(f"a token, h = {h}" for h in widths)),
                [(form, *(f"{n:,}" for n in row),
                  *("" if form == "step" else f"{n / T:.1f}" for n in row))
                 for form, row in numbers.items()])

    figure, axes = plt.subplots(1, 5, figsize=(11.5, 3.3), width_ratios=(1, 1, 1, 1, 1.6))
    for ax, form in zip(axes, FORMS):
        draw_form(ax, form)
    ax = axes[-1]
    for form, color, size in (("loop", GREY, 9), ("scan", BLUE, 4), ("chunk", GREEN, 4)):
        ax.plot(widths, [n / T for n in numbers[form]], "o-", ms=size, color=color,
                label=f"gril_{form}")                           # loop and scan keep the same
    ax.set_xscale("log", base=2)
    ax.set(title="measured, for a backward pass", xlabel="width h of a head", yscale="log",
           ylabel="numbers kept a token")
    ax.set_xticks(widths, widths)
    ax.minorticks_off()
    ax.legend(fontsize=7)
    figure.legend([plt.Rectangle((0, 0), 1, 1, **style) for style in MARKS.values()], MARKS,
                  loc="outside lower center", ncol=4, fontsize=8)
    finish(figure, "forms", quick)


def draw_form(ax, form):
    """The tokens of eight steps below, what is kept of them above."""
    whole, hollow, product, token = MARKS.values()
    past, unseen = hollow if form == "loop" else whole, dict(fc="none", ec=GREY, ls=":")
    boxes = [(t + 0.2, -6.7, 0.5, 1.6, unseen if form == "step" and t < 6 else token)
             for t in range(8)]                                 # left, top, width, height, style
    if form in ("loop", "scan"):
        boxes += [(0.72 * t + 0.1, -1.2 - 0.35 * t, 2.2, 2.2, past if t < 7 else whole)
                  for t in range(8)]
    elif form == "chunk":
        boxes += [(left, -0.6, 2.2, 2.2, whole) for left in (0.05, 4.05)]
        boxes += [(left, -3.6 - 0.7 * t, 0.9 * (t + 1), 0.7, product)
                  for left in (0.2, 4.2) for t in range(4)]
    else:
        boxes.append((5.6, -2.6, 2.2, 2.2, whole))
    blank(ax, 8.5, 9)
    for left, top, width, height, style in boxes:
        ax.add_patch(plt.Rectangle((left, top - height), width, height, lw=0.8, **style))
    arrow(ax, (0, -8.75), (8.2, -8.75))
    ax.text(8.3, -8.75, "t", va="center", fontsize=8, color=GREY)
    ax.text(4.2, -9.6, FORMS[form], ha="center", va="top", fontsize=8)
    ax.set_title(f"gril_{form}")


# ---------------------------------------------------------------------------------- a prompt moving

def prompt(quick):
    """One prompt, example by example: the state fills, the prediction for a fixed query nears the
    truth, GD beside it."""
    f, N, tasks = 5, 6 if quick else 30, 1_000
    (result,) = runs([dict(task="nd_regression", f=f, n=N, seed=0)], quick)
    task, model, _ = train.load(result["folder"])
    x, y, s = task.sample(tasks, torch.Generator().manual_seed(4))
    ours, gd = ([torch.zeros(tasks, f)] for _ in range(2))      # after t examples
    with torch.no_grad():
        for t in range(1, N + 1):
            ours.append(model.query(torch.cat([s[:, :2 * t], s[:, -1:]], 1)))
            gd.append(partial_descent(task, x[:, :t], y[:, :t], x[:, -1]))
        C = window(s[:1], 3, 2, causal=False)
        Z = scan(model.A, C @ model.Q @ C.mT)[0] * model.beta * model.q[2]
    Z = torch.cat([torch.zeros(1, f, f), Z])                    # β q₃ Z_t: the W read, (N+1, f, f)
    answers = {"GRIL, trained": torch.stack(ours), "GD, explicit": torch.stack(gd)}
    errors = {name: 0.5 * (o - y[:, -1]).square().mean(-1) for name, o in answers.items()}
    losses = {(name, what): loss for name, error in errors.items() for what, loss in
              (("this prompt", error[:, 0]), (f"mean of {tasks:,}", error.mean(1)))}
    apart = torch.sub(*answers.values())[:, 0].abs().amax(-1)   # (N+1,), of this prompt
    print_table(f"The fixed query's loss after t examples, f = {f}, N = {N}; GD's step is η t/N, "
                "as a sum over examples has it",
                ("t", *map(", ".join, losses), "largest difference of predictions"),
                [(t, *(f"{z[t]:.4f}" for z in (*losses.values(), apart)))
                 for t in range(N + 1) if t in (0, 1, 2, 5, 10, 20, N)])

    W = torch.linalg.lstsq(x[0].double(), y[0].double()).solution.mT
    this = {name: o[:, 0] for name, o in answers.items()}
    figure, writer = plt.figure(figsize=(9.6, 4.8)), PillowWriter(fps=4)
    path = place("prompt.gif", quick)
    with writer.saving(figure, path, dpi=100):
        for t in [*range(N + 1)] + [N] * (0 if quick else 10):  # the end is held
            draw_prompt(figure, t, s[0], Z, W, y[0, -1], this, losses)
            writer.grab_frame()
    print(f"\nmoving    {os.path.relpath(path)}, {path.stat().st_size / 1e6:.2f} MB")
    plt.close(figure)


def draw_prompt(figure, t, s, Z, W, truth, answers, losses):
    """The prompt s after t examples, the state beside W, the answers, the losses so far."""
    N, f = len(Z) - 1, len(W)
    figure.clear()
    figure.suptitle(f"after {t} of {N} examples", fontsize=11)
    axes = figure.subplot_mosaic(
        "ssss\nZWal", height_ratios=(1, 2.6), width_ratios=(1, 1, 1.5, 1.6),
        gridspec_kw=dict(left=0.03, right=0.98, top=0.84, bottom=0.12, hspace=0.62, wspace=0.3))
    strip, left, right, bar_ax, loss_ax = axes.values()
    tokens = s.mT.clone()
    tokens[:, 2 * t:-1] = 0                                     # still to come
    strip.imshow(tokens.numpy(), vmin=-1.2, vmax=1.2, aspect="auto")
    for start, width in ((2 * N - 0.5, 1), (2 * t - 2.5, 2))[:2 if t else 1]:
        strip.add_patch(plt.Rectangle((start, -0.5), width, f, fill=False, lw=2, clip_on=False))
    every = [1, *range(5, N, 5)]
    strip.set_xticks([2 * i - 1.5 for i in every] + [2 * N],
                     [f"$x_{{{i}}}, y_{{{i}}}$" for i in every] + ["query"], fontsize=8)
    strip.set(yticks=[], title="the prompt; framed, what step t sees: $x_t$, $y_t$ and the query")
    for ax, M, title in ((left, Z[t], "the state, $β q_3 Z_t$"), (right, W, "the task's W")):
        ax.imshow(M.numpy(), vmin=-2, vmax=2)
        ax.set(xticks=[], yticks=[], title=title)

    coordinates = {i + 1: [{name: o[t, i].item() for name, o in answers.items()}] for i in range(f)}
    bars(bar_ax, coordinates, {name: name for name in answers})
    places, bound = np.arange(f), max(z.abs().max().item() for z in (truth, *answers.values()))
    bar_ax.hlines(truth.numpy(), places - 0.42, places + 0.42, color="black", lw=2, label="truth")
    bar_ax.axhline(0, color=GREY, lw=0.6)
    bar_ax.set(title="prediction for the query", ylim=(-1.25 * bound, 1.8 * bound),
               xlabel="coordinate of y")
    bar_ax.legend(fontsize=7, loc="upper left", ncol=2, columnspacing=0.8, handlelength=1.2)
    for (name, prompts), loss in losses.items():
        color, style = (BLUE, "-") if "GRIL" in name else (ORANGE, "--")
        width, label = (2.2, name) if prompts == "this prompt" else (0.9, None)
        loss_ax.plot(loss[:t + 1], color=color, ls=style, lw=width, label=label)
    highest = max(loss.max().item() for loss in losses.values())
    loss_ax.set(title="loss on the query", xlabel="examples seen", xlim=(0, N),
                ylim=(0, 1.6 * highest))
    loss_ax.legend(fontsize=7, loc="upper right", title=f"thin: {prompts} prompts",
                   title_fontsize=7)
