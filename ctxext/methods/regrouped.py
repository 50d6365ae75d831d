"""Keep the rotation, but give far keys distances that were seen in training. No training needed."""

from __future__ import annotations

import math
from dataclasses import replace

from ..errors import UsageError
from ..rope import Rope, Schedule, static, target_length
from ..rope.encodings import Distances
from . import method


def _with(rope: Rope, factor: float, distances: Distances) -> Schedule:
    """The rope as it was, with a rule for distances that keeps the target length within the trained range."""
    target, trained = target_length(rope, factor), rope.trained_length
    largest = distances.largest(target)
    if largest > trained - 1:
        raise UsageError(
            f"at {target} tokens this uses distances up to {largest:g}, the model was trained on {trained} tokens",
            hint="a smaller window, or a larger group or step",
        )
    return replace(static(rope, factor, [1.0] * rope.size), distances=distances)


def _window(rope: Rope, window: int | None, share: float) -> int:
    return max(1, int(rope.trained_length * share)) if window is None else window


@method(title="Self-Extend", paper="Jin et al. 2024, arXiv:2401.01325, section 3")
def self_extend(rope: Rope, factor: float, *, window: int | None = None, group: int | None = None) -> Schedule:
    """Exact distances to the nearest keys, coarser ones beyond: positions there are divided by a group size.

    d below the window; beyond it floor(i/G) - floor(j/G) + w - floor(w/G). By default a window of a quarter of the
    trained length L, and the smallest group that reaches the target: (sL - w) / (L - w), rounded up.
    """
    window = _window(rope, window, 1 / 4)
    if group is None:
        if window >= rope.trained_length:
            raise UsageError(f"a window of {window} tokens leaves nothing of the trained {rope.trained_length}")
        target = target_length(rope, factor)
        group = max(1, math.ceil((target - window) / (rope.trained_length - window)))
        # Rounding of the groups can cost one more.
        while Distances("grouped", window, group).largest(target) > rope.trained_length - 1:
            group += 1
    return _with(rope, factor, Distances("grouped", window, group))


@method(title="ReRoPE", paper="Su 2023, Rectified Rotary Position Embeddings (and its leaky form)")
def rerope(rope: Rope, factor: float, *, window: int | None = None, step: float | None = None) -> Schedule:
    """Exact distances up to a window, and that same distance for every key beyond.

    min(d, w), by default with half of the trained length as the window. With a step k (Leaky ReRoPE) distances
    go on growing, w + (d - w) / k.
    """
    window = _window(rope, window, 1 / 2)
    if factor == 1 and step is None:
        window = rope.trained_length  # every distance of the target is below it
    if step is None and window >= rope.trained_length and factor > 1:
        raise UsageError(f"a window of {window} tokens was never seen in training", hint="a smaller window")
    return _with(rope, factor, Distances("clipped", window, step or 0.0))


@method(title="Dual-chunk attention", paper="An et al. 2024, arXiv:2402.17463, section 3")
def dual_chunk(rope: Rope, factor: float, *, chunk: int | None = None, window: int | None = None) -> Schedule:
    """Cut the text into chunks: exact distances within one and to the end of the one before, the largest beyond.

    With L trained tokens, chunks of s = 3L/4 and a local window w = L - s by default: a query has position i mod
    s for its own chunk, min(i mod s + s, s + w - 1) for the one before, and s + w - 1 for older ones; keys have
    j mod s.
    """
    if chunk is None:
        chunk = max(1, rope.trained_length * 3 // 4)
    if window is None:
        window = max(1, rope.trained_length - chunk)
    return _with(rope, factor, Distances("chunks", window, 0.0, chunk))
