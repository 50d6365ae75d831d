"""Position encodings that no frequency table can express: plain data and the papers' formulas. No torch.

A Schedule may carry, beside its frequencies, one of each: an additive bias by distance (ALiBi, T5), a table
added to the input embeddings (sinusoids), a rule that maps distances to those seen in training (Self-Extend,
ReRoPE, dual-chunk attention), a choice of layers that don't rotate at all, and norms of queries and keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UsageError


def _check(value: str, choices: Sequence[str], what: str) -> None:
    if value not in choices:
        raise UsageError(f"{what} {value!r} is not one of {', '.join(choices)}")


def _at_least(value: float, least: float, what: str) -> None:
    if value < least:
        raise UsageError(f"{what} must be at least {least}, got {value}")


@dataclass(frozen=True)
class Bias:
    """A number per head added to the attention logits by the distance i - j of query and key.

    kind "alibi": minus a slope times the distance; the slopes follow from the number of heads. kind "t5":
    learned, one value per head and bucket of distances, shared by all layers as in T5. start: a new table's
    values, "zero" or "alibi" (minus the slope times the bucket's smallest distance).
    """

    kind: str
    buckets: int = 32
    max_distance: int = 128
    start: str = "zero"

    def __post_init__(self):
        _check(self.kind, ("alibi", "t5"), "the bias")
        _check(self.start, ("zero", "alibi"), "the start of a bias table")
        _at_least(self.buckets, 2, "the number of buckets")
        if self.buckets % 2 or self.max_distance <= self.buckets // 2:
            raise UsageError(
                f"T5 needs an even number of buckets and a max_distance above half of it, got {self.buckets} and "
                f"{self.max_distance}"
            )


@dataclass(frozen=True)
class QueryKeyNorm:
    """RMS norms of queries and of keys in every layer, with learned weights. epsilon: added to the mean square."""

    epsilon: float = 1e-6

    def __post_init__(self):
        if not self.epsilon > 0:
            raise UsageError(f"the epsilon of a norm must be above 0, got {self.epsilon}")


@dataclass(frozen=True)
class InputTable:
    """Sinusoids added to the input embeddings, times `scale`; `base` is the longest period over 2 pi."""

    base: float = 10000.0
    scale: float = 1.0

    def __post_init__(self):
        if self.base <= 1:
            raise UsageError(f"the base of the sinusoids must be greater than 1, got {self.base}")


@dataclass(frozen=True)
class Distances:
    """Which rotary distance a query i and a key j of distance d = i - j are given, in tokens.

    kind "grouped" (Self-Extend): d below `window`, beyond it floor(i/group) - floor(j/group) plus a shift of
    window - floor(window/group).
    kind "clipped" (ReRoPE): d below `window`, else window, plus (d - window) / group if a group is given.
    kind "chunks" (dual-chunk attention): keys have positions j mod chunk; a query has i mod chunk for keys of
    its own chunk, min(i mod chunk + chunk, chunk + window - 1) for those of the one before, chunk + window - 1
    for older ones.
    """

    kind: str
    window: int
    group: float = 0.0
    chunk: int = 0

    def __post_init__(self):
        _check(self.kind, ("grouped", "clipped", "chunks"), "the kind of distances")
        _at_least(self.window, 1, "the window")
        if self.kind == "grouped" and (self.group < 1 or self.group != int(self.group)):
            raise UsageError(f"the group must be a whole number of tokens, at least 1, got {self.group:g}")
        if self.kind == "clipped" and self.group and self.group < 1:
            raise UsageError(f"the step of distances beyond the window must be at least 1, got {self.group:g}")
        if self.kind == "chunks":
            _at_least(self.chunk, 1, "the chunk")

    def largest(self, length: int) -> float:
        """The largest distance that a text of `length` tokens uses; seen in training if below its length."""
        if self.kind == "chunks":
            return min(length - 1, self.chunk + self.window - 1)
        if length <= self.window:
            return length - 1
        if self.kind == "clipped":
            return self.window + ((length - 1 - self.window) / self.group if self.group else 0)
        group = int(self.group)
        return (length - 1) // group + self.window - self.window // group


@dataclass(frozen=True)
class Layers:
    """Some layers of a model, numbered from 0: those listed, or every n-th (every=4: layers 3, 7, 11, ...)."""

    listed: tuple[int, ...] = ()
    every: int = 0

    def __post_init__(self):
        object.__setattr__(self, "listed", tuple(sorted(set(self.listed))))
        if bool(self.listed) == bool(self.every):
            raise UsageError("say which layers: either a list of them, or every n-th", hint="--set every=4")
        if self.every < 0 or any(i < 0 for i in self.listed):
            raise UsageError("layers are numbered from 0")

    def of(self, count: int) -> list[int]:
        """Their numbers in a model of `count` layers; UsageError if it has no such layer."""
        if self.every:
            found = list(range(self.every - 1, count, self.every))
            if not found:
                raise UsageError(f"a model of {count} layers has no layer {self.every}, counted from 1")
            return found
        if self.listed[-1] >= count:
            raise UsageError(f"there is no layer {self.listed[-1]}: the model has {count}, counted from 0")
        return list(self.listed)


def alibi_slopes(heads: int) -> list[float]:
    """The slope of each head (Press et al. 2022, arXiv:2108.12409, section 3, and its code for other head counts).

    2^(-8/n), 2^(-16/n), ... for n heads if n is a power of two; else those of the next smaller power of two, then
    every other one of the next larger.
    """
    _at_least(heads, 1, "the number of heads")
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * power, 2)]
    return slopes + between[: heads - power]


def t5_buckets(buckets: int, max_distance: int) -> list[int]:
    """The bucket of each distance 0 .. max_distance; farther ones share the last (Raffel et al. 2020,
    arXiv:1910.10683, section 2.1, causal): half of the buckets hold one distance each, the others grow
    logarithmically.
    """
    exact = buckets // 2
    found = []
    for distance in range(max_distance + 1):
        if distance < exact:
            found.append(distance)
            continue
        # The sum guards whole results against a last bit that is too small.
        share = math.log(distance / exact) / math.log(max_distance / exact) + 1e-12
        found.append(min(exact + int(share * (buckets - exact)), buckets - 1))
    return found


def sinusoid_frequencies(width: int, base: float = 10000.0) -> list[float]:
    """base^(-2i/d) for i in 0 .. d/2 - 1: coordinate 2i is the sine, 2i + 1 the cosine of position times this
    (Vaswani et al. 2017, arXiv:1706.03762, section 3.5)."""
    return [base ** (-2 * i / width) for i in range((width + 1) // 2)]


def temperature_at(position: int, coefficient: float, trained_length: int) -> float:
    """What the logits of a query at `position` are multiplied by: 1 + c ln(n / L) for a prefix of n > L tokens."""
    return 1 + coefficient * math.log(max(1.0, (position + 1) / trained_length))
