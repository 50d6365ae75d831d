"""Where things are written: however a place is spelled, the model isn't taken away, and nothing is half done."""

import errno
import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import pico_model, run
from test_checkpoint_gguf import write_gguf

import ctxext
from ctxext.errors import CtxextError
from ctxext.files import read_config
from ctxext.folders.load import stored_schedule


@pytest.fixture
def source(llama_folder, tmp_path, monkeypatch):
    """A model folder, with the folder above it the current one."""
    shutil.copytree(llama_folder, tmp_path / "source")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "source"


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


SPELLINGS = {
    "itself": "source",
    "a slash at the end": "source/",
    "a dot": "./source/.",
    "there and back": "source/../source",
    "by a link": "link",
    "by a link with a slash": "link/",
    "through a link's parent": "elsewhere/inner/../../source",
    "the folder above": ".",
    "the folder above, by its name": "source/..",
    "a link to the folder above": "up",
    "inside": "source/new",
    "inside a link": "link/new",
    "inside, not there yet": "source/new/deep",
    "inside, there and back": "elsewhere/../source/new",
    "by a link to inside": "within",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("dry", [False, True])
def test_the_source_is_not_written_over_however_it_is_spelled(
    spelling, dry, source, tmp_path, monkeypatch, capsys
):
    (tmp_path / "config.json").write_text("{}")  # even where --force could replace the folder above
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "up").symlink_to(tmp_path)
    (tmp_path / "elsewhere" / "inner").mkdir(parents=True)
    (tmp_path / "within").symlink_to(source / "new")
    before = contents(tmp_path)
    words = ["patch", source, "-m", "yarn", "-o", SPELLINGS[spelling], "--force", *(["--dry-run"] if dry else [])]
    code, _, err = run(monkeypatch, capsys, *words)
    assert code == 1
    assert "the model to patch" in err
    assert "-o" in err
    assert contents(tmp_path) == before


def test_a_link_and_its_parent_lead_where_the_system_says(source, tmp_path):
    """`way/../out` is beside what `way` links to, not beside `way`."""
    (tmp_path / "far" / "inner").mkdir(parents=True)
    (tmp_path / "way").symlink_to(tmp_path / "far" / "inner")
    ctxext.patch_checkpoint(source, "way/../out", method="yarn", factor=4)
    assert (tmp_path / "far" / "out" / "config.json").is_file()
    assert not (tmp_path / "out").exists()
    # So is the source: its copy beside the link is another folder.
    shutil.copytree(source, tmp_path / "far" / "source")
    with pytest.raises(CtxextError, match="is, or holds, the model to patch"):
        ctxext.patch_checkpoint(tmp_path / "far" / "source", "way/../source", method="yarn", factor=4, force=True)
    ctxext.patch_checkpoint(source, "way/../source", method="yarn", factor=4, force=True)
    assert stored_schedule(read_config(tmp_path / "far" / "source")).method == "yarn"
    assert "ctxext" not in read_config(source)


@pytest.mark.parametrize("out", ["new", "new/", "./new", "a/b/../new", "source-yarn/.", "gone"])
def test_spellings_that_are_right(out, source, tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "gone").symlink_to(tmp_path / "made")
    ctxext.patch_checkpoint("source/", out, method="yarn", factor=4)
    assert stored_schedule(read_config(tmp_path / out)).method == "yarn"
    assert (tmp_path / "gone").is_symlink()
    left = [p.name for p in tmp_path.rglob(".*") if "ctxext" in p.name]
    assert not left


@pytest.mark.parametrize("verb", ["patch", "export", "gguf", "merge"])
@pytest.mark.parametrize("place", ["file", "below a file", "circle", "long", "no such place"])
def test_places_that_can_not_be(place, verb, source, tmp_path, monkeypatch, capsys, adapter_of):
    pytest.importorskip("gguf")
    (tmp_path / "file").write_text("precious")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    places = {"file": "file", "below a file": "file/x", "circle": "circle", "long": "x" * 300}
    out = places.get(place, "/proc/ctxext/x")
    if verb == "gguf":
        write_gguf(tmp_path / "pico.gguf", pico_model())
    words = {
        "patch": ["patch", source, "-m", "yarn"],
        "export": ["export", source],
        "gguf": ["patch", tmp_path / "pico.gguf", "--in-gguf", "-m", "yarn"],
        "merge": ["merge", adapter_of(source)],
    }[verb]
    if place == "file" and verb in ("export", "gguf"):
        out = "source"  # a folder where a file should be
    before = contents(tmp_path)
    code, _, err = run(monkeypatch, capsys, *words, "-o", out, "--force" if place != "file" else "--json")
    assert code == 1, err
    assert "Traceback" not in err
    assert "-o" in err, err
    assert contents(tmp_path) == before


@pytest.fixture
def adapter_of(tmp_path):
    """Writes an adapter of a folder beside it."""

    def write(folder):
        pytest.importorskip("peft")
        from peft import LoraConfig, get_peft_model

        from ctxext.folders.adapter import Base, seal

        model = get_peft_model(pico_model(), LoraConfig(r=2, target_modules=["q_proj"]))
        model.save_pretrained(tmp_path / "adapter")
        seal(tmp_path / "adapter", Base.of(str(folder), folder), read_config(folder), None)
        return tmp_path / "adapter"

    return write


