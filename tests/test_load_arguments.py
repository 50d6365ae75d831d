"""Arguments of from_pretrained do for a staged folder what they do for a static one and in plain transformers."""

import json
import shutil

import pytest
import torch
from conftest import logits, pico_model
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

import ctxext
from ctxext.errors import CtxextError, UsageError

METHODS = ("yarn", "dynamic_yarn")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A pico Llama, alone and by method, each also in a subfolder `inner` of a folder without a model."""
    root = tmp_path_factory.mktemp("arguments")
    pico_model().save_pretrained(root / "plain")
    (root / "plain" / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "do_sample": True}))
    for method in METHODS:
        ctxext.patch_checkpoint(root / "plain", root / method, method=method, factor=4)
    for name in ("plain", *METHODS):
        shutil.copytree(root / name, root / "nested" / name / "inner")
    return root


def same(a, b):
    """What the arguments can change of two models."""
    keys = (
        "use_cache",
        "attention_dropout",
        "output_hidden_states",
        "dtype",
        "_attn_implementation",
        "pad_token_id",
    )
    for key in (*keys, "num_labels", "bos_token_id"):
        assert getattr(a.config, key) == getattr(b.config, key), key
    assert a.dtype == b.dtype
    assert a.device == b.device
    assert a.generation_config.to_dict() == b.generation_config.to_dict()
    assert getattr(a, "hf_device_map", None) == getattr(b, "hf_device_map", None)
    assert not a.training


ARGUMENTS = [
    {"use_cache": False},
    {"attention_dropout": 0.25},
    {"output_hidden_states": True},
    {"pad_token_id": 5, "bos_token_id": 7},
    {"num_labels": 3},
    {"dtype": torch.bfloat16},
    {"dtype": "bfloat16", "use_cache": False},
    {"torch_dtype": torch.float16},
    {"dtype": "auto"},
    {"device_map": "cpu"},
    {"device_map": {"": "cpu"}, "max_memory": {"cpu": "1GB"}},
    {"attn_implementation": "eager"},
    {"attn_implementation": "eager", "attention_dropout": 0.25},
    {"low_cpu_mem_usage": True},
    {"use_safetensors": True},
    {"ignore_mismatched_sizes": True},
    {"trust_remote_code": True},
    {
        "token": "secret",
        "revision": "main",
        "local_files_only": True,
        "cache_dir": "/nowhere",
        "force_download": False,
    },
    {"subfolder": "", "proxies": {}},
    {"weights_only": True, "disable_mmap": True},
    {"generation_config": GenerationConfig(max_new_tokens=3)},
    {"key_mapping": {}},
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("given", ARGUMENTS, ids=lambda given: ",".join(given))
def test_an_argument_does_the_same(given, method, folders, tokens):
    want = AutoModelForCausalLM.from_pretrained(folders / "plain", **given)
    loaded = ctxext.load(folders / method, **given)
    same(loaded, want)
    ctxext.patch(want, method, 4)
    assert torch.equal(logits(loaded, tokens[:, :90]), logits(want, tokens[:, :90]))


@pytest.mark.parametrize("method", METHODS)
def test_the_loading_info_comes_along(method, folders, tokens):
    model, info = ctxext.load(folders / method, output_loading_info=True)
    assert (
        info.keys() == AutoModelForCausalLM.from_pretrained(folders / "plain", output_loading_info=True)[1].keys()
    )
    assert torch.equal(logits(model, tokens), logits(ctxext.load(folders / method), tokens))


@pytest.mark.parametrize("method", METHODS)
def test_a_config_of_the_caller(method, folders, tokens):
    """Its own changes count, its rope is the folder's: also if it was read from what that was made from."""
    want = logits(ctxext.load(folders / method), tokens)
    for read_from in (folders / method, folders / "plain"):
        config = AutoConfig.from_pretrained(read_from)
        config.attention_dropout, config.use_cache = 0.25, False
        before = config.to_dict()
        if method == "yarn" and read_from.name == "plain":
            continue  # plain transformers takes this config at its word
        model = ctxext.load(folders / method, config=config)
        assert (model.config.attention_dropout, model.config.use_cache) == (0.25, False)
        assert torch.equal(logits(model, tokens), want)
        assert config.to_dict() == before
        assert ctxext.load(folders / method, config=str(read_from)).config.use_cache


