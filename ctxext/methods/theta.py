"""The base raised as long-context training runs raise it."""

from __future__ import annotations

import math

from ..errors import UsageError
from ..rope import Rope, Schedule
from .ntk import rebased
from .registry import method


@method(
    title="Raised theta (ABF)",
    paper="Xiong et al. 2023, arXiv:2309.16039; default base: Liu et al. 2023, arXiv:2310.05209, theorem 2",
)
def theta(rope: Rope, factor: float, *, base: float | None = None) -> Schedule:
    """Replace theta by a larger base: the adjusted base frequency of long-context training runs.

    Without `base`, the one at which the frequencies that turned fully during training turn fully over
    the target length: theta' = theta^(ln(sL/2pi) / ln(L/2pi)). Published runs go far higher
    (1e6 for 32k, 8e6 for 64k, 1.28e8 for 512k) and train on it.
    """
    raised = base
    if raised is None:
        length = rope.trained_length / (2 * math.pi)
        if length <= 1:
            raise UsageError(f"a trained length of {rope.trained_length} is too short for a default base")
        raised = rope.theta ** (math.log(factor * length) / math.log(length))
    if raised < rope.theta:
        raise UsageError(
            f"base={raised} is below the model's theta {rope.theta}",
            hint="a longer context needs a larger base",
        )
    return rebased(rope, factor, raised)
