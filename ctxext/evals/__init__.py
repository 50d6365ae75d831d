"""Evaluators: what a model makes of a long context, always beside its crop control."""

from typing import Literal

Kind = Literal["ppl", "passkey", "ruler", "longppl"]
"""What `measure.evaluate` measures."""
Aggregation = Literal["token", "window"]
"""What weighs alike in a sliding window's mean: see `sliding.sliding_window`."""
PresetName = Literal["landmark", "yarn", "longlora", "pose", "ruler"]
"""The published passkey prompts of `passkey_presets`."""
