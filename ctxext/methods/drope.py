"""DroPE: rotation dropped late, recalibrated, and attention sharpened beyond the trained length."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..errors import UsageError
from ..rope import Rope, Schedule, static
from ..rope.encodings import Encoding
from .registry import method


@dataclass(frozen=True)
class QueryTemperature(Encoding, kind="temperature"):
    """Logits of a query beyond the trained length L times 1 + c ln(n / L), n being its position + 1."""

    coefficient: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.coefficient) and self.coefficient >= 0):
            raise UsageError(f"temperature must not be negative, got {self.coefficient}")

    def static_scale(self, length: int, trained_length: int) -> float:
        return 1 + self.coefficient * math.log(max(1.0, length / trained_length))

    def describe(self, trained_length: int) -> str:
        return (
            f"Logits of a query beyond {trained_length:,} tokens are multiplied by "
            f"1 + {self.coefficient:g} ln(n / {trained_length})."
        )


@method(title="DroPE", paper="Gelberg et al. 2025, arXiv:2512.12167", replaces_rope=True)
def drope(rope: Rope, factor: float, *, temperature: float = 0.0) -> Schedule:
    """Drop RoPE from a trained model, recalibrate at the original length, sharpen attention beyond it.

    f'_i = 0 as in NoPE. Logits of a query whose prefix has n > L tokens are multiplied by 1 + c ln(n / L), c being
    the temperature, fitted on text by `ctxext fit-temperature`. With c = 0 plain transformers runs it.
    """
    stopped, sharper = static(rope, factor, [0.0] * rope.size), QueryTemperature(temperature)
    return replace(stopped, encoding=sharper if temperature else None)
