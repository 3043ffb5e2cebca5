"""Whole or not at all: a file has its name only when all of it is on the disk.

Arrays are one file, checked and mapped into memory when read: a line of JSON, in which `arrays` has
the first byte, the bytes and the checksum of each; then they follow, one after the other.
"""
import json
import os
import zlib
from contextlib import contextmanager

import numpy as np


@contextmanager
def whole(path, keep=None):
    """A file open beside `path`, which it becomes if the block ends well; the old one, `keep`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    try:
        with open(beside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if keep and path.exists():
            os.replace(path, keep)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write(path, *parts, keep=None):
    with whole(path, keep) as file:
        file.writelines(parts)


def write_json(path, value):
    write(path, (json.dumps(value, indent=1) + "\n").encode())


def write_arrays(path, arrays, **header):
    """{name: array} behind a header with whatever else is worth knowing."""
    places, at = {}, 0
    for name, array in arrays.items():
        places[name] = [at, array.nbytes, zlib.crc32(array)]
        at += array.nbytes
    line = json.dumps(dict(header, arrays=places)).encode()
    write(path, line.ljust(len(line) | 7), b"\n", *arrays.values())     # they start at 8, 16, …


def read_arrays(path, kinds):
    """(header, {name: array}) of those names of {name: dtype} that there are."""
    try:
        with open(path, "rb") as file:
            header, start = json.loads(file.readline(1 << 20)), file.tell()
        data, arrays, places = np.memmap(path, np.uint8, "r", start), {}, header["arrays"]
        for name in kinds.keys() & places.keys():
            at, size, checksum = places[name]
            part = data[at:][:size]
            if not len(part) or zlib.crc32(part) != checksum:
                raise ValueError
            arrays[name] = part.view(kinds[name])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is damaged") from None
    return header, arrays
