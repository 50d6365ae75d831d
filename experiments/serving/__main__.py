"""The rope tables of vLLM and SGLang themselves, on a CPU and without their servers, against transformers.

    python -m experiments.serving [--vllm SOURCES] [--sglang SOURCES] [-o FOLDER]

SOURCES is a folder that holds the package `vllm` or `sglang` (an unpacked source distribution or wheel); without
it the installed package. Only their rotary files run: everything else that those import (platforms, kernels,
loggers) is replaced by stand-ins that say no to every question. So this proves the tables, and nothing about a
server.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import re
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ctxext import methods, terminal
from ctxext.config.write import write_config
from ctxext.errors import CtxextError
from ctxext.files import dumps, write_json
from ctxext.rope import Rope, Schedule

PACKAGES = {
    "vllm": "vllm.model_executor.layers.rotary_embedding",
    "sglang": "sglang.srt.layers.rotary_embedding",
}


class _No:
    """Stands for any object of the server: has every attribute, calls give another, and it is false."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _No()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # As a decorator it leaves the function alone.
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _No()

    def __bool__(self) -> bool:
        return False


class _Module(torch.nn.Module):
    """Stands for the servers' base classes of layers."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()

    @classmethod
    def register(cls, *args: Any, **kwargs: Any) -> Any:
        return lambda subclass: subclass

    @classmethod
    def enabled(cls) -> bool:
        return False


class _Stand(types.ModuleType):
    """A module of the server that isn't needed: any name can be imported from it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # SGLang asks which device it is on, and whether a server is running.
        answers = {"is_cpu": lambda: True, "publish_role": lambda: None}
        return _Module if name in ("CustomOp", "PluggableLayer", "BaseFusedOp") else answers.get(name, _No())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root: Path, package: str):
        self.root, self.package = root, package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] != self.package.split(".")[0]:
            return None
        if name == self.package or name.startswith(self.package + "."):
            file = self.root.joinpath(*name.split("."))
            inside = file.is_dir()
            found = file / "__init__.py" if inside else file.with_suffix(".py")
            places = [str(file)] if inside else None
            return importlib.util.spec_from_file_location(name, found, submodule_search_locations=places)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _Stand(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextlib.contextmanager
def rope_package(name: str, sources: Path | None = None) -> Iterator[types.ModuleType]:
    """vLLM's or SGLang's package of rotary embeddings, imported alone; forgotten again afterwards.

    Raises CtxextError if it isn't there or can't be imported this way.
    """
    root = sources
    if root is None:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise CtxextError(f"{name} isn't installed", hint=f"give its sources with --{name}")
        root = Path(spec.origin).parent.parent
    package = PACKAGES[name]
    if not root.joinpath(*package.split(".")).is_dir():
        raise CtxextError(f"{root} holds no {package}")
    finder = _Finder(root, package)
    before = {k: v for k, v in sys.modules.items() if k.split(".")[0] == name}
    for module in before:
        del sys.modules[module]
    sys.meta_path.insert(0, finder)
    try:
        try:
            yield importlib.import_module(package)
        except ImportError as error:
            raise CtxextError(f"{package} can't be imported alone: {error}") from error
    finally:
        sys.meta_path.remove(finder)
        for module in [k for k in sys.modules if k.split(".")[0] == name]:
            del sys.modules[module]
        sys.modules.update(before)


def version(name: str, sources: Path | None = None) -> str:
    """The version that the sources, or the installed package, call themselves."""
    if sources is None:
        from importlib.metadata import version as installed

        return installed(name)
    for path in [*sources.glob(f"{name}-*.dist-info/METADATA"), sources / name / "_version.py"]:
        if path.is_file():
            found = re.search(
                r"^(?:Version: |.*__version__ = version = ')([\w.+]+)", path.read_text(encoding="utf-8"), re.M
            )
            if found:
                return found.group(1)
    return "unknown"


def table(name: str, package: types.ModuleType, config: Mapping[str, Any], served: int) -> torch.Tensor:
    """cos and sin, (2, positions, frequencies), that the server would use for a config.json.

    served: its maximum model length. vLLM is given rope_parameters, SGLang rope_scaling and rope_theta.
    """
    size, length = config["head_dim"], config["max_position_embeddings"]
    if name == "vllm":
        longrope = sys.modules.get(f"{PACKAGES['vllm']}.phi3_long_rope_scaled_rope")
        settings = types.SimpleNamespace(model_config=types.SimpleNamespace(max_model_len=served))
        if longrope is not None:
            vars(longrope)["get_current_vllm_config"] = lambda: settings
        rope = package.get_rope(size, length, True, dict(config["rope_parameters"]), torch.float32)
    else:
        scaling = config["rope_scaling"] or None
        rope = package.get_rope(size, size, length, config["rope_theta"], True, scaling, torch.float32)
    rows = getattr(rope, "long_short_cos_sin_cache", None)
    if rows is not None:
        original = config["rope_parameters"]["original_max_position_embeddings"]
        # Both put the short table first; the long one is used above the original length.
        rows = rows[original:] if served > original else rows[:original]
    else:
        rows = rope.cos_sin_cache
    cos, sin = rows.float().chunk(2, dim=-1)
    return torch.stack([cos, sin])


def transformers_table(config: Mapping[str, Any], length: int) -> torch.Tensor:
    """The same from transformers' rotary class."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(LlamaConfig.from_dict(json.loads(json.dumps(config))))
    cos, sin = rotary(torch.zeros(1), torch.arange(length)[None])
    half = cos.shape[-1] // 2
    return torch.stack([cos[0, :, :half], sin[0, :, :half]])


def static_schedules(rope: Rope, factor: float) -> dict[str, Schedule]:
    """Every static method, and YaRN with options of its own."""
    given = {"long_factor": [1 + i / 4 for i in range(rope.size)]}
    chosen = {name: given if method.needs else {} for name, method in methods.all_methods().items()}
    made = {name: methods.schedule(rope, name, factor, **options) for name, options in chosen.items()}
    odd = {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.2}
    made["yarn, own options"] = methods.schedule(rope, "yarn", factor, **odd)
    return {name: schedule for name, schedule in made.items() if schedule.is_static}


def compare(name: str, sources: Path | None = None, *, rope: Rope | None = None, factor: float = 4) -> list[dict]:
    """Per static method the largest difference of cos and sin to transformers over the whole target length."""
    from ctxext.runtimes.portability import stand_in

    rope = rope or Rope(500000.0, 64, 2048)
    rows = []
    with rope_package(name, sources) as package:
        for label, schedule in static_schedules(rope, factor).items():
            config = write_config(stand_in(rope), schedule)
            theirs = table(name, package, config, schedule.max_length)
            ours = transformers_table(config, schedule.max_length)
            if theirs.shape[1] < ours.shape[1]:
                rows.append({"method": label, "error": f"{theirs.shape[1]} rows for {ours.shape[1]} positions"})
                continue
            difference = (theirs[:, : ours.shape[1]] - ours).abs().max().item()
            rows.append({"method": label, "max_difference": difference, "positions": ours.shape[1]})
    return rows


def main(
    vllm: Annotated[
        Path | None, typer.Option(help="Folder with the package vllm; default: the installed one.")
    ] = None,
    sglang: Annotated[Path | None, typer.Option(help="Folder with the package sglang; likewise.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Folder for serving_ropes.json.")] = None,
) -> None:
    """Compare what is there, print a JSON document."""
    document: dict[str, Any] = {}
    for name, sources in (("vllm", vllm), ("sglang", sglang)):
        try:
            document[name] = {"version": version(name, sources), "results": compare(name, sources)}
        except (CtxextError, ImportError) as error:
            document[name] = {"not_run": str(error)}
    print(dumps(document, indent=1))
    if out:
        write_json(out / "serving_ropes.json", document, indent=1)


if __name__ == "__main__":
    terminal.run(main)
