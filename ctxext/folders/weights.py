"""Which weights of a folder from_pretrained reads, whether they are whole, and what else is there: second copies.

Hub folders hold a checkpoint several times: for other programs, with its rope inside (a GGUF, an ONNX graph,
Mistral's and Meta's params.json beside consolidated weights), or as it was before it was converted. A schedule in
config.json doesn't reach those, so a patched folder goes without them.
"""

from __future__ import annotations

import itertools
import json
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import CtxextError
from ..files import WEIGHTS, model_files

INDEX = ".index.json"
_NAMES = [f"{name}{end}" for name in ("model.safetensors", "pytorch_model.bin") for end in ("", INDEX)]
"""Where transformers looks for weights, in its order (modeling_utils._get_resolved_checkpoint_files)."""
_WHOLE = re.compile(
    r"(pytorch_)?model(-+\d+-of-\d+)?\.(safetensors|bin|pt|pth)(\.index\.json)?|weights(\.\d+)?\.npz"
)
"""Names of a whole checkpoint, or of its shards. Variants (model.fp16.safetensors) aren't among them."""
_VARIANT = re.compile(
    r"(pytorch_)?model\..+\.(safetensors|bin)|(pytorch_)?model\.(safetensors|bin)\.index\..+\.json"
)
_OWN_ROPE = frozenset(
    (
        *(
            ".gguf",
            ".ggml",
            ".llamafile",
            ".onnx",
            ".onnx_data",
            ".ort",
            ".h5",
            ".keras",
            ".pb",
            ".msgpack",
            ".ot",
        ),
        *(".tflite", ".litertlm", ".task", ".mlmodel", ".pte", ".engine", ".plan", ".nemo"),
    )
)
"""Formats of other programs, which hold what config.json says once more, or a graph that it was built into."""
_PACKAGES = (".mlpackage", ".mlmodelc")
_NATIVE = {"dim", "n_layers"}
"""What Mistral's and Meta's params.json have in common."""


def weight_files(folder: Path) -> list[Path]:
    """The files that from_pretrained reads a model's weights from, relative to `folder`; an index comes first.

    Empty if it would find none. Raises CtxextError if the index is damaged.
    """
    said = _json(folder / "config.json").get("transformers_weights")
    name = next((name for name in ([said] if said else _NAMES) if (folder / name).is_file()), None)
    if name is None:
        return []
    if not name.endswith(INDEX):
        return [Path(name)]
    try:
        named = json.loads((folder / name).read_text(encoding="utf-8-sig"))["weight_map"].values()
        return [Path(name), *sorted({Path(shard) for shard in named})]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CtxextError(f"{folder / name} is damaged: {error}", hint="download it again") from error


def tensor_files(folder: Path) -> list[Path]:
    """`weight_files` with the folder in front, without the index."""
    return [folder / name for name in weight_files(folder) if not name.name.endswith(INDEX)]


def _json(path: Path) -> dict[str, Any]:
    """A JSON object, empty if there is none that can be read: whoever needs it complains."""
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def has_weights(folder: Path) -> bool:
    """Whether from_pretrained would find all weights of a model, or PEFT those of an adapter."""
    try:
        found = weight_files(folder)
    except CtxextError:
        return False
    if found:
        return all((folder / name).is_file() for name in found)
    return any((folder / f"adapter_model{suffix}").is_file() for suffix in (".safetensors", ".bin"))


def require_weights(folder: Path) -> None:
    """Raise CtxextError if from_pretrained would find no weights of a model, saying what is there instead."""
    if weight_files(folder):
        return
    others = [file for file in model_files(folder) if file.suffix in WEIGHTS | _OWN_ROPE]
    if any(_VARIANT.fullmatch(file.name) for file in others):
        return
    if any(file.name.endswith(".distcp") for file in folder.iterdir()):
        return
    if not others:
        raise CtxextError(f"{folder} has a config.json but no weights", hint="download it again")
    named = ", ".join(map(str, others[:3])) + (" ..." if len(others) > 3 else "")
    if all(file.suffix == ".gguf" for file in others):
        raise CtxextError(
            f"{folder} has its weights as GGUF alone ({named}), beside a config.json that says nothing about them",
            hint=f"give the file: ctxext patch {folder / others[0]} --in-gguf patches it as it is; "
            "without --in-gguf it becomes a folder",
        )
    raise CtxextError(
        f"{folder} has no weights that from_pretrained finds (model.safetensors or pytorch_model.bin, or their "
        f"index), only {named}",
        hint="download those too, or convert what is there with transformers' scripts",
    )


