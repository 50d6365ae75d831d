"""Folders that are written: the model is found, and patched without reading weights, with all that was there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import logits, pico_model

import ctxext
from ctxext import methods
from ctxext.errors import CtxextError, CtxextWarning, UsageError
from ctxext.folders import patch as checkpoint

FACTORS = [1 + i / 4 for i in range(16)]
STATIC = [name for name, m in methods.all_methods().items() if not m.loads.startswith("needs")]


def params(name):
    return {"long_factor": FACTORS} if methods.get(name).needs else {}


@pytest.mark.parametrize("name", STATIC)
def test_plain_transformers_gives_the_live_logits(name, llama_folder, tmp_path, tokens):
    """In a process that never imports ctxext, to the last bit."""
    live = pico_model()
    ctxext.patch(live, name, 4, **params(name))
    done = ctxext.patch_checkpoint(llama_folder, tmp_path / "out", method=name, factor=4, **params(name))
    torch.save((tokens, logits(live, tokens)), tmp_path / "expected.pt")
    script = f"""
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(done.out)!r}).eval()
tokens, expected = torch.load({str(tmp_path / "expected.pt")!r})
with torch.no_grad():
    difference = (model(tokens).logits - expected).abs().max().item()
assert "ctxext" not in sys.modules
assert model.config.max_position_embeddings == 256
print(difference)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(ran.stdout) == 0.0
    torch.testing.assert_close(logits(ctxext.load(done.out).eval(), tokens), logits(live, tokens), atol=0, rtol=0)


def test_start_tokens_refuse_plain_transformers_and_load_with_ctxext(llama_folder, tmp_path, tokens):
    from transformers import AutoModelForCausalLM

    live = pico_model()
    options = {"long_factor": FACTORS, "start_tokens": 8}
    ctxext.patch(live, "longrope", 4, **options)
    out = ctxext.patch_checkpoint(llama_folder, tmp_path / "out", method="longrope", factor=4, **options).out
    with pytest.raises(KeyError, match=r"needs ctxext\.load"):
        AutoModelForCausalLM.from_pretrained(out)
    loaded = ctxext.load(out).eval()
    assert torch.equal(logits(loaded, tokens), logits(live, tokens))
    assert "Plain transformers can't run this folder" in (out / "README.md").read_text()
    # Saved again from memory, it refuses again instead of turning into a static model.
    loaded.save_pretrained(tmp_path / "again")
    with pytest.raises(KeyError, match=r"needs ctxext\.load"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(ctxext.load(tmp_path / "again").eval(), tokens), logits(live, tokens))


def test_everything_comes_along(llama_folder, tmp_path):
    done = ctxext.patch_checkpoint(llama_folder, tmp_path / "out", method="yarn", factor=4)
    out, source = done.out, llama_folder
    assert {p.name for p in out.iterdir()} == {p.name for p in source.iterdir()} | {"README.base.md"}
    for name in ("generation_config.json", "modeling_custom.py"):
        assert (out / name).read_text() == (source / name).read_text()
    tokenizer = json.loads((out / "tokenizer_config.json").read_text())
    assert tokenizer == {"model_max_length": 256, "unknown": [1]}
    assert (out / "model.safetensors").samefile(source / "model.safetensors")
    assert not (out / "modeling_custom.py").samefile(source / "modeling_custom.py")
    assert done.linked_bytes == (source / "model.safetensors").stat().st_size
    copied = ctxext.patch_checkpoint(llama_folder, tmp_path / "copy", method="yarn", factor=4, link=False)
    assert copied.linked_bytes == 0
    assert not (copied.out / "model.safetensors").samefile(source / "model.safetensors")
    card = (out / "README.md").read_text()
    for said in ("base_model: pico-llama", "**256 tokens**", "theta 10000", "transformers | 5.24 | exact", "yarn"):
        assert said in card


