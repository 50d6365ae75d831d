"""Running a staged schedule: which stage each query is in, and keys turned to the stage that reads them.

A query at position i attends with the frequencies of its stage to *all* keys, so keys must be rotated by those
frequencies too. As rotations add up, a key that carries the angles of one stage is brought to another by rotating
it by the difference. Nothing depends on what follows, so every layer, and the whole model, stays causal.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import CtxextError
from . import Foreign
from .blocks import check_not_traced


@dataclass(frozen=True)
class Segment:
    """Queries start .. end - 1 of a call, in which each row is in one stage."""

    start: int
    end: int
    stages: tuple[int, ...]


@dataclass
class Plan:
    """The stages of one call, worked out once and used by every layer.

    positions: (rows, tokens), rows = 1 if all sequences of the batch share them. segments: in order, covering
    the call. turns: cos and sin by which earlier keys are turned for a segment, made when first needed. held: the
    positions of all keys after the call, by the history of a cache.
    """

    positions: torch.Tensor
    segments: list[Segment]
    last: list[int]
    turns: dict[Any, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    masks: dict[Any, torch.Tensor] = field(default_factory=dict)
    held: dict[int, torch.Tensor] = field(default_factory=dict)


class Planned(tuple):
    """cos and sin as every transformers layer takes them, with the plan of the call as an attribute."""

    plan: Plan


class StagedRotary(nn.Module):
    """One stock rotary module per stage. Each token gets the angles of the stage that its position is in.

    digest: that of the schedule, by which a cache knows what it was filled under.
    """

    def __init__(self, modules: list[nn.Module], starts: list[int], layout: str, digest: str):
        super().__init__()
        self.stages = nn.ModuleList(modules)
        self.starts = starts
        self.layout = layout
        self.digest = digest
        self.config = modules[0].config

    def stages_at(self, positions: torch.Tensor) -> torch.Tensor:
        """The stage that each position is in."""
        starts = torch.tensor(self.starts[1:], device=positions.device)
        return torch.bucketize(positions.contiguous(), starts, right=True)

    def plan(self, position_ids: torch.Tensor) -> Plan:
        """The stages of a call with these positions, (rows, tokens)."""
        if position_ids.shape[1] == 1:
            # Decoding: a step is too short for a handful of tensor operations not to show.
            last = position_ids[:, 0].tolist()
            stages = tuple(bisect.bisect_right(self.starts, p) - 1 for p in last)
            return Plan(position_ids, [Segment(0, 1, stages)], last)
        stages = self.stages_at(position_ids)
        cuts = [0, position_ids.shape[1]]
        if bool((stages != stages[:, :1]).any()):
            changes = (stages[:, 1:] != stages[:, :-1]).any(0).nonzero().flatten()
            cuts = [0, *(changes + 1).tolist(), position_ids.shape[1]]
        firsts = stages[:, cuts[:-1]].T.tolist()
        segments = [Segment(a, b, tuple(s)) for a, b, s in zip(cuts, cuts[1:], firsts, strict=False)]
        return Plan(position_ids, segments, position_ids[:, -1].tolist())

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Planned:
        """(cos, sin), each (rows, tokens, rotary width) in x's dtype, and the plan."""
        check_not_traced("a schedule of several stages")
        plan = self.plan(position_ids)
        parts = []
        for segment in plan.segments:
            here = position_ids[:, segment.start : segment.end]
            first = segment.stages[0]
            cos, sin = self.stages[first](x, here)
            for stage in set(segment.stages) - {first}:
                rows = torch.tensor([s == stage for s in segment.stages], device=here.device)[:, None, None]
                other_cos, other_sin = self.stages[stage](x, here)
                cos, sin = torch.where(rows, other_cos, cos), torch.where(rows, other_sin, sin)
            parts.append((cos, sin))
        if len(parts) > 1:
            parts = [(torch.cat([c for c, _ in parts], 1), torch.cat([s for _, s in parts], 1))]
        answer = Planned(parts[0])
        answer.plan = plan
        return answer

    def angles(self, positions: torch.Tensor, stage: int) -> torch.Tensor:
        """The angles that `stage` gives positions, (..., d/2): float32 products as the stock modules make them,
        held in float64 so that differences of two of them are exact."""
        return _angles(self.stages[stage], positions)

    def scale(self, stage: int) -> float:
        """What `stage` multiplies cos and sin by."""
        module: Foreign = self.stages[stage]
        return getattr(module, "scaled", module).attention_scaling

    def turn(
        self, positions: torch.Tensor, now: list[int] | torch.Tensor, then: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, (rows, keys, d/2) float32, that bring keys from their stages to those of the queries.

        positions: (rows, keys). now: the stage of each row's keys, or (rows, keys) the stage of each key.
        then: the stage of each row's queries.
        """
        cos = torch.empty(*positions.shape, self._pairs(), dtype=torch.float32, device=positions.device)
        sin = torch.empty_like(cos)
        per_key = now if isinstance(now, torch.Tensor) else None
        for row, target in enumerate(then):
            wanted = self.angles(positions[row], target)
            sources: list[int] = per_key[row].unique().tolist() if per_key is not None else [int(now[row])]
            for source in sources:
                which = per_key[row] == source if per_key is not None else slice(None)
                delta = wanted[which] - self.angles(positions[row][which], source)
                ratio = self.scale(target) / self.scale(source)
                cos[row, which] = (delta.cos() * ratio).float()
                sin[row, which] = (delta.sin() * ratio).float()
        return cos, sin

    def _pairs(self) -> int:
        module: Foreign = self.stages[0]
        return getattr(module, "scaled", module).inv_freq.numel()


def _angles(module: Foreign, positions: torch.Tensor) -> torch.Tensor:
    if hasattr(module, "start_tokens"):
        early = (positions < module.start_tokens)[..., None]
        return torch.where(early, _angles(module.original, positions), _angles(module.scaled, positions))
    frequencies = module.inv_freq.to(device=positions.device, dtype=torch.float32)
    return (positions[..., None].float() * frequencies).double()


def turn_keys(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str) -> torch.Tensor:
    """Rotate keys (batch, heads, keys, head size) by cos and sin (rows, keys, d/2), in float32 or better.

    Coordinates beyond the rotary dimension d are left alone. layout: "halves" pairs coordinate i with
    i + d/2, "neighbours" pairs 2i with 2i + 1.
    """
    pairs = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    turned, rest = keys[..., : 2 * pairs], keys[..., 2 * pairs :]
    turned = turned.to(torch.promote_types(keys.dtype, torch.float32))
    if layout == "halves":
        a, b = turned[..., :pairs], turned[..., pairs:]
        new = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        new = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    new = new.to(keys.dtype)
    return torch.cat((new, rest), -1) if rest.shape[-1] else new


def find_layout(attention: Foreign, rotary: Foreign) -> str:
    """How this family pairs coordinates, found by trying its own function on a random key.

    Raises CtxextError if it is neither of the two known ways.
    """
    import sys

    rotate = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if rotate is None:
        raise CtxextError(f"{type(attention).__name__} has no apply_rotary_pos_emb, so keys can't be turned")
    positions = torch.tensor([[0, 1, 5]], device=rotary.inv_freq.device)
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32, device=positions.device), positions)
    angle = _angles(rotary, positions)
    table = ((angle.cos() * rotary.attention_scaling).float(), (angle.sin() * rotary.attention_scaling).float())
    sizes = dict.fromkeys([getattr(attention, "head_dim", 2 * angle.shape[-1]), 2 * angle.shape[-1]])
    for size in sizes:
        seeded = torch.Generator().manual_seed(0)
        key = torch.randn(1, 1, 3, size, dtype=torch.float32, generator=seeded).to(positions.device)
        try:
            turned = rotate(key, key, cos, sin)[1]
        except (RuntimeError, TypeError):
            continue
        for layout in ("halves", "neighbours"):
            if torch.allclose(turn_keys(key, *table, layout), turned, atol=1e-5):
                return layout
    raise CtxextError(f"{type(attention).__name__} pairs rotary coordinates in a way that ctxext doesn't know")
