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

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import torch

from ctxext.errors import CtxextError, UsageError
from ctxext.prompts import FILLER, NEEDLE, passkey_prompt

from . import progress
from .head import CHUNK, inference, token_scores
from .stats import wilson
from .text import bos_id

DEPTHS = tuple(i / 10 for i in range(11))
REFERENCE_KEY = "12345"
SENTENCES = [sentence + "." for sentence in FILLER.rstrip(".").split(". ")]
# Tried in this order when whole sentences leave a gap: filler words first, then shorter and attached ones, which
# reach what a tokenizer with few merges can't reach with words.
PADDING = [*(" " + word for word in dict.fromkeys(FILLER.split())), " a", " I", " -", *".!,;?ax"]


@dataclass(frozen=True)
class Prompt:
    """One passkey prompt with its answer, exactly as the model sees it."""

    text: str
    """Prompt, a space, and the key."""
    key: str
    ids: list[int]
    """All tokens, BOS (if the tokenizer puts one) and answer included: `len(ids)` is the length asked for."""
    answer_start: int
    """Index of the answer's first token; `ids[:answer_start]` is what a generator is given."""
    depth_tokens: int
    """Index of the needle's first token, measured."""
    needle_end: int
    """Index after the needle's last token."""


@dataclass(frozen=True)
class PasskeyResult:
    """`rows`: one per cell (length, depth). `lengths`: the same pooled over depths. Both JSON-able.

    A row: {"length", "depth", "trials", "correct", "accuracy", "low", "high" (95 % Wilson), "logprob" (mean over
    trials of the whole key's, in nats), "rank" (median over trials of the worst rank of a key's token; 1 = found),
    "depth_tokens" (mean)}, and with `crop` also "visible": the share of trials whose needle is inside the crop.
    Pooled rows lack "depth" and "depth_tokens".
    """

    rows: list[dict]
    lengths: list[dict]
    settings: dict = field(default_factory=dict)


def make_key(seed: int, length: int, depth: float, trial: int) -> str:
    """Five digits, 10000 to 99999, from a hash: independent of global random state and of other cells."""
    digest = hashlib.sha256(f"{seed}|{length}|{depth:.6f}|{trial}".encode()).digest()
    return str(10000 + int.from_bytes(digest[:8], "big") % 90000)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))


