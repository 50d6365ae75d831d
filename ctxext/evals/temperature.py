"""Fit the temperature of long queries, 1 + c ln(n / L), on held-out text.

DroPE (Gelberg et al. 2025, arXiv:2512.12167) sharpens attention beyond the trained length L by a coefficient c
that is fitted once per model. Here c is the one with the least loss on the tokens beyond L: measured on a grid,
then at the vertex of the parabola through the best point and its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import methods
from ..errors import UsageError

GRID = (0.0, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6)


def vertex(points: Sequence[tuple[float, float]]) -> float | None:
    """Where the parabola through three points (x, y), the middle one lowest, has its minimum; None if it has none.

    >>> vertex([(0, 4), (1, 1), (3, 1)])
    2.0
    """
    (a, fa), (b, fb), (c, fc) = points
    left, right = (b - a) * (fb - fc), (b - c) * (fb - fa)
    if left == right:
        return None
    found = b - 0.5 * ((b - a) * left - (b - c) * right) / (left - right)
    return found if a < found < c else None


def fit(
    subject: Any,
    documents: Sequence[Sequence[int]],
    method: str,
    factor: float,
    params: dict[str, Any] | None = None,
    grid: Sequence[float] = GRID,
) -> dict[str, Any]:
    """The c of least loss: {"temperature", "curve": [{"temperature", "nll", "ppl"}], "tokens", "length"}.

    subject: a model of `models.load`, left as it was found. documents: token ids without special tokens, all read
    up to the shortest one's length, which must be beyond the trained length; the tokenizer's BOS, if it puts one
    in front, counts. nll is in nats per token beyond it, the tokens fitted on. A c at the end of the grid is an
    answer too: no larger one was tried.
    """
    from .. import text
    from . import perplexity

    bos = text.bos_id(subject.tokenizer)
    length = min(len(d) for d in documents)
    grid = sorted(set(grid))
    if "temperature" not in {o.name for o in methods.get(method).options}:
        having = [n for n, m in methods.all_methods().items() if "temperature" in {o.name for o in m.options}]
        raise UsageError(f"{method} has no temperature", hint=f"these have: {', '.join(having)}")
    if len(grid) < 3 or grid[0] < 0:
        raise UsageError("the grid needs at least three temperatures, none negative")
    before = subject.schedule
    trained = before.rope.trained_length
    # A model that was trained under the method keeps its options.
    own = before.params if before.method == method else {}
    if length <= trained:
        raise UsageError(
            f"texts of {length} tokens don't reach beyond the {trained} that the model was trained on"
        )
    measured: dict[float, dict[str, float]] = {}

    def loss(c: float) -> float:
        subject.patch(method, factor, existing="replace", **{**own, **(params or {}), "temperature": c})
        curve = perplexity.prefix_curve(
            subject.model, documents, [trained, length], bos=bos, description=f"c = {c:.3g}"
        )
        sums = [sum(row["length_nll"][i] for row in curve.documents) for i in (0, 1)]
        tokens = (length - trained) * len(documents)
        nll = (sums[1] - sums[0]) / tokens
        measured[c] = {"temperature": c, "nll": nll, "ppl": perplexity.perplexity(nll), "tokens": tokens}
        return nll

    try:
        losses = [loss(c) for c in grid]
        best = losses.index(min(losses))
        if 0 < best < len(grid) - 1:
            near = range(best - 1, best + 2)
            between = vertex([(grid[i], losses[i]) for i in near])
            if between is not None and between not in measured:
                loss(between)
    finally:
        subject.unpatch()
        if before.method != "none":
            import ctxext

            ctxext.apply(subject.model, before)
            subject.schedule = before
    chosen = min(measured.values(), key=lambda row: row["nll"])
    curve = [measured[c] for c in sorted(measured)]
    return {"temperature": chosen["temperature"], "curve": curve, "tokens": chosen["tokens"], "length": length}
