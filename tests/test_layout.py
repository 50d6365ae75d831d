"""Who may import whom: the core never imports the evaluators, and the plain-data layers never import torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLAIN = ["rope", "methods", "spelling", "hf_config", "families", "checkpoint", "inspection", "card", "cli"]
PLAIN += ["config_writing", "preview", "cli_serve", "doctor", "hub"]
PLAIN += ["export.portability", "export.gguf_rope", "export.gguf_model"]


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def test_the_core_imports_no_evaluator():
    for path in (ROOT / "ctxext").rglob("*.py"):
        assert not [name for name in imported(path) if name.startswith(("ctxext.evals", "evals"))], path


@pytest.mark.parametrize("module", PLAIN)
def test_plain_data_layers_import_no_torch(module):
    code = f"import sys, ctxext.{module}; print(sorted({{'torch', 'transformers', 'numpy'}} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


LAYERS = ["errors", "rope", "methods", "families", "hf_config", "config_writing", "rotary", "patching"]
LAYERS += ["checkpoint", "cli"]


def test_layers_point_one_way():
    """rope, methods, hf_config, patching, checkpoint, cli: each may use the ones before it only."""
    for rank, layer in enumerate(LAYERS):
        path = ROOT / "ctxext" / f"{layer}.py"
        paths = [path] if path.exists() else list((ROOT / "ctxext" / layer).glob("*.py"))
        assert paths, layer
        for source in paths:
            for node in ast.walk(ast.parse(source.read_text())):
                if isinstance(node, ast.ImportFrom) and node.level:
                    used = (node.module or node.names[0].name).split(".")[0]
                    if used in LAYERS:
                        assert LAYERS.index(used) <= rank, f"{source} imports {used}"


def test_every_package_is_packaged():
    """A folder that pyproject.toml forgets works from a clone and is missing from the wheel."""
    tomllib = pytest.importorskip("tomllib")
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "ctxext").rglob("__init__.py")}
    assert set(listed) == found | {"ctxext.evals"}
