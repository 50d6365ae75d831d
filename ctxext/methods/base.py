"""Raise the base: fast frequencies stay, slow ones are slowed down more and more."""

from __future__ import annotations

import math

from ..errors import UsageError
from ..rope import Rope, Schedule, static
from . import method


def _rebased(rope: Rope, factor: float, theta: float) -> Schedule:
    """Frequencies theta'^(-2i/d) as ratios (theta/theta')^(2i/d) of the old ones."""
    ratios = [(rope.theta / theta) ** (2 * i / rope.dim) for i in range(rope.size)]
    return static(rope, factor, ratios, native={"rope_type": "default", "rope_theta": theta})


@method(title="NTK-aware scaling", paper="bloc97 2023; Peng et al. 2023, arXiv:2309.00071, eq. 16")
def ntk(rope: Rope, factor: float) -> Schedule:
    """Raise the base so that the slowest frequency is divided by the factor and the fastest is kept.

    theta' = theta * s^(d/(d-2)). Works without training up to small factors; it is a changed rope_theta,
    which every runtime reads.
    """
    if rope.dim < 4:
        raise UsageError(f"NTK-aware scaling needs at least 2 frequencies, the model has {rope.size}")
    return _rebased(rope, factor, rope.theta * factor ** (rope.dim / (rope.dim - 2)))


@method(
    title="Raised theta (ABF)",
    paper="Xiong et al. 2023, arXiv:2309.16039; default base: Liu et al. 2023, arXiv:2310.05209, theorem 2",
    shrinks_to="zero",
)
def theta(rope: Rope, factor: float, *, base: float | None = None) -> Schedule:
    """Replace theta by a larger base: the adjusted base frequency of long-context training runs.

    Without `base`, the one at which the frequencies that turned fully during training turn fully over
    the target length: theta' = theta^(ln(sL/2pi) / ln(L/2pi)). Published runs go far higher
    (1e6 for 32k, 8e6 for 64k, 1.28e8 for 512k) and train on it.
    """
    if base is None:
        length = rope.trained_length / (2 * math.pi)
        if length <= 1:
            raise UsageError(f"a trained length of {rope.trained_length} is too short for a default base")
        base = rope.theta ** (math.log(factor * length) / math.log(length))
    if base < rope.theta:
        raise UsageError(
            f"base={base} is below the model's theta {rope.theta}",
            hint="a longer context needs a larger base",
        )
    return _rebased(rope, factor, base)
