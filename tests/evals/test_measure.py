"""`evaluate`, from Python: what the commands print, of a model by name or a live one; mistakes are named."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from conftest import run

import ctxext
from ctxext.errors import UsageError
from ctxext.evals import Kind, PresetName
from ctxext.evals.measure import MEASURES, evaluate
from ctxext.evals.models import TINY_TEXTS, load
from ctxext.evals.passkey_presets import PRESETS


def test_it_is_what_the_command_prints(monkeypatch, capsys):
    given = (
        "eval",
        "ppl",
        "tiny",
        "--method",
        "yarn",
        "--factor",
        2,
        "--lengths",
        "256,300",
        "--dtype",
        "float32",
    )
    code, printed, err = run(monkeypatch, capsys, *given, "--dtype", "float32", "--set", "beta_fast=16", "--json")
    assert code == 0, err
    options = {"method": "yarn", "factor": 2, "method_options": {"beta_fast": 16}}
    assert evaluate("tiny", lengths=[256, 300], dtype="float32", **options) == json.loads(printed)


def test_a_live_model_is_measured_as_it_is():
    subject = load("tiny", dtype="float32")
    ctxext.patch(subject.model, method="pi", factor=2)
    more = {"data": TINY_TEXTS[0], "lengths": [300], "crop": False}
    live = evaluate(subject.model, tokenizer=subject.tokenizer, **more)
    stored = evaluate("tiny", method="pi", factor=2, dtype="float32", **more)
    assert live["schedule"]["method"] == "pi"
    assert live["results"] == stored["results"]
    keys = evaluate(subject.model, kind="passkey", tokenizer=subject.tokenizer, lengths=[256], depths=1, trials=1)
    assert [row["depth"] for row in keys["results"]] == [0.5]
    for wrong, message in (
        ({"tokenizer": None}, "needs its tokenizer"),
        ({"tokenizer": subject.tokenizer, "method": "pi"}, "measured as it is"),
    ):
        with pytest.raises(UsageError, match=message):
            evaluate(subject.model, **more, **wrong)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "pll"}, "no evaluation 'pll'"),
        ({"kind": "passkey", "trial": 3}, "passkey has no option 'trial'"),
        ({"kind": "passkey", "data": "x.txt"}, "passkey has no option 'data'"),
        ({"method_options": {"beta_fast": 16}}, "beta_fast is an option of a method"),
        ({"dtype": "int8"}, "dtype='int8' is not one of auto"),
    ],
)
def test_mistakes(given, message):
    with pytest.raises(UsageError, match=message):
        evaluate("tiny", **given)


def test_the_names_are_those_that_there_are():
    assert set(MEASURES) == set(get_args(Kind))
    assert list(PRESETS) == list(get_args(PresetName))
