"""Speed and memory, as ratios measured side by side in one run.

    python bench.py core          the recurrence against the dense layers of its block, every form; --compile: both compiled
    python bench.py blocks        GRIL's block against the others, lengths 256 to 16,384, training and inference
    python bench.py growth        time and peak memory against length, to 131,072
    python bench.py streaming     time per token at positions 100 to 100,000, against a key-value cache
    python bench.py generation    tokens a second that five language models make, after texts of 100 to 100,000
    python bench.py icl           optimiser steps per second of nd_regression, against the plainest loop
    python bench.py data          ListOps expressions and BPE megabytes per second
    python bench.py loader        tokens that Long Range Arena's loader delivers, against those that training takes
    python bench.py forms         loop, scan and chunk on the same tokens, time and peak memory
    python bench.py cuda-check    for the first person with a GPU: does it compute there what it computes here?

    --plot draws it into docs/images/, --json FILE writes it, --rounds N sets how often everything is repeated

A time on a busy machine means nothing alone: contenders take turns, round after round, and what is reported is the
median over rounds of their ratio within a round, with the smallest and the largest in brackets.
On CUDA the same tables, with bf16 autocast and synchronised timers.
"""
import argparse
import json
import multiprocessing
import statistics
import time
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import baselines
from baselines import parameters
from files.arena import listops_lines
from files.downloads import data_folder
from files.tokens import BPE
from gril import GRIL, Block, GrilMixer, construct_multivariate
from lm import LanguageModel, NextToken
from lra import LRA
from pictures.plots import place
from tasks import NdRegression

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PRESETS = {                                                     # H, P, J of the paper's tables, and the length; laptop is ours
    "ListOps": (128, 32, 8, 2048), "Text": (256, 128, 16, 4096), "Retrieval": (128, 256, 16, 4000),
    "Image": (512, 256, 2, 1024), "Pathfinder": (256, 128, 16, 1024), "WikiText": (768, 128, 32, 1024),
    "laptop": (64, 64, 4, 1024),
}


# --------------------------------------------------------------------------------------------------------- measuring

def interleaved(contenders, rounds):
    """Seconds of every contender in every round, {name: [seconds]}; they take turns after one warm-up each."""
    seconds = {name: [] for name in contenders}
    for i in range(rounds + 1):
        for name, work in contenders.items():
            start = time.perf_counter()
            work()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            if i:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(slow, fast):
    """Median, smallest and largest of slow/fast, round by round."""
    ratios = sorted(a / b for a, b in zip(slow, fast))
    return dict(ratio=statistics.median(ratios), low=ratios[0], high=ratios[-1])


def shown(r):
    return f"{r['ratio']:6.2f} [{r['low']:.2f}, {r['high']:.2f}]"


def trained(module, *shape):
    """One forward and backward of a module on inputs of this shape, as work to be timed."""
    module = module.to(DEVICE)
    x, g = torch.randn(*shape, device=DEVICE, requires_grad=True), torch.randn(*shape, device=DEVICE)

    def work():
        x.grad = None
        module.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
            y = module(x)
        y.backward(g.to(y.dtype))                               # not y.sum(): a gradient without strides slows products
    return work


def inferred(module, *shape):
    module, x = module.to(DEVICE), torch.randn(*shape, device=DEVICE)

    def work():
        with torch.no_grad(), torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
            module(x)
    return work


def peak_megabytes(work, *args):
    """Memory that forward + backward adds at its peak, in a process of its own (on CUDA: of the allocator)."""
    if DEVICE.type == "cuda":
        work(*args)()
        torch.cuda.reset_peak_memory_stats()
        work(*args)()
        return torch.cuda.max_memory_allocated() / 2 ** 20
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (work, args))


def _peak(work, args):
    work = work(*args)
    torch.ones(64, 64, requires_grad=True).mm(torch.ones(64, 64)).sum().backward()      # libraries loaded before reading
    before = _high_water()
    work()
    return (_high_water() - before) / 1024


