"""Encodings that are added instead of rotated: biases by distance, sinusoids."""

from __future__ import annotations

from dataclasses import replace

from ..rope import Rope, Schedule, static
from ..rope.encodings import Bias, InputTable
from . import method


def _stopped(rope: Rope, factor: float) -> Schedule:
    return static(rope, factor, [0.0] * rope.size)


@method(title="ALiBi", paper="Press et al. 2022, arXiv:2108.12409, section 3", replaces_rope=True)
def alibi(rope: Rope, factor: float) -> Schedule:
    """Subtract a slope times the distance from the logits, another slope in each head; no rotation.

    logit_ij = q_i k_j / sqrt(d) - m_h (i - j), with m_h = 2^(-8h/n) for h = 1 .. n heads. The factor only says how
    long the model is meant to read. A model trained with RoPE is lost right after this.
    """
    return replace(_stopped(rope, factor), bias=Bias("alibi"))


@method(title="T5 bias", paper="Raffel et al. 2020, arXiv:1910.10683, section 2.1", replaces_rope=True)
def t5_bias(
    rope: Rope, factor: float, *, buckets: int = 32, max_distance: int = 128, start: str = "zero"
) -> Schedule:
    """Add a learned number per head and bucket of distances to the logits; no rotation.

    Distances below buckets / 2 have a bucket each, larger ones share them logarithmically up to max_distance, and
    everything beyond is one bucket. The table is trained with the model and saved in its folder or adapter. It
    starts at "zero", or at the values that ALiBi has for each bucket ("alibi").
    """
    return replace(_stopped(rope, factor), bias=Bias("t5", buckets, max_distance, start))


@method(title="Sinusoidal", paper="Vaswani et al. 2017, arXiv:1706.03762, section 3.5", replaces_rope=True)
def sinusoidal(rope: Rope, factor: float, *, base: float = 10000.0, scale: float = 1.0) -> Schedule:
    """Add sines and cosines of the position to the input embeddings; no rotation.

    Coordinate 2i gets scale sin(p base^(-2i/d)), 2i + 1 the cosine, d being the hidden size. The paper's
    embeddings are about as large as the table; for a model with small ones choose a smaller scale.
    """
    return replace(_stopped(rope, factor), table=InputTable(base, scale))
