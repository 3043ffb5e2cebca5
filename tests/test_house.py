"""The house: imports one way and at the top of a file, 100 columns, a README of one sitting."""
import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [path for path in ROOT.rglob("*.py") if not any(
    part.startswith(".") for part in path.relative_to(ROOT).parts)]
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text()
           for path in FILES if path.parent.name != "tests"}
ORDER = "gril baselines tasks lra lm train pictures.trained figures".split()


def imports(sources):
    """module -> the project's modules that it imports, wherever in the file."""
    found = {}
    for name, source in sources.items():
        nodes = list(ast.walk(ast.parse(source)))
        named = [alias.name for node in nodes if isinstance(node, ast.Import)
                 for alias in node.names]
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                named += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        found[name] = {other for other in named if other in sources}
    return found


def inside_functions(source):
    """Lines of imports that a function holds."""
    functions = [node for node in ast.walk(ast.parse(source))
                 if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))]
    return {node.lineno for function in functions for node in ast.walk(function)
            if isinstance(node, (ast.Import, ast.ImportFrom))}


def test_imports_go_one_way():
    graph = imports(MODULES)
    order = list(TopologicalSorter(graph).static_order())       # raises CycleError
    assert graph["machine.cost"] == {"baselines", "gril"}       # the two ways to name a module
    assert graph["lra"] > {"tasks", "files.arena"}
    below = {}
    for name in order:
        below[name] = graph[name].union(*(below[other] for other in graph[name]))
    for i, name in enumerate(ORDER):
        assert not below[name] & set(ORDER[i + 1:]), f"{name} imports what stands above it"
    assert below["figures"] > set(ORDER) - {"figures"} and "lra" not in below["lm"]


def test_a_cycle_is_found():
    for line in ("import p.b", "from p import b", "def f():\n    from p.b import x"):
        with pytest.raises(CycleError):
            TopologicalSorter(imports({"a": line, "p.b": "import c", "c": "import a"})).prepare()


def test_no_function_imports():
    assert inside_functions("import a\ndef f():\n    if a:\n        from b import c") == {4}
    assert {name: lines for name, source in MODULES.items()
            if (lines := inside_functions(source))} == {}


def test_lines_fit_100_columns():
    wide = {f"{path.relative_to(ROOT)}:{i}" for path in FILES
            for i, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 100}
    assert wide == set()


def test_the_readme_is_read_in_one_sitting():
    assert (ROOT / "README.md").stat().st_size <= 16_000