class PromptBuilder:
    """Builds prompts of exactly `length` tokens at `depth` for one tokenizer.

    The plan of a cell (how many sentences, which padding) is searched once, with a reference key, and verified for
    each other key, since keys may take different numbers of tokens.
    """

    def __init__(self, tokenizer, bos: int | None = None):
        self._tokenizer = tokenizer
        self._front = [] if bos is None else [bos]
        self._plans: dict[tuple[int, float], tuple[int, list[str]] | None] = {}
        self._gains: dict[str, int] = {}

    def ids(self, text: str) -> list[int]:
        """Ids of a whole text, BOS in front if the builder was given one."""
        return self._front + list(self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def _text(self, sentences: int, padding: list[str], depth: float, key: str) -> str:
        """The prompt without the answer: the needle after `depth` of the sentences, padding on the longer side."""
        first = round(sentences * depth)
        before, after = (
            " ".join(SENTENCES[i % len(SENTENCES)] for i in range(count)) for count in (first, sentences - first)
        )
        pad = "".join(padding)
        if first * 2 >= sentences:
            before = (before + pad).lstrip(" ")
        else:
            after = (after + pad).lstrip(" ")
        return passkey_prompt(before, after, key)

    def _count(self, sentences: int, padding: list[str], depth: float, key: str) -> int:
        return len(self.ids(f"{self._text(sentences, padding, depth, key)} {key}"))

    def minimum(self, depth: float = 0.5, key: str = REFERENCE_KEY) -> int:
        """Tokens of the shortest prompt, which has no filler at all."""
        return self._count(0, [], depth, key)

    def build(self, length: int, depth: float, key: str) -> Prompt:
        """A prompt whose tokens, answer included, are exactly `length`.

        Raises UsageError if `length` can't hold the prompt, CtxextError if this tokenizer can't hit it.
        """
        if not 0 <= depth <= 1:
            raise UsageError(f"depth must be from 0 (start) to 1 (end), not {depth}")
        prompt = self._text(*self._plan(length, depth, key), depth, key)
        ids = self.ids(f"{prompt} {key}")
        # The answer starts where the tokens of the prompt alone and of prompt + answer part. Usually that is the
        # prompt's end; if the tokenizer merges across it, the merged token belongs to the answer.
        answer_start = _common(self.ids(prompt), ids)
        needle = NEEDLE.format(key=key)
        at = prompt.index(needle)
        depth_tokens, needle_end = self._places(f"{prompt} {key}", at, at + len(needle), ids)
        assert len(ids) == length
        assert depth_tokens < needle_end <= answer_start < length
        return Prompt(f"{prompt} {key}", key, ids, answer_start, depth_tokens, needle_end)

    def _places(self, text: str, start: int, end: int, ids: list[int]) -> tuple[int, int]:
        """Token indices [first, last + 1) of the characters [start, end) of `text`, whose tokens are `ids`."""
        if not getattr(self._tokenizer, "is_fast", False):
            # No offsets: where the text cut there parts from the whole. A token or two off if its end merges.
            return _common(self.ids(text[:start]), ids), _common(self.ids(text[:end]), ids)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        spans = encoded["offset_mapping"]
        front = len(self._front)
        return front + sum(b <= start for _, b in spans), front + sum(a < end for a, _ in spans)

    def _plan(self, length: int, depth: float, key: str) -> tuple[int, list[str]]:
        """(whole sentences, padding) for this key: that of the reference key if it fits, else one of its own.

        So it depends on the arguments alone, whatever was built before.
        """
        least = self.minimum(depth, key)
        if length < least:
            raise UsageError(
                f"a passkey prompt has at least {least} tokens with this tokenizer, so it doesn't fit in {length}",
                hint=f"ask for lengths from {least}",
            )
        shared = (length - least + self.minimum(depth), depth)
        if shared not in self._plans:
            self._plans[shared] = self._search(*shared, REFERENCE_KEY)
        plan = self._plans[shared]
        if plan is None or self._count(*plan, depth, key) != length:
            plan = self._search(length, depth, key)
        if plan is None:
            raise CtxextError(
                f"no filler gives exactly {length} tokens at depth {depth} with this tokenizer",
                hint="a neighbouring length may work",
            )
        return plan

    def _search(self, length: int, depth: float, key: str) -> tuple[int, list[str]] | None:
        sentences = self._sentences(length, depth, key)
        for fewer in range(min(sentences, 3) + 1):
            padding = self._pad(length, sentences - fewer, depth, key)
            if padding is not None:
                return sentences - fewer, padding
        return None

    def _sentences(self, length: int, depth: float, key: str) -> int:
        """The largest number of whole sentences that fits: an estimate, a bracket around it, bisection."""
        rate = max(1.0, (len(self.ids(" ".join([FILLER] * 4))) - len(self.ids(" ".join([FILLER] * 2)))) / 10)

        def fits(sentences: int) -> bool:
            return self._count(sentences, [], depth, key) <= length

        low = high = int((length - self.minimum(depth, key)) / rate)
        step = 1
        while fits(high):
            low, high, step = high, high + step, step * 2
        while low > 0 and not fits(low):  # no filler at all fits: the caller made sure
            low, high, step = max(0, low - step), low, step * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _gain(self, piece: str) -> int:
        """How many tokens `piece` adds to a filler text (an estimate: neighbours may merge)."""
        if piece not in self._gains:
            self._gains[piece] = len(self.ids(FILLER + piece)) - len(self.ids(FILLER))
        return self._gains[piece]

    def _pad(self, length: int, sentences: int, depth: float, key: str) -> list[str] | None:
        """Padding pieces that fill the gap exactly, or None. Each accepted piece is verified on the whole text."""
        padding: list[str] = []
        now = self._count(sentences, padding, depth, key)
        while now < length:
            # The words of the sentence that would come next read best; then whatever fits, large pieces first.
            upcoming = [" " + word for word in SENTENCES[sentences % len(SENTENCES)].split()]
            upcoming = upcoming[len(padding) : len(padding) + 1] if padding == upcoming[: len(padding)] else []
            gap = length - now
            rest = sorted((p for p in PADDING if 0 < self._gain(p) <= gap), key=lambda p: -self._gain(p))
            unlikely = [piece for piece in PADDING if piece not in rest]
            for piece in [*upcoming, *rest, *unlikely]:
                count = self._count(sentences, [*padding, piece], depth, key)
                if now < count <= length:
                    padding.append(piece)
                    now = count
                    break
            else:
                return None
        return padding if now == length else None


def _cropped(ids: list[int], crop: int | None, bos: int | None) -> list[int]:
    """The last `crop` tokens, BOS kept in front if there is one (it takes one place)."""
    if crop is None or len(ids) <= crop:
        return ids
    return ids[-crop:] if bos is None else [bos, *ids[len(ids) - crop + 1 :]]


def _greedy(model, rows: list[list[int]], answer: int) -> list[list[int]]:
    """Greedy continuations of `answer` tokens of equally long prompts; all sampling options are overridden."""
    ids = torch.tensor(rows, device=model.device)
    with inference(model):
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=answer,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            temperature=1.0,
            top_p=1.0,
            top_k=50,
            pad_token_id=0,
        )
    return output[:, ids.shape[1] :].tolist()


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
    bos: int | Callable | None = bos_id,
    chunk: int = CHUNK,
    description: str = "passkey",
) -> PasskeyResult:
    """Measure passkey retrieval on a grid of lengths (tokens, answer included) x depths (0 start, 1 end) x trials.

    `crop=trained_length` is the control: the model sees only the last `crop` tokens of the same prompts, so it can
    find a key only if the needle is that near the end; "visible" in the rows is the share where it is.
    `generate=True` scores by greedy generation and exact ids instead (slower; without "logprob" and "rank").
    `batch_size` prompts of a cell run together: they are equally long, so nothing is padded.
    `bos`: an id, None, or by default what the tokenizer does itself. Lengths past what the model claims are
    allowed: measuring those is the point. Nothing is ever truncated unless `crop` says so.
    """
    lengths, depths = sorted(set(lengths)), sorted(set(depths))
    if trials < 1 or batch_size < 1 or not lengths or not depths:
        raise UsageError("passkey needs at least one length, depth and trial, and a batch size of at least 1")
    front = bos(tokenizer) if callable(bos) else bos
    builder = PromptBuilder(tokenizer, front)
    # Refuse before the first forward, not after an hour of them. Some keys take more tokens than others, so all of
    # them are tried where room is scarce.
    for length in lengths:
        for depth in depths:
            for trial in range(trials if length == lengths[0] else 1):
                builder.build(length, depth, make_key(seed, length, depth, trial))
    cells = [(length, depth) for length in lengths for depth in depths]
    outcomes: dict[tuple[int, float], list[dict]] = {}
    for length, depth in progress(cells, description, total=len(cells)):
        prompts = [builder.build(length, depth, make_key(seed, length, depth, t)) for t in range(trials)]
        outcomes[length, depth] = _score_cell(model, prompts, crop, front, batch_size, generate, chunk)
    rows = [
        {"length": length, "depth": depth}
        | _summary(outcomes[length, depth])
        | {"depth_tokens": fmean(outcome["depth_tokens"] for outcome in outcomes[length, depth])}
        for length, depth in cells
    ]
    pooled = [
        {"length": length} | _summary([outcome for depth in depths for outcome in outcomes[length, depth]])
        for length in lengths
    ]
    settings = {
        "measure": "passkey",
        "depths": depths,
        "trials": trials,
        "seed": seed,
        "crop": crop,
        "bos": front,
        "scoring": "generate" if generate else "teacher-forced",
    }
    return PasskeyResult(rows, pooled, settings)


