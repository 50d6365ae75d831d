"""Keys of past tokens in a patched model: under which schedule, in which stage, and turning them to another."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, StaticLayer

from ..config.block import digest
from ..errors import CtxextError
from . import Foreign
from .stages import Plan, StagedRotary, turn_keys
from .undo import Patched

CACHE_NAMES = ("cache", "past_key_values", "layer_past")
"""What attention modules of transformers call their cache."""
Choice = Callable[[torch.Tensor], torch.Tensor]
"""Takes rows of a tensor, some of them or some of them more than once."""
_HELD = "_ctxext_held"


@dataclass(frozen=True)
class Filled:
    """By whom a cache layer was filled: the digest of the schedule that the model ran.

    expected: that model is about to add to the layer.
    """

    schedule: str
    expected: bool = False

    def rows(self, choose: Choice) -> Filled:
        """The same of the rows that `choose` takes."""
        return self

    def shorter(self, removed: int, length: int) -> Filled:
        """The same after the last `removed` tokens are gone and `length` are left."""
        return self


@dataclass(frozen=True)
class Held(Filled):
    """And what keys it holds, of a model that turns them or looks at where they are.

    stages: per row, the stage that its keys are turned to.
    positions: (rows, keys), rows = 1 if all share them: the position of each key, as it was given. There may be
    holes: pads, masked tokens, the branches of a draft. history: equal for layers that hold the same positions.
    made: None, or the first keys as they were made, each in the stage of its own position; those after them are
    still as they were made.

    Every turn rounds. In 16 bits that shows after many stages, so there all turns begin at `made`.
    """

    stages: tuple[int, ...] = ()
    positions: torch.Tensor = field(default_factory=lambda: torch.empty(1, 0))
    history: int = 0
    made: torch.Tensor | None = None

    def positions_of(self, batch: int) -> torch.Tensor:
        """(rows, keys) for a call of so many sequences; CtxextError if the cache holds another number."""
        if len(self.stages) != batch:
            raise CtxextError(f"the cache holds {len(self.stages)} sequences, the call has {batch}")
        return self.positions

    def followed_by(self, positions: torch.Tensor) -> torch.Tensor:
        """The positions of its keys and of those of a call, (rows, tokens)."""
        return joined(self.positions, positions.to(self.positions.device))

    def rows(self, choose: Choice) -> Held:
        chosen = choose(torch.arange(len(self.stages))).tolist()
        return replace(
            self,
            stages=tuple(self.stages[i] for i in chosen),
            positions=self.positions if self.positions.shape[0] == 1 else self.positions[chosen],
            history=hash((self.history, "rows", tuple(chosen))),
            made=None if self.made is None else self.made[chosen],
        )

    def shorter(self, removed: int, length: int) -> Held:
        made = None if self.made is None or not length else self.made[:, :, :length]
        history = hash((self.history, "crop", removed))
        return replace(self, positions=self.positions[:, :length], history=history, made=made)


def joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Positions (rows, a) and (rows, b) as (rows, a + b); one row stands for as many as the other has."""
    rows = max(first.shape[0], second.shape[0])
    return torch.cat((first.expand(rows, -1), second.expand(rows, -1)), 1)


def _knowing_its_filler(base: type, name: str) -> type:
    """A cache layer class that keeps its `Filled` true under batch operations, and takes keys from one model.

    A layer that exists already is given this class, so it must derive from that layer's class alone: with a
    mixin Python would refuse the change of memory layout.
    """

    class Knowing(base):
        def update(self, *args, **kwargs):
            held = getattr(self, _HELD, None)
            if held is not None and not held.expected:
                # Here a model adds keys that runs neither stages nor an attention of ours.
                if length_of(self):
                    raise _foreign()
                delattr(self, _HELD)
            return super().update(*args, **kwargs)

        def reorder_cache(self, beam_idx):
            super().reorder_cache(beam_idx)
            self._select(lambda rows: rows[beam_idx.cpu()])

        def batch_select_indices(self, indices):
            super().batch_select_indices(indices)
            self._select(lambda rows: rows[indices.cpu()])

        def batch_repeat_interleave(self, repeats):
            super().batch_repeat_interleave(repeats)
            self._select(lambda rows: rows.repeat_interleave(repeats))

        def _select(self, choose):
            if hasattr(self, _HELD) and length_of(self):
                setattr(self, _HELD, getattr(self, _HELD).rows(choose))

        def crop(self, tokens_to_remove):
            super().crop(tokens_to_remove)
            if hasattr(self, _HELD):
                setattr(self, _HELD, getattr(self, _HELD).shorter(abs(tokens_to_remove), length_of(self)))

    Knowing.__name__ = Knowing.__qualname__ = name  # so that caches pickle
    return Knowing


_PATCHED = {
    kind: _knowing_its_filler(kind, f"Patched{name}")
    for name, kind in vars(cache_utils).items()
    if isinstance(kind, type) and issubclass(kind, CacheLayerMixin) and not inspect.isabstract(kind)
}
"""Every kind of layer of transformers, and the one that it becomes."""
globals().update({kind.__name__: kind for kind in _PATCHED.values()})  # where unpickling looks
_TURNED = {kind: _PATCHED[kind] for kind in (DynamicLayer, StaticLayer)}
"""The kinds whose keys can be turned, as all of them stay in place."""


