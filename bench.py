"""Speed and memory, as ratios measured side by side in one run.

    python bench.py forms [--json FILE]     loop, scan and chunk: forward + backward, time and peak memory

A time on a busy machine means nothing alone: contenders take turns, round after round, and what is reported is the
median over rounds of their ratio within a round, with the tenth and ninetieth percentile.
"""
import argparse
import json
import multiprocessing
import statistics
import time

import torch

from gril import FORMS


def interleaved(contenders, rounds):
    """Seconds of every contender in every round, {name: [seconds]}; they take turns after one warm-up each."""
    seconds = {name: [] for name in contenders}
    for i in range(rounds + 1):
        for name, work in contenders.items():
            start = time.perf_counter()
            work()
            if i:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(slow, fast):
    """Median, tenth and ninetieth percentile of slow/fast, round by round."""
    ratios = sorted(a / b for a, b in zip(slow, fast))
    return statistics.median(ratios), ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]


def inputs(B, T, P, J, w=3):
    h = P // J
    shapes = ((B, T, J, h, w), (B, T, J, h, w), (B, T, J, h))
    V, K, r = (torch.randn(*shape).requires_grad_() for shape in shapes)
    return V, K, r, torch.empty(J, 1, h).uniform_(0.5, 1).requires_grad_()


def forward_backward(form, operands):
    o, _ = FORMS[form](*operands)
    o.backward(torch.randn_like(o))             # not o.sum(): a gradient of equal strides would slow products down


def peak_megabytes(form, size):
    """Memory that forward + backward of a form adds at its peak, in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (form, size))


def _peak(form, size):
    operands = inputs(*size)
    forward_backward(form, inputs(1, 8, size[2], size[3]))      # libraries loaded before the first reading
    before = _high_water()
    forward_backward(form, operands)
    return (_high_water() - before) / 1024


def _high_water():
    """Peak kilobytes of this process alone; getrusage would also count those of the process that started it."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))


def forms(rounds):
    rows = []
    for B, T, P, J in ((4, 1024, 128, 16), (4, 1024, 256, 2)):
        operands = inputs(B, T, P, J)
        names = list(FORMS) if P // J < 64 else ["scan", "chunk"]       # the loop has nothing to say at wide states
        seconds = interleaved({name: lambda name=name: forward_backward(name, operands) for name in names}, rounds)
        memory = {name: peak_megabytes(name, (B, T, P, J)) for name in names}
        for name in names:
            middle, low, high = ratio(seconds[names[0]], seconds[name])
            rows.append(dict(B=B, T=T, P=P, J=J, form=name, faster=middle, low=low, high=high, baseline=names[0],
                             megabytes=memory[name], milliseconds=1e3 * statistics.median(seconds[name])))
            print(f"B={B} T={T} P={P:3d} J={J:2d}  {name:5s}  {middle:6.1f}x as fast as {names[0]} [{low:.1f}, {high:.1f}]"
                  f"  peak {memory[name]:7.0f} MB  ({rows[-1]['milliseconds']:.0f} ms here)", flush=True)
    return rows


BENCHES = {"forms": forms}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=BENCHES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="FILE", help="also write the numbers there")
    args = parser.parse_args(argv)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.rounds} rounds")
    rows = BENCHES[args.what](args.rounds)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
