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
from gril import GrilMixer, scan, window
from pictures.plots import BLUE, GREEN, GREY, ORANGE, RED, finish, place, print_table
from pictures.trained import runs
from tasks import NdRegression, gradient_descent

DARK = "#444444"
SIDE = dict(va="center", fontsize=9, color=DARK)                # text beside a drawing


def cells(ax, M, x, y, limit, label="", color="black", edge=None):
    """A matrix as coloured unit cells, its upper left corner at (x, y); red is positive."""
    M = torch.atleast_2d(M.detach())
    rows, columns = M.shape
    ax.imshow(M.numpy(), extent=(x, x + columns, y - rows, y), vmin=-limit, vmax=limit, zorder=2)
    ax.add_patch(plt.Rectangle((x, y - rows), columns, rows, fill=False, ec=edge or GREY,
                               lw=2 if edge else 0.6, zorder=3))
    ax.text(x + columns / 2, y + 0.35, label, ha="center", va="bottom", color=color)


def blank(ax, width, height):
    ax.set(xlim=(-0.3, width), ylim=(-height, 0.3), aspect="equal")
    ax.axis("off")


def how(quick):
    """One prompt through the constructed layer: window, cross-product, state, read-out."""
    f, N, shown = 4, 5, 2
    task = NdRegression(f=f, n=N)
    x, y, s = (z[0] for z in task.sample(1, torch.Generator().manual_seed(3)))
    layer = task.constructed()
    C = window(s[None], 3, 2, causal=False)[0]                  # (N, f, 3)
    Z = (C @ layer.Q @ C.mT).detach().cumsum(0)                 # (N, f, f), the state
    with torch.no_grad():
        o = layer(s[None])[0]                                   # (N, f), the prediction for x_{t+1}
    gd = torch.stack([gradient_descent([task.eta * t / N])(x[None, :t], y[None, :t], x[None, t])[0]
                      for t in range(1, N + 1)])

    def vector(v):
        return " ".join(f"{x:5.2f}" for x in v)
    print_table("One prompt, f = 4, N = 5: the state is the sum of y xᵀ, its read-out is gradient "
                "descent", ("t", "largest |Z_t - Σ y xᵀ|", "|o_t - GD|", "o_t", "GD, step η t/N",
                            "y_{t+1}"),
                [(t, f"{(Z[t - 1] - y[:t].mT @ x[:t]).abs().max():.1e}",
                  f"{(o[t - 1] - gd[t - 1]).abs().max():.1e}",
                  vector(o[t - 1]), vector(gd[t - 1]), vector(y[t])) for t in range(1, N + 1)])

    figure, ax = plt.subplots(figsize=(11, 10.6))
    blank(ax, 32.5, 31)
    limit, big = 0.9, Z.abs().max().item()                      # colour scales of tokens, of states
    for place, name, text in (
            (0, "1  window",
             "tokens arrive one after the other; each step sees three of them, and moves on by "
             "two"),
            (-8.7, "2  cross-product",
             "   $C_t \\, Q \\, C_t^T$ with $Q = e_2 e_1^T$ takes out one product of the nine: "
             f"$y_t$ with $x_t$ (here t = {shown})"),
            (-16.6, "3  state",
             "$Z_t = Z_{t-1} + C_t \\, Q \\, C_t^T$: the sum of the products so far, "
             "minus the gradient of the first t examples' loss"),
            (-24.5, "4  read-out",
             "$o_t = β \\, Z_t \\, C_t \\, q$ with $q = e_3$ and $β = η/N$: "
             "the gradient step's W, applied to the window's last token")):
        ax.text(0, place, name, fontsize=11, weight="bold", va="center")
        ax.text(5.6, place, text, **SIDE)
    for place in ((14.3, -12.6), (22.1, -12.6), (8.6, -28.4)):
        ax.text(*place, "=", ha="center", va="center", fontsize=14)

    top = -1.9                                                                      # 1  window
    for i in range(2 * N + 1):
        name, color = ("x", BLUE) if i % 2 == 0 else ("y", ORANGE)
        cells(ax, s[i][:, None], 1.9 * i, top, limit, f"${name}_{i // 2 + 1}$", color)
    ax.text(3.8 * N + 1.5, top - 2, f"the query: its\n$y_{N + 1}$ is asked for", va="center",
            color=BLUE)
    ax.text(26.6, top - 2, "red is positive, blue\nnegative, white zero;\nstates and products\n"
            "have their own scale", va="center", fontsize=8, color=DARK)
    for t in range(1, N + 1):
        left, right, low = 3.8 * (t - 1), 3.8 * (t - 1) + 4.8, top - 4.35 - 0.55 * (t % 2)
        color, width = (RED, 1.8) if t == shown else (GREY, 1)
        ax.plot([left, left, right, right], [low + 0.25, low, low, low + 0.25], color=color,
                lw=width)
        ax.text((left + right) / 2, low - 0.15, f"$C_{t}$", ha="center", va="top", color=color)

    top, C_t, x_t, y_t = -10.6, C[shown - 1], x[shown - 1], y[shown - 1]          # 2  cross-product
    cells(ax, C_t, 0, top, limit, f"$C_{shown}$", RED, RED)
    cells(ax, layer.Q, 4.6, top - 0.5, limit, "$Q$")
    for (i, j), v in np.ndenumerate(layer.Q.detach().numpy()):
        ax.text(5.1 + j, top - 1 - i, f"{v:.0f}", ha="center", va="center", zorder=4,
                color="white" if v else "black")
    cells(ax, C_t.mT, 9.2, top - 0.5, limit, f"$C_{shown}^T$", RED, RED)
    cells(ax, y_t[:, None], 15.4, top, limit, f"$y_{shown}$", ORANGE)
    cells(ax, x_t[None], 17, top - 1.5, limit, f"$x_{shown}^T$", BLUE)
    cells(ax, torch.outer(y_t, x_t), 23.2, top, big, f"$y_{shown} x_{shown}^T$")
    ax.text(28, top - 2, "minus the\ngradient of one\nexample's loss\nat $W = 0$", **SIDE)

    top = -18.5                                                                     # 3  state
    for t in range(1, N + 1):
        left, mark = 6.5 * (t - 1), RED if t == shown else None
        cells(ax, Z[t - 1], left, top, big, f"$Z_{t}$", mark or "black", mark)
        if t < N:
            ax.annotate("", (left + 6.3, top - 2), (left + 4.2, top - 2),
                        arrowprops=dict(arrowstyle="->", color=GREY))
            ax.text(left + 5.25, top - 2.3, f"$+ y_{t + 1} x_{t + 1}^T$", ha="center", va="top",
                    fontsize=8, color=RED if t + 1 == shown else DARK)

    top = -26.4                                                                     # 4  read-out
    ax.text(0, top - 2, "$β$", va="center", fontsize=13)
    cells(ax, Z[-1], 1.2, top, big, f"$Z_{N}$")
    cells(ax, C[-1, :, 2:], 6.3, top, limit, f"$x_{N + 1}$", BLUE)
    for left, v, label in ((9.9, o[-1], f"$o_{N}$"), (13.9, gd[-1], "GD"),
                           (18.6, y[-1], f"$y_{N + 1}$, held out")):
        cells(ax, v[:, None], left, top, limit, label)
        for i, number in enumerate(v):
            ax.text(left + 1.2, top - 0.5 - i, f"{number:.2f}", va="center", fontsize=7)
    ax.text(23, top - 2, f"$o_{N}$ and explicit gradient descent (GD)\nare the same numbers; "
            f"$y_{N + 1}$ is not reached:\nit was one step, on five examples", **SIDE)
    finish(figure, "how", quick, layout="none")


