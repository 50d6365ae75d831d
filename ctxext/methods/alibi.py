"""ALiBi: logits fall with the distance, and nothing rotates."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..rope import Rope, Schedule, static
from ..rope.encodings import Encoding, at_least
from .registry import method


@dataclass(frozen=True)
class Alibi(Encoding, kind="alibi"):
    """Minus a slope times the distance i - j of query and key, another slope in each head."""

    def describe(self, trained_length: int) -> str:
        return "Attention logits have a bias by distance (alibi)."


def slopes(heads: int) -> list[float]:
    """The slope of each head (Press et al. 2022, arXiv:2108.12409, section 3, and its code for other head counts).

    2^(-8/n), 2^(-16/n), ... for n heads if n is a power of two; else those of the next smaller power of two, then
    every other one of the next larger.
    """
    at_least(heads, 1, "the number of heads")
    power = 2 ** int(math.log2(heads))
    found = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * power, 2)]
    return found + between[: heads - power]


@method(title="ALiBi", paper="Press et al. 2022, arXiv:2108.12409, section 3", replaces_rope=True)
def alibi(rope: Rope, factor: float) -> Schedule:
    """Subtract a slope times the distance from the logits, another slope in each head; no rotation.

    logit_ij = q_i k_j / sqrt(d) - m_h (i - j), with m_h = 2^(-8h/n) for h = 1 .. n heads. The factor only says how
    long the model is meant to read. A model trained with RoPE is lost right after this.
    """
    return replace(static(rope, factor, [0.0] * rope.size), encoding=Alibi())
