"""The tests of this study on one model, each by length: perplexity, passkeys, copying."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ctxext.evals.models import Subject

BUCKET = 64
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
TRIALS = 8
POOL = 64
"""Distinct tokens of a copied sequence."""


@dataclass
class LengthTests:
    """What every model and every rescue is put through.

    documents: token ids of held-out texts, as long as the longest length. seed: draws keys and sequences to copy.
    """

    documents: Sequence[Sequence[int]]
    trained: int
    seed: int

    def all(self, subject: Subject, lengths: Sequence[int]) -> dict[str, Any]:
        """{"ppl", "passkey", "copy"}: a row per length."""
        from ctxext.evals import perplexity

        curve = perplexity.prefix_curve(subject.model, self.documents, lengths, bucket=BUCKET)
        ends = {b["end"]: b for b in curve.buckets}
        vocabulary = len(subject.tokenizer)
        return {
            "ppl": [{"length": n, "ppl": ends[n]["ppl"], "nll": ends[n]["nll"]} for n in lengths],
            "passkey": self._passkeys(subject, lengths),
            "copy": [copying(subject.model, n, vocabulary=vocabulary, rows=16, seed=self.seed) for n in lengths],
        }

    def cropped(self, subject: Subject, lengths: Sequence[int]) -> dict[str, Any]:
        """The same for the crop control; what it would copy from is cut away, so it copies nothing."""
        from ctxext.evals import perplexity

        crop = perplexity.crop_control(
            subject.model, self.documents, lengths, self.trained, bucket=BUCKET, stride=16
        )
        ends = {b["end"]: b["ppl"] for b in crop.buckets}
        return {
            "ppl": [{"length": n, "ppl": ends[n]} for n in lengths],
            "passkey": self._passkeys(subject, lengths, self.trained),
        }

    def _passkeys(self, subject: Subject, lengths: Sequence[int], crop: int | None = None) -> list[dict[str, Any]]:
        from ctxext.evals import passkey

        # A passkey prompt with its answer doesn't fit into half of the trained length.
        found = passkey.passkey(
            subject.model,
            subject.tokenizer,
            [n for n in lengths if n >= self.trained],
            depths=DEPTHS,
            trials=TRIALS,
            seed=self.seed,
            batch_size=TRIALS,
            crop=crop,
        )
        return [{k: row[k] for k in ("length", "trials", "correct", "accuracy")} for row in found.lengths]


def copying(model: Any, length: int, *, vocabulary: int, rows: int, seed: int = 0) -> dict[str, Any]:
    """Accuracy of copying: of the second half, without its first 4 tokens, of `rows` sequences of `length`
    tokens, which is the first half again."""
    import torch

    from ctxext.live.head import token_scores

    rng = random.Random(f"copy/{seed}/{length}")
    half, batch = length // 2, []
    for _ in range(rows):
        pool = rng.sample(range(vocabulary), POOL)
        unit = rng.choices(pool, k=half)
        batch.append(unit + unit)
    # The first tokens of the second half can't be known to be a repetition yet.
    skipped = 4
    scores = token_scores(model, torch.tensor(batch), range(half + skipped, 2 * half))
    right = scores.is_argmax.float()
    return {"length": length, "tokens": right.numel(), "accuracy": right.mean().item()}
