"""`ctxext eval ruler`, `longppl`, `lm-eval`, and the newer options of `ppl` and `passkey`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from test_eval_cli import run

from ctxext.evals.models import TINY_TEXTS
from ctxext.text import load_texts

TINY = ("--dtype", "float32", "--json")


def test_ruler(monkeypatch, capsys, tmp_path):
    args = (
        "eval",
        "ruler",
        "tiny",
        "--lengths",
        "256,512",
        "--tasks",
        "fwe",
        "--samples",
        1,
        "-o",
        tmp_path / "r.json",
    )
    code, out, err = run(monkeypatch, capsys, *args, *TINY)
    assert code == 0, err
    document = json.loads(out)
    assert document == json.loads((tmp_path / "r.json").read_text())
    assert [(row["task"], row["length"]) for row in document["results"]] == [("fwe", 256), ("fwe", 512)]
    assert document["effective_length"] is None
    assert len(document["control"]["rows"]) == 2
    code, out, _ = run(monkeypatch, capsys, *args, "--dtype", "float32")
    assert "effective length none" in out


def test_ruler_by_default(monkeypatch, capsys):
    """The default lengths begin below what the tasks need: those are left out, and said so."""
    code, out, err = run(monkeypatch, capsys, "eval", "ruler", "tiny", "--samples", 1, "--no-crop", *TINY)
    assert code == 0, err
    document = json.loads(out)
    assert [row["length"] for row in document["lengths"]] == [512]
    assert "left out, as prompts don't fit: 128, 256, vt, cwe" in " ".join(err.split())
    code, out, err = run(monkeypatch, capsys, "eval", "ruler", "tiny", "--tasks", "vt", *TINY)
    assert (code, out) == (2, "")
    assert "vt needs at least" in err


def test_longppl(monkeypatch, capsys):
    args = ("eval", "longppl", "tiny", "--length", 400, "--documents", 1, "--short", 64)
    code, out, err = run(monkeypatch, capsys, *args, *TINY)
    assert code == 0, err
    document = json.loads(out)
    assert document["results"][0]["tokens"] == 399
    assert document["settings"]["judge"] == "itself"
    assert document["gains"][0]["gain"] == pytest.approx(0, abs=1e-6)
    code, out, err = run(monkeypatch, capsys, *args, "--judge", "tiny", "--dtype", "float32")
    assert code == 0, err
    assert "context gain" in out


def test_lm_eval(monkeypatch, capsys, tmp_path):
    pytest.importorskip("lm_eval")
    args = ("eval", "lm-eval", "tiny", "--method", "yarn", "--tasks", "ctxext_passkey", "--lengths", "512")
    args = (*args, "--metadata", '{"trials": 1, "depths": 2}', "-o", tmp_path)
    code, out, err = run(monkeypatch, capsys, *args, *TINY)
    assert code == 0, err
    assert "acc_512,none" in json.loads(out)["results"]["ctxext_passkey"]
    assert list(tmp_path.rglob("results_*.json"))
    code, out, err = run(monkeypatch, capsys, *args[:-4], "--metadata", "[1]", *TINY)
    assert (code, out) == (2, "")
    assert "JSON object" in err


def test_ppl_in_pieces_and_against_an_earlier_run(monkeypatch, capsys, tmp_path):
    args = ("eval", "ppl", "tiny", "--lengths", "256,512", "--documents", 2, "--no-crop")
    code, whole, _ = run(monkeypatch, capsys, *args, *TINY, "-o", tmp_path / "plain.json")
    assert code == 0
    code, pieces, err = run(monkeypatch, capsys, *args, *TINY, "--prefill", 100)
    assert code == 0, err
    for one, other in zip(json.loads(whole)["results"], json.loads(pieces)["results"], strict=True):
        assert one["nll"] == pytest.approx(other["nll"], rel=1e-5)
    yarn = ("--method", "yarn", "--factor", 2, "--against", tmp_path / "plain.json")
    code, out, err = run(monkeypatch, capsys, *args, *TINY, *yarn)
    assert code == 0, err
    document = json.loads(out)
    last = document["against"]["buckets"][-1]
    assert last["low"] <= last["difference"] <= last["high"] < 0
    code, _, err = run(monkeypatch, capsys, *args, "--dtype", "float32", *yarn)
    assert "against tiny unpatched" in err
    other = ("eval", "ppl", "tiny", "--lengths", "256,512", "--documents", 1, "--no-crop", *TINY)
    code, _, err = run(monkeypatch, capsys, *other, "--against", tmp_path / "plain.json")
    assert code == 2
    assert "different texts" in err


def test_passkey_options(monkeypatch, capsys, tmp_path):
    args = ("eval", "passkey", "tiny", "--lengths", "512", "--trials", 1, "--depths", 2, "--no-crop", *TINY)
    haystack = ("--haystack", TINY_TEXTS[0], "--distractors", 1, "--resume", tmp_path / "cells.jsonl")
    code, out, err = run(monkeypatch, capsys, *args, *haystack)
    assert code == 0, err
    assert "margin" in json.loads(out)["lengths"][0]
    assert len((tmp_path / "cells.jsonl").read_text().splitlines()) == 2
    code, out, err = run(monkeypatch, capsys, *args, "--preset", "yarn")
    assert code == 0, err
    assert 480 < json.loads(out)["lengths"][0]["tokens"] <= 520
    code, out, err = run(monkeypatch, capsys, *args, "--preset", "yran")
    assert (code, out) == (2, "")
    assert "'yran' is not one of 'landmark', 'yarn'" in " ".join(err.replace("│", " ").split())


def test_names_of_datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(path, split):
        asked.append((path, split))
        if path == "gone":
            raise FileNotFoundError("no such data set")
        return datasets.Dataset.from_list([{"text": "one", "body": "two"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [text.text for text in load_texts("hf:org/name")] == ["one"]
    assert [text.text for text in load_texts(["hf:org/name:train:body"])] == ["two"]
    assert asked == [("org/name", "test"), ("org/name", "train")]
    from ctxext.errors import CtxextError

    with pytest.raises(CtxextError, match="no column") as error:
        load_texts("hf:org/name:train:txt")
    assert "body" in error.value.hint
    with pytest.raises(CtxextError, match="can't load 'gone'"):
        load_texts("hf:gone")


def test_help_imports_nothing_heavy():
    code = "import sys, ctxext.cli.evaluate, ctxext.cli.compare; "
    code += "print(sorted({'torch', 'lm_eval'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
