"""From what a user types as MODEL to a folder on this machine."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any, Literal

from ..errors import CtxextError, check_choice, warn
from ..files import explained, read_config, read_json, spelled, write_json
from .weights import has_weights, require_weights

TINY = Path(__file__).parents[1] / "assets" / "tiny"
SourceDtype = Literal["bfloat16", "float16", "float32"]
"""What a .gguf's weights are dequantised to."""
ModelDtype = Literal["auto", SourceDtype]
"""What a model is loaded as; auto: the checkpoint's own."""
# What from_pretrained takes about a hub id, and a folder has no use for; and about the model's place in it.
HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download")
PLACE_OPTIONS = ("subfolder", "gguf_file")


def resolve(
    model: str | os.PathLike,
    *,
    dtype: str = "bfloat16",
    subfolder: str = "",
    gguf_file: str | None = None,
    **hub: Any,
) -> Path:
    """The folder of MODEL: a folder, `tiny`, a .gguf file or a hub id.

    A hub id is taken from the local cache if its weights are there, or downloaded into it by huggingface_hub.
    hub: HUB_OPTIONS for it. subfolder, gguf_file: the model's place in MODEL, as from_pretrained means them. A
    GGUF is dequantised to `dtype` once, into ctxext's cache, and is an ordinary folder from then on.
    Raises CtxextError if there is nothing there, saying what was looked for, or weights in GGUF files alone.
    """
    text = os.fspath(model)
    path = Path(text).expanduser()
    if text == "tiny":
        return TINY
    if path.suffix == ".gguf":
        if not path.is_file():
            raise CtxextError(f"there is no file {path}")
        return _dequantised(path.resolve(), dtype)
    inside = Path(subfolder, gguf_file or "")
    if path.is_dir():
        return _inside(path, inside, dtype)
    if path.exists():
        raise CtxextError(f"{path} is a file", hint="give a model folder, a .gguf file, a hub id or `tiny`")
    if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", text):
        return _from_hub(text, inside, dtype, **hub)
    raise CtxextError(f"there is no folder {path}")


def display_name(model: str | os.PathLike) -> str:
    """A short name for files and tables: the last part of the path or hub id, without .gguf."""
    return spelled(Path(os.path.abspath(os.fspath(model))).name).removesuffix(".gguf") or "model"


def _require_model(path: Path) -> None:
    if (path / "config.json").is_file():
        if not has_weights(path) and any(path.rglob("*.gguf")):
            require_weights(path)
        return
    if (path / "modules.json").is_file():
        raise CtxextError(
            f"{path} is of sentence-transformers, with its model in a subfolder",
            hint="give that subfolder, the first in modules.json, and put what is written in its place",
        )
    if (path / "adapter_config.json").is_file():
        raise CtxextError(
            f"{path} is a PEFT adapter, not a whole model", hint="patch its base model, or merge the adapter first"
        )
    if (path / "config.json").is_symlink():
        raise CtxextError(f"{path / 'config.json'} is a link to nothing", hint="download it again")
    raise CtxextError(f"{path} has no config.json", hint="give the folder that from_pretrained would load")


def _inside(root: Path, inside: Path, dtype: str) -> Path:
    """The model's folder by its place in `root`; see `resolve`."""
    path = root / inside
    if inside.suffix == ".gguf":
        return resolve(path, dtype=dtype)
    if not path.is_dir():
        raise CtxextError(f"{root} has no subfolder {str(inside)!r}")
    _require_model(path)
    return path


def _from_hub(name: str, inside: Path, dtype: str, **options: Any) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    tries = [options]
    if not options.get("force_download") and not options.get("local_files_only"):
        tries = [{**options, "local_files_only": True}, options]
    found = why = None
    for given in tries:
        try:
            found = Path(snapshot_download(name, **given))
        except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
            why = error
        # The cache gives a snapshot whatever is in it: of a tokenizer alone, or of a download that was broken off.
        if found and (has_weights(found / inside) or (found / inside).is_file()):
            break
    said = f"downloading said: {str(why).splitlines()[0][:160]}" if why else "download it again"
    if found is None:
        revision = f" with a revision {options['revision']}" if options.get("revision") else ""
        raise CtxextError(
            f"no folder {name!r} here, nor a model of that name{revision} in the hub cache or on the hub",
            hint=f"check the spelling; {said}",
        ) from why
    path = _inside(found, inside, dtype)
    if not has_weights(path):
        warn(f"the hub cache holds only a part of {name}, without all its weights; {said}")
    return path