@pytest.mark.parametrize("method", METHODS)
def test_a_subfolder(method, folders, tokens):
    model = ctxext.load(folders / "nested" / method, subfolder="inner")
    assert torch.equal(logits(model, tokens), logits(ctxext.load(folders / method), tokens))
    with pytest.raises(CtxextError, match="has no subfolder 'outer'"):
        ctxext.load(folders / "nested" / method, subfolder="outer")


@pytest.mark.parametrize("method", METHODS)
def test_a_subfolder_of_a_hub_id(method, folders, tmp_path, monkeypatch, tokens):
    snapshot = tmp_path / "models--someone--pico" / "snapshots" / ("a" * 40)
    shutil.copytree(folders / "nested" / method, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    model = ctxext.load("someone/pico", subfolder="inner", revision="main", use_cache=False)
    assert torch.equal(logits(model, tokens), logits(ctxext.load(folders / method), tokens))


@pytest.mark.parametrize("method", METHODS)
def test_a_variant_alone(method, folders, tmp_path, tokens):
    folder = tmp_path / "m"
    shutil.copytree(folders / method, folder)
    (folder / "model.safetensors").rename(folder / "model.fp16.safetensors")
    model = ctxext.load(folder, variant="fp16")
    assert torch.equal(logits(model, tokens), logits(ctxext.load(folders / method), tokens))


@pytest.mark.parametrize("method", METHODS)
def test_a_gguf_file_in_a_folder(method, folders, tmp_path, tokens, monkeypatch):
    """By gguf_file, as transformers takes it, and with the scaling that the file says."""
    pytest.importorskip("gguf")
    if method == "dynamic_yarn":
        pytest.skip("no GGUF says stages")
    monkeypatch.setenv("CTXEXT_CACHE", str(tmp_path / "cache"))
    ctxext.export(folders / method, tmp_path / "m" / "pico.gguf", dtype="f32")
    model = ctxext.load(tmp_path / "m", gguf_file="pico.gguf", dtype=torch.float32)
    assert model.config.max_position_embeddings == 256
    want = logits(ctxext.load(folders / method), tokens)
    torch.testing.assert_close(logits(model, tokens), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_what_nobody_knows_is_the_same_error(method, folders):
    for given in ({"nonsense": 1}, {"temperature": 0.5}, {"num_labels": "x"}):
        with pytest.raises(Exception) as want:
            AutoModelForCausalLM.from_pretrained(folders / "plain", **given)
        with pytest.raises(want.type):
            ctxext.load(folders / method, **given)


def test_another_rope_is_no_argument_of_a_staged_folder(folders):
    for given in ({"rope_theta": 1e6}, {"max_position_embeddings": 64}, {"rope_scaling": None}):
        with pytest.raises(UsageError, match="dynamic_yarn x4, takes its place"):
            ctxext.load(folders / "dynamic_yarn", **given)


def test_a_staged_folder_of_remote_code(folders, tmp_path):
    """The config's class comes with the folder, its rope from the block; then the live patch judges the family."""
    folder = tmp_path / "remote"
    shutil.copytree(folders / "dynamic_yarn", folder)
    (folder / "configuration_mine.py").write_text(
        "from transformers import LlamaConfig\n\n\nclass MineConfig(LlamaConfig):\n    model_type = 'mine'\n"
    )
    (folder / "modeling_mine.py").write_text(
        "from transformers import LlamaForCausalLM\n\nfrom .configuration_mine import MineConfig\n\n\n"
        "class MineForCausalLM(LlamaForCausalLM):\n    config_class = MineConfig\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "architectures": ["MineForCausalLM"]}
    names = {
        "AutoConfig": "configuration_mine.MineConfig",
        "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": names}))
    with pytest.raises(CtxextError, match="no model type 'mine'"):
        ctxext.load(folder, trust_remote_code=True, use_cache=False)
