"""Positions with holes: what a cache remembers of them, against the same tokens without a cache.

The oracle is one forward without a cache, given the same positions and masks.
"""

import copy

import pytest
import torch
from conftest import pico_model
from encoded_models import METHODS, patched
from staged_models import METHODS as STAGED
from staged_models import staged
from transformers import DynamicCache

import ctxext
from ctxext.errors import CtxextError

MODELS = {name: (lambda name=name: patched(name)) for name in METHODS}
MODELS |= {name: (lambda name=name: staged(method=name)) for name in STAGED}
TOLERANCE = 5e-5
P, S = 90, 40


def positions_of(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


def agree(model, ids, mask, parts, cache=None, start=0, positions=None):
    """Feed columns `parts` one after the other into a cache; each unmasked token must have its logits."""
    positions = positions_of(mask) if positions is None else positions
    with torch.no_grad():
        want = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        got = []
        for end in parts:
            out = model(
                ids[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, start:end],
                cache=cache,
                use_cache=True,
            )
            cache, start = out.cache, end
            got.append(out.logits)
    got = torch.cat(got, 1)
    seen = mask[:, ids.shape[1] - got.shape[1] :].bool()
    assert (got - want[:, -got.shape[1] :])[seen].abs().max() < TOLERANCE


def rows(tokens, count=2):
    return torch.cat([tokens.roll(7 * i, 1) for i in range(count)])


@pytest.mark.parametrize("name", MODELS)
def test_masked_tokens_inside_a_prompt(name, tokens):
    ids = rows(tokens)
    mask = torch.ones_like(ids)
    mask[0, 20:55] = 0
    mask[1, 60:70] = 0
    agree(MODELS[name](), ids, mask, [100, 101, 102, 150, 200])


@pytest.mark.parametrize("name", MODELS)
def test_a_prefix_repeated_for_ragged_suffixes(name, tokens):
    """transformers' recipe: prefill once, batch_repeat_interleave, left-padded suffixes of several lengths."""
    model = MODELS[name]()
    ids = torch.cat((tokens[:, :P].expand(3, -1), rows(tokens[:, P:], 3)), 1)
    mask = torch.ones_like(ids)
    mask[0, P : P + 12] = 0
    mask[2, P : P + 33] = 0
    with torch.no_grad():
        cache = model(ids[:1, :P], use_cache=True, cache=DynamicCache(config=model.config)).cache
    cache.batch_repeat_interleave(3)
    agree(model, ids, mask, [P + S, P + S + 1, 200], cache, P)


@pytest.mark.parametrize("name", MODELS)
def test_a_conversation_in_which_one_row_ended_early(name, tokens):
    """Turns of a batch: where a row had nothing to say its columns are pads, then it goes on."""
    ids = rows(tokens, 3)
    mask = torch.ones_like(ids)
    mask[0, 30:80] = 0
    mask[1, :25] = 0
    mask[2, 110:111] = 0
    agree(MODELS[name](), ids, mask, [80, *range(81, 90), 140, 200])


@pytest.mark.parametrize("name", MODELS)
def test_positions_with_gaps(name, tokens):
    """A token that is far behind the one before it: its distance counts, not its place in the cache."""
    ids = tokens[:, :120]
    positions = torch.arange(120)[None].clone()
    positions[:, 50:] += 30
    positions[:, 101:] += 40
    agree(MODELS[name](), ids, torch.ones_like(ids), [70, 71, 110, 120], positions=positions)


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_are_chosen_and_cropped_keep_their_holes(name, tokens):
    model = MODELS[name]()
    ids = rows(tokens, 3)
    mask = torch.ones_like(ids)
    mask[0, 20:55] = 0
    mask[1, 60:90] = 0
    with torch.no_grad():
        cache = model(
            ids[:, :120], attention_mask=mask[:, :120], position_ids=positions_of(mask)[:, :120], use_cache=True
        ).cache
    cache.crop(-10)
    chosen = torch.tensor([1, 0])
    cache.batch_select_indices(chosen)
    agree(model, ids[chosen], mask[chosen], [111, 160, 200], copy.deepcopy(cache), 110)


@pytest.mark.parametrize("name", MODELS)
def test_a_tree_of_drafts(name, tokens):
    """Two branches of three tokens after a prompt, in one call: each sees the prompt and its own branch."""
    model, ids = MODELS[name](), tokens[:, :106]
    own = torch.ones(6, 6, dtype=torch.bool).tril() & torch.block_diag(*[torch.ones(3, 3)] * 2).bool()
    tree = torch.cat((torch.ones(6, 100, dtype=torch.bool), own), 1)[None, None]
    positions = torch.tensor([[100, 101, 102] * 2])
    with torch.no_grad():
        cache = model(ids[:, :100], use_cache=True).cache
        got = model(ids[:, 100:], attention_mask=tree, position_ids=positions, cache=cache, use_cache=True).logits
        for branch in (slice(0, 3), slice(3, 6)):
            alone = torch.cat((ids[:, :100], ids[:, 100:][:, branch]), 1)
            want = model(alone, use_cache=False).logits[:, 100:]
            assert (got[:, branch] - want).abs().max() < TOLERANCE


@pytest.mark.parametrize("how", ["is_causal", "bidirectional mask", "prefix mask", "prefix mask, cached"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_that_see_later_ones_are_refused(name, how, tokens):
    """A mask that shows later keys, or a model told to be bidirectional; a float mask as well as a bool one."""
    model, ids, given = MODELS[name](), tokens[:, :80], {}
    if not ctxext.schedule_of(model).in_attention and len(ctxext.schedule_of(model).stages) == 1:
        pytest.skip("its attention is the model's own, which takes any mask")
    if how == "is_causal":
        model.config.is_causal = False
        for layer in model.model.layers:
            layer.self_attn.is_causal = False
    else:
        mask = torch.ones(80, 80, dtype=torch.bool)
        if how.startswith("prefix"):
            mask = mask.tril()
            mask[:, :72] |= torch.arange(80)[:, None] < 72
        if how.endswith("cached"):
            with torch.no_grad():
                given["cache"] = model(ids[:, :70], use_cache=True).cache
            ids, mask = ids[:, 70:], mask[70:]
        as_float = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        given["attention_mask"] = (as_float if how == "prefix mask" else mask)[None, None]
    with pytest.raises(CtxextError, match="see later ones"):
        model(ids, **given)


def test_an_unpatched_model_feeds_alike(tokens):
    """The oracle itself: what is asked of patched models holds for the stock one."""
    ids = rows(tokens)
    mask = torch.ones_like(ids)
    mask[0, 20:55] = 0
    agree(pico_model(), ids, mask, [100, 101, 200])