def test_links_of_a_hub_cache_are_followed(llama_folder, tmp_path):
    """A snapshot in the hub's cache is a folder of symbolic links; linking the links would dangle."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in llama_folder.iterdir():
        (snapshot / path.name).symlink_to(path)
    out = ctxext.patch_checkpoint(snapshot, tmp_path / "out", method="pi", factor=2).out
    assert not (out / "model.safetensors").is_symlink()
    assert (out / "model.safetensors").samefile(llama_folder / "model.safetensors")


def test_a_hub_id_comes_from_the_local_cache(llama_folder, tmp_path, monkeypatch):
    snapshot = tmp_path / "models--someone--pico" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "models--someone--pico" / "refs").mkdir()
    (tmp_path / "models--someone--pico" / "refs" / "main").write_text("a" * 40)
    for path in llama_folder.iterdir():
        os.link(path, snapshot / path.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    done = ctxext.patch_checkpoint("someone/pico", method="ntk", factor=2)
    assert done.out == Path("pico-ntk-2x")
    assert (tmp_path / done.out / "config.json").is_file()
    with pytest.raises(CtxextError, match="nor a model of that name"):
        ctxext.patch_checkpoint("someone/nothing", method="ntk", factor=2)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/no/such/folder", "there is no folder"),
        ("./nowhere", "there is no folder"),
        ("no/such.gguf", "there is no file"),
        ("a b", "there is no folder"),
        (__file__, "is a file"),
    ],
)
def test_missing_models(model, message):
    with pytest.raises(CtxextError, match=message):
        checkpoint.plan(model, checkpoint.Request("yarn", 4))


def test_options_are_checked_before_anything_is_looked_up():
    with pytest.raises(UsageError, match="did you mean 'beta_fast'"):
        checkpoint.plan("/no/such/folder", checkpoint.Request("yarn", 4, {"beta_fsat": 1}))


def test_sharded_weights(tmp_path, tokens):
    from transformers import AutoModelForCausalLM

    model = pico_model()
    model.save_pretrained(tmp_path / "m", max_shard_size="100KB")
    shards = sorted(p.name for p in (tmp_path / "m").glob("*.safetensors"))
    assert len(shards) > 2
    out = ctxext.patch_checkpoint(tmp_path / "m", tmp_path / "out", method="yarn", factor=4).out
    ctxext.patch(model, "yarn", 4)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out).eval(), tokens), logits(model, tokens))
    (tmp_path / "m" / shards[1]).unlink()
    with pytest.raises(CtxextError, match="lacks 1 shard"):
        ctxext.patch_checkpoint(tmp_path / "m", tmp_path / "out2", method="yarn", factor=4)
    assert not (tmp_path / "out2").exists()


def test_patching_a_patched_folder(llama_folder, tmp_path, tokens):
    first = ctxext.patch_checkpoint(llama_folder, tmp_path / "a", method="pi", factor=2).out
    with pytest.raises(CtxextError, match="already scaled: pi, factor 2, 64 to 128 tokens"):
        ctxext.patch_checkpoint(first, tmp_path / "b", method="pi", factor=2)
    composed = ctxext.patch_checkpoint(first, tmp_path / "b", method="pi", factor=2, existing="compose")
    assert composed.schedule.max_length == 256
    expected = pico_model()
    ctxext.patch(expected, "pi", 4)
    got = logits(ctxext.load(composed.out).eval(), tokens)
    torch.testing.assert_close(got, logits(expected, tokens), atol=1e-5, rtol=0)
    replaced = ctxext.patch_checkpoint(first, tmp_path / "c", method="yarn", factor=4, existing="replace")
    assert replaced.schedule == methods.schedule(replaced.schedule.rope, "yarn", 4)
    assert replaced.schedule.rope.trained_length == 64
    # A patch that composes with start tokens still finds its way back to the scaled original.
    far = ctxext.patch_checkpoint(
        first, tmp_path / "d", method="longrope", factor=2, existing="compose", long_factor=FACTORS, start_tokens=4
    )
    live = ctxext.load(first).eval()
    ctxext.patch(live, "longrope", 2, existing="compose", long_factor=FACTORS, start_tokens=4)
    assert torch.equal(logits(ctxext.load(far.out).eval(), tokens), logits(live, tokens))


def test_composing_with_a_folder_that_does_not_rotate(llama_folder, tmp_path, tokens):
    """What puts something in place of rotation does so here too; what changes rotation has nothing to change."""
    first = ctxext.patch_checkpoint(llama_folder, tmp_path / "a", method="nope", factor=2).out
    for method in methods.all_methods().values():
        options = {name: [2.0] * 16 for name in method.needs}
        out = tmp_path / method.name
        if method.replaces_rope:
            ctxext.patch_checkpoint(first, out, method=method.name, factor=2, existing="compose", **options)
            fresh = pico_model()
            # Half of the length was reached before: only a temperature counts from it.
            ctxext.patch(fresh, method.name, 4)
            assert torch.equal(logits(ctxext.load(out).eval(), tokens), logits(fresh, tokens))
            assert "| stopped |" in (out / "README.md").read_text()
            continue
        with pytest.raises(CtxextError, match=f"doesn't rotate, so there is nothing that {method.name} could"):
            ctxext.patch_checkpoint(first, out, method=method.name, factor=2, existing="compose", **options)
        model = ctxext.load(first).eval()
        with pytest.raises(CtxextError, match="doesn't rotate"):
            ctxext.patch(model, method.name, 2, existing="compose", **options)
        assert not out.exists()


def test_a_sliding_window_is_removed_with_a_warning(tmp_path):
    pico_model("mistral", sliding_window=16).save_pretrained(tmp_path / "m")
    with pytest.warns(CtxextWarning, match="window of 16 tokens"):
        out = ctxext.patch_checkpoint(tmp_path / "m", tmp_path / "out", method="yarn", factor=4).out
    assert ctxext.load(out).config.sliding_window is None


@pytest.mark.parametrize(("told", "left"), [(64, None), (100, None), (500, 500), (None, None)])
def test_generation_does_not_stop_at_the_old_length(told, left, llama_folder, tmp_path):
    """A max_length below what the folder reads is dropped; everything else in generation_config.json stays."""
    import shutil

    source = tmp_path / "source"
    shutil.copytree(llama_folder, source)
    data = {"temperature": 0.7, "do_sample": True, **({} if told is None else {"max_length": told})}
    (source / "generation_config.json").write_text(json.dumps(data))
    out = ctxext.patch_checkpoint(source, tmp_path / "out", method="pi", factor=4).out
    written = json.loads((out / "generation_config.json").read_text())
    assert written.pop("max_length", None) == left
    assert written == {"temperature": 0.7, "do_sample": True}
