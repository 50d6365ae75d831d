"""Key-token perplexity and context gain: does a model *use* its long context?

Ordinary perplexity averages over tokens that need nothing from far away, and hardly tells long-context models
apart. LongPPL (Fang et al., "What is Wrong with Perplexity for Long-context Language Modeling?", ICLR 2025)
averages over *key tokens* alone: those that a judge model predicts much better with the whole context than with
a short one (gain above 2 nats) and then predicts well (loss below 2 nats).

The judge may be another model, with another tokenizer (tokens are matched by characters), or the model itself.
Context gain, NLL(short) - NLL(full), needs no key tokens: it is 0 where the context beyond the short one is
useless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from ..errors import CtxextError, UsageError
from ..live.head import CHUNK, token_nll
from ..terminal import progress
from ..text import Text
from .stats import bootstrap_interval, perplexity

SHORT = 4096
"""Upstream's short context (`trunc_len`), in tokens."""
GAIN, LOSS = 2.0, 2.0
"""Upstream's alpha and -beta, in nats: a key token gains more than GAIN and is then below LOSS."""


@dataclass(frozen=True)
class LongPPL:
    """`longppl`: exp of the mean NLL of all key tokens, so documents weigh by their key tokens; `low`, `high`: a
    95 % bootstrap interval over documents (None below two). `key_tokens` of `tokens`. `ppl`: of all tokens.

    `gains`: context gain by position bucket, {"start", "end", "tokens", "short", "full", "gain"} in nats per
    token. `documents`: {"name", "tokens", "key_tokens", "key_nll", "nll"} with sums in nats.
    """

    longppl: float | None
    low: float | None
    high: float | None
    key_tokens: int
    tokens: int
    ppl: float
    gains: list[dict]
    documents: list[dict]
    settings: dict = field(default_factory=dict)


def key_mask(full: torch.Tensor, short: torch.Tensor, gain: float = GAIN, loss: float = LOSS) -> torch.Tensor:
    """Which tokens are key, from the judge's NLL with the full and with a short context: bool, same shape."""
    return (short - full > gain) & (full < loss)


