"""What a run will read and need, from config.json alone: for `ctxext train --dry-run`. No torch, no weights."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from .. import terminal
from ..config.keys import head_dim
from ..errors import CtxextError
from ..files import read_json
from ..folders.heads import require_causal
from ..folders.source import TINY
from ..folders.weights import tensor_files
from .recipe import AdapterSpec, Recipe

GPU_FLOPS = 0.4 * 312e12
"""What a run is assumed to reach on a GPU: 40 % of an A100's bf16 peak."""


def describe(recipe: Recipe, processes: int | None = None) -> dict[str, Any]:
    """{"tokens", "processes", "parameters", "trainable", "memory_gib", "hours", "notes"}.

    What can't be told is None. processes: those that a launcher started, if not given. Memory is per process,
    without sharding; it and the time are good to about a factor of three.
    """
    processes = processes or terminal.processes()
    answer: dict[str, Any] = {"tokens": recipe.tokens(processes), "processes": processes, "notes": []}
    config = find_config(recipe.model.path)
    if config is None:
        answer["notes"].append(f"no config.json of {recipe.model.path} on this machine: memory and time unknown")
        return answer | {"parameters": None, "trainable": None, "memory_gib": None, "hours": None}
    require_causal(config, recipe.model.path, "training")
    shape = Shape(config)
    trainable = trainable_parameters(recipe.adapter, shape)
    memory = memory_bytes(recipe, shape, trainable)
    speed, how = flops_per_second(shape)
    answer["notes"] += [how, "memory is per process and without sharding; both are good to a factor of three"]
    hours = flops(recipe, shape, answer["tokens"]) / (speed * processes) / 3600
    return answer | {
        "parameters": shape.parameters,
        "trainable": trainable,
        "memory_gib": {name: round(size / 2**30, 3) for name, size in memory.items()},
        "hours": float(f"{hours:.3g}"),
    }


def find_config(model: str) -> dict[str, Any] | None:
    """The config.json of a model that is on this machine; nothing is downloaded."""
    folder = TINY if model == "tiny" else Path(model).expanduser()
    if folder.suffix == ".gguf":
        return _gguf_sizes(folder)
    path: Any = folder / "config.json"
    if not path.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            path = try_to_load_from_cache(model, "config.json")
        except HFValidationError:
            return None
        if not isinstance(path, str):
            return None
    config = read_json(path)
    stored = _stored_type(Path(path).parent)
    return {**config, "dtype": stored or config.get("dtype") or config.get("torch_dtype") or "float32"}