@pytest.mark.parametrize(
    "out", ["adapter", "adapter/", "to-adapter", "adapter/merged", "source", "source/merged", "."]
)
def test_merging_keeps_the_adapter_and_its_base(out, source, tmp_path, adapter_of):
    folder = adapter_of(source)
    (tmp_path / "to-adapter").symlink_to(folder)
    (tmp_path / "config.json").write_text("{}")
    before = contents(tmp_path)
    with pytest.raises(CtxextError, match=r"(is, or holds,|lies inside) the (adapter|base model)"):
        ctxext.merge(folder, out, force=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("out", ["models", "models/", "to-models", "."])
@pytest.mark.parametrize("verb", ["patch", "search"])
def test_a_folder_that_holds_the_gguf_is_not_replaced(out, verb, tmp_path, monkeypatch, capsys):
    """With --force it may replace a model folder, which this one looks like."""
    pytest.importorskip("gguf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CTXEXT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "models").mkdir()
    (tmp_path / "to-models").symlink_to(tmp_path / "models")
    file = write_gguf(tmp_path / "models" / "pico.gguf", pico_model())
    for folder in (tmp_path, tmp_path / "models"):
        (folder / "config.json").write_text("{}")
    before = file.read_bytes()
    words = ["-m", "yarn"] if verb == "patch" else ["--data", "tiny"]
    code, _, err = run(monkeypatch, capsys, verb, file, *words, "-o", out, "--force")
    assert code == 1
    assert "is, or holds, the model to patch" in err
    assert file.read_bytes() == before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer_config.json"])
def test_an_export_takes_no_file_of_the_model_away(name, source, tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "link").symlink_to(source / name)
    before = contents(source)
    for out in (f"source/{name}", f"source/../source/{name}", "link"):
        with pytest.raises(CtxextError, match="a part of the model"):
            ctxext.export(source, out, force=True)
    assert contents(source) == before
    ctxext.export(source, "source/new.gguf")
    ctxext.export(source, "source/new.gguf", force=True)


@pytest.mark.parametrize("spelling", ["pico.gguf", "./pico.gguf", "link.gguf", "hard.gguf"])
def test_a_gguf_is_not_written_over_by_its_export_or_patch(spelling, tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CTXEXT_CACHE", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "pico.gguf", pico_model())
    (tmp_path / "link.gguf").symlink_to(file)
    os.link(file, tmp_path / "hard.gguf")
    before = file.read_bytes()
    from ctxext.folders.gguf_patch import patch_gguf

    with pytest.raises(CtxextError, match="is the file to patch"):
        patch_gguf(file, spelling, method="yarn", factor=4, force=True)
    if spelling != "hard.gguf":  # another name of the same bytes, which a new file takes
        with pytest.raises(CtxextError, match="a part of the model"):
            ctxext.export(file, spelling, force=True)
    assert file.read_bytes() == before


def test_a_source_whose_config_is_a_link_to_nothing(source, tmp_path):
    (source / "config.json").unlink()
    (source / "config.json").symlink_to(tmp_path / "gone")
    with pytest.raises(CtxextError, match=r"config\.json is a link to nothing"):
        ctxext.patch_checkpoint(source, tmp_path / "out", method="yarn", factor=4)


FULL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
from ctxext.cli.app import main
sys.argv = ["ctxext", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("verb", ["patch", "merge", "export", "gguf"])
def test_a_disk_that_takes_no_more(verb, source, tmp_path, adapter_of):
    """Files can't grow past 40 kB, as on a full disk; the weights are larger. Whatever library writes them."""
    pytest.importorskip("gguf")
    file = write_gguf(tmp_path / "pico.gguf", pico_model())
    words = {
        "patch": ["patch", source, "-m", "yarn", "--copy", "-o", "out"],
        "merge": ["merge", adapter_of(source), "-o", "out"],
        "export": ["export", source, "-o", "out.gguf"],
        "gguf": ["patch", file, "-m", "yarn", "-o", "out"],
    }[verb]
    before = contents(tmp_path)
    environment = {**os.environ, "CTXEXT_CACHE": str(tmp_path / "cache")}
    line = [sys.executable, "-c", FULL, *map(str, words)]
    ran = subprocess.run(line, env=environment, capture_output=True, encoding="utf-8", cwd=tmp_path)
    assert ran.returncode == 1, ran.stderr
    assert "Traceback" not in ran.stderr
    assert "could not write" in ran.stderr or "is full" in ran.stderr, ran.stderr
    assert contents(tmp_path) == before
    assert not [p for p in tmp_path.rglob("*out*") if "peft" not in str(p)]


@pytest.mark.parametrize(("number", "said"), [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "can't write to")])
def test_the_writer_of_safetensors_says_it_in_its_own_words(
    number, said, source, tmp_path, adapter_of, monkeypatch
):
    from safetensors import SafetensorError
    from transformers import modeling_utils

    def fail(*_, **__):
        raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})")

    folder = adapter_of(source)
    monkeypatch.setattr(modeling_utils, "safe_save_file", fail)
    with pytest.raises(CtxextError, match=said):
        ctxext.merge(folder, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_what_is_asked_for_is_checked_before_work(source, tmp_path, adapter_of, monkeypatch):
    """A merge into a folder that is there already fails before the base is loaded."""
    from ctxext.folders import merge as merging

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("work of years")
    monkeypatch.setattr(merging, "base_model", lambda *_, **__: pytest.fail("loaded"))
    for force in (False, True):
        with pytest.raises(CtxextError, match=r"exists already|not a model folder"):
            ctxext.merge(adapter_of(source), tmp_path / "out", force=force)
    assert json.loads((source / "config.json").read_text())["model_type"] == "llama"
    assert (tmp_path / "out" / "thesis.txt").read_text() == "work of years"
