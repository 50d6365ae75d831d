"""Write a model folder as one GGUF file for llama.cpp and everything built on it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..config.keys import head_dim
from ..config.read import read_schedule
from ..config.rope_parameters import Fallback
from ..errors import CtxextError, check_choice
from ..files import read_config, replacing_file, settled
from ..rope import Schedule
from ..runtimes.gguf_file import require_gguf
from ..runtimes.gguf_rope import TENSOR, GgufRope, architecture
from ..runtimes.gguf_tokenizer import add_tokenizer
from .heads import require_causal
from .patch import whole
from .source import display_name, resolve
from .weights import check_weights, tensor_files

if TYPE_CHECKING:
    import numpy as np

Dtype = Literal["f32", "f16", "bf16", "q8_0"]
Format = Literal["gguf"]
_BLOCK = 32  # numbers per Q8_0 block, along a row


@dataclass(frozen=True)
class Exported:
    """What `export` wrote: the file, its architecture, type, tokenizer and schedule."""

    out: Path
    architecture: str
    dtype: str
    tokenizer: str
    tensors: int
    schedule: Schedule
    rope: GgufRope


def export(
    model: str | os.PathLike,
    out: str | os.PathLike | None = None,
    *,
    to: Format = "gguf",
    dtype: Dtype = "f16",
    force: bool = False,
    fallback: Fallback = "refuse",
    pretokenizer: str | None = None,
) -> Exported:
    """Write MODEL, with the schedule that its config.json carries, as a GGUF that llama.cpp runs exactly.

    out: by default ./<model>-<dtype>.gguf. dtype: f32, f16, bf16 or q8_0, of matrices; vectors are always f32.
    fallback: "static" writes a staged schedule's last stage. pretokenizer: see `gguf_tokenizer.add_tokenizer`.
    Tensors are read, converted and written one by one. Raises CtxextError for a model whose architecture,
    activation or rope llama.cpp can't run as transformers does, UsageError for a wrong option.
    """
    check_choice("to", to, Format)
    check_choice("dtype", dtype, Dtype)
    check_choice("fallback", fallback, Fallback)
    gguf = require_gguf()
    folder = resolve(model, dtype="float32" if dtype == "f32" else "bfloat16")
    config = read_config(folder)
    try:
        schedule = read_schedule(config)
    except CtxextError as error:
        hint = f"patch it first (ctxext patch): {error.hint}" if error.hint else None
        raise CtxextError(error.message, hint=hint) from error
    arch, rope = architecture(config, schedule, fallback)
    require_causal(config, folder, "a GGUF for llama.cpp")
    check_weights(folder)
    target = Path(out) if out is not None else Path(f"{display_name(model)}-{dtype}.gguf")
    _check_target(whole(model, folder), target)
    with replacing_file(target, force=force) as file, Weights(folder) as weights:
        writer = gguf.GGUFWriter(None, arch)
        writer.add_name(display_name(model))
        _add_shape(writer, config)
        for key, value in rope.prefixed(arch).items():
            add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
            add(key, value)
        kind = add_tokenizer(writer, folder, config["vocab_size"], pretokenizer)
        kinds = gguf.LlamaFileType
        writer.add_file_type(int(kinds.ALL_F32 if dtype == "f32" else kinds[f"MOSTLY_{dtype.upper()}"]))
        if dtype == "q8_0":
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        plan = _planned(weights.shapes(), config, arch, dtype)
        heads = _heads(config) if arch == "llama" else {}
        count = _write(writer, Path(file.name), weights, plan, heads, rope)
    return Exported(target, arch, dtype, kind, count, schedule, rope)


def _check_target(source: Path, target: Path) -> None:
    """Raise CtxextError if writing `target` would take away the model itself, or one of its files."""
    mine, goal = settled(source), settled(target)
    if goal == mine or (goal.is_relative_to(mine) and goal.exists() and goal.suffix != ".gguf"):
        raise CtxextError(f"{target} is a part of the model to export", hint="write to another file with -o")


def _heads(config: Mapping[str, Any]) -> dict[str, int]:
    """Heads of the query and the key projection."""
    heads = config["num_attention_heads"]
    return {"q_proj": heads, "k_proj": config.get("num_key_value_heads") or heads}


def _add_shape(writer: Any, config: Mapping[str, Any]) -> None:
    heads, size = _heads(config), head_dim(config)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["q_proj"])
    writer.add_head_count_kv(heads["k_proj"])
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_vocab_size(config["vocab_size"])


@dataclass(frozen=True)
class _Tensor:
    """One tensor: its name in the folder and in the file, its shape in the folder, its type in the file."""

    name: str
    mapped: str
    shape: tuple[int, ...]
    kind: Any


def _planned(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], arch: str, dtype: str
) -> list[_Tensor]:
    """The tensors that the file shall hold; CtxextError for one that llama.cpp has no place for."""
    gguf = require_gguf()
    kinds = gguf.GGMLQuantizationType
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    plan = []
    for name, shape in shapes.items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if mapped is None or (".bias" in mapped and arch != "llama" and "attn_output" in mapped):
            raise CtxextError(f"llama.cpp's {arch} has no place for the tensor {name}")
        kind = kinds.F32
        if len(shape) > 1:
            whole_blocks = dtype != "q8_0" or list(shape)[-1] % _BLOCK == 0
            kind = kinds[dtype.upper()] if whole_blocks else kinds.F16
        plan.append(_Tensor(name, mapped, shape, kind))
    return plan


def _write(
    writer: Any, path: Path, weights: Weights, plan: Sequence[_Tensor], heads: Mapping[str, int], rope: GgufRope
) -> int:
    """Write the file, tensor by tensor; how many it holds. heads: of the projections that are interleaved."""
    import numpy as np

    gguf = require_gguf()
    table = None if rope.freqs is None else np.array(rope.freqs, dtype=np.float32)
    for t in plan:
        block, size = gguf.GGML_QUANT_SIZES[t.kind]
        count = int(np.prod(t.shape)) // block * size
        writer.add_tensor_info(t.mapped, t.shape, np.dtype(np.float32), count, raw_dtype=t.kind)
    if table is not None:
        writer.add_tensor_info(TENSOR, table.shape, table.dtype, table.nbytes)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for t in plan:
        data = weights.read(t.name)
        projection = t.name.split(".")[-2]
        if projection in heads:
            data = interleaved(data, heads[projection])
        writer.write_tensor_data(gguf.quants.quantize(data, t.kind))
    if table is not None:
        writer.write_tensor_data(table)
    writer.close()
    return len(plan) + (table is not None)


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in llama.cpp's order for Llama.

    transformers turns coordinate i together with i + d/2, llama.cpp's Llama 2i with 2i + 1.
    """
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


class Weights:
    """The tensors of a model folder by name, one at a time, from the files that from_pretrained reads."""

    def __init__(self, folder: Path):
        self._stack = contextlib.ExitStack()
        self._open: dict[str, Any] = {}
        for path in tensor_files(folder):
            if path.suffix == ".safetensors":
                from safetensors import safe_open

                opened = self._stack.enter_context(safe_open(path, "pt"))
                self._open |= dict.fromkeys(opened.keys(), opened)
            else:
                import torch

                self._open |= torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not self._open:
            raise CtxextError(f"{folder} holds no weights that from_pretrained would find")

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, without the rope buffers that old checkpoints carry."""
        return dict(self._shapes())

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, place in self._open.items():
            if not name.endswith(("rotary_emb.inv_freq", ".masked_bias", "attention.bias")):
                shape = place.get_slice(name).get_shape() if hasattr(place, "get_slice") else place.shape
                yield name, tuple(shape)

    def read(self, name: str) -> np.ndarray:
        """One tensor as float32."""
        place = self._open[name]
        tensor = place.get_tensor(name) if hasattr(place, "get_tensor") else place
        return tensor.float().numpy()
