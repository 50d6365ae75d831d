"""The architecture, read from the tree itself: floors, circles, what stays without torch, what is packaged."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
FLOORS = [
    "errors",
    "files",
    "text",
    "needles",
    "plots",
    "terminal",
    "rope",
    "methods",
    "config",
    "live",
    "runtimes",
]
FLOORS += ["folders", "training", "search", "evals", "cli", "__main__"]
"""From the ground up. Each may import what stands before it."""


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules():
    return {name_of(path): path for path in sorted((ROOT / "ctxext").rglob("*.py"))}


@cache
def imports():
    """(module, module that it imports) of the package, wherever in the file the import stands."""
    found = set()
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {(name, alias.name) for alias in node.names if alias.name.split(".")[0] == "ctxext"}
            if not isinstance(node, ast.ImportFrom):
                continue
            package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
            near = package[: len(package) - node.level + 1] if node.level else []
            full = ".".join([*near, *([node.module] if node.module else [])])
            if full.split(".")[0] != "ctxext":
                continue
            for alias in node.names:
                found.add((name, f"{full}.{alias.name}" if f"{full}.{alias.name}" in modules() else full))
    # The root package itself is only the version and names that are imported on first use.
    return {(a, b) for a, b in found if b != "ctxext"}


def circles(edges):
    """Groups of nodes that reach each other (Tarjan)."""
    graph = {}
    for a, b in edges:
        graph.setdefault(a, set()).add(b)
        graph.setdefault(b, set())
    reach = {}
    for start in graph:
        seen, todo = set(), [start]
        while todo:
            for other in graph[todo.pop()] - seen:
                seen.add(other)
                todo.append(other)
        reach[start] = seen
    return sorted({frozenset(o for o in reach[n] if n in reach[o]) for n in graph if n in reach[n]}, key=sorted)


def floor(module):
    return module.split(".")[1]


def test_floors_are_what_the_folders_are():
    named = {floor(m) for m in modules() if m != "ctxext"}
    assert named == set(FLOORS)
    assert len(list((ROOT / "ctxext").glob("*.py"))) <= 8


def test_imports_go_down():
    up = [(a, b) for a, b in imports() if a != "ctxext" and FLOORS.index(floor(b)) > FLOORS.index(floor(a))]
    assert not sorted(up)


def test_no_circles_between_modules_or_floors():
    assert not circles(imports())
    assert not circles({(floor(a), floor(b)) for a, b in imports() if a != "ctxext" and floor(a) != floor(b)})


def test_circles_are_found():
    assert circles({("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")}) == [frozenset("abc")]


def test_the_package_knows_no_experiment():
    for path in modules().values():
        assert "experiments" not in {
            (n.module or "").split(".")[0]
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.ImportFrom)
        }, path


def test_plain_data_imports_no_torch():
    """rope, methods, config, runtimes, the command line and all it imports at once, in one process."""
    light = [m for m in modules() if m.count(".") and floor(m) in ("rope", "methods", "config", "runtimes", "cli")]
    code = f"""import importlib, sys
for name in {light!r}:
    importlib.import_module(name)
    heavy = {{"torch", "transformers", "numpy"}} & set(sys.modules)
    assert not heavy, (name, heavy)"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_file_holds_one_idea():
    long = [p for d in ("ctxext", "experiments", "tests") for p in (ROOT / d).rglob("*.py")]
    assert not [p for p in long if len(p.read_text().splitlines()) > 600]


def test_every_folder_is_a_package():
    """One without an __init__.py works from a clone and is missing from the wheel."""
    assert all((path.parent / "__init__.py").is_file() for path in modules().values())
