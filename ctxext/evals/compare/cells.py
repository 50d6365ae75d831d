"""Several variants of one model on the same texts and keys, cell by cell, resumable.

A cell is one variant (unpatched, a method at a factor, or the crop control) under one measurement. Each is a
result document of its own in a folder; a cell whose file is there already isn't run again, so a comparison that
was killed goes on where it stopped, and a method can be added later. Several processes may share a folder: each
takes cells that no other is working on, by a lock that ends with its process.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import files, terminal
from .. import passkey, perplexity, results
from ..models import Subject
from ..ruler import run as ruler

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


@contextmanager
def claim(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold the lock beside `path`; False (without waiting) if another process has it. A killed process frees
    it."""
    try:
        import fcntl
    except ImportError:  # no such locks on Windows: one process then
        yield True
        return
    lock = path.with_name(f".{path.name}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


@dataclass(frozen=True)
class _Cell:
    variant: Variant
    measurement: str
    path: Path
    asked: dict
    run: Callable[[Any], Any]


class Cells:
    """The cells of one comparison, kept as JSON files in `folder`. The model must be as it was loaded: how it is
    then is part of what tells a cell from another's."""

    def __init__(
        self,
        subject: Subject,
        folder: Path,
        *,
        on_cell: Callable[[str], None] = lambda _: None,
    ):
        self.subject = subject
        self.folder = folder
        self._identity = subject.identity()
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
        cells = []
        if max(lengths) > trained:
            cells.append(
                self._cell(
                    Variant(CROP),
                    "ppl",
                    asked | {"stride": crop_stride},
                    lambda model: perplexity.crop_control(
                        model, docs.ids, lengths, trained, stride=crop_stride, **common
                    ),
                )
            )
        for variant in variants:
            cells.append(
                self._cell(
                    variant,
                    "ppl",
                    asked,
                    lambda model: perplexity.prefix_curve(model, docs.ids, lengths, **common),
                )
            )
        return self._measured(cells)

    def passkey(
        self,
        variants: Iterable[Variant],
        lengths: Sequence[int],
        *,
        depths: Sequence[float],
        trials: int,
        batch: int,
        distractors: int = 0,
    ) -> dict[str, dict]:
        """Passkey documents by label, the crop control among them under CROP."""
        asked = {"lengths": list(lengths), "depths": list(depths), "trials": trials}
        asked |= {"distractors": distractors} if distractors else {}
        common = {"depths": depths, "trials": trials, "batch_size": batch, "distractors": distractors}

        def measure(crop: int | None) -> Callable[[Any], Any]:
            return lambda model: passkey.passkey(model, self.subject.tokenizer, lengths, crop=crop, **common)

        return self._measured(self._with_control(variants, "passkey", asked, lengths, measure))

    def ruler(
        self,
        variants: Iterable[Variant],
        lengths: Sequence[int],
        *,
        tasks: Sequence[str],
        samples: int,
        example: bool,
    ) -> dict[str, dict]:
        """Documents of RULER-type tasks by label, the crop control among them under CROP."""
        common = {"tasks": list(tasks), "samples": samples, "example": example}

        def measure(crop: int | None) -> Callable[[Any], Any]:
            return lambda model: ruler.ruler(model, self.subject.tokenizer, lengths, crop=crop, **common)

        asked = {"lengths": list(lengths), **common}
        return self._measured(self._with_control(variants, "ruler", asked, lengths, measure))

    def _with_control(self, variants, measurement, asked, lengths, measure) -> list[_Cell]:
        trained = self.subject.trained_length
        cells = []
        if max(lengths) > trained:
            cells.append(self._cell(Variant(CROP), measurement, asked, measure(trained)))
        return cells + [self._cell(variant, measurement, asked, measure(None)) for variant in variants]

    def _cell(self, variant: Variant, measurement: str, asked: dict, run: Callable[[Any], Any]) -> _Cell:
        key = {"model": self._identity, "variant": variant.__dict__, "asked": asked}
        digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:8]
        path = self.folder / f"{measurement}-{_slug(variant.label)}-{digest}.json"
        return _Cell(variant, measurement, path, asked, run)

    def _measured(self, cells: list[_Cell]) -> dict[str, dict]:
        """The stored or fresh document of each cell: first those that nobody is working on, then what is left."""
        start = terminal.process_number() * len(cells) // terminal.processes()
        for wait in (False, True):
            for cell in [*cells[start:], *cells[:start]]:
                if cell.path.is_file():
                    continue
                with claim(cell.path, wait=wait) as mine:
                    if mine and not cell.path.is_file():
                        self._run(cell)
        for cell in cells:
            cell.path.with_name(f".{cell.path.name}.lock").unlink(missing_ok=True)
        return {cell.variant.label: files.read_json(cell.path) for cell in cells}

    def _run(self, cell: _Cell) -> None:
        self._on_cell(f"{cell.measurement}, {cell.variant.label}")
        self.subject.unpatch()
        if cell.variant.method:
            self.subject.patch(cell.variant.method, cell.variant.factor, **cell.variant.params)
        measured = cell.run(self.subject.model)
        more = {k: getattr(measured, k) for k in ("buckets", "lengths") if hasattr(measured, k)}
        if hasattr(measured, "documents"):
            more["per_document"] = measured.documents
        document = results.result_document(
            self.subject.name,
            self.subject.description(),
            measured.settings | {"trained_length": self.subject.trained_length, "asked": cell.asked},
            measured.rows,
            model=self.subject.model,
            variant=cell.variant.label,
            **more,
        )
        files.write_json(cell.path, document)
        self.subject.unpatch()
