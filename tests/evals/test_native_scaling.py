"""A scaling that the weights were trained with (Llama 3.1 and 3.2) is their rope, not a patch to take off."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import run
from test_subjects import copy_of_tiny

import ctxext
from ctxext.config.read import read_rope
from ctxext.evals.compare import run as comparison
from ctxext.evals.compare.suite import Suite
from ctxext.evals.models import TINY_TEXTS, load

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ARGS = ("--data", TINY_TEXTS[0], "--dtype", "float32", "--json")


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """tiny as if it had been trained as Llama 3.1 was."""
    changes = {"rope_parameters": LLAMA3, "rope_theta": None, "rope_scaling": None}
    return copy_of_tiny(tmp_path_factory.mktemp("native") / "l3", **changes, max_position_embeddings=1024)


def logits(model):
    with torch.no_grad():
        return model(torch.arange(3, 103)[None], use_cache=False).logits


def test_it_is_the_model_as_trained(native):
    subject = load(native, dtype="float32")
    whole = logits(subject.model)
    assert (subject.trained_length, subject.schedule.max_length, subject.description()) == (1024, 1024, None)
    with subject.as_trained():
        assert torch.equal(logits(subject.model), whole)
    for existing in ("compose", "replace"):
        subject = load(native, method="yarn", factor=4, existing=existing, dtype="float32")
        assert not torch.allclose(logits(subject.model), whole, atol=1e-3)
        assert subject.trained_length == 1024
        with subject.as_trained():
            assert torch.allclose(logits(subject.model), whole, atol=1e-4)
    assert load(native, trained_length=128).trained_length == 128


def test_what_is_composed_with_does_not_depend_on_the_length_given():
    """The frequencies are transformers' own, from the original length in the config."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=1024, rope_parameters=LLAMA3
    )
    rope = read_rope(config.to_dict(), trained_length=512, existing="compose")
    assert rope.trained_length == 512
    assert rope.inv_freq() == pytest.approx(LlamaRotaryEmbedding(config).inv_freq.tolist(), rel=1e-6)


def test_the_control_reads_with_it(native, monkeypatch, capsys):
    args = ("eval", "ppl", native, "--lengths", "128,256", "--trained-length", 128, *ARGS)
    code, out, err = run(monkeypatch, capsys, *args)
    assert code == 0, err
    document = json.loads(out)
    assert document["schedule"] is None
    assert document["control"]["rows"][0]["ppl"] == pytest.approx(document["results"][0]["ppl"], rel=1e-5)


def test_the_harness_reads_as_much_as_it_was_trained_on(native, tmp_path):
    lm_eval_model = pytest.importorskip("ctxext.evals.lm_eval.model", exc_type=ImportError)
    from lm_eval.models.huggingface import HFLM

    own = lm_eval_model.CtxextLM(str(native), dtype="float32")
    assert own.max_length == HFLM(pretrained=own.model, tokenizer=own.tokenizer).max_length == 1024
    # A folder that ctxext scaled by the method of that name is a patched one still.
    patched = ctxext.patch_checkpoint("tiny", tmp_path / "out", method="llama3", factor=2).out
    subject = load(patched)
    assert (subject.schedule.method, subject.trained_length, subject.schedule.max_length) == ("llama3", 256, 512)


@pytest.mark.parametrize("patched", [False, True])
def test_compare_refuses_a_scaled_model_before_it_measures(native, patched, monkeypatch, capsys, tmp_path):
    folder = ctxext.patch_checkpoint("tiny", tmp_path / "pi", method="pi", factor=2).out if patched else native
    args = ("compare", folder, "--methods", "yarn", "--factor", 2, "--lengths", "256,512", "-o", tmp_path / "r")
    code, out, err = run(monkeypatch, capsys, *args, *ARGS)
    assert (code, out) == (1, "")
    assert "already scaled" in err
    assert "measuring" not in err
    assert not (tmp_path / "r" / "cells").exists()


def test_compare_starts_from_what_existing_says(monkeypatch, capsys, tmp_path):
    folder = ctxext.patch_checkpoint("tiny", tmp_path / "pi", method="pi", factor=2).out
    suite = tmp_path / "s.yaml"
    suite.write_text("documents: 1\n")
    args = ("compare", folder, "--methods", "yarn", "--factor", 2, "--suite", suite, *ARGS)
    found = {}
    for existing, lengths in (("replace", "256,512"), ("compose", "512,1024")):
        code, out, err = run(
            *(monkeypatch, capsys, *args, "--lengths", lengths, "-o", tmp_path / "r", "--existing", existing)
        )
        assert code == 0, err
        answer = json.loads(out)
        found[existing] = {(row["label"], row["length"]): row["ppl"] for row in answer["rows"]}, answer
    replaced, composed = found["replace"], found["compose"]
    assert (replaced[1]["trained_length"], composed[1]["trained_length"]) == (256, 512)
    plain = load("tiny", dtype="float32")
    report = comparison.run(
        *(plain, comparison.parse_methods("yarn", 2), [256, 512], Suite(documents=1), [TINY_TEXTS[0]]),
        tmp_path / "plain",
    )
    for row in report["rows"]:
        assert replaced[0][row["label"], row["length"]] == pytest.approx(row["ppl"], rel=1e-4)
    _, out, _ = run(monkeypatch, capsys, "eval", "ppl", folder, "--lengths", "512,1024", "--bucket", 512, *ARGS)
    as_it_is = {row["end"]: row["ppl"] for row in json.loads(out)["buckets"]}
    assert {n: composed[0]["unpatched", n] for n in as_it_is} == pytest.approx(as_it_is, rel=1e-4)
