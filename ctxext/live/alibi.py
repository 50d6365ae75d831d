"""ALiBi, given to whatever attention backend a model uses.

It is linear in the distance, -m (i - j), and a softmax doesn't see what is the same for all keys of a query. So
m j alone is enough, and that is an inner product: one more coordinate per head, m on the query and j on the key.
No heads x L x L tensor exists, and fused kernels stay in use. In bfloat16 the slope is split into two numbers and
the position into two digits of base 256, all exact or nearly so, as kernels add products in float32. A backend
that rounds scores to bfloat16 itself (eager, sdpa without a fused kernel) would lose them beside a large m j; it
is given the bias as a mask instead.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..methods import alibi
from .encoding import Attended, AttentionCall, runs
from .t5_bias import MaskedBias

_FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


@cache
def _slopes(heads: int) -> tuple[float, ...]:
    return tuple(alibi.slopes(heads))


@runs(alibi.Alibi)
class LiveAlibi(MaskedBias):
    """Coordinates on queries and keys where scores keep them, a mask elsewhere."""

    def attend(self, call: AttentionCall) -> Attended:
        exact = call.query.dtype in (torch.float32, torch.float64) or call.backend != "sdpa"
        if call.backend == "eager":
            return super().attend(call)
        query, key, value = with_coordinates(call)
        try:
            if exact:
                out, weights = call.run(query, key, value, call.mask)
            else:
                with sdpa_kernel(_FUSED):
                    out, weights = call.run(query, key, value, call.mask)
            return out[..., : call.value.shape[-1]], weights
        except RuntimeError as error:
            if exact or "kernel" not in str(error):
                raise
        return super().attend(call)

    def added(self, distance: torch.Tensor, heads: int) -> torch.Tensor:
        slopes = torch.tensor(_slopes(heads), device=distance.device)
        return -slopes[:, None, None] * distance.clamp(min=0)[:, None]


def with_coordinates(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value with the coordinates whose product is m j; those of values are zero, cut off later."""
    query = call.query
    queries, keys = call.queries.to(query.device), call.keys.to(query.device)
    slopes = torch.tensor(_slopes(query.shape[1]), dtype=torch.float64, device=query.device)
    slopes = slopes / call.options["scaling"]
    # Counted back from the farthest query: what is near has small numbers.
    behind = queries.amax(1, keepdim=True) - keys
    if query.dtype in (torch.float32, torch.float64):
        sides = [(-slopes, behind)]
    else:
        high = slopes.to(query.dtype)
        low = (slopes - high.double()).to(query.dtype)
        # (on the query, on the key): float16 holds nothing above 65504, so the highest digit is split over both.
        steps = [(256, behind // 65536 * 256), (256, behind // 256 % 256), (1, behind % 256)]
        sides = [(-part * step, digit) for part in (high, low) for step, digit in steps]
    width = -len(sides) % 8 if query.is_cuda else 0
    on_query = torch.stack([side.to(query.dtype) for side, _ in sides], -1)[None, :, None, :]
    on_key = torch.stack([side.to(query.dtype) for _, side in sides], -1)[:, None]

    def widened(tensor: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(torch.cat((tensor, more.expand(*tensor.shape[:3], -1)), -1), (0, width))

    value = nn.functional.pad(call.value, (0, width + len(sides)))
    return widened(query, on_query), widened(call.key, on_key), value
