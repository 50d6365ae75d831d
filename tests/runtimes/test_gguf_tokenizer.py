"""Tokenizers in a GGUF: transformers' reader gives the same ids back, and unknown kinds are refused."""

import itertools
import json

import pytest
from conftest import pico_model

from ctxext.errors import CtxextError
from ctxext.folders.gguf_export import export
from ctxext.folders.source import TINY
from ctxext.runtimes.gguf_tokenizer import PRETOKENIZERS, pretokenizer_name

gguf = pytest.importorskip("gguf")
TEXT = "In the beginning God created 1234 heavens, and don't say  two   spaces:\n\tü € 漢字 🙂 it's THEY'LL"


def fields(path):
    reader = gguf.GGUFReader(path)
    return {k: f.contents() for k, f in reader.fields.items() if k.startswith("tokenizer.")}


def test_the_embedded_models_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    done = export("tiny", tmp_path / "tiny.gguf")
    assert done.tokenizer == "gpt2"
    ours = AutoTokenizer.from_pretrained(TINY)
    theirs = fields(done.out)
    assert theirs["tokenizer.ggml.pre"] == "smollm"
    assert {t: i for i, t in enumerate(theirs["tokenizer.ggml.tokens"])} == ours.get_vocab()
    assert len(theirs["tokenizer.ggml.merges"]) == 767
    assert theirs["tokenizer.ggml.token_type"][0] == gguf.TokenType.CONTROL
    back = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    assert back.decode(back(TEXT).input_ids) == TEXT


def trained(tmp_path, kind):
    """A BPE tokenizer trained on a few words: byte-level like Llama 3, or with byte fallback like Llama 2."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    words = ["the beginning of the heavens and the earth was the word"] * 20
    if kind == "llama3":
        tokenizer = Tokenizer(models.BPE())
        pattern = next(p for p, name in PRETOKENIZERS.items() if name == "llama-bpe").replace("|?[", "| ?[")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special)
    tokenizer.train_from_iterator(words, trainer)
    if kind != "llama3":
        spec = json.loads(tokenizer.to_str())
        # Byte tokens are ordinary entries of the vocabulary in real checkpoints.
        spec["added_tokens"] = [t for t in spec["added_tokens"] if not t["content"].startswith("<0x")]
        tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.add_tokens([AddedToken("<|user|>", normalized=False)])
    folder = tmp_path / kind
    size = tokenizer.get_vocab_size()
    pico_model(vocab_size=size + 4).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    settings |= {"add_bos_token": True, "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder, tokenizer, size


def test_byte_level(tmp_path):
    folder, tokenizer, size = trained(tmp_path, "llama3")
    done = export(folder, tmp_path / "x.gguf")
    found = fields(done.out)
    assert (done.tokenizer, found["tokenizer.ggml.pre"]) == ("gpt2", "llama-bpe")
    tokens = found["tokenizer.ggml.tokens"]
    assert [tokenizer.id_to_token(i) for i in range(size)] == tokens[:size]
    assert tokens[size:] == [f"[PAD{i}]" for i in range(size, size + 4)]
    types = found["tokenizer.ggml.token_type"]
    assert types[tokens.index("<|user|>")] == gguf.TokenType.USER_DEFINED
    assert types[-1] == gguf.TokenType.UNUSED
    assert found["tokenizer.ggml.bos_token_id"] == tokens.index("<s>")
    assert found["tokenizer.chat_template"] == "{{ messages }}"


def test_byte_fallback(tmp_path):
    """Scores must order merges as BPE learnt them: llama.cpp merges the best score first."""
    folder, tokenizer, _ = trained(tmp_path, "llama2")
    done = export(folder, tmp_path / "x.gguf")
    found = fields(done.out)
    assert done.tokenizer == "llama"
    tokens, scores = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.scores"]
    merges = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    made = ["".join(pair) for pair in merges]
    assert [scores[tokens.index(t)] for t in made] == sorted((scores[tokens.index(t)] for t in made), reverse=True)
    types = found["tokenizer.ggml.token_type"]
    assert types[tokens.index("<0x0A>")] == gguf.TokenType.BYTE
    assert types[tokens.index("<unk>")] != gguf.TokenType.NORMAL
    assert merged_by_score(" the beginning was", tokens, scores) == tokenizer.encode("the beginning was").tokens


def merged_by_score(text, tokens, scores):
    """llama.cpp's sentencepiece: merge the neighbouring pair with the best score until none is a token."""
    pieces, score = list(text.replace(" ", "▁")), dict(zip(tokens, scores, strict=True))
    while True:
        pairs = [(score.get(a + b), -i) for i, (a, b) in enumerate(itertools.pairwise(pieces))]
        best = max((p for p in pairs if p[0] is not None), default=None)
        if best is None:
            return pieces
        i = -best[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


def test_unknown_kinds(tmp_path):
    spec = json.loads((TINY / "tokenizer.json").read_text())
    spec["pre_tokenizer"] = {"type": "Whitespace"}
    with pytest.raises(CtxextError, match=r"pass llama\.cpp's name for it"):
        pretokenizer_name(spec)
    folder = tmp_path / "m"
    folder.mkdir()
    for path in TINY.iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(CtxextError, match=r"pass llama\.cpp's name"):
        export(folder, tmp_path / "x.gguf")
    done = export(folder, tmp_path / "x.gguf", pretokenizer="deepseek-llm")
    assert fields(done.out)["tokenizer.ggml.pre"] == "deepseek-llm"
    (folder / "tokenizer.json").write_text(json.dumps(spec | {"model": {"type": "WordPiece"}}))
    with pytest.raises(CtxextError, match="no tokenizer of kind 'WordPiece'"):
        export(folder, tmp_path / "y.gguf")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CtxextError, match="is damaged"):
        export(folder, tmp_path / "y.gguf")


def test_sentencepiece_model(tmp_path):
    spm = pytest.importorskip("sentencepiece")
    folder = tmp_path / "m"
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the beginning of the heavens and the earth was the word\n" * 50)
    pico_model(vocab_size=320).save_pretrained(folder)
    spm.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    done = export(folder, tmp_path / "x.gguf")
    found = fields(done.out)
    processor = spm.SentencePieceProcessor(str(folder / "tokenizer.model"))
    tokens, scores = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.scores"]
    assert tokens[:300] == [processor.id_to_piece(i) for i in range(300)]
    assert scores[:300] == [processor.get_score(i) for i in range(300)]
    assert merged_by_score(" the word", tokens, scores) == processor.encode("the word", out_type=str)
