"""Position interpolation: slow every frequency down by the same amount."""

from __future__ import annotations

from ..rope import Rope, Schedule, static
from .registry import method


@method(title="Position Interpolation", paper="Chen et al. 2023, arXiv:2306.15595, eq. 4")
def pi(rope: Rope, factor: float) -> Schedule:
    """Divide every frequency by the factor, so that positions fill the trained range more densely.

    f'_i = f_i / s. Simple and serveable everywhere, but fast frequencies lose resolution between
    neighbours: it needs a short fine-tune before it is any good.
    """
    return static(rope, factor, [1 / factor] * rope.size, native={"rope_type": "linear", "factor": factor})
