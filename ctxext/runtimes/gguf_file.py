"""GGUF files as bytes: read one, and write a copy with other keys and one more tensor, weights untouched."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..errors import CtxextError, require

if TYPE_CHECKING:
    from gguf import GGUFReader

_UINT32, _FLOAT32, _STRING = 4, 6, 8
_CHUNK = 16 << 20


def require_gguf() -> Any:
    """The gguf package; CtxextError if it isn't installed."""
    require("a .gguf file", "gguf", "gguf")
    import gguf

    return gguf


def read_gguf(path: Path) -> GGUFReader:
    """A reader of a whole, little-endian, unsplit GGUF; CtxextError for anything else."""
    gguf = require_gguf()
    if not path.is_file():
        raise CtxextError(f"there is no file {path}")
    try:
        reader = gguf.GGUFReader(path)
    except Exception as error:  # cut files end in numpy errors of many kinds
        raise CtxextError(
            f"can't read {path}, it isn't a whole GGUF file: {error}", hint="download or convert it again"
        ) from error
    if reader.endianess != gguf.GGUFEndian.LITTLE:
        raise CtxextError(f"{path} is big-endian", hint="gguf-convert-endian turns it round")
    if int(metadata(reader).get("split.count", 1)) > 1:
        raise CtxextError(f"{path} is one part of several", hint="join them with llama-gguf-split --merge")
    return reader


def metadata(reader: GGUFReader) -> dict[str, Any]:
    """Every key but the reader's own and long lists (tokens, merges), as plain Python values."""
    return {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.") and not name.startswith("tokenizer.ggml.")
    }


def tensor(reader: GGUFReader, name: str) -> Any:
    """The reader's tensor of that name, or None."""
    return next((t for t in reader.tensors if t.name == name), None)


def _field_bytes(reader: GGUFReader) -> Iterator[tuple[str, bytes]]:
    """Each key of the file with its bytes, name and type included."""
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            size = sum(int(part.nbytes) for part in field.parts)
            yield name, reader.data[field.offset : field.offset + size].tobytes()


def _packed_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def pack_field(key: str, value: str | int | float) -> bytes:
    """One key as it stands in a file: a string, an unsigned 32-bit integer, or a 32-bit float."""
    if isinstance(value, str):
        return _packed_string(key) + struct.pack("<I", _STRING) + _packed_string(value)
    if isinstance(value, int):
        return _packed_string(key) + struct.pack("<II", _UINT32, value)
    return _packed_string(key) + struct.pack("<If", _FLOAT32, value)


def write_changed(
    reader: GGUFReader,
    source: Path,
    out: IO[bytes],
    *,
    changes: Mapping[str, str | int | float],
    drop: frozenset[str] = frozenset(),
    table: tuple[str, tuple[float, ...]] | None = None,
) -> None:
    """Write a copy of `source` with other keys and, if given, one float32 tensor more (or replaced).

    Every other key keeps its place and its bytes, every other tensor its bytes and its offset. The new tensor goes
    to the end, where no offset changes; one that is there already is overwritten where it stands.
    Raises CtxextError if the tensor is there in another shape or type.
    """
    name, values = table or ("", ())
    present = tensor(reader, name)
    if present is not None and (int(present.n_elements) != len(values) or int(present.tensor_type) != 0):
        raise CtxextError(f"{source} holds {name} in another shape or type than {len(values)} float32")
    fields = dict(_field_bytes(reader))
    fields = {key: raw for key, raw in fields.items() if key not in drop}
    for key, value in changes.items():
        fields[key] = pack_field(key, value)
    infos = b"".join(
        reader.data[t.field.offset : t.field.offset + sum(int(p.nbytes) for p in t.field.parts)].tobytes()
        for t in reader.tensors
    )
    align = int(reader.alignment)
    data_size = source.stat().st_size - reader.data_offset
    adds = table is not None and present is None
    if adds:
        infos += _packed_string(name) + struct.pack("<IQIQ", 1, len(values), 0, _padded(data_size, align))
    head = struct.pack("<4sIQQ", b"GGUF", _version(reader), len(reader.tensors) + adds, len(fields))
    head += b"".join(fields.values()) + infos
    out.write(head + bytes(_padded(len(head), align) - len(head)))
    start = out.tell()
    with source.open("rb") as file:
        file.seek(reader.data_offset)
        shutil.copyfileobj(file, out, _CHUNK)
    if table is None:
        return
    raw = struct.pack(f"<{len(values)}f", *values)
    if present is not None:
        out.seek(start + present.data_offset - reader.data_offset)
        out.write(raw)
    else:
        out.write(bytes(_padded(data_size, align) - data_size))
        out.write(raw + bytes(_padded(len(raw), align) - len(raw)))


def _padded(size: int, align: int) -> int:
    return -(-size // align) * align


def _version(reader: GGUFReader) -> int:
    return int(reader.fields["GGUF.version"].parts[-1][0])