def check_weights(folder: Path) -> None:
    """Raise CtxextError if weights are missing or cut short. Reads headers only, never tensors."""
    require_weights(folder)
    missing = [str(name) for name in weight_files(folder) if not (folder / name).is_file()]
    if missing:
        raise CtxextError(
            f"{folder} lacks {len(missing)} shard(s): {', '.join(missing[:3])}", hint="download it again"
        )
    copies = second_copies(folder)
    for file in model_files(folder):
        if file.suffix == ".safetensors" and not within(file, copies):
            _check_safetensors(folder / file)


def safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """The entries of a safetensors file by tensor, and where in the file its data begins, in bytes.

    An entry has dtype, shape and data_offsets, which count from there; the library shows no offsets, and reads a
    tensor only whole. Raises CtxextError if the file is too short for its header or that is damaged.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 0 < length <= size - 8:
            raise CtxextError(f"{path} is cut short or not a safetensors file", hint="download it again")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CtxextError(f"{path} has a damaged header", hint="download it again") from error
    header.pop("__metadata__", None)
    return header, 8 + length


def _check_safetensors(path: Path) -> None:
    header, begin = safetensors_header(path)
    size = path.stat().st_size
    promised = begin + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if size != promised:
        raise CtxextError(f"{path} is {size} bytes long, its header promises {promised}", hint="download it again")


def within(file: Path, places: Iterable[Path]) -> bool:
    """Whether a file is one of these files, or lies in one of these folders; all relative to the same."""
    return any(place == file or place in file.parents for place in places)


def second_copies(folder: Path) -> list[Path]:
    """Files and folders, relative to `folder`, that hold the model once more and that config.json doesn't reach.

    Kept is what from_pretrained reads, its variants, subfolders that are a part of the model (modules of
    sentence-transformers, adapters) or another model, and whatever isn't known as a copy. A folder that holds a
    copy counts as a whole: a tokenizer in it is a copy too.
    """
    chosen, files = set(weight_files(folder)), list(model_files(folder))
    parts = {file.parent for file in files if file.name == "adapter_config.json"}
    parts |= {Path(module) for module in _modules(folder)}
    parts |= {file.parent for file in files if file.name == "config.json" and _other_model(folder, file)}
    parts.discard(Path())
    found = set()
    for file in files:
        if file in chosen or within(file, parts) or not _is_copy(folder, file, bool(chosen)):
            continue
        place = _package(file) or file.parent
        mixed = place == Path() or any(within(inner, [place]) for inner in itertools.chain(chosen, parts))
        found.add(file if mixed else place)
    return sorted(place for place in found if not within(place, found - {place}))


def _is_copy(folder: Path, file: Path, chosen: bool) -> bool:
    name, inner = file.name, file.parent != Path()
    if file.suffix in _OWN_ROPE or ".onnx" in file.suffixes or _package(file):
        return True
    if name.startswith(("openvino_", "ggml-")) and file.suffix in (".bin", ".xml"):
        return True
    if name.startswith("consolidated") and (file.suffix in WEIGHTS or name.endswith(INDEX)):
        return True
    if name == "params.json":
        return _json(folder / file).keys() >= _NATIVE
    return (chosen or inner) and _WHOLE.fullmatch(name) is not None


def _package(file: Path) -> Path | None:
    """The Core ML package that a file is in: a folder that counts as one file."""
    return next((place for place in file.parents if place.name.endswith(_PACKAGES)), None)


def _modules(folder: Path) -> list[str]:
    """The subfolders that sentence-transformers reads, by modules.json."""
    path = folder / "modules.json"
    if not path.is_file():
        return []
    try:
        return [module["path"] for module in json.loads(path.read_text(encoding="utf-8-sig"))]
    except (ValueError, KeyError, TypeError) as error:
        raise CtxextError(f"{path} is damaged: {error}", hint="download it again") from error


def _other_model(folder: Path, config: Path) -> bool:
    """Whether the config.json of a subfolder is another model's, such as a draft for speculation."""
    mine, other = _json(folder / "config.json"), _json(folder / config)
    return any(
        key in mine and other.get(key, mine[key]) != mine[key] for key in ("hidden_size", "num_hidden_layers")
    )


def native_copy(folder: Path) -> bool:
    """Whether a folder holds Mistral's own format, which vLLM takes before config.json if it isn't told not to."""
    return any(folder.glob("consolidated*.safetensors"))
