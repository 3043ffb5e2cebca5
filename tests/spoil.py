"""python tests/spoil.py FILE NAME TEST …: runs tests with one thing of the project spoiled.

What a function returns is a tenth off; a class is spoiled in the method that does its work. Only
then the tests are loaded, so that every import finds the spoiled one.
"""
import functools
import importlib
import inspect
import sys
import traceback

import pytest
import torch

WORK = "run", "forward", "tokens", "evaluate", "score"


def worse(x):
    """x a tenth off, whatever it is; where there is nothing to be off, it fails."""
    if isinstance(x, (float, torch.Tensor)) and not isinstance(x, torch.BoolTensor):
        return x * 1.1 + 0.1 if isinstance(x, float) or x.is_floating_point() else x + 1
    if isinstance(x, dict):
        return {key: worse(value) if isinstance(value, (float, dict)) else value
                for key, value in x.items()}
    if isinstance(x, (tuple, list)):
        parts = [worse(part) if isinstance(part, (float, torch.Tensor)) else part for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    if isinstance(x, torch.nn.Module):
        with torch.no_grad():
            for p in x.parameters():
                p.add_(0.1)
        return x
    if callable(x):
        return spoiled(x)
    raise AssertionError("spoiled")


def spoiled(function):
    @functools.wraps(function)
    def wrapped(*args, **options):
        return worse(function(*args, **options))
    return wrapped


def spoil(file, name):
    owner = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    *path, name = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    found = inspect.getattr_static(owner, name)
    if inspect.isclass(found):
        owner, name = found, next(method for method in WORK if hasattr(found, method))
        found = inspect.getattr_static(owner, name)
    if isinstance(found, (staticmethod, classmethod)):
        found = type(found)(spoiled(found.__func__))
    else:
        found = worse(found)
    original = vars(owner).get(name)
    setattr(owner, name, found)
    for table in vars(owner).values():                          # such as gril.FORMS, FIGURES
        for key, value in table.items() if isinstance(table, dict) else ():
            if value is original:
                table[key] = found
            elif isinstance(value, functools.partial) and value.func is original:
                table[key] = functools.partial(found, *value.args)


if __name__ == "__main__":
    file, name, *tests = sys.argv[1:]
    try:
        spoil(file, name)
    except Exception as error:
        traceback.print_exception(error)
        sys.exit(9)                                             # not 1, which a failed test has
    sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-m", "slow or not slow", *tests]))
