"""Files: those of a model folder, replacing in one step, JSON and JSON lines."""

from __future__ import annotations

import codecs
import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from .errors import CtxextError, warn

WEIGHTS = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"))
_SKIPPED = frozenset((".git", ".cache", "__pycache__"))


def model_files(folder: Path) -> Iterator[Path]:
    """Every file of a model folder, as paths relative to it, links followed. Warns of a link to nothing."""
    found, seen = [], set()
    for root, inner, names in os.walk(folder, followlinks=True):
        here = os.path.realpath(root)
        inner[:] = [] if here in seen else [name for name in inner if name not in _SKIPPED]
        if here not in seen:
            found += [Path(root) / name for name in names]
        seen.add(here)
    for path in sorted(found):
        if path.is_file():
            yield path.relative_to(folder)
        elif path.is_symlink():
            warn(f"{path} is a link to nothing and is left out: download it again, or remove the link")


def link_or_copy(source: Path, target: Path, *, link: bool) -> bool:
    """Bring one file over; True if it was hard-linked, which takes no space. Links are followed first."""
    target.parent.mkdir(parents=True, exist_ok=True)
    source = source.resolve()
    if link and source.suffix in WEIGHTS | {""}:
        with contextlib.suppress(OSError):
            os.link(source, target)
            return True
    shutil.copyfile(source, target)
    return False


@contextlib.contextmanager
def replacing(out: Path, *, force: bool) -> Iterator[Path]:
    """A temporary sibling of `out` that becomes `out` when the block ends well and vanishes when it doesn't.

    A kill leaves either nothing or all of it under the name `out`; what it left beside it is cleared by
    the next call. Raises CtxextError if `out` exists and not `force`, if it isn't a model folder (so that
    --force can't take away anything else), and for a full disk or a folder that can't be written.
    """
    # A link stays a link: what it points to is replaced.
    out = settled(out)
    _clear_leftovers(out)
    check_overwrite(out, force)
    temporary = out.with_name(f".{out.name}.ctxext-new-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if out.exists():
            aside = out.with_name(f".{out.name}.ctxext-old-{os.getpid()}")
            os.rename(out, aside)
            os.rename(temporary, out)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            os.rename(temporary, out)
    except OSError as error:
        raise explained(error, out) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def replacing_file(out: Path, *, force: bool) -> Iterator[IO[bytes]]:
    """A new file that becomes `out` when the block ends well and vanishes when it doesn't.

    Raises CtxextError if `out` is a folder, or a file and not `force`, and for a full disk or a folder that can't
    be written.
    """
    out = settled(out)
    _clear_leftovers(out)
    if out.is_dir():
        raise CtxextError(f"{out} is a folder", hint="give a file name with -o")
    if out.exists() and not force:
        raise CtxextError(f"{out} exists already", hint="--force overwrites it, -o writes elsewhere")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _swapped_in(out) as file:
            yield file
    except OSError as error:
        raise explained(error, out) from error


@contextlib.contextmanager
def _swapped_in(out: Path) -> Iterator[IO[bytes]]:
    """A temporary sibling of the file `out`, which it becomes when the block ends well."""
    temporary = out.with_name(f".{out.name}.ctxext-new-{os.getpid()}")
    try:
        with temporary.open("wb+") as file:
            yield file
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)


def settled(out: Path) -> Path:
    """Where a path leads as the system follows it: `link/..` is where the link leads, not what stands before it.

    Raises CtxextError for a circle of links, or a name that can't be.
    """
    try:
        found = out.expanduser().resolve()
        found.exists()
        return found
    except (OSError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or error
        raise CtxextError(f"{out} can't be followed: {why}", hint="choose another place with -o") from error


def check_overwrite(out: Path, force: bool) -> None:
    """Raise CtxextError unless `out` is free, an empty folder, or with `force` a model folder to be replaced."""
    if not out.exists():
        return
    if not out.is_dir():
        raise CtxextError(f"{out} exists and is a file", hint="choose another folder with -o")
    empty = not any(out.iterdir())
    if not (empty or force):
        raise CtxextError(f"{out} exists already", hint="--force overwrites it, -o writes elsewhere")
    if not (empty or (out / "config.json").is_file()):
        raise CtxextError(
            f"{out} is not a model folder, so --force won't replace it", hint="choose another with -o"
        )


def _clear_leftovers(out: Path) -> None:
    """Remove what a killed run left beside `out`, and give back what it had moved aside."""
    for left in out.parent.glob(f".{out.name}.ctxext-*"):
        pid = left.name.rpartition("-")[2]
        if not pid.isdigit() or _alive(int(pid)):
            continue
        if "-old-" in left.name and not out.exists():
            os.rename(left, out)
        elif left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def explained(error: OSError, out: Path) -> CtxextError:
    """What to tell of an OSError while `out` was written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CtxextError(
            f"the disk is full: could not write {out}", hint="nothing was left behind; free some space"
        )
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return CtxextError(f"can't write to {out.parent}: {error.strerror}", hint="choose another folder with -o")
    return CtxextError(f"could not write {out}: {error.strerror or error}", hint="choose another place with -o")


def is_marked(path: Path) -> bool:
    """Whether a file begins with UTF-8's byte order mark, which some readers of JSON stop at."""
    try:
        with path.open("rb") as file:
            return file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
    except OSError:
        return False


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder; CtxextError if it is damaged."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8-sig"))
    except (ValueError, OSError) as error:
        raise CtxextError(f"{folder / 'config.json'} can't be read: {error}") from error
    if not isinstance(config, dict):
        raise CtxextError(f"{folder / 'config.json'} holds no object")
    return config


def spelled(name: str) -> str:
    """A file's name in UTF-8, which an ASCII locale leaves as escaped bytes that no file of text can hold."""
    return os.fsencode(name).decode("utf-8", "replace") if any("\udc80" <= c <= "\udcff" for c in name) else name


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return spelled(value)
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value


def dumps(document: Any, *, indent: int | None = 2, ascii: bool = False) -> str:
    """Strict JSON: keys in their order, non-finite numbers as null. ascii: escape all else, for any stream."""
    return json.dumps(_plain(document), indent=indent, allow_nan=False, ensure_ascii=ascii)


def write_text(path: str | Path, text: str) -> Path:
    """Write a file in one step: a kill leaves the old file or the new one, never a part.

    Folders above it are made. A link is replaced, never written through. Raises OSError as `open` does.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _swapped_in(path) as file:
        file.write(spelled(text).encode())
        file.flush()
        os.fsync(file.fileno())
    return path


def write_json(path: str | Path, document: Any, *, indent: int | None = 2) -> Path:
    """`write_text` for a JSON document."""
    return write_text(path, dumps(document, indent=indent) + "\n")


def append_jsonl(path: str | Path, row: Any) -> None:
    """Append one row as one line, in a single write, so that a kill can't interleave rows."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = dumps(row, indent=None) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read_json(path: str | Path) -> dict[str, Any]:
    """A JSON document from a file; CtxextError says which file is missing or broken, and where."""
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise CtxextError(f"{path} doesn't exist") from error
    except ValueError as error:
        raise CtxextError(f"{path} isn't a JSON document: {error}") from error


def read_jsonl(path: str | Path) -> list[Any]:
    """The rows of a JSONL file. A last line without its end, left by a kill, is dropped."""
    lines = Path(path).read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1] if line.strip()]
