"""What a run would cost, counted on the meta device: every shape, no number."""
import math

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from baselines import parameters
from gril import GrilMixer

UTILISATION, LAUNCH = 0.3, 5e-6                                 # of the peak; seconds a kernel: assumptions, not measured
GPUS = {"one A100": (1, 312e12, 2.04e12), "one H100": (1, 989e12, 3.35e12), "four H100": (4, 989e12, 3.35e12)}
FUSED = {"real": 76, "complex": 102}                            # kernels that inductor makes of a layer's recurrence


class OneDevice(TorchDispatchMode):
    """Refuses what a GPU would: an operation on tensors of two devices. Numbers (0-dim tensors) may come from anywhere.

    The meta device alone lets CPU tensors pass through products, embeddings and convolutions. Counts the operations that
    are kernels, that is neither views nor allocations, and the bytes that they read and write.
    """
    traffic = kernels = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        devices = {x.device.type for x in tensors if x.dim()}
        if len(devices) > 1:
            raise ValueError(f"{func} mixes tensors of {' and '.join(sorted(devices))}: one of them was made without "
                             "device=, and would stop a run on a GPU")
        out = func(*args, **(kwargs or {}))
        if not (func.is_view or func.overloadpacket.__name__ in ("empty", "empty_like", "empty_strided", "new_empty",
                                                                 "new_empty_strided", "_unsafe_view", "lift_fresh")):
            out_bytes = [x.nbytes for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            self.traffic += sum(x.nbytes for x in tensors) + sum(out_bytes)
            self.kernels += bool(out_bytes)                     # a question about dtypes is none
        return out


def recurrence_kernels(mixer, tokens):
    """Kernels of one GRIL layer's recurrence, forward and backward, on the meta device; tokens (B, T)."""
    v, k, u = (torch.empty(*tokens, mixer.J, mixer.h, device="meta", requires_grad=True) for _ in range(3))
    mixer.zero_grad()                                           # a gradient to add to would be a kernel more
    with OneDevice() as device:
        log_rho, theta, _ = mixer.gates()
        mixer.recur(v, k, u, log_rho, theta, mixer.start(v))[0].sum().backward()
    return device.kernels


def dry_run(args, task, recipe, world):
    """Forward and backward of the full size on the meta device: every shape, no number. Prints what a run would cost."""
    turns = recipe["accumulate"]
    shares = world * turns
    with torch.device("meta"):
        model, batch = task.model(args.model), task.example(recipe["batch"] // shares)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                raise ValueError(f"{type(module).__name__}.{name} is a plain tensor, which model.to(device) would leave "
                                 "behind: register_buffer, please")
    own, kept = {p.untyped_storage()._cdata for p in model.parameters()}, {}

    def keep(x):
        kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x
    with OneDevice() as device, FlopCounterMode(display=False) as counter:
        with saved_tensors_hooks(keep, lambda x: x):
            loss = task.loss(model, batch)
        loss.backward()
    tokens, mixers = getattr(batch, "s", batch[0]).shape[:2], [m for m in model.modules() if isinstance(m, GrilMixer)]
    r = dict(parameters=parameters(model), tokens=math.prod(tokens) * shares, flops=counter.get_total_flops() * shares,
             traffic=device.traffic * shares, kernels=device.kernels * turns, compiled=None,
             activations=sum(size for storage, size in kept.items() if storage not in own))
    r["optimiser"] = 16 * r["parameters"]                       # weight, gradient and two moments, 4 bytes each
    if mixers:
        fused = FUSED["real" if mixers[0].theta is None else "complex"]
        r["compiled"] = (device.kernels - len(mixers) * (recurrence_kernels(mixers[0], tokens) - fused)) * turns
    r["hours"] = {gpu: dict(
        launches=r["kernels"] * LAUNCH, compiled=(r["compiled"] or r["kernels"]) * LAUNCH, traffic=r["traffic"] / (n * memory),
        products=r["flops"] / (n * flops * UTILISATION)) for gpu, (n, flops, memory) in GPUS.items()}
    for by in r["hours"].values():
        by.update({name: seconds * recipe["steps"] / 3600 for name, seconds in by.items()})
        by["eager"] = max(by["launches"], by["traffic"], by["products"])
        by["best"] = max(by["compiled"], by["traffic"], by["products"])

    paper, n = task.paper_parameters, r["parameters"]
    print(f"task         {args.task}, model {args.model}, recipe {args.recipe}: {recipe['steps']:,} steps")
    print(f"parameters   {n:,}" + (f", the paper's {paper:,.0f} ({n / paper - 1:+.1%})" if paper else ""))
    if mixers:
        print(f"recurrence   {mixers[0].form.__name__}")
    print(f"a step       batch {recipe['batch']}, {r['tokens']:,} tokens, {r['flops']:.3g} FLOPs in matrix products")
    print(f"a GPU        of {world}, {turns} turn{'s' if turns > 1 else ''} a step: activations "
          f"{r['activations'] / 1e9:.3g} GB in float32 (less in bfloat16),\n"
          f"             weights, gradients and AdamW {r['optimiser'] / 1e9:.3g} GB")
    print(f"kernels      {r['kernels']:,} a step on each GPU" + (
          f"; compiled about {r['compiled']:,}, where inductor makes {fused} of\n             each layer's recurrence and the "
          "rest is taken as it is" if mixers else ""))
    print(f"hours        by launches at {1e6 * LAUNCH:.0f} µs; by memory traffic (float32, nothing fused, full bandwidth); by "
          f"matrix\n             products at {UTILISATION:.0%} of the bf16 peak. The largest counts; views, allocations and the "
          "optimiser are\n             left out, and each operation is taken for one kernel")
    print(f"             {'':10s} {'launches':>10s} {'compiled':>10s} {'traffic':>10s} {'products':>10s}   "
          f"{'largest':>8s} {'compiled':>9s}")
    for gpu, by in r["hours"].items():
        print(f"             {gpu:10s} {by['launches']:10.3g} {by['compiled']:10.3g} {by['traffic']:10.3g} {by['products']:10.3g}"
              f"   {by['eager']:8.3g} {by['best']:9.3g}")
    return r
