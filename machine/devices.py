"""The machine of a run: devices, the processes that share a batch, signals."""
import os
import signal
import threading
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist


def choose_device(name):
    there = dict(cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available(), cpu=True)
    kind = next(kind for kind in there if there[kind]) if name == "auto" else name
    if not there[kind]:
        raise ValueError(f"--device {kind}: this machine (or this build of torch) has no "
                         f"{kind.upper()} device")
    device = torch.device(kind, None if kind == "cpu" else int(os.environ.get("LOCAL_RANK", 0)))
    if kind == "cuda":
        if device.index >= torch.cuda.device_count():
            raise ValueError(f"process {device.index} of this machine has no GPU: there are "
                             f"{torch.cuda.device_count()}; start as many with --nproc_per_node")
        torch.cuda.set_device(device)
    return device


def processes():
    """(rank, world): which of how many processes this is, as torchrun says."""
    said = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    rank, world = said.get("RANK", "0"), said.get("WORLD_SIZE", "1")
    within = (rank + world).isdecimal() and int(rank) < int(world)
    if not within or world != "1" and "RANK" not in said:
        there = " and ".join(f"{name}={value}" for name, value in said.items())
        raise ValueError(f"the environment has {there}, which is no process of a run: unset them, "
                         "or start with torchrun, which sets both")
    return int(rank), int(world)


def set_up(recipe, world):
    """(device, name of the dtype, autocast) for a run, with torch set to them; processes joined."""
    device, dtype = choose_device(recipe["device"]), recipe["dtype"]
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(recipe["threads"] or max(1, cores))
    torch.set_default_dtype(torch.float64 if dtype == "float64" else torch.float32)
    # "high" is TF32, also for the products inside a recurrence, which are summed up in float32
    low = dtype == "bfloat16"
    torch.set_float32_matmul_precision("high" if low and device.type == "cuda" else "highest")
    autocast = torch.autocast(device.type, torch.bfloat16) if low else nullcontext()
    if world > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, timeout=timedelta(minutes=10))
        except dist.DistError as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise ValueError(f"the {world} processes do not meet at {where}, MASTER_ADDR and "
                             f"MASTER_PORT: {str(error).splitlines()[0]}") from None
    return device, dtype, autocast


def same(values, world, fault="was started with other words"):
    """Refuses processes that differ in any of {name: value}."""
    of = [values] * world
    if world > 1:
        dist.all_gather_object(of, values)
    for rank, other in enumerate(of):
        differs = [f"{name} {other[name]} there, {of[0][name]} in process 0"
                   for name in other if name != "threads" and other[name] != of[0][name]]
        if differs:
            raise ValueError(f"process {rank} {fault}: {'; '.join(differs)}")


def on(device, *arrays):
    """Arrays as tensors on a device; to a GPU the copy runs beside the computation."""
    cuda, tensors = torch.device(device).type == "cuda", map(torch.from_numpy, arrays)
    return tuple((x.pin_memory() if cuda else x).to(device, non_blocking=cuda) for x in tensors)


class Epochs:
    """Endless batches; a process takes the places `mine` of each.

    A subclass says which examples the batches of an epoch have, ordered(epoch) (batches, batch), by
    its seed, and how a model takes them, take(examples). Epoch and index are the position.
    """

    def __init__(self, batch, mine):
        self.batch, self.mine = batch, mine
        self.seek((0, 0))

    def seek(self, position):
        self.epoch, self.index = position
        self.order = self.ordered(self.epoch)

    def position(self):
        return self.epoch, self.index

    def __next__(self):
        if self.index == len(self.order):
            self.seek((self.epoch + 1, 0))
        self.index += 1
        return self.take(self.order[self.index - 1, self.mine])


def my_share(parts):
    """Of an evaluation: every process of a run takes its part, and summed puts them together."""
    return parts[dist.get_rank()::dist.get_world_size()] if dist.is_initialized() else parts


def summed(sums):
    """The sums of all processes."""
    if dist.is_initialized():
        dist.all_reduce(sums)
    return sums


def seed_dropout(device, seed):
    """The device's own generator: torch.manual_seed visits them all, longer than a small step."""
    generators = {"cuda": torch.cuda, "mps": torch.mps}
    generators.get(device.type, torch.default_generator).manual_seed(seed % 2 ** 63)


def agree(losses, norm, signals, world):
    """(loss, gradient norm, shall we stop?) of all processes: one small tensor a step."""
    asked = norm.new_tensor(float(bool(signals)))
    values = torch.stack([sum(losses) / len(losses), norm, asked])
    if world > 1:
        dist.all_reduce(values)
    loss, norm, asked = (values / world).tolist()
    return loss, norm, asked > 0


@contextmanager
def catch_signals(rank):
    """The first SIGTERM or Ctrl-C is noted, for the loop to stop; the second one acts at once."""
    caught, before = [], {}

    def note(number, frame):
        caught.append(number)
        for number in before:
            signal.signal(number, signal.SIG_DFL)
        if rank == 0:                                           # print may be busy already
            os.write(2, b"\nstopping after this step; once more to leave at once\n")

    if threading.current_thread() is threading.main_thread():   # elsewhere no handler is allowed
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, note)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