class Held:
    """A tensor that autograd keeps; gone when autograd lets it go."""
    every = weakref.WeakSet()

    def __init__(self, x):
        self.x = x
        self.every.add(self)


def kept(h, T, form):
    """Numbers a head of width h keeps for its backward pass over T tokens; a stream's state."""
    mixer = GrilMixer(h, h, 1, gate="real", form="chunk" if form == "step" else form)
    v, k, u = (torch.randn(1, T, 1, h, requires_grad=True) for _ in range(3))
    state = mixer.start(v[:, 0])
    if form == "step":
        return sum(part.numel() for part in state)
    Held.every.clear()
    with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.x):
        log_rho, theta, _ = mixer.gates()
        result = mixer.recur(v, k, u, log_rho, theta, state)    # noqa: F841, alive while counted
    storages = {held.x.untyped_storage()._cdata: held.x for held in Held.every}
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
    numbers = {form: [kept(h, T, form) for h in widths] for form in FORMS}
    print_table(f"Numbers kept by one head of width h over {T:,} tokens (w = 3, real gate), "
                "measured; by step whatever the length",
                ("form", *(f"h = {h}" for h in widths), *(f"a token, h = {h}" for h in widths)),
                [(form, *(f"{n:,}" for n in row),
                  *("" if form == "step" else f"{n / T:.1f}" for n in row))
                 for form, row in numbers.items()])

    figure, axes = plt.subplots(1, 5, figsize=(11.5, 3.3), width_ratios=(1, 1, 1, 1, 1.6))
    for ax, form in zip(axes, FORMS):
        blank(ax, 8.5, 9)
        ax.set_title(f"gril_{form}")
        ax.text(4.2, -9.6, FORMS[form], ha="center", va="top", fontsize=8)
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

    def square(x, y, style):
        ax.add_patch(plt.Rectangle((x, y - 2.2), 2.2, 2.2, lw=0.8, **style))
    for t in range(8):
        unseen = form == "step" and t < 6
        style = dict(fc="none", ec=GREY, ls=":") if unseen else token
        ax.add_patch(plt.Rectangle((t + 0.2, -8.3), 0.5, 1.6, lw=0.6, **style))
    ax.annotate("", (8.2, -8.75), (0, -8.75),
                arrowprops=dict(arrowstyle="->", color=GREY, lw=0.8))
    ax.text(8.3, -8.75, "t", va="center", fontsize=8, color=GREY)
    if form in ("loop", "scan"):
        for t in range(8):
            square(t * 0.72 + 0.1, -1.2 - 0.35 * t, hollow if form == "loop" and t < 7 else whole)
    elif form == "chunk":
        for left in (0.05, 4.05):
            square(left, -0.6, whole)
            for t in range(4):
                ax.add_patch(plt.Rectangle((left + 0.15, -4.3 - 0.7 * t), 0.9 * (t + 1), 0.7,
                                           **product))
    else:
        square(5.6, -2.6, whole)


