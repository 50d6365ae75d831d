"""Perplexity against length and against position, with the control that tells extension from cropping.

Three measurements:

- `prefix_curve`: one prefill of each document at the longest length gives every shorter length too (a causal
  model's score of token i doesn't depend on what follows) and the perplexity by position bucket. This is the
  figure that YaRN published (its evaluation with `--truncate`), at the price of a single point.
- `crop_control`: the unpatched model reading only its last `trained_length` tokens, on the same target tokens.
  A method that doesn't beat this has extended nothing.
- `sliding_window`: YaRN's `eval/perplexity.py` to the letter, for comparison with published tables.

All sums are float64; logits of a whole sequence never exist (see `head.py`).
Positions count the BOS token where there is one: it is position 0, and position 0 is never scored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from ..errors import CtxextError, UsageError, warn
from ..live.head import CHUNK, token_nll
from ..terminal import progress
from .prefix import chunked_nll, length_dependent
from .sliding import sliding_window
from .stats import bootstrap_interval, paired_difference, perplexity

__all__ = [
    "Curve",
    "bucket_width",
    "check_crop",
    "compare",
    "crop_control",
    "crop_nll",
    "length_dependent",
    "prefix_curve",
    "sliding_window",
]

Documents = Sequence[Sequence[int]]
PLACE = ("length", "start", "end", "tokens")


@dataclass(frozen=True)
class Curve:
    """Perplexity of documents by length and by position.

    `rows`: {"length", "tokens", "nll", "ppl"}, cumulative: all tokens of the first `length` positions.
    `buckets`: {"start", "end", "tokens", "nll", "ppl"}, targets at positions start <= t < end.
    With two documents or more, both also have "low" and "high": a 95 % bootstrap interval of ppl over documents.
    `documents`: one row per document with its float64 NLL sums in nats, `length_nll` and `bucket_nll` in the order
    of `rows` and `buckets`; every document has the same number of tokens in each. JSON-able as they are.
    """

    rows: list[dict]
    buckets: list[dict]
    documents: list[dict]
    settings: dict = field(default_factory=dict)


def _sequences(docs_ids: Documents, length: int, bos: int | None, short: str) -> list[torch.Tensor]:
    """Each document as exactly `length` ids, BOS included. Too short ones are an error or skipped."""
    if short not in ("error", "skip"):
        raise UsageError(f"short must be 'error' or 'skip', not {short!r}")
    need = length if bos is None else length - 1
    front = [] if bos is None else [bos]
    kept, dropped = [], []
    for index, ids in enumerate(docs_ids):
        if len(ids) < need:
            dropped.append(f"{index} ({len(ids)} tokens)")
        else:
            kept.append(torch.tensor([*front, *ids[:need]], dtype=torch.long))
    if dropped:
        listed = ", ".join(dropped[:8]) + (" ..." if dropped[8:] else "")
        message = f"documents shorter than {need} tokens: {listed}"
        if short == "error" or not kept:
            raise CtxextError(message, hint="give longer texts, ask for shorter lengths, or skip short documents")
        warn(f"skipped {message}; {len(kept)} documents are left")
    if not kept:
        raise UsageError("no documents to measure")
    return kept


def _lengths(lengths: Iterable[int]) -> list[int]:
    chosen = sorted(set(lengths))
    if not chosen or chosen[0] < 2:
        raise UsageError(f"lengths must be at least 2 tokens each, not {chosen}")
    return chosen


def _curve(scored: Iterable[torch.Tensor], lengths: list[int], bucket: int, seed: int, settings: dict) -> Curve:
    """Sums of per-document NLL tensors [L-1] (entry i scores position i+1), by length and by bucket."""
    if bucket < 1:
        raise UsageError(f"bucket must be at least 1 token, not {bucket}")
    edges = [*range(0, lengths[-1], bucket), lengths[-1]]
    spans = [(max(start, 1) - 1, end - 1) for start, end in pairwise(edges)]
    documents = []
    for index, nll in enumerate(scored):
        exact = nll.double()
        documents.append(
            {
                "document": index,
                "length_nll": [float(exact[: length - 1].sum()) for length in lengths],
                "bucket_nll": [float(exact[first:last].sum()) for first, last in spans],
            }
        )

    def row(place: dict, key: str, column: int, tokens: int) -> dict:
        sums = [document[key][column] for document in documents]
        nll = sum(sums) / (tokens * len(sums)) if tokens else float("nan")
        answer = {**place, "tokens": tokens * len(sums), "nll": nll, "ppl": perplexity(nll)}
        interval = bootstrap_interval(sums, [tokens] * len(sums), seed=seed) if tokens else None
        if interval:
            answer |= {"low": perplexity(interval[0]), "high": perplexity(interval[1])}
        return answer

    rows = [row({"length": length}, "length_nll", i, length - 1) for i, length in enumerate(lengths)]
    places = [{"start": start, "end": end} for start, end in pairwise(edges)]
    buckets = [row(places[i], "bucket_nll", i, last - first) for i, (first, last) in enumerate(spans)]
    # A bucket [0, 1) would hold the unscored first position alone.
    kept = [i for i, entry in enumerate(buckets) if entry["tokens"]]
    for document in documents:
        document["bucket_nll"] = [document["bucket_nll"][i] for i in kept]
    return Curve(rows, [buckets[i] for i in kept], documents, {**settings, "lengths": lengths, "bucket": bucket})


def bucket_width(bucket: int | None, longest: int) -> int:
    """Tokens per position bucket: what was asked for, or an eighth of the longest length."""
    return bucket or max(1, longest // 8)


def prefix_curve(
    model,
    docs_ids: Documents,
    lengths: Iterable[int],
    *,
    bucket: int | None = None,
    bos: int | None = None,
    short: str = "error",
    seed: int = 0,
    chunk: int | None = CHUNK,
    prefill: int | None = None,
    description: str = "perplexity",
) -> Curve:
    """Perplexity at each of `lengths` and by position bucket, from one prefill per document.

    `docs_ids`: token ids without special tokens, at least as long as the longest length (short="skip" drops
    shorter ones with a warning). `bos`: put in front and counted in the length, so L tokens have L-1 scores
    either way. `bucket`: width in tokens, default an eighth of the longest length. `prefill`: read a document so
    many tokens at a time with a KV cache, for lengths whose activations don't fit; the scores are the same.

    One prefill serves all lengths only if the model is causal. A model under stock `dynamic` or two-table
    `longrope` isn't, so with more than one length it is refused; one length per call is fine.
    """
    chosen = _lengths(lengths)
    reason = length_dependent(model)
    if reason and len(chosen) > 1:
        raise CtxextError(
            f"one prefill can't answer for several lengths with this model: {reason}",
            hint="measure one length per call, or patch the model with a causal schedule of ctxext",
        )
    sequences = _sequences(docs_ids, chosen[-1], bos, short)

    def scored() -> Iterator[torch.Tensor]:
        for sequence in progress(sequences, description, total=len(sequences)):
            if reason:
                # Stock `dynamic` keeps the widest base it has seen until a short call resets it.
                token_nll(model, sequence[:2], chunk=chunk)
            if prefill is None:
                yield token_nll(model, sequence, chunk=chunk)
            else:
                yield chunked_nll(model, sequence, prefill, chunk=chunk)

    settings = {"measure": "prefix", "bos": bos, "documents": len(sequences), "seed": seed}
    return _curve(scored(), chosen, bucket_width(bucket, chosen[-1]), seed, settings)


def crop_control(
    model,
    docs_ids: Documents,
    lengths: Iterable[int],
    trained_length: int,
    *,
    stride: int | None = None,
    bucket: int | None = None,
    bos: int | None = None,
    short: str = "error",
    seed: int = 0,
    batch_size: int = 1,
    chunk: int | None = CHUNK,
    description: str = "crop control",
) -> Curve:
    """What the *unpatched* model reaches by reading only its last `trained_length` tokens: the yardstick.

    Same target tokens, lengths and buckets as `prefix_curve`, so rows can be set side by side. Targets below
    `trained_length` have their plain prefix. Past it, windows [e - trained_length, e) score their last `stride`
    tokens, so a target sees between `trained_length - stride` and `trained_length - 1` tokens before it; stride=1
    gives every target the full context at the highest price. Default: trained_length // 16.
    With `bos` every window starts with it (it takes one place), as models expect.
    Costs one forward of `trained_length` tokens per `stride` tokens past it.
    """
    chosen = _lengths(lengths)
    stride = max(1, trained_length // 16) if stride is None else stride
    check_crop(trained_length, stride, bos)
    sequences = _sequences(docs_ids, chosen[-1], bos, short)
    shared = {"stride": stride, "bos": bos, "batch_size": batch_size, "chunk": chunk}
    scored = (
        crop_nll(model, sequence, trained_length, **shared)
        for sequence in progress(sequences, description, total=len(sequences))
    )
    settings = {"measure": "crop", "trained_length": trained_length, "stride": stride, "bos": bos}
    settings |= {"documents": len(sequences), "seed": seed}
    return _curve(scored, chosen, bucket_width(bucket, chosen[-1]), seed, settings)


def check_crop(trained_length: int, stride: int, bos: int | None) -> int:
    """Document tokens per window; UsageError if windows of `trained_length` can't move by `stride`."""
    if trained_length < 2:
        raise UsageError(f"trained_length must be at least 2 tokens, not {trained_length}")
    room = trained_length if bos is None else trained_length - 1
    if not 1 <= stride < room:
        raise UsageError(f"stride must be from 1 to {room - 1}, so that a window of {trained_length} has context")
    return room


