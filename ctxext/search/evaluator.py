"""What a strategy sees of the model: candidates in, a loss per document out. Counts tokens, caches, logs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import CtxextError
from .log import Log
from .parallel import World
from .space import Candidate, Space

Measure = Callable[[Candidate, Sequence[int]], list[float]]
"""The mean loss in nats of each of the documents with these indices, under a candidate."""


class BudgetSpent(Exception):
    """The tokens that the search may spend are spent."""


@dataclass
class Evaluator:
    """Losses of candidates on common documents.

    measure: see `Measure`. sizes: tokens of each document. budget: model tokens to spend at most. phase: written
    into every line of the log. on_value: called after each line with it.
    Attributes after a while: `best` and `best_loss` over all documents; `history`, (tokens, best loss) whenever a
    better one was found; `tokens` spent; `values`, every loss by candidate and document.
    """

    space: Space
    measure: Measure
    sizes: Sequence[int]
    budget: float = math.inf
    log: Log = field(default_factory=lambda: Log(None))
    world: World = field(default_factory=World)
    phase: str = "long"
    on_value: Callable[[dict[str, Any]], None] = lambda record: None

    def __post_init__(self):
        self.tokens = 0
        self._best: Candidate | None = None
        self.best_loss = math.inf
        self.history: list[tuple[int, float]] = []
        self.values: dict[Candidate, dict[int, float]] = {}

    @property
    def best(self) -> Candidate:
        """The best candidate; CtxextError before one was read on all documents."""
        if self._best is None:
            raise CtxextError("no candidate has been read on all documents")
        return self._best

    @best.setter
    def best(self, candidate: Candidate) -> None:
        self._best = candidate

    @property
    def documents(self) -> range:
        """Indices of all documents."""
        return range(len(self.sizes))

    def full_cost(self) -> int:
        """Tokens of one candidate on all documents."""
        return sum(self.sizes)

    def losses(self, candidates: Sequence[Candidate], documents: Sequence[int] | None = None) -> list[list[float]]:
        """Loss of each candidate on each of the documents (all by default): [candidates][documents].

        What was evaluated before costs nothing. Raises BudgetSpent when the tokens run out; what they still
        allowed has been evaluated then. Raises CtxextError for a candidate outside the space, or for a loss that
        isn't finite.
        """
        wanted = list(self.documents if documents is None else documents)
        missing: list[tuple[Candidate, list[int]]] = []
        allowed, spent = True, self.tokens
        for candidate in dict.fromkeys(candidates):
            broken = self.space.violation(candidate)
            if broken:
                raise CtxextError(f"the search made a candidate outside its space: {broken}")
            new = [d for d in wanted if d not in self.values.get(candidate, {})]
            spent += sum(self.sizes[d] for d in new)
            if spent > self.budget:
                allowed = False
                break
            if new:
                missing.append((candidate, new))
        self._evaluate(missing)
        if not allowed:
            raise BudgetSpent
        return [[self.values[c][d] for d in wanted] for c in candidates]

    def means(self, candidates: Sequence[Candidate]) -> list[float]:
        """Mean loss over all documents, in nats."""
        return [sum(row) / len(row) for row in self.losses(candidates)]

    def _evaluate(self, missing: list[tuple[Candidate, list[int]]]) -> None:
        known = []
        for candidate, documents in missing:
            found = self.log.replay(self._asked(candidate, documents))
            if found is None:
                break
            known.append(found["nll"])
        for (candidate, documents), losses in zip(missing, known, strict=False):
            self._take(candidate, documents, losses, new=False)
        # As many candidates at a time as there are processes: a kill loses no more than that.
        rest = missing[len(known) :]
        for start in range(0, len(rest), self.world.size):
            group = rest[start : start + self.world.size]
            fresh = self.world.map(self._measure_pairs, [(c, d) for c, documents in group for d in documents])
            for candidate, documents in group:
                losses, fresh = fresh[: len(documents)], fresh[len(documents) :]
                self._take(candidate, documents, losses, new=True)

    def _measure_pairs(self, pairs: list[tuple[Candidate, int]]) -> list[float]:
        """Losses of (candidate, document) pairs; neighbours of one candidate are measured together."""
        losses: list[float] = []
        while len(losses) < len(pairs):
            candidate = pairs[len(losses)][0]
            mine = [d for c, d in pairs[len(losses) :] if c == candidate]
            losses += self.measure(candidate, mine)
        return losses

    def _asked(self, candidate: Candidate, documents: list[int]) -> dict[str, Any]:
        return {
            "phase": self.phase,
            "factors": list(candidate.factors),
            "start_tokens": candidate.start_tokens,
            "documents": documents,
        }

    def _take(self, candidate: Candidate, documents: list[int], losses: list[float], *, new: bool) -> None:
        if not all(math.isfinite(loss) for loss in losses):
            raise CtxextError(
                f"the loss of factors {list(candidate.factors)} with {candidate.start_tokens} start tokens isn't "
                f"finite: {losses}",
                hint="load the model in float32 or bfloat16: a search must not rank what isn't a number",
            )
        self.tokens += sum(self.sizes[d] for d in documents)
        seen = self.values.setdefault(candidate, {})
        seen.update(zip(documents, losses, strict=True))
        if len(seen) == len(self.sizes):
            mean = sum(seen[d] for d in self.documents) / len(seen)
            if mean < self.best_loss:
                self.best, self.best_loss = candidate, mean
                self.history.append((self.tokens, mean))
        record = self._asked(candidate, documents) | {"nll": losses, "tokens": self.tokens}
        record["best"] = self.best_loss if self._best else None
        if new and self.world.rank == 0:
            self.log.write(record)
        self.on_value(record)


@dataclass(frozen=True)
class Problem:
    """All that a strategy is given: the space, where to start, a source of chance, and the evaluator."""

    space: Space
    seeds: dict[str, Candidate]
    evaluator: Evaluator
    rng: random.Random
    seed: int
