"""Models from the hub: which revision is taken, and what is done about a snapshot that isn't whole.

The hub is a local one: huggingface_hub's cache is filled by hand, and its download is replaced by a copy.
"""

import shutil

import huggingface_hub
import pytest
import torch
from conftest import logits
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import ctxext
from ctxext.errors import CtxextError
from ctxext.folders.source import TINY, resolve

IDS = torch.arange(3, 40)[None]
REVISIONS = {"main": "a" * 40, "v2": "b" * 40}


def snapshot(cache, repo, revision, keep=None):
    """One revision in the cache, or only some of its files. Weights of v2 are twice those of main."""
    root = cache / f"models--{repo.replace('/', '--')}"
    (root / "refs").mkdir(parents=True, exist_ok=True)
    (root / "refs" / revision).write_text(REVISIONS[revision])
    out = root / "snapshots" / REVISIONS[revision]
    shutil.copytree(TINY, out, ignore=lambda _, names: [n for n in names if keep and n not in keep])
    if revision == "v2":
        weights = {name: 2 * value for name, value in load_file(out / "model.safetensors").items()}
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def downloads(cache, tmp_path, monkeypatch):
    """The options of every download; a download brings what the folder `there` holds, or else `tiny`."""
    asked, real, there = [], huggingface_hub.snapshot_download, tmp_path / "there"

    def download(repo, **options):
        if not options.get("local_files_only"):
            asked.append(options)
            found = real(repo, **{**options, "local_files_only": True})
            shutil.copytree(there if there.exists() else TINY, found, dirs_exist_ok=True)
        return real(repo, **{**options, "local_files_only": True})

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


def test_the_revision_that_was_asked_for(cache, tmp_path):
    """As transformers loads it; the cache may be given too."""
    other = tmp_path / "other"
    for place in (cache, other):
        snapshot(place, "org/model", "main")
    snapshot(other, "org/model", "v2")
    theirs = AutoModelForCausalLM.from_pretrained("org/model", revision="v2", cache_dir=other)
    plain = AutoModelForCausalLM.from_pretrained("org/model", cache_dir=other)
    model = ctxext.load("org/model", revision="v2", cache_dir=other)
    assert torch.equal(logits(model, IDS), logits(theirs, IDS))
    assert not torch.equal(logits(model, IDS), logits(plain, IDS))
    assert torch.equal(logits(ctxext.load("org/model"), IDS), logits(plain, IDS))
    with pytest.raises(CtxextError, match=r"no folder 'org/model' here.*with a revision v2"):
        ctxext.load("org/model", revision="v2")


def test_a_download_is_told_what_load_was(cache, downloads):
    snapshot(cache, "org/model", "main", keep=["config.json"])
    options = {"token": "t", "revision": "main"}
    ctxext.load("org/model", **options)
    assert downloads == [options]
    ctxext.load("org/model", **options)
    assert len(downloads) == 1
    ctxext.load("org/model", force_download=True)
    assert downloads[1:] == [{"force_download": True}]


@pytest.mark.parametrize("lacks", ["weights", "a shard"])
def test_a_partly_cached_model_is_completed(lacks, cache, downloads, tmp_path):
    if lacks == "weights":
        snapshot(cache, "org/model", "main", keep=["config.json", "tokenizer.json"])
    else:
        AutoModelForCausalLM.from_pretrained(TINY).save_pretrained(tmp_path / "there", max_shard_size="1MB")
        found = snapshot(cache, "org/model", "main", keep=["config.json"])
        shutil.copytree(tmp_path / "there", found, dirs_exist_ok=True)
        next(found.glob("model-00002*")).unlink()
    ctxext.patch_checkpoint("org/model", tmp_path / "out", method="yarn", factor=2)
    assert len(downloads) == 1


def test_a_partly_cached_model_without_a_network(cache, tmp_path, monkeypatch):
    """What config.json alone can tell still works, the rest says what is missing."""
    found = snapshot(cache, "org/model", "main", keep=["config.json"])
    with pytest.warns(ctxext.errors.CtxextWarning, match="only a part of org/model"):
        assert resolve("org/model") == found
    for use in (ctxext.load, lambda model: ctxext.patch_checkpoint(model, tmp_path / "x", method="pi", factor=2)):
        with (
            pytest.warns(ctxext.errors.CtxextWarning, match="only a part of org/model"),
            pytest.raises(CtxextError, match="no weights"),
        ):
            use("org/model")
    with pytest.raises(CtxextError, match="no weights"):
        ctxext.load("org/model", local_files_only=True)
