"""Caches that patched models fill: whose keys they hold, and what is refused."""

import copy
import itertools

import pytest
import torch
from conftest import logits, pico_model
from feeding import TOLERANCE

import ctxext
from ctxext.errors import CtxextError

SCHEDULES = {
    "unpatched": None,
    "yarn": {"method": "yarn", "factor": 4},
    "dynamic_ntk": {"method": "dynamic_ntk", "factor": 4, "granularity": 16},
    "dynamic_ntk, other stages": {"method": "dynamic_ntk", "factor": 8, "granularity": 24},
    "rerope": {"method": "rerope", "factor": 4, "window": 24},
    "alibi": {"method": "alibi", "factor": 4},
}
STATIC = {"unpatched", "yarn"}


def put(model, name):
    """Make the model run one of SCHEDULES."""
    if SCHEDULES[name]:
        ctxext.patch(model, **SCHEDULES[name])
    elif ctxext.schedule_of(model):
        ctxext.unpatch(model)


def cache_of(model, kind):
    from transformers import DynamicCache, StaticCache

    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=224)
    return DynamicCache(config=model.config)


def go_on(model, ids, cache):
    with torch.no_grad():
        return model(ids, cache=cache, use_cache=True).logits


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize(
    ("before", "after"), [p for p in itertools.permutations(SCHEDULES, 2) if not set(p) <= STATIC]
)
def test_a_cache_filled_under_another_schedule_is_refused(before, after, kind, tokens):
    """Its keys were turned otherwise, and those of deeper layers come from states that would be others now."""
    model = pico_model()
    put(model, before)
    cache = cache_of(model, kind)
    go_on(model, tokens[:, :130], cache)
    put(model, after)
    with pytest.raises(CtxextError, match="filled before the model was patched"):
        go_on(model, tokens[:, 130:140], cache)
    # Nothing was put into it, so it is still good for what filled it.
    put(model, before)
    want = logits(model, tokens[:, :140])[:, 130:]
    torch.testing.assert_close(go_on(model, tokens[:, 130:140], cache), want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", [n for n in SCHEDULES if n not in STATIC])
def test_an_emptied_cache_is_anybodys(name, kind, tokens):
    model = pico_model()
    for empty in ("reset", "crop"):
        put(model, name)
        cache = cache_of(model, kind)
        go_on(model, tokens[:, :130], cache)
        put(model, "unpatched")
        cache.reset() if empty == "reset" else cache.crop(-130)
        # Its batch may be reordered before anything is in it.
        cache.reorder_cache(torch.tensor([0]))
        torch.testing.assert_close(
            go_on(model, tokens[:, :60], cache), logits(model, tokens[:, :60]), atol=TOLERANCE, rtol=0
        )
        put(model, name)
        with pytest.raises(CtxextError, match="filled before the model was patched"):
            go_on(model, tokens[:, 60:70], cache)


@pytest.mark.parametrize("name", [n for n in SCHEDULES if n not in STATIC])
def test_a_copy_of_the_model_and_the_same_patch_go_on(name, tokens):
    model = pico_model()
    put(model, name)
    want = logits(model, tokens)[:, 130:]
    cache = cache_of(model, "dynamic")
    go_on(model, tokens[:, :130], cache)
    again = copy.deepcopy(model)
    put(again, "yarn")
    put(again, name)
    torch.testing.assert_close(go_on(again, tokens[:, 130:], cache), want, atol=TOLERANCE, rtol=0)
