"""Words for the person who made the mistake.

Scripts import this file before torch, so that Ctrl-C while that loads ends in no traceback, too.
"""
import difflib
import errno
import os
import sys
from contextlib import contextmanager


def quietly(kind, error, traceback):
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = quietly
FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG


class Missing(ValueError):
    """Data that is not there, and what to do about it."""


@contextmanager
def spoken(script):
    """A command that cannot go on ends with one sentence, not with a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")                # a ÷ on a terminal without it
    try:
        try:
            yield
        finally:
            sys.stdout.flush()          # when Python ends it is too late to say anything
    except BrokenPipeError:                                     # … | head: nobody reads any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141 if script == "train.py" else 0)            # a run is not over; SIGPIPE's code
    except (ValueError, FloatingPointError) as error:
        sys.exit(f"{script}: {error}")
    except OSError as error:
        again = "--resume" if script == "train.py" else "once more"
        full = f". What was written before is whole: make room, then {again}"
        sys.exit(f"{script}: {error}{full if error.errno in FULL else ''}")
    except KeyboardInterrupt:
        print(f"\n{script}: stopped", file=sys.stderr)
        sys.exit(130)
    except (MemoryError, RuntimeError) as error:
        said = str(error)
        words = "out of memory", "allocate memory", "calculation overflowed"
        if not (any(word in said.lower() for word in words) or isinstance(error, MemoryError)):
            raise
        what = f" ({said.splitlines()[0]})" if said else ""
        less = ". A smaller --batch, or --accumulate 2, needs less" if script == "train.py" else ""
        sys.exit(f"{script}: too little memory{what}{less}")


def refuse(*rules):
    """Of (is it so?, sentence) the first that is so ends the command with its sentence."""
    for so, sentence in rules:
        if so:
            raise ValueError(sentence)


def known(what, name, table):
    """The row of a table, or an answer that lists them all."""
    if name not in table:
        near = [other for other in table if name and other.startswith(name)]
        near = " or ".join(near or difflib.get_close_matches(name, table, 1))
        raise ValueError(f"unknown {what} {name!r}{f', did you mean {near}?' if near else '.'} "
                         f"There are: {', '.join(table)}")
    return table[name]


def fitting(**operands):
    """The sizes of named axes, from tensors given as name=(tensor or None, letters of its axes).

    An axis of size 1 fits any, and J may be missing; the first tensor that does not fit is named.
    """
    sizes = dict.fromkeys("".join(axes for _, axes in operands.values()), 1)
    for name, (x, axes) in operands.items():
        if x is None:
            continue
        for axis, n in zip(axes[::-1], x.shape[::-1]):
            sizes[axis] = n if sizes[axis] == 1 else sizes[axis]
        wanted = tuple(sizes[axis] for axis in axes)
        few, many = x.ndim < len(axes) and axes[0] != "J", x.ndim > len(axes)
        if few or many or any(a not in (1, n) for a, n in zip(x.shape[::-1], wanted[::-1])):
            raise ValueError(f"{name} {tuple(x.shape)} does not broadcast to "
                             f"({', '.join(axes)}) = {wanted}")
        if not (x.is_floating_point() or x.is_complex() and "T" not in axes):
            raise ValueError(f"{name} must be floating point, got {x.dtype}")
    return sizes
