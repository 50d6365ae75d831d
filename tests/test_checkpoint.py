"""Folders: patched without reading weights, loaded by plain transformers, whole after a kill."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import logits, pico_model

import ctxext
from ctxext import checkpoint, folder, methods
from ctxext.errors import CtxextError, CtxextWarning, UsageError

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


def test_a_sliding_window_is_removed_with_a_warning(tmp_path):
    pico_model("mistral", sliding_window=16).save_pretrained(tmp_path / "m")
    with pytest.warns(CtxextWarning, match="window of 16 tokens"):
        out = ctxext.patch_checkpoint(tmp_path / "m", tmp_path / "out", method="yarn", factor=4).out
    assert ctxext.load(out).config.sliding_window is None


def broken(llama_folder, tmp_path, name):
    """A copy of the pico folder with one thing wrong."""
    target = tmp_path / "broken"
    target.mkdir()
    for path in llama_folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    weights = target / "model.safetensors"
    config = json.loads((target / "config.json").read_text())
    if name == "no config":
        (target / "config.json").unlink()
    elif name == "config not json":
        (target / "config.json").write_text("{")
    elif name == "config not an object":
        (target / "config.json").write_text("[]")
    elif name == "tokenizer config not json":
        (target / "tokenizer_config.json").write_text("{")
    elif name == "adapter":
        (target / "config.json").rename(target / "adapter_config.json")
    elif name == "truncated weights":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif name == "empty weights":
        weights.write_bytes(b"")
    elif name == "not safetensors":
        weights.write_bytes(b"x" * 1000)
    elif name == "no weights":
        weights.unlink()
    elif name == "not a rope model":
        (target / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    elif name == "remote code":
        changed = config | {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "modeling_custom.M"}}
        (target / "config.json").write_text(json.dumps(changed))
    return target


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no config", "has no config.json"),
        ("config not json", "config.json can't be read"),
        ("config not an object", "holds no object"),
        ("tokenizer config not json", "is damaged"),
        ("adapter", "is a PEFT adapter"),
        ("truncated weights", "its header promises"),
        ("empty weights", "is cut short"),
        ("not safetensors", "is cut short"),
        ("no weights", "no weights"),
        ("not a rope model", "no rotary embedding"),
        ("remote code", "its own modelling code"),
    ],
)
def test_broken_sources(name, message, llama_folder, tmp_path):
    source = broken(llama_folder, tmp_path, name)
    with pytest.raises(CtxextError, match=message):
        ctxext.patch_checkpoint(source, tmp_path / "out", method="yarn", factor=4)
    assert [p.name for p in tmp_path.iterdir()] == ["broken"]


def test_remote_code_with_permission(llama_folder, tmp_path):
    source = broken(llama_folder, tmp_path, "remote code")
    out = ctxext.patch_checkpoint(source, tmp_path / "out", method="pi", factor=2, trust_remote_code=True).out
    assert json.loads((out / "config.json").read_text())["auto_map"]


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
        checkpoint.plan(model, "yarn", 4)


def test_options_are_checked_before_anything_is_looked_up():
    with pytest.raises(UsageError, match="did you mean 'beta_fast'"):
        checkpoint.plan("/no/such/folder", "yarn", 4, beta_fsat=1)


def test_existing_targets(llama_folder, tmp_path):
    target = tmp_path / "out"
    ctxext.patch_checkpoint(llama_folder, target, method="pi", factor=2)
    with pytest.raises(CtxextError, match="exists already"):
        ctxext.patch_checkpoint(llama_folder, target, method="yarn", factor=4)
    assert checkpoint.stored_schedule(checkpoint.read_config(target)).method == "pi"
    ctxext.patch_checkpoint(llama_folder, target, method="yarn", factor=4, force=True)
    assert checkpoint.stored_schedule(checkpoint.read_config(target)).method == "yarn"
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("work of years")
    with pytest.raises(CtxextError, match="not a model folder"):
        ctxext.patch_checkpoint(llama_folder, precious, method="pi", factor=2, force=True)
    assert (precious / "thesis.txt").read_text() == "work of years"
    with pytest.raises(CtxextError, match="is, or holds, the model to patch"):
        ctxext.patch_checkpoint(llama_folder, llama_folder, method="pi", factor=2, force=True)
    with pytest.raises(CtxextError, match="is a file"):
        ctxext.patch_checkpoint(llama_folder, precious / "thesis.txt", method="pi", factor=2, force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "precious"]


@pytest.mark.parametrize(
    ("number", "message"),
    [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "can't write to"), (errno.EIO, "could not")],
)
def test_a_failing_disk_leaves_nothing(number, message, llama_folder, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(folder.shutil, "copyfile", fail)
    with pytest.raises(CtxextError, match=message):
        ctxext.patch_checkpoint(llama_folder, tmp_path / "out", method="pi", factor=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_really_full_disk(llama_folder, tmp_path):
    disk = tmp_path / "small"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        with pytest.raises(CtxextError, match="the disk is full"):
            ctxext.patch_checkpoint(llama_folder, disk / "out", method="pi", factor=2)
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("existing", [False, True])
def test_sigkill_leaves_all_or_nothing(existing, llama_folder, tmp_path):
    """Killed while files are being brought over; the next call clears what it left."""
    target = tmp_path / "out"
    if existing:
        ctxext.patch_checkpoint(llama_folder, target, method="pi", factor=2)
    script = f"""
