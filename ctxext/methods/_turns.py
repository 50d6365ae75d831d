"""What the methods share that treat a frequency by how many turns it made in training."""

from __future__ import annotations

from ..errors import UsageError


def clamp(x: float) -> float:
    """`x` kept within 0 and 1."""
    return min(1.0, max(0.0, x))


def check_ordered(low: float, high: float, low_name: str, high_name: str) -> None:
    """Raise UsageError unless 0 < low < high."""
    if not 0 < low < high:
        raise UsageError(f"need 0 < {low_name} < {high_name}, got {low_name}={low}, {high_name}={high}")
