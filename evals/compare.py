"""Several variants of one model on the same texts and keys, cell by cell, resumable.

A cell is one variant (unpatched, a method at a factor, or the crop control) under one measurement. Each is a
result document of its own in a folder; a cell whose file is there already isn't run again, so a comparison that
was killed goes on where it stopped, and a method can be added later.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import passkey, perplexity, results
from .models import Subject

CROP = "crop control"


@dataclass(frozen=True)
class Variant:
    """What is done to the model before it is measured. No method: left as it is."""

    label: str
    method: str | None = None
    factor: float = 1.0
    params: dict[str, Any] = field(default_factory=dict)


UNPATCHED = Variant("unpatched")


def _slug(label: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in label)


class Cells:
    """The cells of one comparison, kept as JSON files in `folder`."""

    def __init__(self, subject: Subject, folder: Path, *, on_cell: Callable[[str], None] = lambda _: None):
        self.subject = subject
        self.folder = folder
        self._on_cell = on_cell

    def ppl(
        self,
        variants: Iterable[Variant],
        docs: Any,
        lengths: Sequence[int],
        *,
        bucket: int,
        bos: int | None,
        crop_stride: int | None = None,
    ) -> dict[str, dict]:
        """Perplexity documents by label, the crop control among them under CROP."""
        trained = self.subject.trained_length
        common = {"bucket": bucket, "bos": bos}
        asked = {"lengths": list(lengths), **common, "data": docs.sha256, "documents": docs.names}
        found = {}
        if max(lengths) > trained:
            found[CROP] = self._cell(
                Variant(CROP),
                "ppl",
                asked | {"stride": crop_stride},
                lambda model: perplexity.crop_control(
                    model, docs.ids, lengths, trained, stride=crop_stride, **common
                ),
            )
        for variant in variants:
            found[variant.label] = self._cell(
                variant, "ppl", asked, lambda model: perplexity.prefix_curve(model, docs.ids, lengths, **common)
            )
        return found

    def passkey(
        self,
        variants: Iterable[Variant],
        lengths: Sequence[int],
        *,
        depths: Sequence[float],
        trials: int,
        batch: int,
    ) -> dict[str, dict]:
        """Passkey documents by label, the crop control among them under CROP."""
        trained = self.subject.trained_length
        asked = {"lengths": list(lengths), "depths": list(depths), "trials": trials}
        common = {"depths": depths, "trials": trials, "batch_size": batch}

        def measure(crop: int | None) -> Callable[[Any], Any]:
            return lambda model: passkey.passkey(model, self.subject.tokenizer, lengths, crop=crop, **common)

        found = {}
        if max(lengths) > trained:
            found[CROP] = self._cell(Variant(CROP), "passkey", asked, measure(trained))
        for variant in variants:
            found[variant.label] = self._cell(variant, "passkey", asked, measure(None))
        return found

    def _cell(self, variant: Variant, measurement: str, asked: dict, run: Callable[[Any], Any]) -> dict:
        """The stored document of this cell, or a fresh one."""
        key = {"model": self.subject.name, "variant": variant.__dict__, "asked": asked}
        digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:8]
        path = self.folder / f"{measurement}-{_slug(variant.label)}-{digest}.json"
        if path.is_file():
            return results.read_json(path)
        self._on_cell(f"{measurement}, {variant.label}")
        self.subject.unpatch()
        if variant.method:
            self.subject.patch(variant.method, variant.factor, **variant.params)
        measured = run(self.subject.model)
        more = {k: getattr(measured, k) for k in ("buckets", "lengths") if hasattr(measured, k)}
        if hasattr(measured, "documents"):
            more["per_document"] = measured.documents
        document = results.result_document(
            self.subject.name,
            self.subject.description(),
            measured.settings | {"trained_length": self.subject.trained_length, "asked": asked},
            measured.rows,
            model=self.subject.model,
            variant=variant.label,
            **more,
        )
        results.write_json(path, document)
        self.subject.unpatch()
        return document