def _high_water():
    """Peak kilobytes of this process alone; getrusage would also count those of the process that started it."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))


# ----------------------------------------------------------------------------------------------------- the benchmarks

class Dense(nn.Module):
    """A GrilMixer without its recurrence: the projections, GELU and GLU that anyone must compute."""

    def __init__(self, mixer):
        super().__init__()
        self.mixer = mixer

    def forward(self, z):
        v, k, u = self.mixer.tokens(z, self.mixer.gates()[2])
        return self.mixer.output(v + k + u, z)


def recurrence(mixer, B, T, compiled=False):
    """Forward and backward of what stands between the projections, the gates with it."""
    v, k, u = (torch.randn(B, T, mixer.J, mixer.h, device=DEVICE, requires_grad=True) for _ in range(3))
    mixer, g = mixer.to(DEVICE), torch.randn(B, T, mixer.J, mixer.h, device=DEVICE)

    def recur(v, k, u):
        log_rho, theta, _ = mixer.gates()
        return mixer.recur(v, k, u, log_rho, theta, mixer.start(v))[0]
    recur = torch.compile(recur, dynamic=False) if compiled else recur

    def work():
        for x in (v, k, u):
            x.grad = None
        mixer.zero_grad()
        recur(v, k, u).backward(g)
    return work


def core(rounds, compiled=False):
    """Of each preset: every form against the dense layers; compiled, chunk alone and a real gate, for the minutes' sake."""
    rows = []
    for name, (H, P, J, T) in PRESETS.items():
        B = 32 if name == "laptop" else max(1, 16384 // T)
        for gate in ("real",) if compiled else ("real", "complex"):
            shown_here = []
            for group in (("chunk",),) if compiled else (("chunk",), ("scan", "loop")):     # apart, for the caches' sake
                if group[0] == "scan" and B * T * P * P // J > 3e8:
                    continue
                torch.compiler.reset()
                mixers = {form: GrilMixer(H, P, J, gate=gate, form=form) for form in group}
                dense = Dense(mixers[group[0]])
                work = dict(dense=trained(torch.compile(dense, dynamic=False) if compiled else dense, B, T, H),
                            **{form: recurrence(mixer, B, T, compiled) for form, mixer in mixers.items()})
                seconds = interleaved(work, rounds if "chunk" in work else 1)
                shown_here += [dict(preset=name, gate=gate, form=form, **ratio(seconds[form], seconds["dense"]))
                               for form in group]
            print(f"{name:10s} {gate:7s} core ÷ dense: " + "   ".join(f"{r['form']} {shown(r)}" for r in shown_here),
                  flush=True)
            rows += shown_here
    return rows


def softmax_block(H, heads=8):
    return Block(baselines.Attention(H, heads), H)


class GRU(nn.Module):
    def __init__(self, H):
        super().__init__()
        self.gru = nn.GRU(H, H, batch_first=True)

    def forward(self, x):
        return x + self.gru(x)[0]


BLOCKS = {                                                      # equal width, about equal parameters
    "GRIL": lambda H: Block(GrilMixer(H, H // 2, H // 16, gate="real"), H),
    "linear attention (w = 1)": lambda H: Block(GrilMixer(H, H // 2, H // 16, w=1, gate="real"), H),
    "linear self-attention": lambda H: Block(baselines.LinearAttention(H, H // 8), H),
    "S5": lambda H: Block(baselines.S5(H), H),
    "LRU": lambda H: Block(baselines.LRU(H), H),
    "Mamba": lambda H: Block(baselines.Mamba(H, expand=1), H),
    "Griffin (RG-LRU)": lambda H: Block(baselines.RecurrentBlock(H, H, 16), H),
    "GRU": GRU,
    "softmax attention": softmax_block,
}


def blocks(rounds, H=256, lengths=(256, 1024, 4096, 8192, 16384)):
    rows = []
    for T in lengths:
        B = max(1, 8192 // T)
        modules = {name: make(H) for name, make in BLOCKS.items()}
        for mode, work in (("training", trained), ("inference", inferred)):
            seconds = interleaved({name: work(module, B, T, H) for name, module in modules.items()}, rounds)
            for name, module in modules.items():
                row = dict(length=T, mode=mode, block=name, parameters=parameters(module),
                           tokens_per_second=B * T / statistics.median(seconds[name]), **ratio(seconds[name], seconds["GRIL"]))
                rows.append(row)
                print(f"T = {T:6d}  {mode:9s}  {name:25s} {row['parameters'] / 1e3:5.0f}k parameters "
                      f"{row['tokens_per_second']:9,.0f} tokens/s, takes {shown(row)} × GRIL's time", flush=True)
    return rows


def gril_block(T, H=256):
    return trained(BLOCKS["GRIL"](H), 1, T, H)


def growth(rounds, lengths=(1024, 4096, 16384, 65536, 131072)):
    work = {T: gril_block(T) for T in lengths if T <= 16384}
    seconds = interleaved(work, rounds)
    for T in lengths:
        if T not in seconds:                                    # once is enough where it takes seconds
            seconds[T] = [s for s in interleaved({T: gril_block(T)}, 1)[T]] * len(seconds[lengths[0]])
    rows = []
    for T in lengths:
        rows.append(dict(length=T, megabytes=peak_megabytes(gril_block, T), milliseconds=1e3 * statistics.median(seconds[T]),
                         **ratio(seconds[T], seconds[lengths[0]])))
        print(f"T = {T:7d}  {shown(rows[-1])} × the time at {lengths[0]}   {rows[-1]['megabytes']:8.0f} MB "
              f"= {rows[-1]['megabytes'] / rows[0]['megabytes']:6.2f} × the memory   "
              f"({rows[-1]['milliseconds']:.0f} ms here)", flush=True)
    return rows


def streaming(rounds, H=256, positions=(100, 1_000, 10_000, 100_000)):
    gril, softmax = BLOCKS["GRIL"](H).to(DEVICE).eval(), softmax_block(H).to(DEVICE).eval()
    x, heads = torch.randn(1, H, device=DEVICE), softmax.mixer.heads
    rows = []
    for name, block in (("GRIL", gril), ("key-value cache", softmax)):          # apart: a long cache leaves no other cache warm
        contenders = {}
        for n in positions:
            with torch.no_grad():                                               # the state as it is after n tokens
                state = gril.run(torch.randn(1, n, H, device=DEVICE))[1] if block is gril else tuple(
                    torch.randn(1, heads, n, H // heads, device=DEVICE) for _ in "kv")
            contenders[n] = partial(steps, block, x, state)
        seconds = interleaved(contenders, max(rounds, 15) if block is gril else 3)
        for n in positions:
            rows.append(dict(block=name, position=n, microseconds=1e6 * statistics.median(seconds[n]) / 20,
                             **ratio(seconds[n], seconds[positions[0]])))
            print(f"{name:16s} position {n:7d}  {shown(rows[-1])} × the time at {positions[0]}   "
                  f"({rows[-1]['microseconds']:.0f} µs a token here)", flush=True)
    return rows


def steps(block, x, state, count=20):
    with torch.no_grad():
        for _ in range(count):
            _, state = block.step(x, state)


def generation(rounds, positions=(100, 10_000, 100_000), count=20):
    """A token at a time from the bytes' language models, the state as it is after so many tokens; weights do not matter."""
    recipe = NextToken.numbers("bytes")
    sizes = {key: recipe[key] for key in ("layers", "H", "inner", "P", "J")}
    rows = []
    for name in ("gril", "linear_attention", "lru", "mamba", "transformer"):
        model, contenders = LanguageModel(256, model=name, **sizes).to(DEVICE).eval(), {}
        for n in positions if model.constant else positions[:2]:                    # attention would take hours to get there
            state = None
            with torch.no_grad():
                for part in torch.randint(256, (1, n), device=DEVICE).split(1000, 1):
                    _, state = model.hidden(part, state)
            contenders[n] = partial(steps, model, torch.zeros(1, dtype=torch.long, device=DEVICE), state, count)
        seconds = interleaved(contenders, rounds)
        for n in contenders:
            megabytes = sum(x.nbytes for x in tree_leaves(contenders[n].args[2]) if x is not None) / 2 ** 20
            rows.append(dict(model=name, position=n, per_second=count / statistics.median(seconds[n]), megabytes=megabytes,
                             **ratio(seconds[n], seconds[positions[0]])))
            print(f"{name:17s} after {n:7,d}  {shown(rows[-1])} × the time after {positions[0]}   state {megabytes:7.2f} MB   "
                  f"({rows[-1]['per_second']:.0f} tokens a second here)", flush=True)
    return rows


def plainest_loop(f, N, batch):
    """nd_regression as one would first write it: form every C Q Cᵀ, sum them with their decay, read out, Adam."""
    torch.manual_seed(0)
    Q = nn.Parameter(torch.randn(3, 3) / 3)
    q = nn.Parameter(torch.randn(3))
    A = nn.Parameter(torch.rand(f, f) / 2 + 0.5)
    beta = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([Q, q, A, beta], lr=1e-2)

    def work():
        W, x = torch.randn(batch, f, f), torch.rand(batch, N + 1, f) - 0.5
        y = x @ W.mT
        C = torch.stack([x[:, :-1], y[:, :-1], x[:, 1:]], -1)                       # (B, N, f, 3)
        products = C @ Q @ C.mT                                                     # (B, N, f, f)
        Z = torch.zeros(batch, f, f)
        for t in range(N):
            Z = A * Z + products[:, t]
        o = beta * (Z @ (C[:, -1] @ q)[..., None])[..., 0]
        loss = 0.5 * (o - y[:, -1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return work


def our_loop(f, N, batch):
    """What train.py does in a step."""
    torch.manual_seed(0)
    task = NdRegression(f=f, n=N)
    model, stream = task.model(), task.stream(0, batch)
    optimizer, parameters = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), list(model.parameters())

    def work():
        loss = task.loss(model, next(stream))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        torch.stack([loss.detach(), norm]).tolist()
        optimizer.step()
    return work


def icl(rounds, count=100):
    torch.set_num_threads(1)                                    # as train.py does: a step is too small for two
    rows = []
    for f in (5, 10, 20, 35, 50):
        contenders = {name: partial(repeat, make(f, 10, 64), count)
                      for name, make in (("ours", our_loop), ("plainest", plainest_loop))}
        seconds = interleaved(contenders, rounds)
        rows.append(dict(f=f, steps_per_second=count / statistics.median(seconds["ours"]),
                         **ratio(seconds["plainest"], seconds["ours"])))
        print(f"f = {f:2d}, N = 10, batch 64: {shown(rows[-1])} × the steps of the plainest loop "
              f"({rows[-1]['steps_per_second']:.0f} a second here)", flush=True)
    return rows


def repeat(work, count):
    for _ in range(count):
        work()


def form_work(form, size):
    B, T, P, J = size
    return recurrence(GrilMixer(P, P, J, gate="real", form=form), B, T)


def forms(rounds):
    rows = []
    for size in ((4, 1024, 128, 16), (4, 1024, 256, 2)):
        names = ["loop", "scan", "chunk"] if size[2] // size[3] < 64 else ["scan", "chunk"]     # a loop over wide states: hours
        seconds = interleaved({name: form_work(name, size) for name in names}, rounds)
        for name in names:
            rows.append(dict(zip("BTPJ", size), form=name, baseline=names[0], megabytes=peak_megabytes(form_work, name, size),
                             milliseconds=1e3 * statistics.median(seconds[name]), **ratio(seconds[names[0]], seconds[name])))
            print(f"B, T, P, J = {size}  {name:5s} {shown(rows[-1])} × as fast as {names[0]}  peak "
                  f"{rows[-1]['megabytes']:7.0f} MB  ({rows[-1]['milliseconds']:.0f} ms here)", flush=True)
    return rows


# --------------------------------------------------------------------------------------------------- the first GPU

def cuda_check(rounds):
    """Every form, bf16, compile and two training steps on the GPU against float64 on the CPU; what compiling gains."""
    if not torch.cuda.is_available():
        print("cuda-check: this machine (or this build of torch) has no CUDA device, so there is nothing to compare")
        return []
    rows = []

    def report(what, got, expected, tolerance):
        error = max((g.detach().cpu().double() - e.detach().double()).abs().max().item() / max(1, e.detach().abs().max().item())
                    for g, e in zip(got, expected))
        rows.append(dict(what=what, error=error, tolerance=tolerance, agrees=error <= tolerance))
        print(f"{'agrees' if error <= tolerance else 'DIFFERS':8s} {what:42s} error {error:.1e} (allowed {tolerance:.0e})",
              flush=True)

    def run(form, gate, device, dtype, autocast=False, compiled=False):
        torch.manual_seed(0)
        block = Block(GrilMixer(64, 64, 4, gate=gate, form=form), 64).double().to(device, dtype)
        x = torch.randn(2, 300, 64, dtype=torch.float64).to(device, dtype).requires_grad_()
        module = torch.compile(block, dynamic=False) if compiled else block
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            y = module(x)
        y.float().square().mean().backward() if dtype != torch.float64 else y.square().mean().backward()
        return y, x.grad, *(p.grad for p in block.parameters())
    for gate in ("real", "complex"):
        exact = run("loop", gate, "cpu", torch.float64)
        for form in ("loop", "scan", "chunk"):
            report(f"{form}, {gate} gate, float64", run(form, gate, "cuda", torch.float64), exact, 1e-9)
            report(f"{form}, {gate} gate, float32", run(form, gate, "cuda", torch.float32), exact, 1e-3)
            report(f"{form}, {gate} gate, bf16 autocast", run(form, gate, "cuda", torch.float32, autocast=True), exact, 5e-2)
        for how, dtype, autocast, tolerance in (("float64", torch.float64, False, 1e-9), ("float32", torch.float32, False, 1e-3),
                                                ("bf16 autocast", torch.float32, True, 5e-2)):
            report(f"compiled, {gate} gate, {how}", run("chunk", gate, "cuda", dtype, autocast, compiled=True), exact, tolerance)
        work = {name: trained(make(Block(GrilMixer(256, 128, 16, gate=gate), 256)), 16, 1024, 256)
                for name, make in (("eager", lambda block: block), ("compiled", partial(torch.compile, dynamic=False)))}
        seconds = interleaved(work, rounds)
        rows.append(dict(what=f"eager ÷ compiled, {gate} gate", **ratio(seconds["eager"], seconds["compiled"])))
        print(f"compiled, {gate} gate: {shown(rows[-1])} × as fast as eager (a block of Text's size, bf16)", flush=True)
    weights = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        task, model = NdRegression(f=5, n=5), construct_multivariate(GRIL(5), 3.0, 5).double().to(device)
        optimizer, generator = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.Generator().manual_seed(0)
        for _ in range(2):
            batch = task.sample(64, generator)
            loss = task.loss(model, type(batch)(*(t.double().to(device) for t in batch)))
            optimizer.zero_grad(), loss.backward(), optimizer.step()
        weights.append([p.detach() for p in model.parameters()])
    report("two training steps, float64", weights[1], weights[0], 1e-9)
    return rows


def data(rounds, rows=1000):
    """How fast data is made and encoded, on one core: absolute, so only of this machine."""
    work = {"ListOps, expressions": (lambda: sum(1 for _ in listops_lines(rows)), rows)}
    folder = data_folder()
    text, gpt2 = folder / "wikitext-2/wiki.valid.tokens", folder / "gpt2"
    if text.exists() and gpt2.exists():
        encoder = [gpt2 / name for name in ("encoder.json", "vocab.bpe")]
        work["GPT-2 byte pairs, MB of WikiText-2"] = (lambda: BPE(*encoder).encode(text.read_text()),
                                                      text.stat().st_size / 1e6)
    else:
        print(f"no {text} or {gpt2}: byte pairs left out (--data is the environment variable GRIL_DATA here)")
    seconds = interleaved({name: job for name, (job, _) in work.items()}, rounds)
    rows = []
    for name, (_, amount) in work.items():
        rates = sorted(amount / s for s in seconds[name])
        rows.append(dict(what=name, per_second=statistics.median(rates), low=rates[0], high=rates[-1]))
        print(f"{name:36s} {rows[-1]['per_second']:8.1f} a second [{rates[0]:.1f}, {rates[-1]:.1f}]", flush=True)
    return rows


def loader(rounds, batches=10):
    """Tokens a second that the loader alone delivers ÷ those that training the tiny model takes, on the files there are."""
    rows = []
    for name, Task in LRA.items():
        task = Task()
        try:
            stream = task.stream(0, task.recipe["batch"], DEVICE)
        except ValueError as error:
            print(f"{name}: left out. {error}")
            continue
        model = task.model().to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        counts = []

        def deliver():
            counts.append(sum(next(stream)[0].numel() for _ in range(batches)))

        def learn():
            optimizer.zero_grad(set_to_none=True)
            task.loss(model, batch).backward()
            optimizer.step()
        batch = next(stream)
        seconds = interleaved({"delivered": deliver, "learnt": learn}, rounds)
        delivered = [n / s for n, s in zip(counts[1:], seconds["delivered"])]           # the first was to warm up
        learnt = [batch[0].numel() / s for s in seconds["learnt"]]
        rows.append(dict(task=name, delivered=statistics.median(delivered), **ratio(delivered, learnt)))
        print(f"{name:12s} {shown(rows[-1])} × the tokens that training takes "
              f"({rows[-1]['delivered'] / 1e6:.1f} million a second here)", flush=True)
    return rows


BENCHES = {"core": core, "blocks": blocks, "growth": growth, "streaming": streaming,
           "generation": generation, "icl": icl, "data": data, "loader": loader, "forms": forms,
           "cuda-check": cuda_check}


# --------------------------------------------------------------------------------------------------------- pictures

def plot(what, rows):
    panels = 2 if what in ("blocks", "growth") else 1
    figure, axes = plt.subplots(1, panels, figsize=(10 if panels == 2 else 6.5, 3.6), layout="constrained", squeeze=False)
    ax = axes[0, 0]
    if what == "core":
        names = list(PRESETS)
        series = sorted({(r["gate"], r["form"]) for r in rows if r["form"] in ("chunk", "scan")}, reverse=True)
        for i, (gate, form) in enumerate(series):
            values = {r["preset"]: r["ratio"] for r in rows if (r["gate"], r["form"]) == (gate, form)}
            places = [k + 0.13 * (i - (len(series) - 1) / 2) for k, n in enumerate(names) if n in values]
            ax.bar(places, [values[n] for n in names if n in values], 0.12, label=f"{form}, {gate} gate")
        ax.set_xticks(range(len(names)), names, fontsize=8), ax.axhline(1, color="grey", ls=":"), ax.set_yscale("log")
        ax.set(ylabel="time ÷ dense layers' time",
               title="The recurrence against the dense layers of its block"), ax.legend(fontsize=7)
    elif what == "blocks":
        for ax, mode in zip(axes[0], ("training", "inference")):
            for name in BLOCKS:
                line = [(r["length"], r["tokens_per_second"]) for r in rows if (r["mode"], r["block"]) == (mode, name)]
                ax.loglog(*zip(*line), marker="o", ms=3, label=name, lw=2.5 if name == "GRIL" else 1.2)
            ax.set(title=mode, xlabel="length", ylabel="tokens per second")
        axes[0, 1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    elif what == "growth":
        for ax, key, label in zip(axes[0], ("milliseconds", "megabytes"), ("ms, forward + backward", "peak MB")):
            ax.loglog([r["length"] for r in rows], [r[key] for r in rows], marker="o")
            ax.loglog([r["length"] for r in rows], [rows[0][key] * r["length"] / rows[0]["length"] for r in rows],
                      color="grey", ls=":", label="linear")
            ax.set(xlabel="length, batch 1", ylabel=label), ax.legend()
    elif what == "streaming":
        for name in dict.fromkeys(r["block"] for r in rows):
            ax.loglog(*zip(*((r["position"], r["microseconds"]) for r in rows if r["block"] == name)), marker="o", label=name)
        ax.set(xlabel="position in the stream", ylabel="µs a token"), ax.legend()
    elif what == "icl":
        ax.plot([r["f"] for r in rows], [r["ratio"] for r in rows], marker="o")
        ax.set(xlabel="f", ylabel="steps ÷ plainest loop's steps", ylim=(0, None),
               title="In-context training, N = 10, batch 64")
    else:
        plt.close(figure)
        return print(f"--plot: there is no picture of {what}")
    path = place(f"bench_{what}.png", False)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
    print(f"figure    {path}")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=BENCHES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="FILE", help="also write the numbers there")
    parser.add_argument("--compile", action="store_true", help="of core: torch.compile both sides, a minute each")
    parser.add_argument("--plot", action="store_true", help="also draw them, into docs/images/bench_WHAT.png")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    if args.compile and args.what != "core":
        parser.error(f"--compile is for core; {args.what} has no compiled side")
    print(f"torch {torch.__version__}, {DEVICE}, {torch.get_num_threads()} threads, {args.rounds} rounds")
    rows = BENCHES[args.what](args.rounds, **dict(compiled=True) if args.compile else {})
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))
    if args.plot:
        plot(args.what, rows)


if __name__ == "__main__":
    main()
