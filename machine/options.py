"""The numbers of a recipe: what each one means, what it is if nobody says, and what it may be.

A task declares its own in `options`, the training loop's are in LOOP; the command line shows both.
"""
import math
from typing import NamedTuple

from machine.errors import known, refuse


class Option(NamedTuple):
    default: object
    help: str
    least: float = None             # the smallest value allowed
    above: float = None             # or: it must be more than this
    most: float = None              # the largest value allowed
    below: float = None             # or: it must be less than this
    among: tuple = ()               # or: one of these names
    kind: type = None               # of the value, where the default is None

    @property
    def type(self):
        return self.kind or type(self.default)

    def check(self, name, value):
        """Refuses what this number cannot be; not a number and infinity are in no range."""
        name = flag(name)
        if self.among:
            known(name.strip("-"), value, dict.fromkeys(self.among))
        if value is None or self.type not in (int, float):
            return
        rules = (
            (self.type is int and abs(value) >= 2 ** 63, "less than 2^63"),
            (not -math.inf < value < math.inf, "a finite number"),
            (self.least is not None and value < self.least,
             f"at least {self.least}" if self.least else "0 or more"),
            (self.above is not None and value <= self.above, f"more than {self.above}"),
            (self.most is not None and value > self.most, f"at most {self.most}"),
            (self.below is not None and value >= self.below, f"less than {self.below}"))
        refuse(*((broken, f"{name} must be {rule}, got {value}") for broken, rule in rules))


def flag(name):
    """An option's name as one types it."""
    return f"--{name.replace('_', '-')}"


def sequence_options(layers, H, P, J, length):
    """The numbers that all models of long sequences have."""
    return dict(
        layers=Option(layers, "layers", least=1),
        H=Option(H, "width of the model", least=1),
        P=Option(P, "state size", least=1),
        J=Option(J, "blocks of the state", least=1),
        length=Option(length, "tokens of a sequence, at most", least=1),
        dropout=Option(0.0, "share of activations dropped in training", least=0, below=1),
        form=Option("chunk", "of the recurrence: loop, scan or chunk",
                    among=("loop", "scan", "chunk")))


LOOP = dict(
    steps=Option(1000, "optimiser steps", least=1),
    batch=Option(64, "examples a step, of all GPUs together", least=1),
    lr=Option(1e-3, "peak learning rate", above=0),
    recurrent_lr=Option(1e-3, "peak learning rate of the recurrent parameters", least=0),
    weight_decay=Option(0.0, "of the other parameters", least=0),
    warmup=Option(0, "steps of linear warm-up before the cosine", least=0),
    clip=Option(0.0, "largest gradient norm, 0 for no limit", least=0),
    evaluate_every=Option(1000, "steps between validations", least=1),
    checkpoint_every=Option(1000, "steps between checkpoints (last.pt)", least=1),
    patience=Option(0, "stop after so many validations without improvement, 0 for never", least=0),
    device=Option("auto", "auto, cpu, cuda or mps; auto is the best there is",
                  among=("auto", "cpu", "cuda", "mps")),
    dtype=Option("auto", "auto, bfloat16 (autocast), float32 or float64; auto is bfloat16 on CUDA, "
                 "else float32", among=("auto", "bfloat16", "float32", "float64")),
    threads=Option(0, "CPU threads, 0 for all cores", least=0, most=1024),
    accumulate=Option(1, "take the batch in so many turns, for fewer GPUs or less memory", least=1),
)