def cache_dir() -> Path:
    """$CTXEXT_CACHE, else ctxext/ in the user's cache directory."""
    root = os.environ.get("CTXEXT_CACHE")
    return Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "ctxext"


def _dequantised(gguf: Path, dtype: str) -> Path:
    """A folder in ctxext's cache with the GGUF's weights in `dtype`; made on the first call."""
    check_choice("dtype", dtype, SourceDtype)
    stat = gguf.stat()
    key = hashlib.sha256(f"{gguf}:{stat.st_size}:{stat.st_mtime_ns}:{dtype}".encode()).hexdigest()[:12]
    out = cache_dir() / "gguf" / f"{gguf.stem}-{dtype}-{key}"
    if not (out / "config.json").is_file():
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = out.with_name(f".{out.name}-{os.getpid()}")
        try:
            _convert(gguf, temporary, dtype)
            os.replace(temporary, out)
        except OSError as error:
            # Another process has converted the same file meanwhile.
            if not (out / "config.json").is_file():
                raise explained(error, out) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return out


def _convert(gguf: Path, out: Path, dtype: str) -> None:
    from ..runtimes.gguf_file import read_gguf

    reader = read_gguf(gguf)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kind = reader.get_field("tokenizer.ggml.model")
    tokenizer = None
    try:
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=getattr(torch, dtype))
        if kind is not None and kind.contents() != "no_vocab":
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except Exception as error:  # whatever its readers and the tokenizer library raise, the file is the reason
        raise CtxextError(f"transformers can't read {gguf}: {error}") from error
    if model.config.model_type == "llama" and any(t.name.endswith("attn_q.bias") for t in reader.tensors):
        raise CtxextError(
            f"{gguf} is a Llama with attention biases (an exported Qwen2), which transformers' GGUF reader drops",
            hint="use the folder that it was made from",
        )
    # The weights are plain now; left in place, the entry would make from_pretrained look for a quantizer.
    if hasattr(model.config, "quantization_config"):
        delattr(model.config, "quantization_config")
    setattr(model, "hf_quantizer", None)  # noqa: B010
    save(model, out)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    _restore_scaling(gguf, out / "config.json")


def save(model: Any, out: Path) -> None:
    """`save_pretrained`, with an OSError for a full disk, which the writer of safetensors calls something else."""
    from safetensors import SafetensorError

    try:
        model.save_pretrained(out)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number.group(1)) if number else errno.EIO, str(error)) from error


def _restore_scaling(gguf: Path, config_json: Path) -> None:
    """Write the GGUF's rope scaling into the config: transformers' reader takes over theta and nothing else."""
    from ..config.read import read_schedule
    from ..config.write import write_config
    from ..runtimes.gguf_rope import gguf_config, is_scaled

    if not is_scaled(gguf):
        return
    config = read_json(config_json)
    schedule = read_schedule(gguf_config(gguf))
    if schedule.method != "none":
        write_json(config_json, write_config(config, schedule))


def is_gguf(model: str | os.PathLike) -> bool:
    """Whether MODEL names a GGUF file."""
    return os.fspath(model).endswith(".gguf")


def peek(model: str | os.PathLike) -> dict[str, Any]:
    """The config.json of MODEL; of a .gguf what its header says of the rope, its weights left alone."""
    if not is_gguf(model):
        return read_config(resolve(model))
    from ..runtimes.gguf_rope import gguf_config

    path = Path(model).expanduser()
    if not path.is_file():
        raise CtxextError(f"there is no file {path}")
    return gguf_config(path)
