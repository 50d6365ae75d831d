"""RULER-type tasks on a model: scores by task and length, averages, and the effective length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import StoppingCriteria

from ...errors import UsageError
from ...terminal import progress
from ...text import bos_id, sha256
from ..greedy import greedy
from ..results import Finished
from ..stats import wilson
from .samples import Sample, SampleBuilder, string_match_all
from .tasks import known_tasks

DEFAULT_TASKS = ("niah_single_1", "niah_multikey_2", "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe")
THRESHOLD = 85.6
"""Percent: Llama-2-7B-chat at 4K, upstream's bar for a chat model. Its bar for a base model is 79.4."""


@dataclass(frozen=True)
class RulerResult:
    """`rows`: {"task", "length", "samples", "score", "low", "high"} per cell, scores in 0..1; with `crop` also
    "visible", the mean share of a sample's answers that the crop shows (tasks with needles).

    The interval is Wilson's with the sum of scores as the number correct: a score between 0 and 1 varies less than
    a coin of the same mean, so it is at worst too wide. `lengths`: {"length", "score", "passes"}, means over
    tasks. `effective`: the longest length whose mean is above the threshold, None if none is.
    """

    rows: list[dict]
    lengths: list[dict]
    effective: int | None
    settings: dict = field(default_factory=dict)


class _AllSaid(StoppingCriteria):
    """Stop a row once all its answers were said: the score can't change any more."""

    def __init__(self, tokenizer, start: int, answers: Sequence[Sequence[str]]):
        self._tokenizer, self._start, self._answers = tokenizer, start, answers

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        done = [
            string_match_all(_decode(self._tokenizer, row[self._start :].tolist()), answers) == 1
            for row, answers in zip(input_ids, self._answers, strict=True)
        ]
        return torch.tensor(done, device=input_ids.device)


def _decode(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def answer(
    model, tokenizer, samples: Sequence[Sample], *, crop: int | None = None, bos: int | None = None
) -> list[str]:
    """Greedy answers to equally long samples, at most `generate` tokens each, cut short once all was said.

    `crop`: the model reads the last `crop` tokens only, those that it will write included; `bos` stays in front.
    """
    generate = samples[0].generate
    rows = [sample.ids for sample in samples]
    if crop is not None and len(rows[0]) + generate > crop:
        room = crop - generate - (bos is not None)
        if room < 1:
            raise UsageError(f"a crop of {crop} tokens leaves nothing before {generate} tokens to generate")
        rows = [([] if bos is None else [bos]) + row[-room:] for row in rows]
    stop = _AllSaid(tokenizer, len(rows[0]), [sample.answers for sample in samples])
    return [_decode(tokenizer, said) for said in greedy(model, rows, generate, stop)]


def ruler(
    model,
    tokenizer,
    lengths: Iterable[int],
    *,
    tasks: Iterable[str] = DEFAULT_TASKS,
    samples: int = 20,
    seed: int = 0,
    batch_size: int = 1,
    crop: int | None = None,
    haystack: str | None = None,
    example: bool = True,
    threshold: float = THRESHOLD,
    resume: str | Path | None = None,
    identity: str = "",
    bos: int | Callable | None = bos_id,
    description: str = "ruler",
) -> RulerResult:
    """Measure `tasks` at `lengths` (tokens: prompt, BOS and what may be generated).

    `crop=trained_length` is the control: the unpatched model reads only the last tokens. `resume`: a JSONL file
    that keeps finished cells; `identity` says which model they are of. `haystack`, `example`: see `ruler_tasks`.
    All samples are built before the first forward (and again when they are read, as they are large), so a length
    that can't be is refused at once.
    """
    lengths, tasks = sorted(set(lengths)), known_tasks(list(dict.fromkeys(tasks)))
    if samples < 1 or batch_size < 1 or not lengths or not tasks:
        raise UsageError("ruler needs at least one length, task and sample, and a batch size of at least 1")
    front = bos(tokenizer) if callable(bos) else bos
    builder = SampleBuilder(tokenizer, front, haystack=haystack, example=example)
    settings = {
        "measure": "ruler",
        "tasks": tasks,
        "samples": samples,
        "seed": seed,
        "crop": crop,
        "bos": front,
        "example": example,
        "threshold": threshold,
        "haystack_sha256": haystack and sha256(haystack),
    }
    finished = Finished(resume, settings | {"identity": identity})
    done = {(cell["task"], cell["length"]): cell["row"] for cell in finished.cells}
    cells = [(task, length) for length in lengths for task in tasks if (task, length) not in done]
    for task, length in cells:
        for index in range(samples):
            builder.build(task, length, index, seed)
    for task, length in progress(cells, description, total=len(cells)):
        made = [builder.build(task, length, index, seed) for index in range(samples)]
        said: list[str] = []
        for start in range(0, samples, batch_size):
            said += answer(model, tokenizer, made[start : start + batch_size], crop=crop, bos=front)
        scores = [string_match_all(text, sample.answers) for text, sample in zip(said, made, strict=True)]
        low, high = wilson(sum(scores), samples)
        row = {
            "task": task,
            "length": length,
            "samples": samples,
            "score": fmean(scores),
            "low": low,
            "high": high,
        }
        if crop is not None and made[0].places:
            row["visible"] = fmean(_visible(builder, sample, crop, front) for sample in made)
        done[task, length] = row
        finished.add(task=task, length=length, row=row)
    rows = [done[task, length] for length in lengths for task in tasks]
    means = []
    for length in lengths:
        mean = fmean(done[task, length]["score"] for task in tasks)
        means.append({"length": length, "score": mean, "passes": 100 * mean > threshold})
    effective = max((row["length"] for row in means if row["passes"]), default=None)
    return RulerResult(rows, means, effective, settings)


def grid_that_fits(
    tokenizer,
    lengths: Iterable[int],
    tasks: Iterable[str] | None = None,
    *,
    seed: int = 0,
    haystack: str | None = None,
    example: bool = True,
) -> tuple[list[int], list[str]]:
    """What of lengths that nobody asked for can be measured: (lengths, tasks).

    Without `tasks` those of the default ones that fit in the longest length; then the lengths that each of them
    fits in. Raises UsageError if there is none.
    """
    builder = SampleBuilder(tokenizer, bos_id(tokenizer), haystack=haystack, example=example)
    lengths, refused = sorted(set(lengths)), UsageError("ruler needs at least one length and task")

    def fits(task: str, length: int) -> bool:
        nonlocal refused
        try:
            builder.build(task, length, 0, seed)
        except UsageError as error:
            refused = error
            return False
        return True

    if tasks is None:
        tasks = [task for task in DEFAULT_TASKS if fits(task, lengths[-1])]
    tasks = known_tasks(list(tasks))
    found = [length for length in lengths if tasks and all(fits(task, length) for task in tasks)]
    if not found:
        raise refused
    return found, tasks


def _visible(builder: SampleBuilder, sample: Sample, crop: int, bos: int | None) -> float:
    """The share of a sample's sources that begin inside the last `crop` tokens."""
    kept = crop - sample.generate - (bos is not None)
    if len(sample.ids) + sample.generate <= crop:
        return 1.0
    first = len(sample.ids) - kept
    return fmean(start >= first for start in builder.starts(sample))