import time
from ctxext import checkpoint
bring = checkpoint.link_or_copy
def slow(*args, **kwargs):
    result = bring(*args, **kwargs)
    print("one", flush=True)
    time.sleep(0.5)
    return result
checkpoint.link_or_copy = slow
checkpoint.patch_checkpoint({str(llama_folder)!r}, {str(target)!r}, method="yarn", factor=4, force=True)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "one\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    if existing:
        assert checkpoint.stored_schedule(checkpoint.read_config(target)).method == "pi"
    else:
        assert not target.exists()
    assert any(p.name.startswith(".out.ctxext-new") for p in tmp_path.iterdir())
    ctxext.patch_checkpoint(llama_folder, target, method="yarn", factor=4, force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_kill_between_the_two_renames_gives_the_old_folder_back(llama_folder, tmp_path):
    target = tmp_path / "out"
    ctxext.patch_checkpoint(llama_folder, target, method="pi", factor=2)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    target.rename(tmp_path / f".out.ctxext-old-{dead.pid}")
    with pytest.raises(CtxextError, match="exists already"):
        ctxext.patch_checkpoint(llama_folder, target, method="yarn", factor=4)
    assert checkpoint.stored_schedule(checkpoint.read_config(target)).method == "pi"


def test_a_gguf_is_dequantised_once(tmp_path, monkeypatch, tokens):
    pytest.importorskip("gguf")
    source = write_gguf(tmp_path / "pico.gguf", model := pico_model())
    monkeypatch.setenv("CTXEXT_CACHE", str(tmp_path / "cache"))
    out = ctxext.patch_checkpoint(source, tmp_path / "out", method="yarn", factor=4, dtype="float32").out
    ctxext.patch(model, "yarn", 4)
    torch.testing.assert_close(logits(ctxext.load(out).eval(), tokens), logits(model, tokens), atol=1e-4, rtol=0)
    (made,) = (tmp_path / "cache" / "gguf").iterdir()
    assert (out / "model.safetensors").samefile(made / "model.safetensors")
    stamp = made.stat().st_mtime_ns
    time.sleep(0.01)
    ctxext.patch_checkpoint(source, tmp_path / "out2", method="pi", factor=2, dtype="float32")
    assert made.stat().st_mtime_ns == stamp
    with pytest.raises(UsageError, match="dtype 'int8'"):
        checkpoint.plan(source, "pi", 2, dtype="int8")
    (tmp_path / "bad.gguf").write_bytes(b"not a gguf")
    with pytest.raises(CtxextError, match="can't read"):
        checkpoint.plan(tmp_path / "bad.gguf", "pi", 2)


def test_an_estimate_needs_only_the_header_of_a_gguf(tmp_path):
    pytest.importorskip("gguf")
    from ctxext.training import estimate

    model = pico_model()
    config = estimate.find_config(str(write_gguf(tmp_path / "pico.gguf", model)))
    assert estimate.Shape(config).parameters == sum(p.numel() for p in model.parameters())
    (tmp_path / "bad.gguf").write_bytes(b"not a gguf")
    with pytest.raises(CtxextError, match=r"bad\.gguf can't be read"):
        estimate.find_config(str(tmp_path / "bad.gguf"))
    assert estimate.find_config(str(tmp_path / "none.gguf")) is None


def write_gguf(path, model):
    """A float32 GGUF of a pico Llama, with a byte-level tokenizer of its 128 tokens."""
    import gguf

    config, state = model.config, {k: v.float().numpy() for k, v in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    pieces = [chr(33 + i) if i < 94 else f"t{i}" for i in range(config.vocab_size - 2)]
    writer.add_token_list([*pieces, '!"', '"#'])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(['! "', '" #'])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def permuted(weight, heads):
        """llama.cpp rotates neighbouring pairs, transformers halves: rows are interleaved on the way out."""
        return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)

    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    names["lm_head.weight"] = "output.weight"
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for i in range(config.num_hidden_layers):
        names |= {f"model.layers.{i}.{k}.weight": f"blk.{i}.{v}.weight" for k, v in parts.items()}
    for name, tensor in state.items():
        if "q_proj" in name:
            tensor = permuted(tensor, config.num_attention_heads)
        if "k_proj" in name:
            tensor = permuted(tensor, config.num_key_value_heads)
        writer.add_tensor(names[name], tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
