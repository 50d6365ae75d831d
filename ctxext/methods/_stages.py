"""Dynamic scaling as a causal, staged schedule: a query uses the scale that its own position needs.

The original dynamic NTK (emozilla 2023; Peng et al. 2023, arXiv:2309.00071, section 3.3) scales by the length of
the current sequence. That makes the output at a position depend on what follows it, and contradicts every key
that is in a cache already. Here the scale belongs to the query's position instead: with a prefix of n tokens
the scale is n / L beyond the trained length L, rounded up to a whole stage. Up to L it is 1, so short text is read
by exactly the unpatched model.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..errors import UsageError
from ..rope import Rope, Schedule, Stage, target_length

MOST = 4096
"""Stages that a schedule may have."""


def staged(
    rope: Rope, factor: float, granularity: int | None, temperature: float, make: Callable[[float], Stage]
) -> Schedule:
    """Stages of `granularity` tokens beyond the trained length; make(scale) gives each one's frequencies.

    The stage that covers prefixes of a < n <= b tokens uses the scale b / L, so that no position in it is
    further out than the scale provides for. Default granularity: an eighth of the trained length, or what
    keeps to the largest number of stages.
    """
    if temperature < 0:
        raise UsageError(f"temperature must not be negative, got {temperature}")
    length, target = rope.trained_length, target_length(rope, factor)
    step = granularity if granularity is not None else max(1, length // 8, math.ceil((target - length) / MOST))
    if step < 1:
        raise UsageError(f"granularity must be at least 1 token, got {step}")
    if (target - length) / step > MOST:
        raise UsageError(
            f"a granularity of {step} tokens makes {(target - length) // step} stages, {MOST} is the limit",
            hint="give a larger granularity",
        )
    stages = [Stage(0, tuple(rope.inv_freq()), rope.attention_scale)]
    for start in range(length, target, step):
        scale = min(start + step, target) / length
        stage = make(scale)
        # attention_scale acts on queries and keys, so squared on logits: a temperature t on logits is its root.
        sharpened = stage.attention_scale * math.sqrt(1 + temperature * math.log(scale))
        stages.append(Stage(start, stage.inv_freq, sharpened))
    return Schedule(rope=rope, stages=tuple(stages), max_length=target, factor=factor)
