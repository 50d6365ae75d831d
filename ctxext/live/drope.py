"""Sharper attention beyond the trained length, for a model without rotation (DroPE)."""

from __future__ import annotations

from ..methods.drope import QueryTemperature
from .encoding import Attended, AttentionCall, LiveEncoding, runs


@runs(QueryTemperature)
class LiveTemperature(LiveEncoding):
    """Queries times the temperature of their position; the model's own attention does the rest."""

    def attend(self, call: AttentionCall) -> Attended:
        length = self.schedule.rope.trained_length
        prefix = (call.queries + 1).clamp(min=length).double() / length
        sharper = 1 + self.spec.coefficient * prefix.log()
        query = call.query * sharper[:, None, :, None].to(call.query.dtype)
        return call.run(query, call.key, call.value, call.mask)
