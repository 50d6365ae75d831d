"""Write a model folder as one GGUF file for llama.cpp and everything built on it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.read import head_dim, read_schedule
from ..config.rope_parameters import FALLBACKS
from ..errors import CtxextError, UsageError
from ..files import check_weights, read_config, replacing_file
from ..rope import Schedule
from ..runtimes.gguf_file import require_gguf
from ..runtimes.gguf_rope import TENSOR, GgufRope, architecture
from ..runtimes.gguf_tokenizer import add_tokenizer
from .source import display_name, resolve

if TYPE_CHECKING:
    import numpy as np

DTYPES = ("f32", "f16", "bf16", "q8_0")
_BLOCK = 32  # numbers per Q8_0 block, along a row


@dataclass(frozen=True)
class Exported:
    """What `export_gguf` wrote: the file, its architecture, type, tokenizer and schedule."""

    out: Path
    architecture: str
    dtype: str
    tokenizer: str
    tensors: int
    schedule: Schedule
    rope: GgufRope


def export_gguf(
    model: str | os.PathLike,
    out: str | os.PathLike | None = None,
    *,
    dtype: str = "f16",
    force: bool = False,
    fallback: str = "refuse",
    pretokenizer: str | None = None,
) -> Exported:
    """Write MODEL, with the schedule that its config.json carries, as a GGUF that llama.cpp runs exactly.

    out: by default ./<model>-<dtype>.gguf. dtype: f32, f16, bf16 or q8_0, of matrices; vectors are always f32.
    fallback: "static" writes a staged schedule's last stage. pretokenizer: see `gguf_tokenizer.add_tokenizer`.
    Tensors are read, converted and written one by one. Raises CtxextError for a model whose architecture,
    activation or rope llama.cpp can't run as transformers does, UsageError for a wrong option.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if fallback not in FALLBACKS:
        raise UsageError(f"fallback={fallback!r} is not one of {', '.join(FALLBACKS)}")
    gguf = require_gguf()
    folder = resolve(model, dtype="float32" if dtype == "f32" else "bfloat16")
    config = read_config(folder)
    schedule = read_schedule(config)
    arch, rope = architecture(config, schedule, fallback)
    check_weights(folder)
    target = Path(out) if out is not None else Path(f"{display_name(model)}-{dtype}.gguf")
    names = _names(arch, config)
    with replacing_file(target, force=force) as file, Weights(folder) as weights:
        writer = gguf.GGUFWriter(None, arch)
        writer.add_name(display_name(model))
        _add_shape(writer, config)
        for key, value in rope.prefixed(arch).items():
            add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
            add(key, value)
        kind = add_tokenizer(writer, folder, config["vocab_size"], pretokenizer)
        writer.add_file_type(int(gguf.LlamaFileType[_file_type(dtype)]))
        if dtype == "q8_0":
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        count = _write_tensors(writer, Path(file.name), weights, names, config, arch, dtype, rope)
    return Exported(target, arch, dtype, kind, count, schedule, rope)


def _add_shape(writer: Any, config: Mapping[str, Any]) -> None:
    heads, size = config["num_attention_heads"], head_dim(config)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_vocab_size(config["vocab_size"])


def _names(arch: str, config: Mapping[str, Any]) -> Any:
    gguf = require_gguf()
    kind = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    return gguf.get_tensor_name_map(kind, config["num_hidden_layers"])


def _file_type(dtype: str) -> str:
    return "ALL_F32" if dtype == "f32" else f"MOSTLY_{dtype.upper()}"


def _write_tensors(
    writer: Any,
    path: Path,
    weights: Weights,
    names: Any,
    config: Mapping[str, Any],
    arch: str,
    dtype: str,
    rope: GgufRope,
) -> int:
    import numpy as np

    gguf = require_gguf()
    kinds = gguf.GGMLQuantizationType
    plan = []
    for name, shape in weights.shapes().items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if mapped is None or (".bias" in mapped and arch != "llama" and "attn_output" in mapped):
            raise CtxextError(f"llama.cpp's {arch} has no place for the tensor {name}")
        kind = kinds[dtype.upper()] if len(shape) > 1 else kinds.F32
        if kind == kinds.Q8_0 and shape[-1] % _BLOCK:
            kind = kinds.F16
        plan.append((name, mapped, shape, kind))
    for _, mapped, shape, kind in plan:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        count = int(np.prod(shape)) // block * size
        writer.add_tensor_info(mapped, shape, np.dtype(np.float32), count, raw_dtype=kind)
    if rope.freqs is not None:
        table = np.array(rope.freqs, dtype=np.float32)
        writer.add_tensor_info(TENSOR, table.shape, table.dtype, table.nbytes)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    heads = {"q_proj": config["num_attention_heads"]}
    heads["k_proj"] = config.get("num_key_value_heads") or heads["q_proj"]
    for name, _, _, kind in plan:
        data = weights.read(name)
        projection = name.split(".")[-2]
        if arch == "llama" and projection in heads:
            data = interleaved(data, heads[projection])
        writer.write_tensor_data(gguf.quants.quantize(data, kind))
    if rope.freqs is not None:
        writer.write_tensor_data(table)
    writer.close()
    return len(plan) + (rope.freqs is not None)


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in llama.cpp's order for Llama.

    transformers turns coordinate i together with i + d/2, llama.cpp's Llama 2i with 2i + 1.
    """
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


class Weights:
    """The tensors of a model folder by name, read one at a time; safetensors, or PyTorch's own files."""

    def __init__(self, folder: Path):
        self._stack = contextlib.ExitStack()
        self._open = {}
        files = sorted(folder.glob("*.safetensors"))
        if files:
            from safetensors import safe_open

            for path in files:
                opened = self._stack.enter_context(safe_open(path, "pt"))
                self._open |= dict.fromkeys(opened.keys(), opened)
            return
        import torch

        for path in sorted(folder.glob("pytorch_model*.bin")):
            self._open |= torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not self._open:
            raise CtxextError(f"{folder} holds no safetensors and no pytorch_model.bin")

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
