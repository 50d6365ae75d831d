"""Write ctxext/live/patch.pyi: `patch` with each method's own options, for editors and type checkers.

    python -m experiments.stubs

Read from the registry and from patch.py, so that nothing is listed by hand; a test holds the file to it.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import typing
from pathlib import Path

from ctxext import methods

SOURCE = Path(__file__).parents[2] / "ctxext" / "live" / "patch.py"
STUB = SOURCE.with_suffix(".pyi")
COMMON = 'trained_length: int | None = None, existing: Existing = "refuse"'


def stub() -> str:
    """The text of the file."""
    plain = []
    for node in ast.parse(SOURCE.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.name != "patch":
            answer = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            plain.append(f"def {node.name}({ast.unparse(node.args)}){answer}: ...")
    overloads = [overload(method) for method in methods.all_methods().values()]
    any_name = (
        f"method: str, factor: float, *, {COMMON}, method_options: Mapping[str, Any] | None = None, **options: Any"
    )
    text = "\n".join(
        [
            '"""Written by python -m experiments.stubs."""',
            "",
            "from collections.abc import Mapping",
            "from typing import Any, Literal, overload",
            "",
            "from ..config.read import Existing as Existing",
            "from ..rope import Schedule as Schedule",
            "from . import Foreign as Foreign",
            "",
            *overloads,
            "@overload",
            f"def patch(model: Foreign, {any_name}) -> Schedule: ...",
            *plain,
            "",
        ]
    )
    ruff = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(STUB), "-"]
    return subprocess.run(ruff, input=text, capture_output=True, encoding="utf-8", check=True).stdout


def overload(method: methods.Method) -> str:
    """One method's form of `patch`."""
    options = "".join(f", {o.name}: {spelled(o.type)} = ..." for o in method.options)
    doc = method.summary.replace('"', "'")
    given = f'model: Foreign, method: Literal["{method.name}"], factor: float, *, {COMMON}{options}'
    return f'@overload\ndef patch({given}) -> Schedule:\n    """{doc}"""\n'


def spelled(annotation: typing.Any) -> str:
    """A type as it is written in a signature."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__name__
    return str(annotation).replace("typing.", "")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    STUB.write_text(stub(), encoding="utf-8")