def _encode(tokenizer, text: str, length: int | None, bos: int | None) -> tuple[list[int], list[tuple[int, int]]]:
    """(ids, character spans) of at most `length` tokens, BOS included with an empty span."""
    if not getattr(tokenizer, "is_fast", False):
        raise CtxextError(
            "key tokens are matched by characters, which needs a fast tokenizer",
            hint="leave out the judge, or convert the tokenizer",
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    front = [] if bos is None else [bos]
    ids = [*front, *encoded["input_ids"]][:length]
    spans = [*([(0, 0)] * len(front)), *encoded["offset_mapping"]][:length]
    return ids, spans


def matching(spans: Sequence[tuple[int, int]], keys: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Which of `spans` (ascending character spans of tokens) overlap one of `keys` (ascending): bool
    [len(spans)]."""
    hit = torch.zeros(len(spans), dtype=torch.bool)
    at = 0
    for index, (start, end) in enumerate(spans):
        while at < len(keys) and keys[at][1] <= start:
            at += 1
        hit[index] = at < len(keys) and keys[at][0] < end
    return hit


def contrast(
    model, ids: Sequence[int], short: int, stride: int, *, bos: int | None = None, chunk: int | None = CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """NLL [T-1] of each token with everything before it, and with a short context.

    Short as upstream's `find_key_token` has it: windows of `short` + `stride` tokens move by `stride` and score
    what lies beyond their first `short`, so a token sees from `short` to `short` + `stride` - 1 tokens before it.
    With `bos` every window starts with it (it takes one place), where upstream has it in the first alone.
    """
    sequence = torch.tensor(ids, dtype=torch.long)
    full = token_nll(model, sequence, chunk=chunk)
    little = full.clone()  # the first window begins where the text does
    for start in range(stride, len(sequence) - short, stride):
        window = sequence[start : start + short + stride].clone()
        if bos is not None:
            window[0] = bos
        first = start + short - 1
        scored = len(window) - short
        little[first : first + scored] = token_nll(model, window, last=scored, chunk=chunk)
    return full, little


def longppl(
    model,
    tokenizer,
    texts: Sequence[Text],
    *,
    length: int | None = None,
    judge=None,
    judge_tokenizer=None,
    short: int = SHORT,
    stride: int | None = None,
    gain: float = GAIN,
    loss: float = LOSS,
    bucket: int | None = None,
    bos: int | None = None,
    judge_bos: int | None = None,
    seed: int = 0,
    chunk: int | None = CHUNK,
    description: str = "longppl",
) -> LongPPL:
    """LongPPL and context gain of `model` on whole texts, or on their first `length` tokens.

    `judge`: the model that says which tokens are key, with its own tokenizer; None means the model itself (then a
    model that uses no context has no key tokens, so read `key_tokens` too). `short`, `stride`: tokens of the short
    context at least, and how far its windows move (default a quarter of `short`, as upstream's 1,024 of 4,096);
    see `contrast`. Texts that fit into one window can't tell anything and are an error.
    """
    stride = max(1, short // 4) if stride is None else stride
    if stride < 1 or short < 1:
        raise UsageError(f"short and stride must be at least 1 token, not {short} and {stride}")
    if (judge is None) != (judge_tokenizer is None):
        raise UsageError("a judge comes with its tokenizer")
    if not texts:
        raise UsageError("no texts to measure on")
    documents, fulls, shorts = [], [], []
    for text in progress(texts, description, total=len(texts)):
        if judge is None and not getattr(tokenizer, "is_fast", False):
            front = [] if bos is None else [bos]
            ids = [*front, *tokenizer(text.text, add_special_tokens=False, verbose=False).input_ids][:length]
            spans: list[tuple[int, int]] = []
        else:
            ids, spans = _encode(tokenizer, text.text, length, bos)
        if len(ids) <= short + stride:
            raise CtxextError(
                f"{text.name} has {len(ids)} tokens, no more than the short context of {short}, "
                f"read in windows of {short + stride}",
                hint="give longer texts, or a smaller --short",
            )
        full, little = contrast(model, ids, short, stride, bos=bos, chunk=chunk)
        if judge is None:
            keys = key_mask(full, little, gain, loss)
        else:
            last = spans[-1][1]
            theirs, places = _encode(judge_tokenizer, text.text[:last], None, judge_bos)
            known = key_mask(*contrast(judge, theirs, short, stride, bos=judge_bos, chunk=chunk), gain, loss)
            chosen = [place for place, key in zip(places[1:], known.tolist(), strict=True) if key]
            keys = matching(spans, chosen)[1:]
        exact = full.double()
        documents.append(
            {
                "name": text.name,
                "tokens": len(full),
                "key_tokens": int(keys.sum()),
                "key_nll": float(exact[keys].sum()),
                "nll": float(exact.sum()),
            }
        )
        fulls.append(exact)
        shorts.append(little.double())
    keyed = [d for d in documents if d["key_tokens"]]
    count = sum(d["key_tokens"] for d in keyed)
    nll, tokens = sum(d["key_nll"] for d in keyed), sum(d["tokens"] for d in documents)
    interval = bootstrap_interval([d["key_nll"] for d in keyed], [d["key_tokens"] for d in keyed], seed=seed)
    low, high = (perplexity(end) for end in interval) if interval else (None, None)
    settings = {
        "measure": "longppl",
        "short": short,
        "stride": stride,
        "gain": gain,
        "loss": loss,
        "length": length,
    }
    return LongPPL(
        perplexity(nll / count) if count else None,
        low,
        high,
        count,
        tokens,
        perplexity(sum(d["nll"] for d in documents) / tokens),
        _gains(fulls, shorts, bucket),
        documents,
        settings | {"judge": "itself" if judge is None else type(judge).__name__, "bos": bos, "seed": seed},
    )


def _gains(fulls: list[torch.Tensor], shorts: list[torch.Tensor], bucket: int | None) -> list[dict]:
    """Context gain by position; entry i of a tensor scores position i + 1."""
    longest = max(len(full) for full in fulls) + 1
    width = bucket or max(1, longest // 8)
    rows = []
    for start, end in pairwise([*range(0, longest, width), longest]):
        part = slice(max(start, 1) - 1, end - 1)
        full, short = (torch.cat([nll[part] for nll in nlls]) for nlls in (fulls, shorts))
        if len(full):
            means = {"short": float(short.mean()), "full": float(full.mean())}
            rows.append(
                {"start": start, "end": end, "tokens": len(full), **means, "gain": means["short"] - means["full"]}
            )
    return rows
