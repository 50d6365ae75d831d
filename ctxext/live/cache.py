"""Keys of past tokens in a patched model: under which schedule, in which stage, and turning them to another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from ..errors import CtxextError
from . import Foreign
from .stages import Plan, StagedRotary, turn_keys

_HELD = "_ctxext_held"


@dataclass(frozen=True)
class Held:
    """What a cache layer holds that a patched model filled.

    schedule: digest of the schedule that the model ran. stages, ends: per row, the stage that its keys are turned
    to and its last position. expected: the patched model is about to add to the layer. made: None, or the first
    keys as they were made, each in the stage of its own position; those after them are still as they were made.

    Every turn rounds. In 16 bits that shows after many stages, so there all turns begin at `made`.
    """

    schedule: str
    stages: tuple[int, ...]
    ends: tuple[int, ...]
    expected: bool = False
    made: torch.Tensor | None = None

    def rows(self, chosen: list[int]) -> Held:
        """The same of these rows."""
        return replace(
            self,
            stages=tuple(self.stages[i] for i in chosen),
            ends=tuple(self.ends[i] for i in chosen),
            made=None if self.made is None else self.made[chosen],
        )

    def shorter(self, removed: int, length: int) -> Held:
        """The same after the last `removed` tokens are gone and `length` are left."""
        made = None if self.made is None or not length else self.made[:, :, :length]
        return replace(self, ends=tuple(end - removed for end in self.ends), made=made)


def _knowing_its_stage(base: type, name: str) -> type:
    """A cache layer class that keeps its `Held` true under batch operations, and takes keys from its model alone.

    A layer that exists already is given this class, so it must derive from that layer's class alone: with a
    mixin Python would refuse the change of memory layout.
    """

    class Staged(base):
        def update(self, *args, **kwargs):
            held = getattr(self, _HELD, None)
            if held is not None and not held.expected:
                # Here a model adds keys that runs neither stages nor an attention of ours.
                if _length(self):
                    raise _foreign()
                delattr(self, _HELD)
            return super().update(*args, **kwargs)

        def reorder_cache(self, beam_idx):
            super().reorder_cache(beam_idx)
            self._select(beam_idx.tolist())

        def batch_select_indices(self, indices):
            super().batch_select_indices(indices)
            rows = torch.arange(self._batch())
            self._select(rows[indices.cpu()].tolist())

        def batch_repeat_interleave(self, repeats):
            super().batch_repeat_interleave(repeats)
            self._select([i for i in range(self._batch()) for _ in range(repeats)])

        def _batch(self):
            return len(getattr(self, _HELD).ends) if hasattr(self, _HELD) else 0

        def _select(self, rows):
            if hasattr(self, _HELD):
                setattr(self, _HELD, getattr(self, _HELD).rows(rows))

        def crop(self, tokens_to_remove):
            super().crop(tokens_to_remove)
            if hasattr(self, _HELD):
                setattr(self, _HELD, getattr(self, _HELD).shorter(abs(tokens_to_remove), _length(self)))

    Staged.__name__ = Staged.__qualname__ = name  # so that caches pickle
    return Staged


StagedDynamicLayer = _knowing_its_stage(DynamicLayer, "StagedDynamicLayer")
StagedStaticLayer = _knowing_its_stage(StaticLayer, "StagedStaticLayer")
_KNOWN = {DynamicLayer: StagedDynamicLayer, StaticLayer: StagedStaticLayer}


class Block:
    """The keys and values that one layer sees during a segmented call; stands in for the cache.

    Keys are kept as they were made, each in its own stage, and turned to a segment's stage from there: one
    rounding in the model's dtype, however many stages a call crosses.
    """

    def __init__(self, rotary: StagedRotary, plan: Plan, layer: Any, batch: int):
        self.rotary, self.plan = rotary, plan
        self.past = _length(layer)
        self.own = _as_made(layer, self.past) if self.past else None
        self.values = layer.values[:, :, : self.past] if self.past else None
        self.turned = None
        self._index = 0
        rows = plan.positions.shape[0]
        if self.past:
            held = getattr(layer, _HELD)
            check_contiguous(layer, plan.positions, batch)
            rows = batch
            offsets = torch.arange(-self.past + 1, 1, device=plan.positions.device)
            before = torch.tensor(held.ends, device=offsets.device)[:, None] + offsets
            before = before.clamp(min=0)
            self.positions = torch.cat((before, plan.positions.expand(batch, -1)), 1)
            if _keeps_made(layer.keys):
                old = rotary.stages_at(before)
            else:
                old = torch.tensor(held.stages, device=offsets.device)[:, None].expand(-1, self.past)
        else:
            self.positions = plan.positions
            old = plan.positions.new_empty(rows, 0)
        made = [
            torch.tensor(rows_of(s.stages, rows), device=old.device)[:, None].expand(-1, s.end - s.start)
            for s in plan.segments
        ]
        self.stages = torch.cat((old, *made), 1)
        self._key = (self.past, held.stages if self.past else ())

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


def _length(layer: Any) -> int:
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


def _foreign() -> CtxextError:
    return CtxextError(
        "this cache was filled before the model was patched, patched again or unpatched, so its keys don't fit",
        hint="start with an empty cache",
    )


def layer_of(cache: Any, module: Foreign, schedule: str) -> Any:
    """This module's layer of the cache if it holds anything, ready to be given more; None if it holds nothing.

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
    if type(layer) not in {*_KNOWN, *_KNOWN.values()}:
        raise CtxextError(
            f"this schedule can't turn the keys of a {type(layer).__name__}",
            hint="use DynamicCache or StaticCache, without quantization or a sliding window",
        )
    if not _length(layer):
        return None
    held = getattr(layer, _HELD, None)
    if held is None or held.schedule != schedule:
        raise _foreign()
    setattr(layer, _HELD, replace(held, expected=True))
    return layer


