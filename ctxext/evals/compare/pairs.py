"""The paired difference of two stored result documents of `ctxext eval ppl`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...errors import UsageError
from ...files import read_json
from ..perplexity import Curve, bucket_width, compare


def read_baseline(path: str | Path) -> dict:
    """A stored document to set another against; UsageError if it has no sums by document."""
    baseline = read_json(path)
    if not {"per_document", "buckets", "results", "settings"} <= set(baseline):
        raise UsageError("a paired difference needs two documents of `ctxext eval ppl`, without --stride")
    return baseline


def check(
    baseline: dict, *, data_sha256: str, documents: Sequence[str], lengths: Sequence[int], bucket: int | None
) -> None:
    """Raise UsageError if a measurement yet to be made couldn't be set against `baseline`: other texts, lengths
    (tokens) or buckets (their width in tokens, None for the default)."""
    settings = baseline["settings"]
    for name, mine, theirs in (
        ("lengths", list(lengths), settings.get("lengths")),
        ("buckets", bucket_width(bucket, max(lengths)), settings.get("bucket")),
    ):
        if mine != theirs:
            raise UsageError(
                f"the {name} of the two differ: {mine}, against {theirs}", hint="measure both at the same"
            )
    if (settings.get("data_sha256"), baseline.get("documents")) != (data_sha256, list(documents)):
        raise UsageError(
            "the two were measured on different texts", hint="give both the same --data and --documents"
        )


def paired(document: dict, baseline: dict, *, seed: int = 0) -> dict:
    """`perplexity.compare` of two stored documents: {"model", "lengths", "buckets"}.

    Raises UsageError if they weren't measured on the same documents at the same lengths and buckets.
    """
    curves = [Curve(d["results"], d["buckets"], d["per_document"], d["settings"]) for d in (document, baseline)]
    label = (baseline.get("schedule") or {}).get("method", "unpatched")
    return {"model": f"{baseline['model']} {label}", **compare(*curves, seed=seed)}
