"""Modules with learned weights that a patch adds to a decoder: a bias table, norms of queries and keys.

What was learned under a patch outlives it: the same patch, applied again, finds its weights (a temperature is
fitted by patching many times over).
"""

from __future__ import annotations

from typing import Any

from torch import nn

_KEPT = "_ctxext_learned"


def add(owner: nn.Module, name: str, spec: Any, made: nn.Module) -> None:
    """Give the decoder the module that it had under the same `spec` and name, or else `made`."""
    # A list hides a module from the decoder's own ones while it isn't in use.
    kept = owner.__dict__.setdefault(_KEPT, {})
    if name not in kept or kept[name][0] != spec:
        kept[name] = (spec, [made])
    owner.add_module(name, kept[name][1][0].to(owner.get_input_embeddings().weight.device))


def put_aside(owner: nn.Module) -> None:
    """Take all of them out of the decoder; their weights, as they are now, are kept."""
    for name, (_, module) in owner.__dict__.get(_KEPT, {}).items():
        if hasattr(owner, name):
            module[0] = getattr(owner, name)
            delattr(owner, name)