class Block:
    """The keys and values that one layer sees during a segmented call; stands in for the cache.

    Keys are kept as they were made, each in its own stage, and turned to a segment's stage from there: one
    rounding in the model's dtype, however many stages a call crosses.
    """

    def __init__(self, rotary: StagedRotary, plan: Plan, layer: Any, batch: int):
        self.rotary, self.plan = rotary, plan
        self.past = length_of(layer)
        self.own = _as_made(layer, self.past) if self.past else None
        self.values = layer.values[:, :, : self.past] if self.past else None
        self.turned = None
        self._index = 0
        rows = plan.positions.shape[0]
        if self.past:
            held = getattr(layer, _HELD)
            before = held.positions_of(batch)
            self.positions = held.followed_by(plan.positions)
            if _keeps_made(layer.keys):
                old = rotary.stages_at(before)
            else:
                old = torch.tensor(held.stages, device=before.device)[:, None].expand(-1, self.past)
            rows = max(self.positions.shape[0], old.shape[0], *(len(s.stages) for s in plan.segments))
            self.positions, old = self.positions.expand(rows, -1), old.expand(rows, -1)
        else:
            self.positions = plan.positions
            old = plan.positions.new_empty(rows, 0)
        made = [
            torch.tensor(rows_of(s.stages, rows), device=old.device)[:, None].expand(-1, s.end - s.start)
            for s in plan.segments
        ]
        self.stages = torch.cat((old, *made), 1)
        self._key = (self.past, held.history, held.stages) if self.past else ()

    def begin(self, index: int) -> None:
        """Turn to segment `index`."""
        self._index = index

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any):
        """Take a segment's keys and values; give all so far, keys turned to the segment's stage."""
        segment = self.plan.segments[self._index]
        known = self.past + segment.start
        if self.own is None or self.values is None:
            self.own, self.values, self.turned = keys, values, keys
            return keys, values
        where = (self._key, self._index)
        if where not in self.plan.turns:
            # Every layer turns its keys by the same angles.
            self.plan.turns[where] = self.rotary.turn(
                self.positions[:, :known],
                self.stages[:, :known],
                list(rows_of(segment.stages, self.positions.shape[0])),
            )
        before = _turned(self.own, self.plan.turns[where], self.rotary.layout)
        self.turned = torch.cat((before, keys), 2)
        self.own = torch.cat((self.own, keys), 2)
        self.values = torch.cat((self.values, values), 2)
        return self.turned, self.values

    def made(self) -> torch.Tensor | None:
        """What a cache layer has to keep of the keys as they were made, once the call is through."""
        if self.own is None or not _keeps_made(self.own):
            return None
        return self.own[:, :, : self.past + self.plan.segments[-1].start]


def rows_of(values: Any, batch: int) -> list[int]:
    """One value per row, when all rows share one."""
    return list(values) if len(values) == batch else [values[0]] * batch


def length_of(layer: Any) -> int:
    """Keys that a cache layer holds; 0 without one."""
    return int(layer.get_seq_length()) if layer is not None else 0


def _keeps_made(keys: torch.Tensor) -> bool:
    """Whether a cache of such keys keeps them as they were made, too."""
    return keys.element_size() < 4


def _as_made(layer: Any, length: int) -> torch.Tensor:
    """The first `length` keys of a cache layer, as near to how they were made as it has them."""
    made = getattr(layer, _HELD).made
    if made is None:
        return layer.keys[:, :, :length]
    return torch.cat((made, layer.keys[:, :, made.shape[2] : length]), 2)


def guard(module: Foreign, patched: Patched) -> None:
    """Make an attention module that is stock, but for what it is given or may see, refuse caches of others."""
    names = inspect.signature(module.forward).parameters
    name = next((n for n in CACHE_NAMES if n in names), None)
    if name is not None:
        widened = "sliding_window" in patched.config
        forward = functools.partial(_guarded, module, module.forward, name, digest(patched.schedule), widened)
        patched.set_forward(module, forward)


def _guarded(
    module: Foreign, inner: Callable, name: str, schedule: str, widened: bool, *args: Any, **kwargs: Any
) -> Any:
    def layer() -> Any:
        layers = getattr(kwargs.get(name), "layers", ())
        return layers[module.layer_idx] if len(layers) > module.layer_idx else None

    there = layer()
    if widened and getattr(there, "is_sliding", False):
        raise CtxextError(
            "this cache was made for a sliding window, which the patch took away",
            hint="make the cache after patching",
        )
    # Compiled code can't branch on the length of a fixed-size cache, nor give an object another class.
    compiling = torch.compiler.is_compiling()
    if there is not None and not compiling and length_of(there):
        held = getattr(there, _HELD, None)
        if (held is None or held.schedule != schedule) and type(there) in {*_PATCHED, *_PATCHED.values()}:
            raise _foreign()
    if there is not None:
        setattr(there, _HELD, Filled(schedule, expected=True))
    answer = inner(*args, **kwargs)
    there = layer()
    if there is not None:
        setattr(there, _HELD, Filled(schedule))
        if not compiling:
            there.__class__ = _PATCHED.get(type(there), type(there))
    return answer


