"""Passkey retrieval (Mohtashami and Jaggi, "Landmark Attention", 2023) at exact lengths, scored in one forward.

What published variants get wrong, and this one doesn't:

- Length is counted in characters there and misses the target by 1 to 6 %. Here prompt and answer together have
  exactly L tokens, so a length is comparable between tokenizers and nothing falls over the edge of a context.
- The text is tokenised whole, never pasted from pieces: with sentencepiece the pieces' ids aren't the text's.
- Keys have five digits always, and come from a hash of (seed, length, depth, trial): the same cell has the same
  prompts whichever other cells run.
- Scoring is teacher-forced: the key is right if each of its tokens is the argmax given the prompt and the key's
  tokens before. That is what greedy decoding would say (both agree token for token), without generating.

Repeated filler is easy to tell from a key: passing this doesn't prove that a model can use its context, failing it
proves that it can't. Trials of one cell differ in the key alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ..errors import UsageError
from ..live.head import CHUNK, token_scores
from ..needles.prompts import Prompt, PromptBuilder, make_distractors, make_key, sentences_of
from ..terminal import progress
from ..text import bos_id, sha256
from .greedy import greedy
from .passkey_presets import PresetBuilder
from .prefix import PrefixScorer, why_not
from .results import Finished
from .stats import wilson

__all__ = ["DEPTHS", "PasskeyResult", "Prompt", "PromptBuilder", "make_key", "passkey"]
DEPTHS = tuple(i / 10 for i in range(11))


@dataclass(frozen=True)
class PasskeyResult:
    """`rows`: one per cell (length, depth). `lengths`: the same pooled over depths. Both JSON-able.

    A row: {"length", "depth", "trials", "correct", "accuracy", "low", "high" (95 % Wilson), "logprob" (mean over
    trials of the whole key's, in nats), "rank" (median over trials of the worst rank of a key's token; 1 = found),
    "depth_tokens" (mean)}, and with `crop` also "visible": the share of trials whose needle is inside the crop,
    with distractors "margin" (mean log-probability of the key above that of the likeliest other key, in nats), and
    with a preset "tokens" (mean, what the preset's own length control came to). Pooled rows lack "depth" and
    "depth_tokens".
    """

    rows: list[dict]
    lengths: list[dict]
    settings: dict = field(default_factory=dict)


def _cropped(ids: list[int], crop: int | None, bos: int | None) -> list[int]:
    """The last `crop` tokens, BOS kept in front if there is one (it takes one place)."""
    if crop is None or len(ids) <= crop:
        return ids
    return ids[-crop:] if bos is None else [bos, *ids[len(ids) - crop + 1 :]]


class _Prompts:
    """The prompts of a grid: which key, which distractors, which builder."""

    def __init__(self, tokenizer, bos, preset, haystack, distractors: int, seed: int):
        if preset is not None and (haystack is not None or distractors):
            raise UsageError("a preset brings its own filler and one key: leave out haystack and distractors")
        sentences = None if haystack is None else sentences_of(haystack)
        self._own = PromptBuilder(tokenizer, bos, sentences)
        self._preset = None if preset is None else PresetBuilder(preset, tokenizer, bos)
        self._distractors, self._seed = distractors, seed

    def __call__(self, length: int, depth: float, trial: int) -> Prompt:
        cell = (self._seed, length, depth, trial)
        if self._preset is not None:
            return self._preset.build(length, depth, self._preset.key(*cell))
        return self._own.build(length, depth, make_key(*cell), *make_distractors(self._distractors, *cell))


def passkey(
    model,
    tokenizer,
    lengths: Iterable[int],
    *,
    depths: Iterable[float] = DEPTHS,
    trials: int = 20,
    seed: int = 0,
    batch_size: int = 1,
    crop: int | None = None,
    generate: bool = False,
    preset: str | None = None,
    haystack: str | None = None,
    distractors: int = 0,
    reuse: bool | None = None,
    resume: str | Path | None = None,
    identity: str = "",
    bos: int | Callable | None = bos_id,
    chunk: int | None = CHUNK,
    description: str = "passkey",
) -> PasskeyResult:
    """Measure passkey retrieval on a grid of lengths (tokens, answer included) x depths (0 start, 1 end) x trials.

    `crop=trained_length` is the control: the model sees only the last `crop` tokens of the same prompts, so it can
    find a key only if the needle is that near the end; "visible" in the rows is the share where it is.
    `generate=True` scores by greedy generation and exact ids instead (slower; without "logprob" and "rank").
    `batch_size` prompts of a cell run together: they are equally long, so nothing is padded.

    `preset`: landmark, yarn, pose, longlora or ruler, that evaluation's prompts and its approximate lengths (see
    `presets.py`). `haystack`: a text whose sentences are the filler. `distractors`: so many other keys, each under
    an ordinal of its own ("the third pass key"), of which one is asked for.
    `reuse`: run the shared beginning of a row's prompts once, from the deepest needle up. None does so where it is
    exact (one prompt at a time, no crop, no generation, a causal model with a whole KV cache); True insists.
    `resume`: a JSONL file with finished cells; `identity` says which model they are of.
    `bos`: an id, None, or by default what the tokenizer does itself. Lengths past what the model claims are
    allowed: measuring those is the point. Nothing is ever truncated unless `crop` says so.
    """
    lengths, depths = sorted(set(lengths)), sorted(set(depths))
    if trials < 1 or batch_size < 1 or not lengths or not depths:
        raise UsageError("passkey needs at least one length, depth and trial, and a batch size of at least 1")
    front = bos(tokenizer) if callable(bos) else bos
    build = _Prompts(tokenizer, front, preset, haystack, distractors, seed)
    # Refuse before the first forward, not after an hour of them. Some keys take more tokens than others, so all of
    # them are tried where room is scarce.
    for length in lengths:
        for depth in depths:
            for trial in range(trials if length == lengths[0] else 1):
                build(length, depth, trial)
    settings = {
        "measure": "passkey",
        "depths": depths,
        "trials": trials,
        "seed": seed,
        "crop": crop,
        "bos": front,
        "scoring": "generate" if generate else "teacher-forced",
    }
    if preset is not None or haystack is not None or distractors:
        settings |= {
            "preset": preset,
            "haystack_sha256": haystack and sha256(haystack),
            "distractors": distractors,
        }
    possible = batch_size == 1 and crop is None and not generate
    if reuse and not possible:
        raise UsageError("reuse takes one prompt at a time, whole and teacher-forced")
    scorer = None
    if reuse or (reuse is None and possible and why_not(model) is None):
        scorer = PrefixScorer(model, chunk=chunk)
    finished = Finished(resume, settings | {"identity": identity})
    done = {(cell["length"], cell["depth"]): cell["outcomes"] for cell in finished.cells}
    # Deepest first: what stands before a needle also stands before every deeper one.
    cells = [(length, depth) for length in lengths for depth in reversed(depths)]
    for length, depth in progress(cells, description, total=len(cells)):
        if (length, depth) not in done:
            prompts = [build(length, depth, trial) for trial in range(trials)]
            outcomes = _score_cell(model, prompts, crop, front, batch_size, generate, chunk, scorer=scorer)
            done[length, depth] = outcomes
            finished.add(length=length, depth=depth, outcomes=outcomes)
    measured = None if preset is None else "tokens"
    rows = [
        {"length": length, "depth": depth}
        | _summary(done[length, depth], measured)
        | {"depth_tokens": fmean(outcome["depth_tokens"] for outcome in done[length, depth])}
        for length in lengths
        for depth in depths
    ]
    pooled = [
        {"length": length} | _summary([o for depth in depths for o in done[length, depth]], measured)
        for length in lengths
    ]
    return PasskeyResult(rows, pooled, settings)


def _score_cell(
    model,
    prompts: list[Prompt],
    crop: int | None,
    bos: int | None,
    batch_size: int,
    generate: bool,
    chunk: int | None,
    *,
    scorer: PrefixScorer | None = None,
) -> list[dict]:
    """One outcome per prompt, in order. Answers of different token counts go in separate batches, and prompts of
    different lengths, which presets give."""

    def forced(rows: list[list[int]], answer: int):
        where = range(len(rows[0]) - answer, len(rows[0]))
        return token_scores(model, rows, where, chunk=chunk) if scorer is None else scorer.scores(rows[0], where)

    outcomes: list[dict] = [{} for _ in prompts]
    groups: dict[tuple[int, int], list[int]] = {}
    for index, prompt in enumerate(prompts):
        answer = len(prompt.ids) - prompt.answer_start
        if crop is not None and crop < answer + (2 if bos is not None else 1):
            raise UsageError(f"a crop of {crop} tokens leaves nothing before an answer of {answer}")
        groups.setdefault((answer, len(prompt.ids)), []).append(index)
    for (answer, _), members in groups.items():
        for start in range(0, len(members), batch_size):
            batch = members[start : start + batch_size]
            rows = [_cropped(prompts[index].ids, crop, bos) for index in batch]
            if generate:
                said = greedy(model, [row[:-answer] for row in rows], answer)
                answers: list[dict[str, Any]] = [
                    {"correct": ids == row[-answer:]} for ids, row in zip(said, rows, strict=True)
                ]
            else:
                scores = forced(rows, answer)
                answers = [
                    {
                        "correct": bool(scores.is_argmax[i].all()),
                        "logprob": float(scores.logprob[i].double().sum()),
                        "rank": int(scores.rank[i].max()),
                    }
                    for i in range(len(rows))
                ]
            for index, outcome in zip(batch, answers, strict=True):
                prompt = prompts[index]
                kept = len(prompt.ids) if crop is None else crop - (bos is not None and crop < len(prompt.ids))
                outcome |= {"depth_tokens": prompt.depth_tokens, "tokens": len(prompt.ids)}
                if prompt.rivals and not generate:
                    context = prompt.ids[: prompt.answer_start]
                    wrong = [
                        forced([_cropped([*context, *rival], crop, bos)], len(rival)).logprob.double().sum()
                        for rival in prompt.rivals
                    ]
                    outcome["margin"] = outcome["logprob"] - float(max(wrong))
                if crop is not None:
                    outcome["visible"] = prompt.depth_tokens >= len(prompt.ids) - kept
                outcomes[index] = outcome
    return outcomes


def _summary(outcomes: list[dict], measured: str | None = None) -> dict:
    correct = sum(outcome["correct"] for outcome in outcomes)
    low, high = wilson(correct, len(outcomes))
    row: dict[str, Any] = {
        "trials": len(outcomes),
        "correct": correct,
        "accuracy": correct / len(outcomes),
        "low": low,
        "high": high,
    }
    if "logprob" in outcomes[0]:
        row["logprob"] = fmean(outcome["logprob"] for outcome in outcomes)
        row["rank"] = median(outcome["rank"] for outcome in outcomes)
    for key in ("visible", "margin", measured):
        if key and key in outcomes[0]:
            row[key] = fmean(outcome[key] for outcome in outcomes)
    return row
