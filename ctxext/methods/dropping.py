"""No rotation: in every layer or in some of them, from the start or dropped late."""

from __future__ import annotations

from dataclasses import replace

from ..errors import UsageError
from ..rope import Rope, Schedule, static
from ..rope.encodings import Layers, QueryKeyNorm
from . import method


@method(
    title="NoPE",
    paper="Haviv et al. 2022, arXiv:2203.16634; Kazemnejad et al. 2023, arXiv:2305.19466; some layers: SmolLM3",
    replaces_rope=True,
)
def nope(rope: Rope, factor: float, *, layers: list[int] | None = None, every: int | None = None) -> Schedule:
    """Stop all rotation: no position encoding but the causal mask; or stop it in some layers only.

    f'_i = 0, whatever the factor, which only says how long the model is meant to read. A model trained
    with RoPE is lost right after this; DroPE recovers it by a recalibration at the original length.
    layers (numbered from 0) or every n-th (every=4: 3, 7, ...) leaves the rotation of the others as it was; such a
    Llama is written as a SmolLM3, which has this choice in its config.
    """
    if layers is None and every is None:
        return static(rope, factor, [0.0] * rope.size)
    if every is not None and every < 1:
        raise UsageError(f"every must be at least 1, got {every}")
    kept = static(rope, factor, [1.0] * rope.size, native={"rope_type": "default"})
    return replace(kept, unrotated=Layers(tuple(layers or ()), every or 0))


@method(title="DroPE", paper="Gelberg et al. 2025, arXiv:2512.12167", replaces_rope=True)
def drope(rope: Rope, factor: float, *, temperature: float = 0.0, qk_norm: bool = False) -> Schedule:
    """Drop RoPE from a trained model, recalibrate at the original length, sharpen attention beyond it.

    f'_i = 0 as in NoPE. Logits of a query whose prefix has n > L tokens are multiplied by 1 + c ln(n / L), c being
    the temperature, fitted on text by `ctxext fit-temperature`. With c = 0 plain transformers runs it.
    qk_norm adds RMS norms of queries and keys, to be recalibrated with the rest: the authors need them for
    learning rates of 1e-3 (not for 3e-4), and no plain runtime has them.
    """
    norms = QueryKeyNorm() if qk_norm else None
    return replace(static(rope, factor, [0.0] * rope.size), temperature=temperature, norms=norms)
