"""Logits and perplexity by llama.cpp itself, through llama-cpp-python's plain C bindings.

An optional oracle: `pip install llama-cpp-python` builds it from source. Only token ids go in, so a GGUF without a
vocabulary will do. Results are float32 on the CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ctxext.errors import CtxextError


def bindings() -> Any:
    """The llama_cpp module; CtxextError if it isn't installed."""
    try:
        import llama_cpp
    except ImportError as error:
        raise CtxextError("this needs llama.cpp", hint="pip install llama-cpp-python") from error
    return llama_cpp


_QUIET: list[Any] = []


def _silence(lib: Any) -> None:
    """Keep llama.cpp's log off stderr; the callback must outlive every call."""
    if not _QUIET:
        _QUIET.append(lib.llama_log_callback(lambda level, text, data: None))
        lib.llama_log_set(_QUIET[0], ctypes.c_void_p(0))


@contextlib.contextmanager
def opened(path: Path, context: int, threads: int = 1) -> Iterator[tuple[Any, Any, int]]:
    """llama.cpp's module, a context of `context` tokens on the file, and the size of its vocabulary.

    The KV cache is float32, so that nothing but the weights rounds. Raises CtxextError if llama.cpp refuses the
    file.
    """
    lib = bindings()
    _silence(lib)
    lib.llama_backend_init()
    settings = lib.llama_model_default_params()
    settings.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(str(path).encode(), settings)
    if not model:
        raise CtxextError(f"llama.cpp refuses to load {path}")
    params = lib.llama_context_default_params()
    params.n_ctx = context
    params.n_batch = params.n_ubatch = min(512, context)
    params.n_threads = params.n_threads_batch = threads
    params.type_k = params.type_v = 0  # GGML_TYPE_F32
    params.flash_attn_type = 0
    state = lib.llama_init_from_model(model, params)
    try:
        if not state:
            raise CtxextError(f"llama.cpp makes no context of {context} tokens for {path}")
        yield lib, state, int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model)))
    finally:
        if state:
            lib.llama_free(state)
        lib.llama_model_free(model)


def stream(
    path: Path, tokens: Sequence[int], *, context: int | None = None, threads: int = 1
) -> Iterator[np.ndarray]:
    """Logits of consecutive chunks of one text, each (chunk, vocabulary) float32, read with one KV cache."""
    context = context or -(-len(tokens) // 256) * 256
    with opened(path, context, threads) as (lib, state, size):
        step = min(512, context)
        batch = lib.llama_batch_init(step, 0, 1)
        try:
            for start in range(0, len(tokens), step):
                chunk = tokens[start : start + step]
                batch.n_tokens = len(chunk)
                for i, token in enumerate(chunk):
                    batch.token[i], batch.pos[i], batch.logits[i] = int(token), start + i, 1
                    batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
                if lib.llama_decode(state, batch):
                    raise CtxextError(f"llama.cpp failed at token {start} of {len(tokens)}")
                pointer = lib.llama_get_logits(state)
                yield np.ctypeslib.as_array(pointer, shape=(len(chunk), size)).copy()
        finally:
            lib.llama_batch_free(batch)


def logits(path: Path, tokens: Sequence[int], *, context: int | None = None, threads: int = 1) -> np.ndarray:
    """Logits at every position of one text, (tokens, vocabulary) float32."""
    return np.concatenate(list(stream(path, tokens, context=context, threads=threads)))


def last_logits(path: Path, tokens: Sequence[int], count: int) -> np.ndarray:
    """Logits at the last `count` positions of a text, (count, vocabulary) float32; the others are dropped."""
    kept: list[np.ndarray] = []
    for rows in stream(path, tokens):
        kept = [*kept, rows][-(count // 512 + 2) :]
    return np.concatenate(kept)[-count:]


def losses(path: Path, tokens: Sequence[int], *, threads: int = 1) -> np.ndarray:
    """Negative log-likelihood in nats of tokens[1:], (tokens - 1,) float64; logits are dropped chunk by chunk."""
    out, done = [], 0
    for rows in stream(path, tokens, threads=threads):
        targets = np.asarray(tokens[done + 1 : done + 1 + len(rows)])
        rows = rows[: len(targets)].astype(np.float64)
        top = rows.max(axis=1)
        out.append(top + np.log(np.exp(rows - top[:, None]).sum(axis=1)) - rows[np.arange(len(targets)), targets])
        done += 512
    return np.concatenate(out)


def perplexity_by_bucket(values: np.ndarray, bucket: int) -> list[dict[str, float]]:
    """Perplexity per `bucket` tokens of position: rows {"start", "end", "tokens", "ppl"}."""
    rows = []
    for start in range(0, len(values), bucket):
        part = values[start : start + bucket]
        rows.append(
            {"start": start, "end": start + len(part), "tokens": len(part), "ppl": math.exp(float(part.mean()))}
        )
    return rows


def tokenize(path: Path, text: str) -> list[int]:
    """Token ids of a text by the file's own vocabulary, without special tokens."""
    with opened(path, 256) as (lib, state, _):
        vocab = lib.llama_model_get_vocab(lib.llama_get_model(state))
        raw = text.encode()
        room = (lib.llama_token * (len(raw) + 8))()
        count = lib.llama_tokenize(vocab, raw, len(raw), room, len(room), False, False)
        return list(room[:count])
