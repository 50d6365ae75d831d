"""Training text as blocks of token ids, by the datasets library: read, tokenise, cut or pack, mix, cache, stream.

A block is a row {"input_ids", "starts", "filled"}: ids of one fixed size, where documents start in it, and how
many ids are text (the rest of a packed block is padding). `sequences` turns blocks into what the Trainer reads.
"""

from __future__ import annotations

import bisect
import fnmatch
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import CtxextError, UsageError
from ..folders.source import TINY
from ..text import BIBLES, bos_id, check_utf8, read, read_bible
from .passkeys import passkey_blocks
from .recipe import DataSpec, Source

_LOOKED_AT = 1 << 20
"""Bytes of a streamed file that are looked at before it is read."""
BUILDERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def load_blocks(spec: DataSpec, tokenizer: Any, size: int, seed: int = 0) -> Any:
    """Blocks of `size` tokens of all sources, mixed by weight: a Dataset, or an IterableDataset if streaming.

    Raises CtxextError if a source can't be read or gives no block, UsageError for a path of no known kind.
    """
    from datasets import interleave_datasets

    cut = functools.partial(_rows, encoder(tokenizer), size, spec.layout, tokenizer.eos_token_id or 0)
    parts = []
    for source in spec.sources:
        if source.path == "passkey":
            made = passkey_blocks(tokenizer, size, seed)
            parts.append(made.to_iterable_dataset() if spec.streaming else made)
            continue
        documents = read_source(source, spec)
        parts.append(_blocks(documents, cut, _identity(tokenizer, size, spec.layout), spec.streaming))
        if not spec.streaming and not len(parts[-1]):
            raise CtxextError(
                f"{source.path} has no document of {size} tokens, so it gives no block",
                hint="make data.length shorter, take longer documents, or set data.layout: packed",
            )
    if len(parts) > 1:
        total = sum(s.weight for s in spec.sources)
        shares = [s.weight / total for s in spec.sources]
        # all_exhausted: the end of the smallest source doesn't end the epoch, so no text is left out.
        mixed = interleave_datasets(parts, probabilities=shares, seed=seed, stopping_strategy="all_exhausted")
    else:
        mixed = parts[0]
    return mixed.shuffle(seed=seed, buffer_size=spec.shuffle_buffer) if spec.streaming else mixed


def read_source(source: Source, spec: DataSpec) -> Any:
    """The documents of one source, a (streamed) dataset with the one column "text"."""
    from datasets import Dataset, IterableDataset, load_dataset
    from datasets.exceptions import DatasetGenerationError

    path = TINY.parent / "text" if source.path == "tiny" else Path(source.path).expanduser()
    options: dict[str, Any] = {"streaming": spec.streaming, "cache_dir": spec.cache}
    column = source.column
    try:
        if path.suffix in BIBLES and path.is_file():
            books = read_bible(path)
            kept = [books[name] for name in _kept(list(books), source.leave_out, f"no book of {path}")]
            documents = Dataset.from_dict({"text": kept})
            return documents.to_iterable_dataset() if spec.streaming else documents
        if path.exists():
            files, builder = _files(path, source.leave_out)
            names = [str(file) for file in files]
            if builder == "text":
                # When they were written is part of what the cache of `datasets` knows them by.
                stamps = [file.stat().st_mtime_ns for file in files]
                given = {"files": names, "stamps": stamps}
                if spec.streaming:
                    return IterableDataset.from_generator(_texts, gen_kwargs=given)
                return Dataset.from_generator(_texts, gen_kwargs=given, cache_dir=spec.cache)  # pyright: ignore[reportArgumentType]
            if builder == "json":
                for file in files:
                    check_utf8(file, _LOOKED_AT if spec.streaming else -1)
            loaded = load_dataset(builder, data_files=names, split="train", **options)
        else:
            loaded = load_dataset(source.path, source.name, split=source.split, **options)
    except CtxextError:
        raise
    except Exception as error:  # datasets raises errors of many libraries; each means the source can't be read
        if isinstance(error, DatasetGenerationError) and isinstance(error.__cause__, CtxextError):
            raise error.__cause__ from None
        raise CtxextError(
            f"can't read the data source {source.path}: {str(error).splitlines()[0][:200]}",
            hint="give a .txt, .jsonl or .parquet file, a folder of them, or a dataset on the hub",
        ) from error
    names = loaded.column_names
    if names is not None and column not in names:
        raise UsageError(f"{source.path} has no column {column!r}", hint=f"it has: {', '.join(names)}")
    if names is None:  # a stream tells its columns only when read
        return loaded.map(lambda row: {"text": row[column]})
    loaded = loaded.select_columns([column])
    return loaded if column == "text" else loaded.rename_column(column, "text")


