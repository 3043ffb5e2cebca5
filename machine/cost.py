"""What a run would cost, counted on the meta device: every shape, no number."""
import textwrap

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from baselines import parameters
from gril import GrilMixer


GPUS = {                            # FLOPs a second (the peak in bfloat16), bytes a second
    "one A100": dict(number=1, flops=312e12, memory=2.04e12),
    "one H100": dict(number=1, flops=989e12, memory=3.35e12),
    "four H100": dict(number=4, flops=989e12, memory=3.35e12),
}
UTILISATION, LAUNCH = 0.3, 5e-6     # of the peak; seconds a kernel: assumptions, not measured
FUSED = {"real": 77, "complex": 103}            # kernels inductor makes of a layer's recurrence
FREE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view",
        "lift_fresh")               # allocations and such: no kernel


def dry_run(args, task, recipe, world):
    """Forward and backward of the full size, counted and printed."""
    r = count(task, args.model, recipe, world)
    r["hours"] = {gpu: hours(r, recipe["steps"], **numbers) for gpu, numbers in GPUS.items()}
    show(r, args, task, recipe, world)
    return r


def count(task, name, recipe, world):
    """Parameters, tokens, FLOPs, bytes and kernels of a step; GB on a GPU."""
    turns, shares = recipe["accumulate"], world * recipe["accumulate"]
    with torch.device("meta"):
        model, batch = task.model(name), task.example(recipe["batch"] // shares)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                raise ValueError(f"{type(module).__name__}.{name} is a plain tensor, which "
                                 "model.to(device) would leave behind: register_buffer, please")
    own, kept = {p.untyped_storage()._cdata for p in model.parameters()}, {}

    def keep(x):
        kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    with OneDevice() as device, FlopCounterMode(display=False) as flops:
        with saved_tensors_hooks(keep, lambda x: x):
            loss = task.loss(model, batch)
        loss.backward()
    B, T = getattr(batch, "s", batch[0]).shape[:2]
    r = dict(parameters=parameters(model), tokens=B * T * shares, turns=turns,
             flops=flops.get_total_flops() * shares, traffic=device.traffic * shares,
             kernels=device.kernels * turns, compiled=None,
             activations=sum(size for storage, size in kept.items() if storage not in own),
             optimiser=16 * parameters(model))      # weight, gradient, two moments, 4 bytes each
    mixers = [module for module in model.modules() if isinstance(module, GrilMixer)]
    if mixers:
        r["form"] = mixers[0].form.__name__
        r["fused"] = FUSED["real" if mixers[0].theta is None else "complex"]
        saved = len(mixers) * (recurrence_kernels(mixers[0], (B, T)) - r["fused"])
        r["compiled"] = (device.kernels - saved) * turns
    return r


class OneDevice(TorchDispatchMode):
    """Refuses what a GPU would: an operation on tensors of two devices, but for 0-dim numbers.

    The meta device alone lets CPU tensors pass through products, embeddings and convolutions.
    Counts the operations that are kernels, that is neither views nor allocations, and the bytes
    that they read and write.
    """
    traffic = kernels = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        devices = {x.device.type for x in tensors if x.dim()}
        if len(devices) > 1:
            raise ValueError(f"{func} mixes tensors of {' and '.join(sorted(devices))}: one of "
                             "them was made without device=, and would stop a run on a GPU")
        out = func(*args, **(kwargs or {}))
        if not (func.is_view or func.overloadpacket.__name__ in FREE):
            written = [x.nbytes for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            self.traffic += sum(x.nbytes for x in tensors) + sum(written)
            self.kernels += bool(written)           # a question about dtypes is none
        return out


def recurrence_kernels(mixer, tokens):
    """Kernels of one GRIL layer's recurrence, forward and backward; tokens (B, T)."""
    v, k, u = (torch.empty(*tokens, mixer.J, mixer.h, device="meta", requires_grad=True)
               for _ in range(3))
    mixer.zero_grad()                               # a gradient to add to would be a kernel more
    with OneDevice() as device:
        log_rho, theta, _ = mixer.gates()
        mixer.recur(v, k, u, log_rho, theta, mixer.start(v))[0].sum().backward()
    return device.kernels


def hours(r, steps, number, flops, memory):
    """Of the run on such GPUs, by each bound, and the largest of them, eager and compiled."""
    seconds = dict(launches=r["kernels"] * LAUNCH,
                   compiled=(r["compiled"] or r["kernels"]) * LAUNCH,
                   traffic=r["traffic"] / (number * memory),
                   products=r["flops"] / (number * flops * UTILISATION))
    by = {name: value * steps / 3600 for name, value in seconds.items()}
    more = max(by["traffic"], by["products"])
    return dict(by, eager=max(by["launches"], more), best=max(by["compiled"], more))


COLUMNS = dict(launches="launches", compiled="(compiled)", traffic="traffic", products="products",
               eager="largest", best="(compiled)")


def show(r, args, task, recipe, world):
    def say(title, text):
        print(textwrap.fill(f"{title:13s}{text}", 100, subsequent_indent=13 * " "))

    paper = compiled = ""
    if task.paper_parameters:
        share = r["parameters"] / task.paper_parameters - 1
        paper = f", the paper's {task.paper_parameters:,.0f} ({share:+.1%})"
    if r["compiled"]:
        compiled = (f"; compiled about {r['compiled']:,}, where inductor makes {r['fused']} of "
                    "each layer's recurrence and the rest is taken as it is")
    say("task", f"{args.task}, model {args.model}, recipe {args.recipe}: {recipe['steps']:,} steps")
    say("parameters", f"{r['parameters']:,}{paper}")
    if "form" in r:
        say("recurrence", r["form"])
    say("a step", f"batch {recipe['batch']}, {r['tokens']:,} tokens, {r['flops']:.3g} FLOPs in "
        "matrix products")
    say("a GPU", f"of {world}, {r['turns']} turn{'s' if r['turns'] > 1 else ''} a step: "
        f"activations {r['activations'] / 1e9:.3g} GB in float32 (less in bfloat16), weights, "
        f"gradients and AdamW {r['optimiser'] / 1e9:.3g} GB")
    say("kernels", f"{r['kernels']:,} a step on each GPU{compiled}")
    say("hours", f"by launches at {1e6 * LAUNCH:.0f} µs (if compiled); by memory traffic (float32, "
        "nothing fused, full bandwidth); by matrix products at "
        f"{UTILISATION:.0%} of the bf16 peak. The largest counts; views, allocations and the "
        "optimiser are left out, and each operation is taken for one kernel")
    say("", f"{'':10s}" + "".join(f"{title:>11s}" for title in COLUMNS.values()))
    for gpu, by in r["hours"].items():
        say("", f"{gpu:10s}" + "".join(f"{by[name]:11.3g}" for name in COLUMNS))
