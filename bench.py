"""Speed and memory, as ratios measured side by side in one run.

    python bench.py core          the recurrence against the dense layers of its block, every form
    python bench.py blocks        GRIL's block against the others, lengths 256 to 16,384
    python bench.py growth        time and peak memory against length, to 131,072
    python bench.py streaming     time per token to position 100,000, beside a key-value cache
    python bench.py generation    tokens a second of five language models, after 100 to 100,000
    python bench.py icl           optimiser steps of nd_regression, beside the plainest loop
    python bench.py cuda-check    for the first person with a GPU: does it compute the same there?

    --plot draws it into docs/images, --rounds N is how often all is repeated

A time on a busy machine means nothing alone: contenders take turns, round after round, and what is
reported is the median over rounds of their ratio within a round, with the smallest and the largest
in brackets. What takes long is measured less often. On CUDA timers are synchronised, and core,
blocks and growth run in bf16 autocast; icl is of the CPU.
"""
import argparse
import multiprocessing
import time
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

from machine.errors import spoken          # before torch, which takes seconds to load

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import baselines
from baselines import parameters
from gril import GRIL, Block, GrilMixer, construct_multivariate
from lm import LanguageModel, NextToken
from machine.scan import full_precision
from pictures.plots import finish, place
from tasks import Batch, NdRegression

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PRESETS = {             # sizes of the paper's tables, 16,384 tokens a batch; laptop is ours
    "ListOps": dict(B=8, T=2048, H=128, P=32, J=8),
    "Text": dict(B=4, T=4096, H=256, P=128, J=16),
    "Retrieval": dict(B=4, T=4000, H=128, P=256, J=16),
    "Image": dict(B=16, T=1024, H=512, P=256, J=2),
    "Pathfinder": dict(B=16, T=1024, H=256, P=128, J=16),
    "WikiText": dict(B=16, T=1024, H=768, P=128, J=32),
    "laptop": dict(B=32, T=1024, H=64, P=64, J=4),
}
BENCHES = {}


def benchmark(measure):
    """A generator of rows as a command: prints what it measures, each row when it comes."""
    def run(*args, **options):
        print(measure.__doc__)
        rows = []
        for row in measure(*args, **options):
            print(line(row), flush=True)
            rows.append(row)
        return rows
    BENCHES[measure.__name__.replace("_", "-")] = run
    return run


def line(row):
    """A row to read: its words, its numbers with their names, the ratio with its range."""
    cells = [f"{value:25s}" if isinstance(value, str) else
             f"{name.replace('_', ' ')} {format(value, ',' if type(value) is int else ',.4g'):9s}"
             for name, value in row.items() if name not in ("ratio", "low", "high")]
    if "ratio" in row:
        cells.append("ratio {ratio:.2f} [{low:.2f}, {high:.2f}]".format(**row))
    return " ".join(cells)


# ---------------------------------------------------------------------------------------- measuring

def interleaved(contenders, rounds, times=1):
    """name -> seconds of a call, in every round; contenders take turns, once to warm up."""
    seconds = {name: [] for name in contenders}
    for i in range(rounds + 1):
        for name, work in contenders.items():
            start = time.perf_counter()
            for _ in range(times):
                work()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            if i:
                seconds[name].append((time.perf_counter() - start) / times)
    return seconds


def ratio(slow, fast):
    """Median, smallest and largest of slow/fast, round by round."""
    ratios = sorted(a / b for a, b in zip(slow, fast))
    return dict(ratio=median(ratios), low=ratios[0], high=ratios[-1])


