"""Encodings as plain data: through JSON and back, and which values, combinations and models are refused."""

import copy
import json

import pytest
import torch
from conftest import logits, pico_model

import ctxext
from ctxext import methods
from ctxext.errors import CtxextError, UsageError
from ctxext.methods.alibi import Alibi
from ctxext.methods.nope import UnrotatedLayers
from ctxext.methods.self_extend import SelfExtend
from ctxext.methods.sinusoidal import Sinusoids
from ctxext.methods.t5_bias import T5Bias
from ctxext.rope import Rope, Schedule
from ctxext.rope.encodings import Encoding

ROPE = Rope(1e4, 32, 64)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("alibi", {}),
        ("t5_bias", {"buckets": 16, "max_distance": 77, "start": "alibi"}),
        ("sinusoidal", {"base": 12345.678, "scale": 0.1}),
        ("nope", {"layers": [5, 1, 1]}),
        ("nope", {"every": 4}),
        ("drope", {"temperature": 0.1}),
        ("self_extend", {"window": 10}),
        ("rerope", {"step": 8.5, "window": 5}),
        ("dual_chunk", {"chunk": 30}),
    ],
)
def test_json_round_trip(name, options):
    schedule = methods.schedule(ROPE, name, 4, **options)
    assert Schedule.from_dict(json.loads(json.dumps(schedule.to_dict()))) == schedule
    assert not schedule.is_static
    assert schedule.table_alone().is_static


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Encoding.from_dict({"kind": "rotary"}), "no encoding 'rotary'"),
        (lambda: Encoding.from_dict({"kind": "alibi", "depth": 2}), "no such fields"),
        (lambda: T5Bias(buckets=31), "even number of buckets"),
        (lambda: T5Bias(buckets=32, max_distance=16), "max_distance above half"),
        (lambda: Sinusoids(base=1.0), "greater than 1"),
        (lambda: SelfExtend(10, 1.5), "whole number"),
        (lambda: UnrotatedLayers(), "which layers"),
        (lambda: UnrotatedLayers((1,), 4), "which layers"),
        (lambda: UnrotatedLayers((3,)).of(3), "no layer 3"),
        (lambda: UnrotatedLayers(every=4).of(3), "has no layer 4"),
        (lambda: methods.schedule(ROPE, "nope", 2, every=0), "at least 1"),
        (lambda: methods.schedule(ROPE, "drope", 2, temperature=-1), "must not be negative"),
        (
            lambda: methods.schedule(ROPE, "self_extend", 4, window=16, group=2),
            "smaller window, or a larger group",
        ),
        (lambda: methods.schedule(ROPE, "self_extend", 4, window=64), "leaves nothing"),
        (lambda: methods.schedule(ROPE, "rerope", 2, window=64), "never seen in training"),
        (lambda: methods.schedule(ROPE, "dual_chunk", 2, chunk=60, window=20), "distances up to 79"),
        (lambda: methods.schedule(ROPE, "t5_bias", 2, start="high"), "must be zero or alibi, got 'high'"),
    ],
)
def test_bad_values(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_what_does_not_combine():
    from dataclasses import replace

    staged = methods.schedule(ROPE, "dynamic_ntk", 4)
    with pytest.raises(UsageError, match="alibi can't be combined with stages"):
        replace(staged, encoding=Alibi())
    searched = methods.schedule(ROPE, "longrope", 4, long_factor=[2.0] * 16, start_tokens=4)
    with pytest.raises(UsageError, match="can't be combined with stages or start tokens"):
        replace(searched, encoding=SelfExtend(16, 8))


def test_families_without_attention_functions_are_refused(tokens):
    model = pico_model("gpt_neox_japanese")
    before = logits(model, tokens)
    with pytest.raises(CtxextError, match="computes attention itself"):
        ctxext.patch(model, "alibi", 4)
    assert torch.equal(logits(model, tokens), before)
    # Layers that don't rotate and sinusoids need no attention function.
    for method, options in (("nope", {"every": 2}), ("sinusoidal", {})):
        ctxext.patch(model, method, 4, **options)
        assert (logits(model, tokens) - before).abs().max() > 1e-3
    ctxext.unpatch(model)
    assert torch.equal(logits(model, tokens), before)


def test_other_instances_are_untouched(tokens):
    one, other = pico_model(), pico_model()
    before = logits(other, tokens)
    ctxext.patch(one, "alibi", 4)
    assert torch.equal(logits(other, tokens), before)
    assert torch.equal(logits(copy.deepcopy(other), tokens), before)
    assert one.config._attn_implementation == other.config._attn_implementation == "sdpa"
