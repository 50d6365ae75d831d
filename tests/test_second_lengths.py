"""A folder says in several places how much it reads: none of them stops a reader at the old length."""

import json
import shutil

import pytest
import torch
from conftest import pico_model, run
from transformers import AutoModelForCausalLM, AutoTokenizer

import ctxext
from ctxext.errors import CtxextError
from ctxext.folders.lengths import CONFIG_LENGTHS, longer_config
from ctxext.folders.source import TINY


@pytest.fixture
def source(llama_folder, tmp_path):
    shutil.copytree(llama_folder, tmp_path / "source")
    return tmp_path / "source"


def write(path, data):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(data), encoding="utf-8")


def change(path, **keys):
    write(path, json.loads(path.read_text(encoding="utf-8")) | keys)


@pytest.mark.parametrize("method", ["yarn", "dynamic_ntk", "nope"])
def test_names_of_other_readers(method, source, tmp_path):
    """vLLM takes the smallest of them (_get_and_verify_max_len). More than the new length, and no number, stay."""
    for key in CONFIG_LENGTHS:
        change(source / "config.json", **{key: 64})
    change(source / "config.json", seq_len=2048, n_ctx=None, model_max_length=True, max_new_tokens=10)
    out = ctxext.patch_checkpoint(source, tmp_path / "out", method=method, factor=4).out
    config = json.loads((out / "config.json").read_text())
    kept = {"seq_len": 2048, "n_ctx": None, "model_max_length": True}
    assert {key: config[key] for key in CONFIG_LENGTHS} == dict.fromkeys(CONFIG_LENGTHS, 256) | kept
    numbers = [
        v for k, v in config.items() if k in CONFIG_LENGTHS and isinstance(v, int) and not isinstance(v, bool)
    ]
    assert min([*numbers, config["max_position_embeddings"]]) == 256
    assert config["max_new_tokens"] == 10
    assert ctxext.load(out).config.max_position_embeddings == 256


@pytest.mark.parametrize("place", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("method", ["yarn", "dynamic_ntk"])
def test_generation_goes_on(place, method, source, tmp_path, tokens):
    """Older folders have their settings of generate() in config.json."""
    (source / "generation_config.json").unlink()
    if place == "generation_config.json":
        write(source / place, {"max_length": 64, "min_length": 100, "pad_token_id": 0})
    else:
        change(source / place, max_length=64, min_length=100)
    stock = AutoModelForCausalLM.from_pretrained(source)
    assert stock.generation_config.max_length == 64
    out = ctxext.patch_checkpoint(source, tmp_path / "out", method=method, factor=4).out
    model = ctxext.load(out)
    prompt = tokens[:, :60]
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=45, do_sample=False)
    assert made.shape[1] >= 100
    assert model.generation_config.max_length in (None, 20)  # transformers' own default
    assert model.generation_config.min_length == 100


def test_what_sentence_transformers_cuts_at(source, tmp_path):
    """In the folder, and in a module's; by the names of older versions too."""
    for name in (
        "sentence_bert_config.json",
        "sentence_xlm-roberta_config.json",
        "0_Transformer/sentence_bert_config.json",
    ):
        write(source / name, {"max_seq_length": 48, "do_lower_case": False})
    write(source / "1_Pooling/config.json", {"word_embedding_dimension": 128})
    write(source / "2_Other/sentence_bert_config.json", {"max_seq_length": 10**6})
    write(source / "3_Other/sentence_bert_config.json", {"max_seq_length": None})
    paths = ("", "1_Pooling", "0_Transformer", "2_Other", "3_Other")
    write(source / "modules.json", [{"path": path} for path in paths])
    out = ctxext.patch_checkpoint(source, tmp_path / "out", method="yarn", factor=4).out

    def read(name):
        return json.loads((out / name).read_text())

    for name in (
        "sentence_bert_config.json",
        "sentence_xlm-roberta_config.json",
        "0_Transformer/sentence_bert_config.json",
    ):
        assert read(name) == {"max_seq_length": 256, "do_lower_case": False}
    assert read("2_Other/sentence_bert_config.json") == {"max_seq_length": 10**6}
    assert read("3_Other/sentence_bert_config.json") == {"max_seq_length": None}
    assert read("1_Pooling/config.json") == {"word_embedding_dimension": 128}


def test_what_a_tokenizer_cuts_at(tmp_path):
    """tokenizer.json may hold a limit of its own, which is all that the tokenizers library looks at."""
    from tokenizers import Tokenizer

    source = tmp_path / "source"
    shutil.copytree(TINY, source)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.enable_truncation(max_length=100, stride=7)
    tokenizer.save(str(source / "tokenizer.json"))
    change(source / "tokenizer_config.json", model_max_length=256, max_length=100)
    text = "In the beginning God created the heaven and the earth. " * 100
    assert len(tokenizer.encode(text)) == 100
    out = ctxext.patch_checkpoint(source, tmp_path / "out", method="yarn", factor=4).out
    longer = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert longer.truncation["max_length"] == 1024
    assert longer.truncation["stride"] == 7
    assert len(longer.encode(text)) == 1024
    assert longer.encode(text).ids[:100] == tokenizer.encode(text).ids
    stock = AutoTokenizer.from_pretrained(out)
    assert stock.model_max_length == 1024
    assert len(stock(text, truncation=True).input_ids) == 1024
    # One without a limit is left byte for byte.
    again = ctxext.patch_checkpoint(TINY, tmp_path / "plain", method="yarn", factor=4).out
    assert (again / "tokenizer.json").read_bytes() == (TINY / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("name", ["tokenizer.json", "sentence_bert_config.json", "generation_config.json"])
@pytest.mark.parametrize("data", ["{", "[]"])
def test_damaged_files_are_named(name, data, source, tmp_path):
    (source / name).write_text(data)
    with pytest.raises(CtxextError, match=name):
        ctxext.patch_checkpoint(source, tmp_path / "out", method="yarn", factor=4)
    assert not (tmp_path / "out").exists()


def test_a_smaller_target_changes_nothing():
    config = {"max_position_embeddings": 64, "seq_length": 512, "max_length": 512}
    assert longer_config(config, 256) == config


def test_trained_folders_have_it_too(source, tmp_path, monkeypatch, capsys):
    """An adapter's config.json, and the folder that it is merged into."""
    pytest.importorskip("peft")
    from peft import LoraConfig, get_peft_model

    from ctxext import methods
    from ctxext.config.read import read_rope
    from ctxext.folders.adapter import Base, seal

    change(source / "config.json", seq_length=64)
    write(source / "generation_config.json", {"max_length": 64})
    config = json.loads((source / "config.json").read_text())
    schedule = methods.schedule(read_rope(config), "yarn", 4)
    model = pico_model()
    ctxext.apply(model, schedule)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    seal(tmp_path / "adapter", Base.of(str(source), source), config, schedule)
    code, _, err = run(monkeypatch, capsys, "merge", tmp_path / "adapter", "-o", tmp_path / "merged")
    assert code == 0, err
    for folder in ("adapter", "merged"):
        assert json.loads((tmp_path / folder / "config.json").read_text())["seq_length"] == 256
    assert "max_length" not in json.loads((tmp_path / "merged" / "generation_config.json").read_text())
    assert json.loads((tmp_path / "merged" / "tokenizer_config.json").read_text())["model_max_length"] == 256
