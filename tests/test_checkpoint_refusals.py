"""Folders that are not written: broken sources, targets in the way, full disks; and whole after a kill."""

import errno
import json
import os
import signal
import subprocess
import sys

import pytest

import ctxext
from ctxext import files as folder
from ctxext.errors import CtxextError
from ctxext.files import read_config
from ctxext.folders.load import stored_schedule


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


def test_existing_targets(llama_folder, tmp_path):
    target = tmp_path / "out"
    ctxext.patch_checkpoint(llama_folder, target, method="pi", factor=2)
    with pytest.raises(CtxextError, match="exists already"):
        ctxext.patch_checkpoint(llama_folder, target, method="yarn", factor=4)
    assert stored_schedule(read_config(target)).method == "pi"
    ctxext.patch_checkpoint(llama_folder, target, method="yarn", factor=4, force=True)
    assert stored_schedule(read_config(target)).method == "yarn"
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
from ctxext.folders import patch as checkpoint
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
        assert stored_schedule(read_config(target)).method == "pi"
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
    assert stored_schedule(read_config(target)).method == "pi"


@pytest.mark.parametrize("existing", ["replace", "compose"])
def test_layers_that_were_stopped_can_not_be_started_again(existing, llama_folder, tmp_path):
    """config.json says in SmolLM3's words which layers rotate, and not what it said before."""
    nope = ctxext.patch_checkpoint(llama_folder, tmp_path / "nope", method="nope", factor=2, every=2).out
    with pytest.raises(CtxextError):
        ctxext.patch_checkpoint(nope, tmp_path / "pi", method="pi", factor=2, existing=existing)
    assert not (tmp_path / "pi").exists()


@pytest.mark.parametrize("method", ["dynamic_ntk", "self_extend", "alibi", "t5_bias"])
@pytest.mark.parametrize("told", [True, False])
def test_what_no_live_model_could_run_is_not_written(method, told, tmp_path):
    """Layers with windows, said in config.json or left to the family's class (older Gemma 2 folders)."""
    from conftest import pico_model

    source = tmp_path / "gemma"
    pico_model("gemma2", sliding_window=16, query_pre_attn_scalar=16).save_pretrained(source)
    if not told:
        config = json.loads((source / "config.json").read_text())
        del config["layer_types"]
        (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(CtxextError, match="needs full attention in every layer"):
        ctxext.patch_checkpoint(source, tmp_path / "out", method=method, factor=4)
    assert not (tmp_path / "out").exists()
    ctxext.patch_checkpoint(source, tmp_path / "out", method="yarn", factor=4)


def test_links_in_a_source_are_followed(llama_folder, tmp_path):
    """Linked files and folders come along, a circle of links ends, and a link to nothing is told of."""
    source, elsewhere = tmp_path / "source", tmp_path / "elsewhere"
    source.mkdir()
    elsewhere.mkdir()
    (elsewhere / "notes.txt").write_text("x")
    (elsewhere / "round").symlink_to(source)
    for path in llama_folder.iterdir():
        (source / path.name).symlink_to(path)
    (source / "more").symlink_to(elsewhere)
    (source / "tokenizer.model").symlink_to(tmp_path / "gone")
    with pytest.warns(UserWarning, match="tokenizer.model is a link to nothing"):
        out = ctxext.patch_checkpoint(source, tmp_path / "out", method="pi", factor=2).out
    assert (out / "more" / "notes.txt").read_text() == "x"
    assert not (out / "tokenizer.model").exists()
    assert not (out / "more" / "round" / "config.json").exists()
    assert stored_schedule(read_config(out)).method == "pi"


def test_a_target_that_is_a_link_stays_one(llama_folder, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    for method in ("pi", "yarn"):
        ctxext.patch_checkpoint(llama_folder, tmp_path / "out", method=method, factor=2, force=True)
        assert (tmp_path / "out").is_symlink()
        assert stored_schedule(read_config(tmp_path / "disk")).method == method
    assert {p.name for p in tmp_path.iterdir()} == {"disk", "out"}


def test_a_target_inside_the_source(llama_folder, tmp_path):
    import shutil

    source = tmp_path / "source"
    shutil.copytree(llama_folder, source)
    with pytest.raises(CtxextError, match="lies inside the model to patch"):
        ctxext.patch_checkpoint(source, source / "yarn", method="yarn", factor=4)
    assert not (source / "yarn").exists()
