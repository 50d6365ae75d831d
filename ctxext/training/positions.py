"""Which positions the tokens of a training window have, so that a long target trains inside a short window.

PoSE (Zhu et al. 2023, arXiv:2309.10400, section 3.2) splits the window into chunks and skips positions between
them; over many draws every position in [0, target) and every distance occurs. Random positions (Ruoss et al.
2023, arXiv:2305.16843) are a sorted draw without replacement.

transformers takes every step of position_ids other than 1 for the start of a new document, unless there is an
attention mask. So a batch with skips must come with an all-ones mask, or tokens after a skip see nothing before.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from .recipe import PositionSpec


class Chunk(NamedTuple):
    """`size` tokens at positions `position`, `position` + 1, ..."""

    position: int
    size: int


def draw(spec: PositionSpec, rng: random.Random, length: int, target: int) -> list[Chunk]:
    """The chunks of one window of `length` tokens, in order, together in [0, target)."""
    if spec.kind == "plain" or rng.random() < spec.plain_share:
        return [Chunk(0, length)]
    if spec.kind == "random":
        return [Chunk(p, 1) for p in sorted(rng.sample(range(target), length))]
    return pose(rng, length, target, spec.chunks)


def pose(rng: random.Random, length: int, target: int, chunks: int) -> list[Chunk]:
    """Skip-wise chunks: sizes by uniform cuts, skips uniform and ascending; the first chunk starts at 0.

    The paper draws the i-th skip between the one before and the largest, target - length; sorting independent
    draws is the same for two chunks and doesn't crowd later ones at the end.
    """
    cuts = [0, *sorted(rng.sample(range(1, length), chunks - 1)), length]
    skips = [0, *sorted(rng.randint(0, target - length) for _ in range(chunks - 1))]
    return [Chunk(a + skip, b - a) for a, b, skip in zip(cuts, cuts[1:], skips, strict=False)]


def flatten(chunks: list[Chunk]) -> list[int]:
    """The position of every token."""
    return [p for chunk in chunks for p in range(chunk.position, chunk.position + chunk.size)]
