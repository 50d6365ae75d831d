"""The texts that candidates are compared on: whole documents of the target length, or needles in them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import CtxextError
from ..needles.token_ids import hide_key
from ..text import SUFFIXES, bos_id, load_texts


@dataclass(frozen=True)
class Document:
    """Token ids, and the first position whose loss counts: 1 for plain text, the answer's for a needle."""

    ids: tuple[int, ...]
    scored_from: int = 1


def read_texts(paths: Sequence[str]) -> Iterable[str]:
    """The texts of files and folders, as `ctxext eval` reads them, or of what else `ctxext train` takes."""
    from datasets import disable_progress_bars

    from ..training.data import read_source
    from ..training.recipe import DataSpec, Source

    disable_progress_bars()
    for path in paths:
        given = Path(path).expanduser()
        files = given.rglob("*") if given.is_dir() else [given]
        if path.startswith("hf:"):
            yield from (text.text for text in load_texts(path))
            continue
        if any(file.suffix in SUFFIXES and file.is_file() for file in files):
            yield from (text.text for text in load_texts(given))
            continue
        spec = DataSpec(sources=[Source(path=path)], length=16)
        for row in read_source(spec.sources[0], spec):
            yield row["text"]


def cut(texts: Iterable[str], tokenizer: Any, length: int, count: int) -> list[list[int]]:
    """`count` stretches of exactly `length` tokens: the starts of texts, then second stretches of long ones, ...

    The tokenizer's own beginning (BOS, if it adds one) is in front of each and counts. Nothing is shortened to
    fit. A text that comes twice is used once, or what is held out might be what was searched on. Raises
    CtxextError if the texts don't hold as much.
    """
    start = _beginning(tokenizer)
    size, encoded, longest = length - len(start), [], 0
    for text in texts:
        ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        if text.strip() and not ids:
            raise CtxextError("the model's tokenizer makes no tokens of text", hint="does its folder lack files?")
        longest = max(longest, len(ids))
        if len(ids) >= size and ids not in encoded:
            encoded.append(ids)
        if len(encoded) >= count:
            break
    rounds = max((len(ids) // size for ids in encoded), default=0)
    stretches = (
        [*start, *ids[at : at + size]]
        for at in range(0, rounds * size, size)
        for ids in encoded
        if len(ids) >= at + size
    )
    found = list(islice(stretches, count))
    if len(found) < count:
        raise CtxextError(
            f"the data holds {len(found)} documents of {length} tokens, {count} are needed (to search on and to "
            f"check with); its longest text has {longest} tokens",
            hint="give more or longer texts with --data (one that comes twice counts once), or lower --documents "
            "and --held-out",
        )
    return found


def tails(stretches: Iterable[Sequence[int]], tokenizer: Any, length: int) -> list[list[int]]:
    """What follows the first `length` tokens of each stretch, up to as many, behind the tokenizer's beginning.

    Empty if that is less than half of `length`.
    """
    start = _beginning(tokenizer)
    found = [[*start, *ids[length : 2 * length - len(start)]] for ids in stretches]
    return found if found and 2 * len(found[0]) >= length else []


def _beginning(tokenizer: Any) -> list[int]:
    bos = bos_id(tokenizer)
    return [] if bos is None else [bos]


def plain(stretches: Iterable[Sequence[int]]) -> list[Document]:
    """Documents whose every token is scored: the perplexity of the paper."""
    return [Document(tuple(ids)) for ids in stretches]


def needles(stretches: Sequence[Sequence[int]], tokenizer: Any, seed: int) -> list[Document]:
    """The same texts with a key hidden in each, and the question for it at the end; only the key is scored.

    LongRoPE2 (arXiv:2502.20082) calls the loss of these tokens needle-driven perplexity: most tokens of a text can
    be told from what stands just before them, these can't. Depths are spread evenly. The length stays the same.
    """
    found = []
    for number, ids in enumerate(stretches):
        rng = random.Random(f"{seed}/needle/{number}")
        key = str(rng.randint(10000, 99999))
        whole, answer = hide_key(ids, tokenizer, key, (number + rng.random()) / len(stretches))
        found.append(Document(tuple(whole), answer))
    return found


def digest(documents: Iterable[Document]) -> str:
    """A hash of all ids, so that a log knows its documents."""
    found = hashlib.sha256()
    for document in documents:
        found.update(repr((document.ids, document.scored_from)).encode())
    return found.hexdigest()[:16]
