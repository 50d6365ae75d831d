"""A tokenizer as llama.cpp reads it from a GGUF: vocabulary, merges or scores, special tokens, chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CtxextError, warn
from .gguf_file import require_gguf

if TYPE_CHECKING:
    from gguf import GGUFWriter

# How llama.cpp calls the ways of cutting text before byte-pair merging. Keys: the pattern that tokenizer.json
# splits by, without white space; "+digits" for a step that cuts every digit off.
_GPT2 = "bytelevel"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
    + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRETOKENIZERS = {
    _GPT2: "gpt-2",
    _GPT2 + "+digits": "smollm",
    _LLAMA3: "llama-bpe",
    _QWEN2: "qwen2",
    _TEKKEN: "tekken",
}


def add_tokenizer(writer: GGUFWriter, folder: Path, vocab_size: int, pretokenizer: str | None = None) -> str:
    """Add the folder's tokenizer to the writer; returns llama.cpp's name for its kind.

    vocab_size: rows of the embedding; tokens that the tokenizer doesn't have are filled up as unused.
    pretokenizer: llama.cpp's `tokenizer.ggml.pre`, where it can't be told from tokenizer.json.
    A folder without a tokenizer gives "no_vocab": llama.cpp then takes token ids only.
    Raises CtxextError for a kind of tokenizer that llama.cpp doesn't have.
    """
    gguf = require_gguf()
    spec = _json(folder / "tokenizer.json")
    if (folder / "tokenizer.model").is_file():
        kind = "llama"
        tokens, scores, types = _sentencepiece(folder, spec)
    elif spec and spec["model"].get("type") == "BPE":
        kind = "llama" if spec["model"].get("byte_fallback") else "gpt2"
        tokens, scores, types = _from_json(spec, kind)
    elif spec:
        raise CtxextError(f"llama.cpp has no tokenizer of kind {spec['model'].get('type')!r}")
    else:
        warn("the folder has no tokenizer.json or tokenizer.model: the GGUF takes token ids, not text")
        writer.add_tokenizer_model("no_vocab")
        return "no_vocab"
    if len(tokens) > vocab_size:
        raise CtxextError(f"the tokenizer has {len(tokens)} tokens, the embedding {vocab_size} rows")
    missing = range(len(tokens), vocab_size)
    writer.add_tokenizer_model(kind)
    if kind == "gpt2":
        writer.add_tokenizer_pre(pretokenizer or pretokenizer_name(spec))
    else:
        writer.add_tokenizer_pre("default")
        writer.add_token_scores([*scores, *(-10000.0 for _ in missing)])
    writer.add_token_list([*tokens, *(f"[PAD{i}]" for i in missing)])
    writer.add_token_types([*types, *(gguf.TokenType.UNUSED for _ in missing)])
    settings = _json(folder / "tokenizer_config.json") or {}
    if kind == "llama" and settings.get("add_prefix_space") is not None:
        writer.add_add_space_prefix(bool(settings["add_prefix_space"]))
    special = gguf.SpecialVocab(folder, load_merges=kind == "gpt2", n_vocab=vocab_size)
    special.add_to_gguf(writer, quiet=True)
    return kind


def _json(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CtxextError(f"{path} is damaged: {error}") from error


def pretokenizer_name(spec: Mapping[str, Any]) -> str:
    """llama.cpp's name for the way a tokenizer.json cuts text before merging.

    Raises CtxextError for one that isn't known here: llama.cpp would cut otherwise, and tokens come out wrong.
    """
    found = PRETOKENIZERS.get(_cutting(spec.get("pre_tokenizer") or {}) or "")
    if found is None:
        raise CtxextError(
            "how this tokenizer cuts text before merging isn't one of those that ctxext can name for llama.cpp",
            hint="pass llama.cpp's name for it, such as --pretokenizer deepseek-llm",
        )
    return found


def _cutting(pre: Mapping[str, Any]) -> str | None:
    steps = pre.get("pretokenizers", [pre])
    pattern, digits = None, ""
    for step in steps:
        if step.get("type") == "Split" and pattern is None:
            pattern = "".join((step["pattern"].get("Regex") or "").split())
        elif step.get("type") == "Digits" and step.get("individual_digits"):
            digits = "+digits"
        elif step.get("type") == "ByteLevel":
            # With a pattern before it, ByteLevel only maps bytes to letters.
            pattern = pattern or (_GPT2 if step.get("use_regex", True) else None)
        else:
            return None
    return None if pattern is None else pattern + digits


def _from_json(spec: Mapping[str, Any], kind: str) -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types of a BPE tokenizer.json, in the order of their ids."""
    types = require_gguf().TokenType
    vocab = dict(spec["model"]["vocab"])
    added = {token["id"]: token for token in spec.get("added_tokens") or []}
    by_id = {i: token for token, i in vocab.items()} | {i: token["content"] for i, token in added.items()}
    # llama.cpp merges the pair with the best score first; BPE the pair whose merge was learnt first.
    rank: dict[str, int] = {}
    for number, pair in enumerate(spec["model"].get("merges") or []):
        rank.setdefault("".join(pair if isinstance(pair, list) else pair.split(" ")), number)
    tokens, scores, kinds = [], [], []
    for i in range(max(by_id) + 1):
        token = by_id.get(i)
        tokens.append(token if token is not None else f"[PAD{i}]")
        scores.append(-float(rank.get(token or "", 10000)) if kind == "llama" else 0.0)
        if token is None:
            kinds.append(types.UNUSED)
        elif i in added:
            kinds.append(types.CONTROL if added[i].get("special") else types.USER_DEFINED)
        elif kind == "llama" and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            kinds.append(types.BYTE)
        else:
            kinds.append(types.NORMAL)
    unknown = spec["model"].get("unk_token")
    if kind == "llama" and unknown in vocab:
        kinds[vocab[unknown]] = types.UNKNOWN
    return tokens, scores, kinds


def _sentencepiece(folder: Path, spec: Any) -> tuple[list[str], list[float], list[int]]:
    """The same of a tokenizer.model, with what tokenizer.json adds to it."""
    gguf = require_gguf()
    try:
        rows = list(gguf.SentencePieceVocab(folder).all_tokens())
    except RuntimeError as error:
        raise CtxextError(f"reading tokenizer.model: {error}", hint="pip install sentencepiece") from error
    tokens = [text.decode() for text, _, _ in rows]
    scores, types = [score for _, score, _ in rows], [int(kind) for _, _, kind in rows]
    for token in (spec or {}).get("added_tokens") or []:
        while len(tokens) <= token["id"]:
            tokens.append(f"[PAD{len(tokens)}]")
            scores.append(-1000.0)
            types.append(gguf.TokenType.UNUSED)
        if types[token["id"]] in (gguf.TokenType.UNUSED, gguf.TokenType.NORMAL):
            tokens[token["id"]] = token["content"]
            types[token["id"]] = gguf.TokenType.CONTROL if token.get("special") else gguf.TokenType.USER_DEFINED
    return tokens, scores, types
