"""What tells one model's figures from another's: its weights, how it is run, and the length it was trained on."""

from __future__ import annotations

import json
import shutil

import pytest
from conftest import run
from safetensors.torch import load_file, save_file

import ctxext
from ctxext.evals.compare import cells as compare
from ctxext.evals.models import TINY_TEXTS, load
from ctxext.folders.source import TINY
from ctxext.text import documents

FLOAT = ("--dtype", "float32", "--json")


def copy_of_tiny(folder, **changes):
    """tiny in `folder`, with keys of its config.json changed (None: left out)."""
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


@pytest.fixture
def namesakes(tmp_path):
    """Two folders called `model` with other weights."""
    one, other = (copy_of_tiny(tmp_path / name / "model") for name in "ab")
    (weights,) = other.glob("*.safetensors")
    save_file({k: v.flip(-1).contiguous() for k, v in load_file(weights).items()}, weights, {"format": "pt"})
    return one, other


def ppl_cells(subject, folder, said):
    docs = documents(TINY_TEXTS, subject.tokenizer, 512, 1)
    cells = compare.Cells(subject, folder, on_cell=said.append)
    return cells.ppl([compare.UNPATCHED, compare.Variant("pi x2", "pi", 2)], docs, [512], bucket=256, bos=None)


def test_cells_are_not_those_of_another_model_of_the_same_name(namesakes, tmp_path):
    said = []
    found = [ppl_cells(load(folder, dtype="float32"), tmp_path / "cells", said) for folder in namesakes]
    assert said == 2 * ["ppl, crop control", "ppl, unpatched", "ppl, pi x2"]
    assert found[0]["unpatched"]["results"] != found[1]["unpatched"]["results"]
    ppl_cells(load(namesakes[0], dtype="float32"), tmp_path / "cells", said)
    assert len(said) == 6
    for other in ({"attention": "eager"}, {"dtype": "bfloat16"}, {"trained_length": 128}):
        ppl_cells(load(namesakes[0], **{"dtype": "float32", **other}), tmp_path / "cells", said)
        assert said[-3:] == said[:3], other
    assert len(said) == 15


def test_a_resumed_file_is_not_taken_for_another_model(namesakes, tmp_path, monkeypatch, capsys):
    cells = tmp_path / "cells.jsonl"
    args = ("--lengths", 256, "--depths", 1, "--trials", 1, "--resume", cells, *FLOAT)
    shown = [run(monkeypatch, capsys, "eval", "passkey", folder, *args)[1] for folder in namesakes]
    first, second = (json.loads(out)["results"][0]["logprob"] for out in shown)
    assert first != second
    assert len(cells.read_text().splitlines()) == 2
    run(monkeypatch, capsys, "eval", "passkey", namesakes[0], *args)
    assert len(cells.read_text().splitlines()) == 2, "the same model goes on from its cells"


def test_the_trained_length_asked_for_holds_for_every_cell(tmp_path):
    subject = load("tiny", dtype="float32", trained_length=128)
    found = ppl_cells(subject, tmp_path, [])
    assert {label: cell["settings"]["trained_length"] for label, cell in found.items()} == {
        "crop control": 128,
        "unpatched": 128,
        "pi x2": 128,
    }
    assert found["pi x2"]["schedule"]["rope"]["trained_length"] == 128
    subject.patch("yarn", 2)
    assert subject.schedule == ctxext.patch(load("tiny").model, "yarn", 2, trained_length=128)
    subject.unpatch()
    assert subject.trained_length == 128