def _texts(files: list[str], stamps: list[int]) -> Iterator[dict[str, str]]:
    yield from ({"text": read(Path(file))} for file in files)


def _files(path: Path, leave_out: list[str]) -> tuple[list[Path], str]:
    found = sorted(p for p in path.rglob("*") if p.suffix in BUILDERS) if path.is_dir() else [path]
    kept = _kept([f.name for f in found], leave_out, f"no file of {path}")
    files = [f for f in found if f.name in kept]
    kinds = {BUILDERS.get(f.suffix, "") for f in files}
    if len(kinds) != 1 or "" in kinds:
        what = "files of several kinds" if len(kinds) > 1 else "no .txt, .jsonl or .parquet file"
        raise UsageError(f"{path}: {what}", hint="give each kind as a source of its own")
    return files, kinds.pop()


def _kept(names: Iterable[str], leave_out: list[str], none: str) -> list[str]:
    """The names that no pattern matches; UsageError for a pattern that matches `none`."""
    for pattern in leave_out:
        if not any(fnmatch.fnmatch(name, pattern) for name in names):
            raise UsageError(f"leave_out: {none} matches {pattern!r}")
    return [name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in leave_out)]


def encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Text to the ids of one document: the tokenizer's own beginning (BOS, if it adds one), text, end of text."""
    bos = bos_id(tokenizer)
    start = [] if bos is None else [bos]
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []

    def encode(text: str) -> list[int]:
        # verbose: a whole book is longer than the model's context, and that is no mistake here
        return [*start, *tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], *end]

    return encode


def _rows(
    encode: Callable[[str], list[int]], size: int, layout: str, padding: int, batch: dict[str, list[str]]
) -> dict[str, list]:
    """The blocks of a batch of documents, as columns."""
    documents = [encode(text) for text in batch["text"]]
    if layout == "packed":
        return pack([d[i : i + size] for d in documents for i in range(0, len(d), size)], size, padding)
    ids = [d[i : i + size] for d in documents for i in range(0, len(d) - size + 1, size)]
    return {"input_ids": ids, "starts": [[0]] * len(ids), "filled": [size] * len(ids)}


def pack(pieces: list[list[int]], size: int, padding: int) -> dict[str, list]:
    """Best-fit decreasing: each piece, longest first, goes where the least room is left that still holds it."""
    room: list[tuple[int, int]] = []  # (room left, block), ascending
    blocks: list[list[list[int]]] = []
    for piece in sorted(pieces, key=len, reverse=True):
        at = bisect.bisect_left(room, (len(piece), -1))
        left, block = room.pop(at) if at < len(room) else (size, len(blocks))
        if block == len(blocks):
            blocks.append([])
        blocks[block].append(piece)
        bisect.insort(room, (left - len(piece), block))
    rows: dict[str, list] = {"input_ids": [], "starts": [], "filled": []}
    for block in blocks:
        ids, starts = [], []
        for piece in block:
            starts.append(len(ids))
            ids += piece
        rows["filled"].append(len(ids))
        rows["input_ids"].append(ids + [padding] * (size - len(ids)))
        rows["starts"].append(starts)
    return rows


def _blocks(documents: Any, cut: Callable, identity: str, streaming: bool) -> Any:
    """`documents` cut to blocks. The cache is keyed by the tokenizer's content: pickles of it aren't stable."""
    options: dict[str, Any] = {"batched": True, "batch_size": 256, "remove_columns": ["text"]}
    if streaming:
        names = documents.column_names
        return documents.map(cut, **{**options, "remove_columns": names or ["text"]})
    key = hashlib.sha256(f"{documents._fingerprint}/{identity}".encode()).hexdigest()[:16]
    return documents.map(cut, **options, new_fingerprint=key, load_from_cache_file=True, desc="tokenising")


def _identity(tokenizer: Any, size: int, layout: str) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    return f"{hashlib.sha256(content.encode()).hexdigest()}/{special}/{size}/{layout}/1"
