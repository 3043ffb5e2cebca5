"""The machine of a run: devices, the processes that share a batch, signals."""
import os
import signal
import threading
from contextlib import contextmanager

import torch
import torch.distributed as dist


def choose_device(name):
    for kind, there in (("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available())):
        if name == kind and not there:
            raise ValueError(f"--device {kind}: this machine (or this build of torch) has no {kind.upper()} device")
        if name in ("auto", kind) and there:
            device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)))
            if kind == "cuda":
                torch.cuda.set_device(device)
            return device
    return torch.device("cpu")


def on(device, *arrays):
    """Arrays as tensors on a device; to a GPU the copy runs beside the computation."""
    tensors = [torch.from_numpy(x) for x in arrays]
    if torch.device(device).type == "cuda":
        return tuple(x.pin_memory().to(device, non_blocking=True) for x in tensors)
    return tuple(x.to(device) for x in tensors)


def my_share(parts):
    """Of an evaluation: every process of a run takes its part, and summed puts them together."""
    return parts[dist.get_rank()::dist.get_world_size()] if dist.is_initialized() else parts


def summed(sums):
    """The sums of all processes."""
    if dist.is_initialized():
        dist.all_reduce(sums)
    return sums


def seed_dropout(device, seed):
    """The device's own generator only: torch.manual_seed visits them all, which takes longer than an in-context step."""
    generators = {"cuda": torch.cuda, "mps": torch.mps}
    generators.get(device.type, torch.default_generator).manual_seed(seed % 2 ** 63)


def agree(losses, norm, signals, world):
    """Loss and gradient norm over all processes, and whether one of them was told to stop: one small tensor a step."""
    values = torch.stack([*losses, norm])
    if world > 1:
        values = torch.cat([values, values.new_tensor([float(bool(signals))])])
        dist.all_reduce(values)
        *losses, norm, asked = (values / world).tolist()
    else:
        *losses, norm, asked = *values.tolist(), bool(signals)
    return sum(losses) / len(losses), norm, asked > 0


@contextmanager
def catch_signals(rank):
    """The first SIGTERM or Ctrl-C is noted, for the loop to stop after its step; the second one acts at once."""
    caught, before = [], {}

    def note(number, frame):
        caught.append(number)
        for number in before:
            signal.signal(number, signal.SIG_DFL)
        if rank == 0:
            os.write(2, b"\nstopping after this step; once more to leave at once\n")      # print may be busy already
    if threading.current_thread() is threading.main_thread():                   # elsewhere Python allows no handler
        before.update({number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)})
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
