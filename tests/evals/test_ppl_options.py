"""`ctxext eval ppl` refuses what can't be before anything is measured, and loses nothing that was."""

from __future__ import annotations

import json

import pytest
from conftest import run
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import LlamaForCausalLM, LlamaModel

ARGS = ("eval", "ppl", "tiny", "--lengths", "256,512", "--dtype", "float32")


@pytest.fixture
def forwards():
    """Every forward of a Llama while the test runs."""
    seen = []
    hook = register_module_forward_pre_hook(
        lambda module, args: seen.append(module) if isinstance(module, LlamaModel | LlamaForCausalLM) else None
    )
    yield seen
    hook.remove()


@pytest.fixture
def earlier(monkeypatch, capsys, tmp_path):
    path = tmp_path / "earlier.json"
    code, _, err = run(monkeypatch, capsys, *ARGS, "--no-crop", "-o", path)
    assert code == 0, err
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--stride", 64, "--bucket", 64), "--stride has no --bucket"),
        (("--stride", 64, "--prefill", 64), "--stride has no --prefill"),
        (("--stride", 64, "--crop"), "--stride has no --crop"),
        (("--stride", 64, "--crop-stride", 8), "--stride has no --crop-stride"),
        (("--stride", 64, "--against", "x.json"), "--stride has no --against"),
        (("--stride", 64, "--aggregation", "mean"), "'mean' is not one of 'token', 'window'"),
        (("--aggregation", "token"), "--aggregation needs --stride"),
        (("--no-crop", "--crop-stride", 8), "--crop-stride needs --crop"),
        (("--stride", 0), "--stride"),
        (("--bucket", 0), "--bucket"),
        (("--crop-stride", 0), "--crop-stride"),
    ],
)
def test_options_that_exclude_each_other(options, message, monkeypatch, capsys):
    """The model isn't even looked for."""
    code, out, err = run(monkeypatch, capsys, "eval", "ppl", "/no/such", *options)
    assert (code, out) == (2, "")
    assert message in " ".join(err.replace("│", " ").split())


def test_an_earlier_result_is_read_before_the_model(monkeypatch, capsys, tmp_path):
    args = ("eval", "ppl", "/no/such", "--against", tmp_path / "none.json")
    code, _, err = run(monkeypatch, capsys, *args)
    assert code == 1
    assert "none.json doesn't exist" in err
    (tmp_path / "none.json").write_text('{"results": []}')
    code, _, err = run(monkeypatch, capsys, *args)
    assert code == 2
    assert "needs two documents of `ctxext eval ppl`" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--documents", 2), "different texts"),
        (("--lengths", "256,768"), "the lengths"),
        (("--bucket", 128), "the buckets"),
    ],
)
def test_an_earlier_result_of_other_things_is_refused_before_measuring(
    options, message, earlier, forwards, monkeypatch, capsys
):
    forwards.clear()
    code, out, err = run(monkeypatch, capsys, *ARGS, "--against", earlier, *options)
    assert (code, out, forwards) == (2, "", [])
    assert message in err


def test_a_control_that_can_not_be_is_refused_before_measuring(forwards, monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys, *ARGS, "--crop-stride", 256)
    assert (code, out, forwards) == (2, "", [])
    assert "stride must be from 1 to 255" in err


def test_what_was_measured_is_kept_if_it_can_not_be_paired(earlier, monkeypatch, capsys, tmp_path):
    damaged = json.loads(earlier.read_text())
    damaged["per_document"] *= 2
    earlier.write_text(json.dumps(damaged))
    out = tmp_path / "out.json"
    code, _, err = run(monkeypatch, capsys, *ARGS, "--no-crop", "--against", earlier, "-o", out)
    assert code == 2
    assert "differ" in err
    assert json.loads(out.read_text())["results"] == damaged["results"]
