"""What a model was trained with (`Rope`) and what it should run (`Schedule`): plain data, no torch."""

from .schedule import Rope, Schedule, Stage, static, target_length, unpatched

__all__ = ["Rope", "Schedule", "Stage", "static", "target_length", "unpatched"]
