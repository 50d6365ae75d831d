"""What runs inside a live model: patching, rotary modules, stages and caches, one class per encoding, the head."""

from typing import Any

Foreign = Any
"""A module of a transformers model. torch says that attributes of an nn.Module are tensors or modules; those of
transformers' modules are configs, windows and numbers too."""