def passes(module, *shape, inputs=1, backward=True):
    """One forward (and backward) of a module on inputs of this shape, as work to be timed."""
    module = module.to(DEVICE)
    given = [torch.randn(shape, device=DEVICE, requires_grad=backward) for _ in range(inputs)]
    g = torch.randn(shape, device=DEVICE)       # not of y.sum(): one without strides slows products

    def work():
        for x in (*given, *module.parameters()):
            x.grad = None
        with (torch.set_grad_enabled(backward),
              torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda")):
            y = module(*given)
        if backward:
            y.backward(g.to(y.dtype))
    return work


# ----------------------------------------------------------------------- the recurrence, and blocks

class Dense(nn.Module):
    """A GrilMixer without its recurrence: the projections, GELU and GLU anyone must compute."""

    def __init__(self, mixer):
        super().__init__()
        self.mixer = mixer

    def forward(self, z):
        v, k, u = self.mixer.tokens(z, self.mixer.gates()[2])
        return self.mixer.output(v + k + u, z)


class Recurrence(Dense):
    """What stands between the projections, the gates with it."""

    def forward(self, v, k, u):
        log_rho, theta, _ = self.mixer.gates()
        with full_precision(v.device.type):                     # as in GrilMixer.run
            return self.mixer.recur(v, k, u, log_rho, theta, self.mixer.start(v))[0]


@benchmark
def core(rounds, compiled=False):
    """Time ÷ that of the dense layers (with --compile, chunk and a real gate alone)."""
    for name, sizes in PRESETS.items():
        B, T, H, P, J = sizes.values()
        turns = {("chunk",): rounds}                            # apart, for the caches' sake
        if not compiled and B * T * P ** 2 // J <= 3e8:         # numbers in all states
            turns["scan", "loop"] = 1
        for gate, forms in product(("real",) if compiled else ("real", "complex"), turns):
            torch.compiler.reset()
            parts = {form: Recurrence(GrilMixer(H, P, J, gate=gate, form=form)) for form in forms}
            dense = Dense(parts[forms[0]].mixer)
            for module in (dense, *parts.values()) if compiled else ():
                module.compile(dynamic=False)
            work = {form: passes(part, B, T, J, P // J, inputs=3) for form, part in parts.items()}
            seconds = interleaved(dict(work, dense=passes(dense, B, T, H)), turns[forms])
            for form in forms:
                yield dict(preset=name, gate=gate, form=form,
                           **ratio(seconds[form], seconds["dense"]))


class GRU(nn.GRU):
    def forward(self, x):
        return x + super().forward(x)[0]


BLOCKS = {              # equal width, about equal parameters
    "GRIL": lambda H: Block(GrilMixer(H, H // 2, H // 16, gate="real"), H),
    "linear attention (w = 1)": lambda H: Block(GrilMixer(H, H // 2, H // 16, w=1, gate="real"), H),
    "linear self-attention": lambda H: Block(baselines.LinearAttention(H, H // 8), H),
    "S5": lambda H: Block(baselines.S5(H), H),
    "LRU": lambda H: Block(baselines.LRU(H), H),
    "Mamba": lambda H: Block(baselines.Mamba(H, expand=1), H),
    "Griffin (RG-LRU)": lambda H: Block(baselines.RecurrentBlock(H, H, 16), H),
    "GRU": lambda H: GRU(H, H, batch_first=True),
    "softmax attention": lambda H: Block(baselines.Attention(H, 8), H),
}


@benchmark
def blocks(rounds, H=256, lengths=(256, 1024, 4096, 8192, 16384)):
    """Time ÷ that of GRIL's block."""
    for T in lengths:
        B = max(1, 8192 // T)
        modules = {name: make(H) for name, make in BLOCKS.items()}
        for mode in ("training", "inference"):
            seconds = interleaved({name: passes(module, B, T, H, backward=mode == "training")
                                   for name, module in modules.items()}, rounds)
            for name, module in modules.items():
                yield dict(length=T, mode=mode, block=name, parameters=parameters(module),
                           tokens_per_second=B * T / median(seconds[name]),
                           **ratio(seconds[name], seconds["GRIL"]))


def gril_block(T):
    return passes(BLOCKS["GRIL"](256), 1, T, 256)


def peak_megabytes(T):
    """Memory that GRIL's block adds at its peak, on CUDA in all; for a process of its own."""
    work, x = gril_block(T), torch.ones(64, 64, device=DEVICE, requires_grad=True)
    x.mm(x).sum().backward()                                    # libraries loaded before reading
    before = 0 if DEVICE.type == "cuda" else high_water()
    work()
    return high_water() - before


def high_water():
    """Peak megabytes of this process alone, or of its GPU; getrusage would count the parent's."""
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2 ** 20
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


@benchmark
def growth(rounds, lengths=(1024, 4096, 16384, 65536, 131072)):
    """Time of GRIL's block ÷ that of the shortest sequence."""
    seconds = interleaved({T: gril_block(T) for T in lengths if T <= 16384}, rounds)
    for T in lengths:
        if T not in seconds:                    # once is enough where it takes seconds
            seconds[T] = interleaved({T: gril_block(T)}, 1)[T] * rounds
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            megabytes = pool.apply(peak_megabytes, (T,))
        yield dict(length=T, megabytes=megabytes, milliseconds=1e3 * median(seconds[T]),
                   **ratio(seconds[T], seconds[lengths[0]]))


# -------------------------------------------------------------------------------- a token at a time

def a_token(name, step, x, states, rounds):
    """Rows of what a step takes after n tokens, n -> state, ÷ that after the fewest."""
    seconds = interleaved({n: partial(step, x, state) for n, state in states.items()}, rounds, 20)
    for n, state in states.items():
        each = median(seconds[n])
        megabytes = sum(z.nbytes for z in tree_leaves(state) if z is not None) / 2 ** 20
        yield dict(model=name, position=n, microseconds=1e6 * each, per_second=1 / each,
                   megabytes=megabytes, **ratio(seconds[n], seconds[min(seconds)]))


@benchmark
@torch.no_grad()
def streaming(rounds, H=256, positions=(100, 1_000, 10_000, 100_000)):
    """Time of a token ÷ that at the first position."""
    gril, softmax = (BLOCKS[name](H).to(DEVICE).eval() for name in ("GRIL", "softmax attention"))
    x, heads = torch.randn(1, H, device=DEVICE), softmax.mixer.heads
    states = {n: gril.run(torch.randn(1, n, H, device=DEVICE))[1] for n in positions}
    caches = {n: torch.randn(2, 1, heads, n, H // heads, device=DEVICE).unbind() for n in positions}
    yield from a_token("GRIL", gril.step, x, states, max(rounds, 15))
    yield from a_token("key-value cache", softmax.step, x, caches, 3)   # leaves no other cache warm


@benchmark
@torch.no_grad()
def generation(rounds, positions=(100, 10_000, 100_000)):
    """Time of a token of the bytes' language models ÷ that after the first position."""
    recipe, token = NextToken.numbers("bytes"), torch.zeros(1, dtype=torch.long, device=DEVICE)
    sizes = {key: recipe[key] for key in ("layers", "H", "inner", "P", "J")}
    for name in ("gril", "linear_attention", "lru", "mamba", "transformer"):
        model = LanguageModel(256, model=name, **sizes).to(DEVICE).eval()
        states = dict.fromkeys(positions if model.constant else positions[:2])  # attention: hours
        for n in states:
            for part in torch.randint(256, (1, n), device=DEVICE).split(1000, 1):
                _, states[n] = model.hidden(part, states[n])
        yield from a_token(name, model.step, token, states, rounds)


# --------------------------------------------------------------------------------- training's steps

def plainest_loop(f, N, batch):
    """nd_regression as one would first write it: every C Q Cᵀ, their sum with decay, Adam."""
    torch.manual_seed(0)
    Q = nn.Parameter(torch.randn(3, 3) / 3)
    q = nn.Parameter(torch.randn(3))
    A = nn.Parameter(torch.rand(f, f) / 2 + 0.5)
    beta = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([Q, q, A, beta], lr=1e-2)

    def work():
        W, x = torch.randn(batch, f, f), torch.rand(batch, N + 1, f) - 0.5
        y = x @ W.mT
        C = torch.stack([x[:, :-1], y[:, :-1], x[:, 1:]], -1)   # (B, N, f, 3)
        products = C @ Q @ C.mT                                 # (B, N, f, f)
        Z = torch.zeros(batch, f, f)
        for t in range(N):
            Z = A * Z + products[:, t]
        o = beta * (Z @ (C[:, -1] @ q)[..., None])[..., 0]
        loss = 0.5 * (o - y[:, -1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return work


def training(task, model, batches):
    """What train.py does in a step."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)

    def work():
        loss = task.loss(model, next(batches))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        torch.stack([loss.detach(), norm]).tolist()
        optimizer.step()
    return work


def our_loop(f, N, batch):
    torch.manual_seed(0)
    task = NdRegression(f=f, n=N)
    return training(task, task.model(), task.stream(0, batch))


@benchmark
def icl(rounds, count=100):
    """Steps of nd_regression, N = 10, batch 64, ÷ those of the plainest loop."""
    torch.set_num_threads(1)                    # as train.py does: a step is too small for two
    for f in (5, 10, 20, 35, 50):
        loops = {make: make(f, 10, 64) for make in (our_loop, plainest_loop)}
        seconds = interleaved(loops, rounds, count)
        yield dict(f=f, steps_per_second=1 / median(seconds[our_loop]),
                   **ratio(seconds[plainest_loop], seconds[our_loop]))


# ------------------------------------------------------------------------------------ the first GPU

PRECISIONS = (          # name, dtype of the weights, autocast, error allowed
    ("float64", torch.float64, False, 1e-9), ("float32", torch.float32, False, 1e-3),
    ("bf16 autocast", torch.float32, True, 5e-2))


@benchmark
def cuda_check(rounds):
    """Every form, bf16, compile and two training steps against the CPU; eager ÷ compiled time."""
    if not torch.cuda.is_available():
        print("cuda-check: this machine (or this build of torch) has no CUDA device, so there is "
              "nothing to compare")
        return
    for gate in ("real", "complex"):
        exact = block_run("loop", gate, "cpu", torch.float64, False)
        for form, (name, dtype, autocast, tolerance) in product(
                ("loop", "scan", "chunk", "compiled"), PRECISIONS):
            got = block_run(form, gate, "cuda", dtype, autocast)
            yield agreement(f"{form}, {gate} gate, {name}", got, exact, tolerance)
        eager, compiled = (Block(GrilMixer(256, 128, 16, gate=gate), 256) for _ in range(2))
        compiled.compile(dynamic=False)
        seconds = interleaved({module: passes(module, 16, 1024, 256)        # of Text's size, bf16
                               for module in (eager, compiled)}, rounds)
        yield dict(what=f"eager ÷ compiled, {gate} gate",
                   **ratio(seconds[eager], seconds[compiled]))
    yield agreement("two training steps, float64", two_steps("cuda"), two_steps("cpu"), 1e-9)


def agreement(what, got, expected, tolerance):
    """The largest error, beside a number's own size where that is above 1."""
    pairs = [(g.detach().cpu().double(), e.detach().double()) for g, e in zip(got, expected)]
    error = max(((g - e).abs().max() / e.abs().max().clamp(min=1)).item() for g, e in pairs)
    return dict(verdict="agrees" if error <= tolerance else "DIFFERS", what=what, error=error,
                tolerance=tolerance)


def block_run(form, gate, device, dtype, autocast):
    """Output and every gradient of a block."""
    torch.manual_seed(0)
    mixer = GrilMixer(64, 64, 4, gate=gate, form="chunk" if form == "compiled" else form)
    block = Block(mixer, 64).double().to(device, dtype)
    x = torch.randn(2, 300, 64, dtype=torch.float64).to(device, dtype).requires_grad_()
    if form == "compiled":
        block.compile(dynamic=False)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        y = block(x)
    y.to(dtype).square().mean().backward()
    return y, x.grad, *(p.grad for p in block.parameters())


def two_steps(device):
    """The weights after two steps of training from the construction."""
    torch.manual_seed(0)
    task, generator = NdRegression(f=5, n=5), torch.Generator().manual_seed(0)
    model = construct_multivariate(GRIL(5), 3.0, 5).double().to(device)
    batches = (Batch(*(x.double().to(device) for x in task.sample(64, generator)))
               for _ in range(2))
    step = training(task, model, batches)
    step()
    step()
    return list(model.parameters())


# ----------------------------------------------------------------------------------------- pictures

PICTURES = {            # of each panel: the columns x and y, that which names a line, how it looks
    "blocks": [("length", "tokens_per_second", "block", dict(title=mode))
               for mode in ("training", "inference")],
    "growth": [("length", "milliseconds", None, dict(ylabel="ms, forward + backward")),
               ("length", "megabytes", None, dict(ylabel="peak MB"))],
    "streaming": [("position", "microseconds", "model", dict(ylabel="µs a token"))],
    "icl": [("f", "ratio", None, dict(xscale="linear", yscale="linear", ylim=(0, None),
                                      title="In-context training, N = 10, batch 64",
                                      ylabel="steps ÷ plainest loop's steps"))],
}


def plot(what, rows):
    """A line for each kind of rows; of blocks, in a panel, those of the mode that is its title."""
    count = len(PICTURES[what])
    figure, axes = plt.subplots(1, count, figsize=(3 + 3.5 * count, 3.6), squeeze=False)
    for ax, (x, y, by, look) in zip(axes[0], PICTURES[what]):
        lines = {}
        for row in rows:
            if row.get("mode") in (None, look.get("title")):
                lines.setdefault(row.get(by), []).append((row[x], row[y]))
        for label, points in lines.items():
            ax.plot(*zip(*points), "o-", ms=3, lw=2.5 if label == "GRIL" else 1.2, label=label)
        if what == "growth":
            (first, start), (last, _) = points[0], points[-1]
            ax.plot([first, last], [start, start * last / first], ":", color="grey", label="linear")
        named = dict(xlabel=x, ylabel=y.replace("_", " "), xscale="log", yscale="log")
        ax.set(**{**named, **look})
    if what != "icl":
        ax.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    finish(figure, f"bench_{what}")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=BENCHES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compile", action="store_true",
                        help="of core: torch.compile both sides, a minute each")
    parser.add_argument("--plot", action="store_true",
                        help="also draw them, into docs/images/bench_WHAT.png")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    if args.compile and args.what != "core":
        parser.error(f"--compile is for core; {args.what} has no compiled side")
    if args.plot and args.what not in PICTURES:
        parser.error(f"--plot: there is no picture of {args.what}")
    with spoken("bench.py"):
        if DEVICE.type == "cuda" and args.what != "cuda-check":     # as train.py for bfloat16
            torch.set_float32_matmul_precision("high")
        if args.plot:                           # what cannot be written is said before the hour
            place(f"bench_{args.what}.png", False).open("a").close()
        print(f"torch {torch.__version__}, {DEVICE}, {torch.get_num_threads()} threads, "
              f"{args.rounds} rounds")
        rows = BENCHES[args.what](args.rounds, **(dict(compiled=True) if args.compile else {}))
        if args.plot:
            plot(args.what, rows)


if __name__ == "__main__":
    main()