def remember(
    cache: Any,
    module: Foreign,
    schedule: str,
    stages: list[int],
    ends: list[int],
    made: torch.Tensor | None = None,
) -> None:
    """Note what this module's layer of the cache holds after a call; see `Held`. made: None if it is as it was."""
    layer = cache.layers[module.layer_idx]
    if type(layer) in _KNOWN:
        layer.__class__ = _KNOWN[type(layer)]
    if made is None and hasattr(layer, _HELD):
        made = getattr(layer, _HELD).made
    setattr(layer, _HELD, Held(schedule, tuple(stages), tuple(ends), made=made))


def check_contiguous(layer: Any, positions: torch.Tensor, batch: int) -> None:
    """Raise CtxextError unless positions, (rows, tokens), go on where each row of a cache layer ends."""
    ends = list(getattr(layer, _HELD).ends)
    if len(ends) != batch:
        raise CtxextError(f"the cache holds {len(ends)} sequences, the call has {batch}")
    # Seen from its last token, as the first ones may be pads; a row that begins in this call has only pads before.
    first = [p - positions.shape[1] + 1 for p in rows_of(positions[:, -1].tolist(), batch)]
    if any(a != b + 1 and a > 0 for a, b in zip(first, ends, strict=True)):
        raise CtxextError(
            f"the call begins at positions {first}, the cache ends at {ends}: a cached sequence can't have gaps",
            hint="pass position_ids that go on where the cache ends",
        )


def align(layer: Any, rotary: StagedRotary, stages: list[int], plan: Plan, batch: int) -> None:
    """Turn the cached keys of each row to the stage of its queries, where they differ."""
    held = getattr(layer, _HELD)
    now, ends = held.stages, held.ends
    if len(now) != batch:
        raise CtxextError(f"the cache holds {len(now)} sequences, the call has {batch}")
    if now == tuple(stages):
        return
    check_contiguous(layer, plan.positions, batch)
    length = _length(layer)
    own, keeps = _as_made(layer, length), _keeps_made(layer.keys)
    where = ("align", length, now, tuple(stages), ends, keeps)
    if where not in plan.turns:
        # Rows that move alike share their angles: usually the whole batch does.
        offsets = torch.arange(-length + 1, 1, device=plan.positions.device)
        alike = len({*zip(now, stages, ends, strict=True)}) == 1
        rows = 1 if alike else batch
        positions = (torch.tensor(ends[:rows], device=offsets.device)[:, None] + offsets).clamp(min=0)
        source = rotary.stages_at(positions) if keeps else now[:rows]
        plan.turns[where] = rotary.turn(positions, source, stages[:rows])
    turned = _turned(own, plan.turns[where], rotary.layout)
    if isinstance(layer, StaticLayer):
        if held.made is None and keeps:
            own = own.clone()
        layer.keys[:, :, :length].copy_(turned)
    else:
        layer.keys = turned
    setattr(layer, _HELD, replace(held, stages=tuple(stages), made=own if keeps else None))


def _turned(keys: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], layout: str) -> torch.Tensor:
    """Keys turned where they are: with a device map, layers of one call sit on several devices."""
    cos, sin = (t.to(keys.device) for t in turn)
    return turn_keys(keys, cos, sin, layout)
