"""Result documents and their files."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ctxext.errors import CtxextError, UsageError
from ctxext.evals import results
from ctxext.evals.results import environment, result_document, resume_jsonl
from ctxext.files import append_jsonl, dumps, read_json, read_jsonl, write_json


def test_a_document_says_what_made_it():
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    rows = [{"length": 8, "tokens": 7, "nll": 2.0, "ppl": math.exp(2.0)}]
    document = result_document(
        "tiny", {"method": "yarn"}, {"seed": 3}, rows, model=model, data_sha256="ab", buckets=[{"start": 0}]
    )
    assert list(document) == ["model", "schedule", "settings", "results", "buckets"]
    settings = document["settings"]
    assert settings["seed"] == 3
    assert settings["data_sha256"] == "ab"
    assert settings["dtype"] == "bfloat16"
    assert settings["attention"] == "sdpa"
    assert settings["architecture"] == "LlamaForCausalLM"
    assert settings["torch"].startswith(torch.__version__.split("+")[0])
    assert {"ctxext", "transformers", "commit", "device"} <= set(settings)
    assert json.loads(dumps(document)) == document


def test_the_commit_is_this_source_trees_or_none(tmp_path, monkeypatch):
    def git(*args):
        subprocess.run(
            ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(tmp_path), *args],
            check=True,
            capture_output=True,
        )

    try:
        git("init")
    except OSError:
        pytest.skip("git isn't installed")
    monkeypatch.setattr(results, "__file__", str(tmp_path / "results.py"))
    (tmp_path / "results.py").write_text("1")
    # In a repository, but not part of it: an installed copy in somebody's project.
    assert results.commit() is None
    git("add", "results.py")
    git("commit", "-m", "x")
    head = results.commit()
    assert len(head) == 40
    (tmp_path / "results.py").write_text("2")
    assert results.commit() == f"{head}-dirty"
    monkeypatch.setenv("PATH", "")
    assert results.commit() is None
    assert environment()["commit"] is None


def test_json_is_strict():
    assert json.loads(dumps({"a": math.inf, "b": [math.nan, 1.5], 3: (True, None)})) == {
        "a": None,
        "b": [None, 1.5],
        "3": [True, None],
    }


def test_writing_is_atomic(tmp_path, monkeypatch):
    path = write_json(tmp_path / "deep" / "result.json", {"a": 1})
    assert read_json(path) == {"a": 1}
    assert path.read_text().endswith("}\n")

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_json(path, {"a": 2})
    assert read_json(path) == {"a": 1}
    assert [entry.name for entry in path.parent.iterdir()] == ["result.json"]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_files_get_the_usual_permissions(tmp_path):
    mask = os.umask(0o022)
    try:
        assert write_json(tmp_path / "a.json", {}).stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(mask)


def test_jsonl_rows_append_and_a_torn_last_line_is_dropped(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_jsonl(path, {"n": 1, "text": "line\nbreak"})
    append_jsonl(path, {"n": 2})
    assert read_jsonl(path) == [{"n": 1, "text": "line\nbreak"}, {"n": 2}]
    with path.open("a") as file:
        file.write('{"n": 3')
    assert [row["n"] for row in read_jsonl(path)] == [1, 2]


def test_reading_errors_name_the_file(tmp_path):
    with pytest.raises(CtxextError, match=r"none\.json doesn't exist"):
        read_json(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(CtxextError, match=r"bad\.json isn't a JSON document"):
        read_json(tmp_path / "bad.json")


@pytest.mark.parametrize(
    "content",
    [
        "a precious text without a newline",
        "a precious text\nof two lines",
        '{"text": "of another kind"}\n',
        '{"settings": "a"}\n{"text": "torn',
        '{"settings": {}}\n',
        "[1, 2]\n",
        "12\n",
    ],
)
def test_only_files_of_cells_are_gone_on_with(tmp_path, content):
    path = tmp_path / "mine.txt"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"mine\.txt isn't a file of finished cells"):
        resume_jsonl(path)
    assert path.read_text() == content


def test_a_torn_last_line_is_cut_off_a_file_of_cells(tmp_path):
    path = tmp_path / "cells.jsonl"
    whole = '{"settings": "a", "outcomes": []}\n'
    for torn in ("", '{"settings": "a", "outc', '{"set', "{"):
        path.write_text(whole + torn)
        assert resume_jsonl(path) == [{"settings": "a", "outcomes": []}]
        assert path.read_text() == whole
    path.write_text('{"settings": "a", "ou')
    assert resume_jsonl(path) == []
    assert path.read_text() == ""
    path.write_bytes(b"")
    assert resume_jsonl(path) == resume_jsonl(tmp_path / "none") == []
