"""llama.cpp itself against transformers, where llama-cpp-python is installed (it builds from source: optional)."""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import logits, pico_model

import ctxext
from ctxext import methods
from ctxext.errors import CtxextError
from ctxext.folders.gguf_export import export
from ctxext.folders.gguf_patch import patch_gguf
from ctxext.folders.source import TINY
from ctxext.runtimes.portability import portability

pytest.importorskip("gguf")
pytest.importorskip("llama_cpp")
from experiments.serving import llama_cpp as oracle

pytestmark = pytest.mark.filterwarnings("ignore:the folder has no tokenizer")
DIVISORS = [1 + i / 4 for i in range(16)]
STATIC = [n for n, m in methods.all_methods().items() if not m.loads.startswith("needs")]


def params(name):
    return {"long_factor": DIVISORS} if methods.get(name).needs else {}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("gguf")
    for name in ("llama", "mistral", "qwen2", "qwen3"):
        model = pico_model(name, **({"sliding_window": None} if name == "mistral" else {}))
        if name == "qwen2":
            for layer in model.model.layers:
                torch.nn.init.normal_(layer.self_attn.q_proj.bias, std=0.5)
                torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=0.5)
        model.save_pretrained(root / name)
    return root


def compare(path, folder, tokens):
    """Largest difference of logits and number of different top tokens, at every position."""
    ours = logits(ctxext.load(folder).eval(), tokens)[0]
    theirs = torch.from_numpy(oracle.logits(path, tokens[0].tolist()))
    return (ours - theirs).abs().max().item(), int((ours.argmax(-1) != theirs.argmax(-1)).sum())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", STATIC)
def test_logits(name, family, folders, tmp_path, tokens):
    folder = ctxext.patch_checkpoint(folders / family, tmp_path / "m", method=name, factor=4, **params(name)).out
    if family == "qwen3" and name in ("llama3", "longrope", "nope", "drope", "ntk_by_parts"):
        with pytest.raises(CtxextError, match="reads no frequency table"):
            export(folder, tmp_path / "x.gguf", dtype="f32")
        return
    path = export(folder, tmp_path / "x.gguf", dtype="f32").out
    for length in (40, 200):
        difference, changed = compare(path, folder, tokens[:, :length])
        assert difference < 2e-4
        assert changed == 0


def test_a_patched_file_is_the_exported_folder(folders, tmp_path, tokens):
    plain = export(folders / "llama", tmp_path / "plain.gguf", dtype="f32").out
    options = {"beta_fast": 8, "attention_factor": 1.2}
    path = patch_gguf(plain, tmp_path / "x.gguf", method="yarn", factor=4, **options).out
    folder = ctxext.patch_checkpoint(folders / "llama", tmp_path / "m", method="yarn", factor=4, **options).out
    difference, changed = compare(path, folder, tokens)
    assert difference < 2e-4
    assert changed == 0
    assert compare(plain, folder, tokens)[0] > 1


def test_llama_cpp_refuses_a_table_for_qwen(folders, tmp_path):
    """Why the exporter refuses it first: the file wouldn't load at all."""
    from ctxext.runtimes.gguf_file import read_gguf, write_changed

    source = export(folders / "qwen3", tmp_path / "x.gguf", dtype="f32").out
    with (tmp_path / "y.gguf").open("wb+") as file:
        write_changed(read_gguf(source), source, file, changes={}, table=("rope_freqs.weight", (2.0,) * 16))
    with pytest.raises(CtxextError, match="refuses to load"):
        oracle.logits(tmp_path / "y.gguf", [1, 2, 3])


def test_text_is_cut_the_same(tmp_path):
    """The embedded model's tokenizer, by llama.cpp and by transformers."""
    from transformers import AutoTokenizer

    path = export("tiny", tmp_path / "tiny.gguf").out
    text = "In the beginning God created 1234 heavens, and don't say  two   spaces: ü € it's THEY'LL"
    ours = AutoTokenizer.from_pretrained(TINY)(text, add_special_tokens=False).input_ids
    assert oracle.tokenize(path, text) == ours


def test_losses_are_the_logits(folders, tmp_path, tokens):
    path = export(folders / "llama", tmp_path / "x.gguf", dtype="f32").out
    ids = tokens[0].tolist()
    rows = torch.from_numpy(oracle.logits(path, ids)).double()
    want = torch.nn.functional.cross_entropy(rows[:-1], torch.tensor(ids[1:]), reduction="none")
    torch.testing.assert_close(torch.from_numpy(oracle.losses(path, ids)), want, atol=1e-9, rtol=0)


CONVERT = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/gguf-py"]
from pathlib import Path
import gguf
from conversion import get_model_class
kind = get_model_class("LlamaForCausalLM")
kind.set_vocab = lambda self: self.gguf_writer.add_tokenizer_model("no_vocab")
kind(Path({folder!r}), gguf.LlamaFileType.ALL_F32, Path({out!r})).write()
"""
OWN = {"beta_fast": 8, "beta_slow": 2}
CONVERTED = {"pi": {}, "ntk": {}, "theta": {}, "llama3": {}, "yarn": {}, "ntk_by_parts": {}, "nope": {}}
CONVERTED |= {
    "longrope": {"long_factor": DIVISORS},
    "yarn, own ramp": OWN,
    "yarn, own scale": {"attention_factor": 1.5},
}


@pytest.mark.parametrize("name", CONVERTED)
def test_llama_cpps_own_converter(name, folders, tmp_path, tokens):
    """What the portability table says of convert_hf_to_gguf.py; CTXEXT_LLAMA_CPP names llama.cpp's sources."""
    root = os.environ.get("CTXEXT_LLAMA_CPP")
    if not root:
        pytest.skip("CTXEXT_LLAMA_CPP isn't set")
    method = name.split(",")[0]
    options = {"method": method, "factor": 4, **CONVERTED[name]}
    folder = ctxext.patch_checkpoint(folders / "llama", tmp_path / "m", **options).out
    code = CONVERT.format(root=root, folder=str(folder), out=str(tmp_path / "x.gguf"))
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    difference, _ = compare(tmp_path / "x.gguf", folder, tokens)
    config = json.loads((folder / "config.json").read_text())
    said = next(v for v in portability(config) if v.runtime == "llama.cpp (its own converter)").runs
    assert said == ("exact" if difference < 2e-4 else "misread"), difference
