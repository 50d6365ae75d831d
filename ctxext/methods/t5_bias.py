"""T5: a learned bias by distance, and nothing rotates."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from ..errors import UsageError
from ..rope import Rope, Schedule, static
from ..rope.encodings import Encoding, at_least
from .registry import method

Start = Literal["zero", "alibi"]


@dataclass(frozen=True)
class T5Bias(Encoding, kind="t5_bias"):
    """A learned number per head and bucket of distances, added to the logits; shared by all layers, as in T5.

    start: a new table's values, "zero" or "alibi" (minus ALiBi's slope times the bucket's smallest distance).
    """

    buckets: int = 32
    max_distance: int = 128
    start: Start = "zero"

    def __post_init__(self) -> None:
        at_least(self.buckets, 2, "the number of buckets")
        if self.buckets % 2 or self.max_distance <= self.buckets // 2:
            raise UsageError(
                f"T5 needs an even number of buckets and a max_distance above half of it, got {self.buckets} and "
                f"{self.max_distance}"
            )

    def describe(self, trained_length: int) -> str:
        return f"Attention logits have a bias by distance (t5, a learned table that starts at {self.start})."

    def bucket_of(self) -> list[int]:
        """The bucket of each distance 0 .. max_distance; farther ones share the last (Raffel et al. 2020,
        arXiv:1910.10683, section 2.1, causal): half of the buckets hold one distance each, the others grow
        logarithmically.
        """
        exact = self.buckets // 2
        found = []
        for distance in range(self.max_distance + 1):
            if distance < exact:
                found.append(distance)
                continue
            # The sum guards whole results against a last bit that is too small.
            share = math.log(distance / exact) / math.log(self.max_distance / exact) + 1e-12
            found.append(min(exact + int(share * (self.buckets - exact)), self.buckets - 1))
        return found


@method(title="T5 bias", paper="Raffel et al. 2020, arXiv:1910.10683, section 2.1", replaces_rope=True)
def t5_bias(
    rope: Rope, factor: float, *, buckets: int = 32, max_distance: int = 128, start: Start = "zero"
) -> Schedule:
    """Add a learned number per head and bucket of distances to the logits; no rotation.

    Distances below buckets / 2 have a bucket each, larger ones share them logarithmically up to max_distance, and
    everything beyond is one bucket. The table is trained with the model and saved in its folder or adapter. It
    starts at "zero", or at the values that ALiBi has for each bucket ("alibi").
    """
    return replace(static(rope, factor, [0.0] * rope.size), encoding=T5Bias(buckets, max_distance, start))
