"""Samples of RULER's task types at exact lengths for one tokenizer, and their score."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import CtxextError, UsageError
from ...needles.exact_length import Fitter
from ...needles.prompts import hashed, sentences_of
from ..words import embedded_text
from .tasks import TASKS, known_tasks


@dataclass(frozen=True)
class Sample:
    """One prompt with its answers. `ids` has length - generate tokens, BOS included."""

    task: str
    length: int
    index: int
    text: str
    answers: tuple[str, ...]
    generate: int
    ids: list[int]
    places: tuple[tuple[int, int], ...]
    """Character spans of the text that the answers were read from, in the order of `answers` (none for
    counting)."""


class SampleBuilder:
    """Builds samples for one tokenizer. `haystack`: a text for the essay tasks, instead of the embedded one."""

    def __init__(self, tokenizer, bos: int | None = None, *, haystack: str | None = None, example: bool = True):
        self._fitter = Fitter(tokenizer, bos)
        self._sentences = sentences_of(embedded_text() if haystack is None else haystack)
        self._example = example

    def build(self, task: str, length: int, index: int, seed: int = 0) -> Sample:
        """Sample `index` of a task: prompt + tokens to generate are exactly `length`.

        Raises UsageError for an unknown task or a length that can't hold it, CtxextError if no filler hits it.
        """
        known_tasks([task])
        generate, make = TASKS[task]
        draft = make(
            random.Random(hashed("ruler", task, length, seed, index)), length, self._sentences, self._example
        )
        room = length - generate
        least = self._fitter.count(draft.render(0, []))
        if least > room:
            raise UsageError(
                f"{task} needs at least {least + generate} tokens with this tokenizer: it doesn't fit in {length}",
                hint=f"ask for lengths from {least + generate}" + (", or leave the example out" * self._example),
            )
        rate = max(0.5, (self._fitter.count(draft.render(40, [])) - least) / 40)
        plan = self._fitter.fit(draft.render, room, rate=rate, upcoming=draft.upcoming, pieces=draft.pieces)
        if plan is None:
            raise CtxextError(
                f"no filler gives {task} exactly {length} tokens with this tokenizer",
                hint="a neighbouring length may work",
            )
        text = draft.render(*plan)
        ids = self._fitter.ids(text)
        assert len(ids) == room
        places = tuple((at := text.rindex(source), at + len(source)) for source in draft.sources)
        return Sample(task, length, index, text, draft.answers, generate, ids, places)

    def starts(self, sample: Sample) -> list[int]:
        """The token where each of a sample's sources begins."""
        return [self._fitter.places(sample.text, *place, sample.ids)[0] for place in sample.places]


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
    """Upstream's score: the share of answers that occur in the prediction, whatever their case."""
    said = "".join("\n" if ord(c) < 32 else c for c in prediction.strip()).strip().lower()
    return sum(answer.lower() in said for answer in answers) / len(answers)