def _foreign() -> CtxextError:
    return CtxextError(
        "this cache was filled before the model was patched, patched again or unpatched, so its keys don't fit",
        hint="start with an empty cache",
    )


def layer_of(cache: Any, module: Foreign, schedule: str) -> Any:
    """This module's layer of the cache if it holds anything, None if it holds nothing.

    schedule: digest of what the model runs. Raises CtxextError for a cache that can't be used, and for one that
    was filled under another schedule.
    """
    if cache is None:
        return None
    if not isinstance(cache, Cache) or type(cache).__name__ == "EncoderDecoderCache":
        raise CtxextError(f"this schedule can't run with a {type(cache).__name__}", hint="use DynamicCache")
    if getattr(cache, "offloading", False):
        raise CtxextError(
            "this schedule needs all keys in place, not offloaded", hint="use a cache without offloading"
        )
    if len(cache.layers) <= module.layer_idx:
        return None
    layer = cache.layers[module.layer_idx]
    if type(layer) not in {*_TURNED, *_TURNED.values()}:
        raise CtxextError(
            f"this schedule can't turn the keys of a {type(layer).__name__}",
            hint="use DynamicCache or StaticCache, without quantization or a sliding window",
        )
    if not length_of(layer):
        return None
    held = getattr(layer, _HELD, None)
    if held is None or held.schedule != schedule:
        raise _foreign()
    known, there = held.positions.shape[1], length_of(layer)
    if known != there:
        raise CtxextError(
            f"this cache holds {there} keys, the model made {known}: some were taken or put in from outside, "
            "so nobody knows which positions are left",
            hint="use the cache's own crop, reorder_cache and batch methods, or start with an empty cache",
        )
    return layer


def expect(layer: Any) -> None:
    """Let a layer that `layer_of` found take the keys of this call, which nothing speaks against."""
    setattr(layer, _HELD, replace(getattr(layer, _HELD), expected=True))


def remember(
    cache: Any,
    module: Foreign,
    schedule: str,
    stages: list[int],
    positions: torch.Tensor,
    made: torch.Tensor | None = None,
    known: dict[int, torch.Tensor] | None = None,
) -> None:
    """Note what this module's layer of the cache holds after a call; see `Held`.

    positions: of the call's tokens, (rows, tokens). made: None if it is as it was. known: `Plan.held`, by which
    the layers of a call share one tensor of positions.
    """
    layer = cache.layers[module.layer_idx]
    layer.__class__ = _TURNED.get(type(layer), type(layer))
    before: Held | None = getattr(layer, _HELD, None)
    history = hash((before.history if before else 0, tuple(positions.flatten().tolist())))
    if before is not None:
        known = {} if known is None else known
        if history not in known:
            known[history] = before.followed_by(positions)
        positions = known[history]
        made = before.made if made is None else made
    setattr(layer, _HELD, Held(schedule, False, tuple(stages), positions, history, made))


def positions_held(layer: Any, batch: int) -> torch.Tensor:
    """The positions of a cache layer's keys, (rows, keys), for a call of so many sequences."""
    return getattr(layer, _HELD).positions_of(batch)


def align(layer: Any, rotary: StagedRotary, stages: list[int], plan: Plan, batch: int) -> None:
    """Turn the cached keys of each row to the stage of its queries, where they differ."""
    held: Held = getattr(layer, _HELD)
    now, positions = held.stages, held.positions_of(batch)
    if now == tuple(stages):
        return
    length = length_of(layer)
    own, keeps = _as_made(layer, length), _keeps_made(layer.keys)
    where = ("align", held.history, now, tuple(stages), keeps)
    if where not in plan.turns:
        # Rows that move alike share their angles: usually the whole batch does.
        rows = 1 if positions.shape[0] == 1 and len({*zip(now, stages, strict=True)}) == 1 else batch
        positions = positions.expand(rows, -1)
        source = rotary.stages_at(positions) if keeps else list(now[:rows])
        plan.turns[where] = rotary.turn(positions, source, stages[:rows])
    turned = _turned(own, plan.turns[where], rotary.layout)
    if isinstance(layer, StaticLayer):
        if held.made is None and keeps:
            own = own.clone()
        assert layer.keys is not None
        layer.keys[:, :, :length].copy_(turned)
    else:
        layer.keys = turned
    setattr(layer, _HELD, replace(held, stages=tuple(stages), made=own if keeps else None))


def _turned(keys: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], layout: str) -> torch.Tensor:
    """Keys turned where they are: with a device map, layers of one call sit on several devices."""
    cos, sin = (t.to(keys.device) for t in turn)
    return turn_keys(keys, cos, sin, layout)
