"""The scaling of Llama 3.1: keep fast frequencies, divide slow ones, blend between."""

from __future__ import annotations

from ..rope import Rope, Schedule, static
from ._turns import check_ordered, clamp
from .registry import method


@method(title="Llama 3 scaling", paper="Llama 3.1 reference code (Meta 2024), apply_scaling")
def llama3(rope: Rope, factor: float, *, low_freq_factor: float = 1.0, high_freq_factor: float = 4.0) -> Schedule:
    """Divide frequencies that made few turns in training, keep those that made many, blend between.

    Few is less than low_freq_factor, many more than high_freq_factor turns over the trained length; the
    blend is linear in turns, (r - low) / (high - low). Unlike YaRN it doesn't sharpen attention.
    """
    check_ordered(low_freq_factor, high_freq_factor, "low_freq_factor", "high_freq_factor")
    keep = [clamp((r - low_freq_factor) / (high_freq_factor - low_freq_factor)) for r in rope.turns()]
    native = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low_freq_factor,
        "high_freq_factor": high_freq_factor,
        "original_max_position_embeddings": rope.trained_length,
    }
    return static(rope, factor, [(1 - g) / factor + g for g in keep], native=native)
