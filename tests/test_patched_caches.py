"""Caches that patched models fill: whose keys they hold, and what is refused."""

import copy
import itertools
import pickle

import pytest
import torch
from conftest import logits, pico_model
from feeding import TOLERANCE, chunks, decode

import ctxext
from ctxext.errors import CtxextError

SCHEDULES = {
    "unpatched": None,
    "yarn": {"method": "yarn", "factor": 4},
    "dynamic_ntk": {"method": "dynamic_ntk", "factor": 4, "granularity": 16},
    "dynamic_ntk, other stages": {"method": "dynamic_ntk", "factor": 8, "granularity": 24},
    "rerope": {"method": "rerope", "factor": 4, "window": 24},
    "alibi": {"method": "alibi", "factor": 4},
    "nope": {"method": "nope", "factor": 4, "every": 2},
    "sinusoidal": {"method": "sinusoidal", "factor": 4},
    "start tokens": {"method": "longrope", "factor": 4, "long_factor": [2.0] * 16, "start_tokens": 4},
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
@pytest.mark.parametrize("name", ["nope", "sinusoidal", "start tokens"])
def test_a_cache_with_a_wide_window_knows_who_filled_it(name, kind, tokens):
    model = pico_model("mistral", sliding_window=300)
    put(model, name)
    cache = cache_of(model, kind)
    assert cache.layers[0].is_sliding or kind == "static"
    go_on(model, tokens[:, :50], cache)
    cache = pickle.loads(pickle.dumps(cache))
    put(model, "unpatched")
    with pytest.raises(CtxextError, match="filled before the model was patched"):
        go_on(model, tokens[:, 50:60], cache)
    put(model, name)
    want = logits(model, tokens)[:, 50:]
    torch.testing.assert_close(go_on(model, tokens[:, 50:], cache), want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["dynamic_ntk", "alibi", "rerope"])
def test_a_call_that_was_refused_opens_no_cache(name, tokens):
    model = pico_model()
    put(model, name)
    cache = cache_of(model, "dynamic")
    go_on(model, tokens[:, :50], cache)
    with pytest.raises(CtxextError, match="see later ones"):
        model(tokens[:, 50:60], cache=cache, attention_mask=torch.ones(1, 1, 10, 60, dtype=torch.bool))
    put(model, "unpatched")
    with pytest.raises(CtxextError, match="filled before the model was patched"):
        go_on(model, tokens[:, 50:60], cache)


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


def test_an_emptied_cache_is_chosen_from_by_whoever_fills_it(tokens):
    """What is remembered of the sequences that were in it says nothing of the new ones."""
    model = pico_model()
    put(model, "dynamic_ntk")
    cache = cache_of(model, "dynamic")
    go_on(model, tokens[:, :20], cache)
    cache.reset()
    put(model, "unpatched")
    ids = tokens[:, :60].view(3, 20)
    go_on(model, ids, cache)
    chosen = torch.tensor([2, 0])
    cache.batch_select_indices(chosen)
    more = tokens[:, 60:70].view(2, 5)
    want = logits(model, torch.cat((ids[chosen], more), 1))[:, 20:]
    torch.testing.assert_close(go_on(model, more, cache), want, atol=TOLERANCE, rtol=0)


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


@pytest.mark.parametrize("method", ["yarn", "nope", "sinusoidal", "dynamic_ntk", "rerope"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_made_for_a_window_that_the_patch_took_away_is_refused(method, kind, tokens):
    """It would keep the last 48 keys alone."""
    model = pico_model("mistral", sliding_window=48)
    cache = cache_of(model, kind)
    ctxext.patch(model, method, 4, **({"every": 2} if method == "nope" else {}))
    with pytest.raises(CtxextError, match="sliding window"):
        go_on(model, tokens[:, :100], cache)
    cache = cache_of(model, kind)
    got = torch.cat([go_on(model, part, cache) for part in tokens.split(100, 1)], 1)
    torch.testing.assert_close(got, logits(model, tokens), atol=5e-5, rtol=0)


# ---------------------------------------------------------------- 16 bits


def half_model(method="dynamic_ntk", dtype=torch.bfloat16):
    """The embedded model under stages of 8 tokens: 96 of them in 1,024 tokens."""
    model = ctxext.load("tiny", dtype=torch.float32).eval()
    ctxext.patch(model, method, 4, granularity=8)
    return model.to(dtype)


@pytest.fixture(scope="module")
def text():
    from transformers import AutoTokenizer

    from ctxext.folders.source import TINY

    words = next((TINY.parent / "text").glob("*.txt")).read_text()[:8000]
    return AutoTokenizer.from_pretrained(TINY)(words, return_tensors="pt").input_ids[:, :768]


def divergence(got, exact):
    """Mean KL, nats per token, of the last 128 positions."""
    got, exact = (x[:, -128:].double().log_softmax(-1) for x in (got, exact))
    return (exact.exp() * (exact - got)).sum(-1).mean().item()


@pytest.mark.parametrize("method", ["dynamic_ntk", "dynamic_yarn"])
def test_many_changes_of_stage_cost_no_precision(method, text):
    """In bfloat16, 64 changes in turn are as near to float32 as one forward, which turns each key once."""
    exact = logits(half_model(method, torch.float32), text)
    model = half_model(method)
    whole = divergence(logits(model, text), exact)
    assert divergence(chunks(model, text, 8), exact) < 1.5 * whole
    assert divergence(chunks(model, text, 13), exact) < 1.5 * whole
    assert divergence(decode(model, text[:, :400], 270), exact[:, :400]) < 1.5 * whole


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_cached_keys_are_turned_once_whatever_happens_to_the_cache(kind, tokens):
    """In the first layer keys after any history are those that one prefill leaves: the same roundings."""
    from transformers import DynamicCache, StaticCache

    torch.manual_seed(0)
    model = half_model()
    ids = torch.randint(3, 1000, (3, 460))

    def fresh():
        if kind == "static":
            return StaticCache(config=model.config, max_cache_len=480)
        return DynamicCache(config=model.config)

    def keys(ids):
        """From one prefill and one more token, alone in its stage or not."""
        cache = fresh()
        go_on(model, ids[:, :-1], cache)
        go_on(model, ids[:, -1:], cache)
        return cache.layers[0].keys[:, :, : ids.shape[1]]

    cache = fresh()
    go_on(model, ids[:, :250], cache)
    for a in range(250, 400, 5):
        go_on(model, ids[:, a : a + 5], cache)
    # Beam search, assisted decoding, prompts that are forked, and back to an earlier stage.
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    ids = ids[[2, 0, 0]]
    cache.crop(-70)
    rest = ids[:, 330:390].flip(0)
    ids = torch.cat((ids[:, :330], rest), 1)
    cache = copy.deepcopy(cache)
    for a in range(330, 390, 3):
        go_on(model, ids[:, a : a + 3], cache)
    if kind == "dynamic":
        cache.batch_select_indices(torch.tensor([0, 2]))
        cache.batch_repeat_interleave(2)
        ids = ids[[0, 0, 2, 2]]
        more = torch.randint(3, 1000, (4, 41))
        ids = torch.cat((ids, more), 1)
        go_on(model, ids[:, 390:430], cache)
        go_on(model, ids[:, 430:], cache)
    got = cache.layers[0].keys[:, :, : ids.shape[1]]
    # A product of another shape may round a key otherwise as it is made.
    assert (got != keys(ids)).double().mean() < 0.01


def test_only_16_bits_and_only_past_the_first_change_keep_a_second_tensor(tokens):
    model = pico_model()
    ctxext.patch(model, "dynamic_ntk", 4, granularity=16)
    for dtype, length, ratio in ((torch.float32, 200, 1), (torch.bfloat16, 64, 1), (torch.bfloat16, 200, 1.5)):
        cache = cache_of(model, "dynamic")
        go_on(model.to(dtype), tokens[:, :length], cache)
        stock = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
        second = [layer._ctxext_held.made for layer in cache.layers]
        more = sum(x.nbytes for x in second if x is not None)
        assert stock + more <= ratio * stock
        assert bool(more) == (ratio > 1)