def _gguf_sizes(file: Path) -> dict[str, Any] | None:
    """The sizes that `Shape` reads, from a GGUF's header; None if there is no such file, or nothing to read it."""
    try:
        from gguf import GGUFReader
    except ImportError:
        return None
    if not file.is_file():
        return None
    try:
        reader = GGUFReader(file)
    except ValueError as error:
        raise CtxextError(f"{file} can't be read as a GGUF: {error}") from error

    def value(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    family = value("general.architecture")
    names = {
        "hidden_size": "embedding_length",
        "num_hidden_layers": "block_count",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
    }
    sizes = {name: value(f"{family}.{key}") for name, key in names.items()}
    tensors = {tensor.name: tensor.shape for tensor in reader.tensors}
    return {name: size for name, size in sizes.items() if size is not None} | {
        "vocab_size": int(tensors["token_embd.weight"][1]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": "bfloat16",  # what resolve() dequantises to
    }


def _stored_type(folder: Path) -> str | None:
    from safetensors import safe_open

    for path in [file for file in tensor_files(folder) if file.suffix == ".safetensors"][:1]:
        with safe_open(path, framework="numpy") as tensors:
            kinds = {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
        return "bfloat16" if "BF16" in kinds else "float16" if "F16" in kinds else "float32"
    return None


class Shape:
    """The sizes of a Llama-like decoder."""

    def __init__(self, config: dict[str, Any]):
        try:
            self.hidden, self.layers = config["hidden_size"], config["num_hidden_layers"]
            self.vocabulary, self.inner = config["vocab_size"], config["intermediate_size"]
            heads = config["num_attention_heads"]
        except KeyError as error:
            raise CtxextError(f"config.json has no {error}, so the run can't be estimated") from error
        size = head_dim(config)
        self.query, self.key = heads * size, (config.get("num_key_value_heads") or heads) * size
        self.tied = bool(config.get("tie_word_embeddings", True))
        self.dtype = config["dtype"]
        self.linears = [
            (self.hidden, self.query),
            (self.hidden, self.key),
            (self.hidden, self.key),
            (self.query, self.hidden),
            (self.hidden, self.inner),
            (self.hidden, self.inner),
            (self.inner, self.hidden),
        ]

    @property
    def layer(self) -> int:
        return sum(a * b for a, b in self.linears)

    @property
    def parameters(self) -> int:
        tables = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return tables + self.layers * (self.layer + 2 * self.hidden) + self.hidden


def trainable_parameters(spec: AdapterSpec, shape: Shape) -> int:
    """How many numbers the run trains, all-linear assumed where targets are listed by name."""
    if spec.kind == "full":
        return shape.parameters
    layers = shape.layers if spec.layers is None else len(spec.layers)
    count = layers * spec.r * sum(a + b for a, b in shape.linears)
    if spec.dora:
        count += layers * sum(b for _, b in shape.linears)
    if spec.embeddings:
        count += shape.vocabulary * shape.hidden
    if spec.norms:
        count += (2 * shape.layers + 1) * shape.hidden
    return count


def memory_bytes(recipe: Recipe, shape: Shape, trainable: int) -> dict[str, float]:
    """Bytes of one process by what holds them."""
    spec, tokens = recipe.train, recipe.train.batch_size * recipe.data.length
    dtype = shape.dtype if recipe.model.dtype == "auto" else recipe.model.dtype
    low = dtype != "float32" if spec.bf16 is None else spec.bf16
    width = 2 if low else 4
    frozen = 0.5 if recipe.adapter.quantize else 2 if dtype != "float32" else 4
    if recipe.adapter.kind == "full":
        frozen = 0
    # What one layer keeps for backward: inputs of norms, projections, attention and the gated MLP.
    kept = tokens * width * (6 * shape.hidden + 2 * shape.query + 2 * shape.key + 4 * shape.inner)
    if spec.activation_checkpointing:
        layers = (
            tokens * width * shape.hidden * shape.layers / spec.checkpoint_every + kept * spec.checkpoint_every
        )
    else:
        layers = kept * shape.layers
    rows = min(spec.loss_chunk, tokens) if spec.loss == "chunked" else tokens
    memory = {
        "frozen weights": shape.parameters * frozen,
        "trained weights, gradients, Adam": trainable * 16.0,
        "activations": layers,
        "logits": rows * shape.vocabulary * 16.0,
    }
    if recipe.data.layout == "packed" and "flash" not in recipe.model.attention:
        memory["mask"] = float(recipe.train.batch_size * recipe.data.length**2)
    memory["total"] = sum(memory.values())
    return memory


def flops(recipe: Recipe, shape: Shape, tokens: int) -> float:
    """Floating-point operations of the run: 2 per weight and token forward, as many for gradients of activations,
    and as many again for those of trained weights, plus attention."""
    passes = 6 if recipe.adapter.kind == "full" else 4
    passes += 2 if recipe.train.activation_checkpointing else 0
    weights = shape.layers * shape.layer + shape.vocabulary * shape.hidden * (
        2 if recipe.train.loss == "chunked" else 1
    )
    attention = shape.layers * 2 * shape.query * recipe.data.length / 2
    return passes * tokens * (weights + attention)


def flops_per_second(shape: Shape) -> tuple[float, str]:
    """(operations per second, how that is known)."""
    if shutil.which("nvidia-smi"):
        return GPU_FLOPS, "time assumes 40 % of an A100's bf16 peak"
    import numpy as np

    rows = 1024
    a, b = np.ones((rows, shape.hidden), np.float32), np.ones((shape.hidden, shape.inner), np.float32)
    best = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        np.matmul(a, b)
        best = min(best, time.perf_counter() - started)
    reached = 2 * rows * shape.hidden * shape.inner / best
    how = f"time assumes 40 % of the {reached / 1e9:.0f} GFLOP/s that one layer's product just reached here"
    return 0.4 * reached, how