def prompt(quick):
    """One prompt, example by example: the state fills, the prediction for a fixed query nears the
    truth, GD beside it."""
    f, N, tasks = 5, 6 if quick else 30, 1_000
    (result,) = runs([dict(task="nd_regression", f=f, n=N, seed=0)], quick)
    task, model, _ = train.load(result["folder"])
    x, y, s = task.sample(tasks, torch.Generator().manual_seed(4))
    W = torch.linalg.lstsq(x[0].double(), y[0].double()).solution.mT.float()
    answers = {"GRIL, trained": torch.zeros(N + 1, tasks, f),   # after t examples
               "GD, explicit": torch.zeros(N + 1, tasks, f)}
    with torch.no_grad():
        for t in range(1, N + 1):
            gd = gradient_descent([task.eta * t / N])           # each example its N-th part
            answers["GRIL, trained"][t] = model.query(torch.cat([s[:, :2 * t], s[:, -1:]], 1))
            answers["GD, explicit"][t] = gd(x[:, :t], y[:, :t], x[:, -1])
        C = window(s[:1], 3, 2, causal=False)
        Z = scan(model.A, C @ model.Q @ C.mT)[0] * model.beta * model.q[2]
    Z = torch.cat([torch.zeros(1, f, f), Z])                    # β q₃ Z_t: the W read, (N+1, f, f)
    loss = {name: 0.5 * (o - y[:, -1]).square().mean(-1) for name, o in answers.items()}
    apart = torch.sub(*answers.values())[:, 0].abs().amax(-1)   # (N+1,), of this prompt
    print_table(f"The fixed query's loss after t examples, f = {f}, N = {N}; GD's step is η t/N, "
                "as a sum over examples has it",
                ("t", *(f"{name}, {what}" for name in loss
                        for what in ("this prompt", f"mean of {tasks:,}")),
                 "largest difference of predictions"),
                [(t, *(f"{v:.4f}" for l in loss.values() for v in (l[t, 0], l[t].mean())),
                  f"{apart[t]:.4f}") for t in range(N + 1) if t in (0, 1, 2, 5, 10, 20, N)])

    figure = plt.figure(figsize=(9.6, 4.8))
    grid = figure.add_gridspec(2, 4, height_ratios=(1, 2.6), width_ratios=(1, 1, 1.5, 1.6),
                               left=0.03, right=0.98, top=0.84, bottom=0.12, hspace=0.62,
                               wspace=0.3)
    strip, state_ax, W_ax, bar_ax, loss_ax = map(
        figure.add_subplot, (grid[0, :], *(grid[1, i] for i in range(4))))
    title = figure.suptitle("", fontsize=11)
    tokens = torch.zeros(f, 2 * N + 1)
    tokens[:, -1] = s[0, -1]
    seen = strip.imshow(tokens.numpy(), vmin=-1.2, vmax=1.2, aspect="auto")
    frame = strip.add_patch(plt.Rectangle((-0.5, -0.5), 2, f, fill=False, ec="black", lw=2))
    strip.add_patch(plt.Rectangle((2 * N - 0.5, -0.5), 1, f, fill=False, ec="black", lw=2,
                                  clip_on=False))
    every = [i for i in range(N - 1) if i == 0 or i % 5 == 4]
    strip.set_xticks([2 * i + 0.5 for i in every] + [2 * N],
                     [f"$x_{{{i + 1}}}, y_{{{i + 1}}}$" for i in every] + ["query"], fontsize=8)
    strip.set(yticks=[], title="the prompt; framed, what step t sees: $x_t$, $y_t$ and the query")
    heat = state_ax.imshow(Z[0].numpy(), vmin=-2, vmax=2)
    state_ax.set(xticks=[], yticks=[], title="the state, $β q_3 Z_t$")
    W_ax.imshow(W.numpy(), vmin=-2, vmax=2)
    W_ax.set(xticks=[], yticks=[], title="the task's W")
    places, truth = np.arange(f), y[0, -1]
    drawn = {}                                                  # name -> its bars, its two curves
    for name, color, shift, style in (("GRIL, trained", BLUE, -0.19, "-"),
                                      ("GD, explicit", ORANGE, 0.19, "--")):
        (this,) = loss_ax.plot([], [], color=color, ls=style, lw=2.2, label=name)
        (mean,) = loss_ax.plot([], [], color=color, ls=style, lw=0.9)
        bars = bar_ax.bar(places + shift, np.zeros(f), 0.36, color=color, label=name)
        drawn[name] = bars, this, mean
    bar_ax.hlines(truth.numpy(), places - 0.42, places + 0.42, color="black", lw=2, label="truth")
    bar_ax.axhline(0, color=GREY, lw=0.6)
    bound = 1.25 * max(z.abs().max().item() for z in (truth, *(o[:, 0] for o in answers.values())))
    bar_ax.set(title="prediction for the query", ylim=(-bound, 1.45 * bound),
               xlabel="coordinate of y")
    bar_ax.set_xticks(places.tolist(), range(1, f + 1))
    bar_ax.legend(fontsize=7, loc="upper left", ncol=2, columnspacing=0.8, handlelength=1.2)
    highest = max(max(l[:, 0].max(), l.mean(1).max()).item() for l in loss.values())
    loss_ax.set(title="loss on the query", xlabel="examples seen", xlim=(0, N),
                ylim=(0, 1.6 * highest))
    loss_ax.legend(fontsize=7, loc="upper right", title=f"thin: mean of {tasks:,} prompts",
                   title_fontsize=7)

    def draw(t):
        title.set_text(f"after {t} of {N} examples")
        tokens[:, :2 * t] = s[0, :2 * t].mT
        seen.set_data(tokens.numpy())
        frame.set(x=2 * t - 2.5, visible=t > 0)
        heat.set_data(Z[t].numpy())
        for name, (bars, this, mean) in drawn.items():
            for bar, height in zip(bars, answers[name][t, 0].tolist()):
                bar.set_height(height)
            this.set_data(range(t + 1), loss[name][:t + 1, 0])
            mean.set_data(range(t + 1), loss[name][:t + 1].mean(1))
    path, writer = place("prompt.gif", quick), PillowWriter(fps=4)
    with writer.saving(figure, path, dpi=100):
        for t in [*range(N + 1)] + [N] * (0 if quick else 10):  # the end is held
            draw(t)
            writer.grab_frame()
    print(f"\nmoving    {os.path.relpath(path)}, {path.stat().st_size / 1e6:.2f} MB")
    finish(figure, "prompt", quick, layout="none")              # its last frame, as a still
