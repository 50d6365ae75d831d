"""Staged schedules in every shape of model, backend and call; `test_feeding` has the methods' invariants matrix.

Every row of it is also run for stock `dynamic` and two-table `longrope` of transformers, where most of them fail:
that is what the staged schedules are for.
"""

import copy

import pytest
import torch
from conftest import logits, pico_model
from feeding import LENGTH, ROWS, TOLERANCE, TRAINED, chunks, decode, differences
from staged_models import METHODS, SHAPES, staged, stock
from test_patching import FAMILIES, family

import ctxext
from ctxext.errors import CtxextError

# What stock transformers gets right all the same. Its longrope is consistent while every call is a long one, and
# its dynamic keeps the scale of the longest call so far, so a later call past the boundary agrees with that.
STOCK_HOLDS = {
    "dynamic": {"causality past the boundary", "left padding"},
    "longrope": {
        *("decode past the boundary", "second call", "causality past the boundary", "left padding"),
        *("left padding, decoding", "crop and continue", "forked cache"),
    },
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("shape", [s for s in SHAPES if s != "llama-gqa"])
def test_every_shape_agrees(shape, row, tokens):
    difference, mismatches = differences(row, staged(shape), tokens)
    assert difference < TOLERANCE
    assert mismatches == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_agrees_or_is_refused(name, tokens):
    model = family(name)
    plain = logits(model, tokens)
    if name in ("gemma2", "cohere2"):
        with pytest.raises(CtxextError, match="full attention in every layer"):
            ctxext.patch(model, "dynamic_ntk", 4)
        assert torch.equal(logits(model, tokens), plain)
        return
    ctxext.patch(model, "dynamic_ntk", 4, granularity=16)
    whole = logits(model, tokens)
    assert torch.equal(whole[:, :TRAINED], plain[:, :TRAINED])
    assert (whole - plain).abs().max() > 0.1
    for other in (decode(model, tokens), chunks(model, tokens, 50)):
        assert (other - whole).abs().max() < TOLERANCE


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("kind", STOCK_HOLDS)
def test_stock_transformers_does_not(kind, row, tokens):
    """If one of these starts to hold, transformers has changed and the README's table is out of date."""
    difference, _ = differences(row, stock(kind), tokens)
    if row in STOCK_HOLDS[kind]:
        assert difference < TOLERANCE
    else:
        assert difference > 100 * TOLERANCE


@pytest.mark.parametrize("method", METHODS)
def test_short_text_is_the_unpatched_model_to_the_bit(method, tokens):
    model, plain = staged(method=method), pico_model()
    for length in (1, 40, TRAINED):
        assert torch.equal(logits(model, tokens[:, :length]), logits(plain, tokens[:, :length]))
    assert not torch.allclose(logits(model, tokens)[:, TRAINED:], logits(plain, tokens)[:, TRAINED:], atol=1e-2)


def test_it_is_the_static_model_of_the_last_stage_there(tokens):
    """Position by position: the first layer of a one-layer model must equal static NTK at the stage's scale."""
    model = pico_model(num_hidden_layers=1)
    plain = copy.deepcopy(model)
    schedule = ctxext.patch(model, "dynamic_ntk", 4, granularity=16)
    got = logits(model, tokens)
    for stage, until in zip(schedule.stages, [s.start for s in schedule.stages[1:]] + [LENGTH], strict=True):
        until = min(until, LENGTH)
        if stage.start >= until:
            break
        reference = copy.deepcopy(plain)
        if stage.start:
            scale = min(stage.start + 16, 256) / TRAINED
            ctxext.patch(reference, "ntk", scale)
        want = logits(reference, tokens)[:, stage.start : until]
        torch.testing.assert_close(got[:, stage.start : until], want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention"])
def test_backends(attention, tokens):
    # Three stages instead of ten: flex attention compiles each segment's shape.
    model = staged(granularity=70)
    want = logits(model, tokens)
    model.set_attn_implementation(attention)
    torch.testing.assert_close(logits(model, tokens), want, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(chunks(model, tokens, 90), want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}])
def test_generation_with_and_without_a_cache(options, tokens):
    model = staged()
    prompt = torch.cat((tokens[:, :60], tokens[:, 60:120]))
    mask = torch.ones_like(prompt)
    prompt[0, :20], mask[0, :20] = 0, 0
    common = {"attention_mask": mask, "max_new_tokens": 60, "do_sample": False, "eos_token_id": None} | options
    with_cache = model.generate(prompt, use_cache=True, **common)
    without = model.generate(prompt, use_cache=False, **common)
    assert torch.equal(with_cache, without)
    static = model.generate(prompt, cache_implementation="static", disable_compile=True, **common)
    if not options:
        assert torch.equal(static, without)


def test_assisted_generation(tokens):
    """A draft model proposes, the model crops what it rejects."""
    model, draft = staged(), staged()
    torch.manual_seed(5)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(0.02 * torch.randn_like(p))
    common = {"max_new_tokens": 80, "do_sample": False, "eos_token_id": None}
    mask = torch.ones_like(tokens[:, :50])
    plain = model.generate(tokens[:, :50], attention_mask=mask, **common)
    assisted = model.generate(tokens[:, :50], attention_mask=mask, assistant_model=draft, **common)
    assert torch.equal(plain, assisted)


def test_packed_documents(tokens):
    """Position resets without a mask: each document as if alone, the first one crossing stages."""
    model = staged()
    positions = torch.cat((torch.arange(130), torch.arange(70)))[None]
    with torch.no_grad():
        packed = model(tokens, position_ids=positions, use_cache=False).logits
    alone = torch.cat((logits(model, tokens[:, :130]), logits(model, tokens[:, 130:])), 1)
    torch.testing.assert_close(packed, alone, atol=TOLERANCE, rtol=0)


def test_under_torch_compile(tokens):
    """With graph breaks where stages are looked up, and the same logits."""
    model = staged(granularity=70)
    want = logits(model, tokens)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(logits(compiled, tokens), want, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(chunks(compiled, tokens, 70), want, atol=TOLERANCE, rtol=0)
