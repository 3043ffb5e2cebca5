"""Whole or not at all: a file has its name only when all of it is on the disk."""
import os
from contextlib import contextmanager


@contextmanager
def whole(path, keep=None):
    """A file open beside `path`, which it becomes if the block ends well; the old one, `keep`."""
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