def _score_cell(
    model, prompts: list[Prompt], crop: int | None, bos: int | None, batch_size: int, generate: bool, chunk: int
) -> list[dict]:
    """One outcome per prompt, in order. Answers of different token counts go in separate batches."""
    outcomes: list[dict] = [{} for _ in prompts]
    groups: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        answer = len(prompt.ids) - prompt.answer_start
        if crop is not None and crop < answer + (2 if bos is not None else 1):
            raise UsageError(f"a crop of {crop} tokens leaves nothing before an answer of {answer}")
        groups.setdefault(answer, []).append(index)
    for answer, members in groups.items():
        for start in range(0, len(members), batch_size):
            batch = members[start : start + batch_size]
            rows = [_cropped(prompts[index].ids, crop, bos) for index in batch]
            if generate:
                said = _greedy(model, [row[:-answer] for row in rows], answer)
                answers = [{"correct": ids == row[-answer:]} for ids, row in zip(said, rows, strict=True)]
            else:
                scores = token_scores(model, rows, range(len(rows[0]) - answer, len(rows[0])), chunk=chunk)
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
                outcome["depth_tokens"] = prompt.depth_tokens
                if crop is not None:
                    outcome["visible"] = prompt.depth_tokens >= len(prompt.ids) - kept
                outcomes[index] = outcome
    return outcomes


def _summary(outcomes: list[dict]) -> dict:
    correct = sum(outcome["correct"] for outcome in outcomes)
    low, high = wilson(correct, len(outcomes))
    row = {
        "trials": len(outcomes),
        "correct": correct,
        "accuracy": correct / len(outcomes),
        "low": low,
        "high": high,
    }
    if "logprob" in outcomes[0]:
        row["logprob"] = fmean(outcome["logprob"] for outcome in outcomes)
        row["rank"] = median(outcome["rank"] for outcome in outcomes)
    if "visible" in outcomes[0]:
        row["visible"] = fmean(outcome["visible"] for outcome in outcomes)
    return row