def crop_nll(
    model,
    sequence: torch.Tensor,
    trained_length: int,
    *,
    stride: int,
    bos: int | None = None,
    batch_size: int = 1,
    chunk: int | None = CHUNK,
) -> torch.Tensor:
    """NLL in nats, float32 [T-1], of each token of `sequence` [T] (BOS included) given a window before it.

    Windows of `trained_length` tokens score their last `stride`; see `crop_control`.
    """
    room, length = check_crop(trained_length, stride, bos), len(sequence)
    ends = [min(end, length) for end in range(trained_length + stride, length + stride, stride)]
    nll = torch.empty(length - 1)
    head = sequence[: min(trained_length, length)]
    nll[: len(head) - 1] = token_nll(model, head, chunk=chunk)
    for first in range(0, len(ends), batch_size):
        group = ends[first : first + batch_size]
        rows = torch.stack([sequence[end - room : end] for end in group])
        if bos is not None:
            rows = torch.cat([torch.full((len(group), 1), bos), rows], dim=1)
        scores = token_nll(model, rows, last=stride, chunk=chunk)
        for end, score in zip(group, scores, strict=True):
            # The last window may reach back over targets that already have their score.
            fresh = (end - trained_length - 1) % stride + 1
            nll[end - 1 - fresh : end - 1] = score[-fresh:]
    return nll


def compare(curve: Curve, baseline: Curve, *, seed: int = 0) -> dict[str, list[dict]]:
    """Paired NLL differences (nats per token, negative: `curve` is better) by length and by bucket.

    Both must come from the same documents, lengths and bucket width. With two documents or more the rows have a
    95 % bootstrap interval over documents.
    """
    answer = {}
    for name, key, own, other in (
        ("lengths", "length_nll", curve.rows, baseline.rows),
        ("buckets", "bucket_nll", curve.buckets, baseline.buckets),
    ):
        places, others = ([{k: row[k] for k in row if k in PLACE} for row in rows] for rows in (own, other))
        if places != others or len(curve.documents) != len(baseline.documents):
            raise UsageError(f"the {name} of the two curves differ; measure both on the same documents")
        answer[name] = [
            place
            | paired_difference(
                [document[key][column] for document in curve.documents],
                [document[key][column] for document in baseline.documents],
                [place["tokens"] // len(curve.documents)] * len(curve.documents),
                seed=seed,
            )
            for column, place in enumerate(places)
        ]
    return answer
