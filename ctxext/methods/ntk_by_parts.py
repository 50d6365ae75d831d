"""Keep frequencies that turned often in training, interpolate those that turned rarely, as in the paper."""

from __future__ import annotations

from ..rope import Rope, Schedule, static
from ._turns import check_ordered, clamp
from .registry import method


@method(title="NTK-by-parts", paper="Peng et al. 2023, arXiv:2309.00071, eq. 17-19")
def ntk_by_parts(rope: Rope, factor: float, *, alpha: float = 1.0, beta: float = 32.0) -> Schedule:
    """Interpolate frequencies that made fewer than alpha turns, keep those above beta, blend between.

    With r = L f / 2pi turns over the trained length, gamma = clamp((r - alpha) / (beta - alpha), 0, 1)
    and f' = (1 - gamma) f/s + gamma f. The ramp is linear in turns, as in the paper; the YaRN code's ramp
    is linear in the dimension.
    """
    check_ordered(alpha, beta, "alpha", "beta")
    keep = [clamp((r - alpha) / (beta - alpha)) for r in rope.turns()]
    return static(rope, factor, [(1 - g) / factor + g for g in keep])
