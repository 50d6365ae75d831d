"""The invariants matrix: however a text is fed to a model under a staged schedule, its logits are the same.

Every row is also run for stock `dynamic` and two-table `longrope` of transformers, where most of them fail: that
is what the staged schedules are for.
"""

import copy

import pytest
import torch
from conftest import logits, pico_model
from test_patching import FAMILIES, family

import ctxext
from ctxext.errors import CtxextError, UsageError

TRAINED, LENGTH = 64, 200
TOLERANCE = 1e-4
SHAPES = {
    "llama-gqa": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "mistral": ("mistral", {"sliding_window": None}),
    # Heads larger than hidden size / heads, as in the real Qwen3.
    "qwen3-wide-heads": ("qwen3", {"head_dim": 48}),
    "cohere-neighbours": ("cohere", {}),
    "phi-partial": ("phi", {"num_key_value_heads": 4}),
    # The embedded model: trained weights, told that it was trained on 64 tokens.
    "tiny": ("tiny", {}),
}
METHODS = {
    "dynamic_pi": {"granularity": 16},
    "dynamic_ntk": {"granularity": 16},
    "dynamic_yarn": {"granularity": 32, "temperature": 0.2},
    "longrope": {"granularity": 1000},
}


def staged(shape="llama-gqa", method="dynamic_ntk", **more):
    """A pico model under a staged schedule of 4 x 64 tokens."""
    family, changes = SHAPES[shape]
    options = {**METHODS[method], **more}
    if family == "tiny":
        model = ctxext.load("tiny", dtype=torch.float32).eval()
        options["trained_length"] = TRAINED
    else:
        model = pico_model(family, **changes)
    if method == "longrope":
        size = model.base_model.rotary_emb.inv_freq.numel()
        options = {"short_factor": [1.0] * size, "long_factor": [1 + 3 * i / size for i in range(size)], **more}
    schedule = ctxext.patch(model, method, 4, **options)
    assert len(schedule.stages) > 1
    return model


def stock(kind):
    """The same model under transformers' own length-dependent types."""
    keys = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    changes = {"rope_parameters": keys}
    if kind == "longrope":
        keys |= {"short_factor": [1.0] * 16, "long_factor": [1 + 3 * i / 16 for i in range(16)]}
        keys |= {"original_max_position_embeddings": TRAINED}
        changes["max_position_embeddings"] = 4 * TRAINED
    return pico_model("llama", **changes)


# Each feeds `tokens` (1, 200) in its own way and returns (logits, expected), to be compared.


def whole(model, tokens):
    return logits(model, tokens)


def decode(model, tokens, start=50, cache=None):
    """Prefill `start` tokens, then one by one."""
    parts = []
    with torch.no_grad():
        out = model(tokens[:, :start], cache=cache, use_cache=True)
        parts.append(out.logits)
        for i in range(start, tokens.shape[1]):
            out = model(tokens[:, i : i + 1], cache=out.cache, use_cache=True)
            parts.append(out.logits)
    return torch.cat(parts, 1)


def chunks(model, tokens, size):
    parts, cache = [], None
    with torch.no_grad():
        for piece in tokens.split(size, 1):
            out = model(piece, cache=cache, use_cache=True)
            cache = out.cache
            parts.append(out.logits)
    return torch.cat(parts, 1)


def prefixes(model, tokens):
    """The oracle: each probed position from a fresh forward over its prefix alone, no cache."""
    probes = range(45, tokens.shape[1], 5)
    with torch.no_grad():
        return torch.cat([model(tokens[:, : n + 1], use_cache=False).logits[:, -1:] for n in probes], 1), probes


def static_cache(model, tokens):
    from transformers import StaticCache

    return decode(model, tokens, 50, StaticCache(config=model.config, max_cache_len=224))


def left_padded(model, tokens, size):
    """A row of `size` beside a row of 200: the short one starts later, and is in other stages."""
    pad, short = LENGTH - size, tokens[:, :size].flip(1)
    batch = torch.cat((torch.cat((torch.zeros(1, pad, dtype=torch.long), short), 1), tokens))
    mask = torch.ones_like(batch)
    mask[0, :pad] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        out = model(batch, attention_mask=mask, position_ids=positions).logits
    return torch.cat((out[:1, pad:], out[1:, :]), 1), torch.cat((logits(model, short), logits(model, tokens)), 1)


def left_padded_decode(model, tokens):
    """The same, decoding both rows in different stages from a common cache."""
    short = tokens[:, :150].flip(1)
    batch = torch.cat((torch.cat((torch.zeros(1, 50, dtype=torch.long), short), 1), tokens))
    mask = torch.ones_like(batch)
    mask[0, :50] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        out = model(batch[:, :110], attention_mask=mask[:, :110], position_ids=positions[:, :110], use_cache=True)
        parts = [out.logits]
        for i in range(110, 200):
            out = model(
                batch[:, i : i + 1],
                attention_mask=mask[:, : i + 1],
                position_ids=positions[:, i : i + 1],
                cache=out.cache,
                use_cache=True,
            )
            parts.append(out.logits)
    got = torch.cat(parts, 1)
    return torch.cat((got[:1, 50:], got[1:]), 1), torch.cat((logits(model, short), logits(model, tokens)), 1)


def crop_and_continue(model, tokens):
    """Run to 150, take 70 tokens back (into an earlier stage), go on with others: assisted decoding does this."""
    other = torch.cat((tokens[:, :80], tokens[:, 80:].flip(1)), 1)
    with torch.no_grad():
        cache = model(tokens[:, :150], use_cache=True).cache
        cache.crop(-70)
        rest = model(other[:, 80:], cache=cache, use_cache=True).logits
    return rest, logits(model, other)[:, 80:]


def forked(model, tokens):
    """A cache deep-copied for another continuation, as prompt caching does."""
    other = torch.cat((tokens[:, :100], tokens[:, 100:].flip(1)), 1)
    with torch.no_grad():
        first = model(tokens[:, :100], use_cache=True).cache
        second = copy.deepcopy(first)
        model(tokens[:, 100:], cache=first, use_cache=True)
        rest = model(other[:, 100:], cache=second, use_cache=True).logits
    return rest, logits(model, other)[:, 100:]


def second_call(model, tokens):
    """Exactly the trained length, then 80 tokens, after a long call."""
    fresh = [logits(copy.deepcopy(model), tokens[:, :n]) for n in (TRAINED, 80)]
    logits(model, tokens)
    return torch.cat([logits(model, tokens[:, :n]) for n in (TRAINED, 80)], 1), torch.cat(fresh, 1)


ROWS = {
    "decode": lambda m, t: (decode(m, t), whole(m, t)),
    "decode from an empty prompt": lambda m, t: (decode(m, t, 1), whole(m, t)),
    "decode past the boundary": lambda m, t: (decode(m, t, 180), whole(m, t)),
    "chunks of 50": lambda m, t: (chunks(m, t, 50), whole(m, t)),
    "chunks of 64": lambda m, t: (chunks(m, t, 64), whole(m, t)),
    "chunks of 7": lambda m, t: (chunks(m, t, 7), whole(m, t)),
    "static cache": lambda m, t: (static_cache(m, t), whole(m, t)),
    "prefix oracle": lambda m, t: (prefixes(m, t)[0], decode(m, t)[:, list(prefixes(m, t)[1])]),
    "causality": lambda m, t: (whole(m, t)[:, :40], logits(m, t[:, :40])),
    "causality past the boundary": lambda m, t: (whole(m, t)[:, :90], logits(m, t[:, :90])),
    "second call": second_call,
    "left padding": lambda m, t: left_padded(m, t, 150),
    "left padding of a short row": lambda m, t: left_padded(m, t, 40),
    "left padding, decoding": left_padded_decode,
    "crop and continue": crop_and_continue,
    "forked cache": forked,
}
# What stock transformers gets right all the same. Its longrope is consistent while every call is a long one, and
# its dynamic keeps the scale of the longest call so far, so a later call past the boundary agrees with that.
STOCK_HOLDS = {
    "dynamic": {"causality past the boundary", "left padding"},
    "longrope": {
        *("decode past the boundary", "second call", "causality past the boundary", "left padding"),
        *("left padding, decoding", "crop and continue", "forked cache"),
    },
}


def differences(row, model, tokens):
    got, want = ROWS[row](model, tokens)
    assert got.shape == want.shape
    return (got - want).abs().max().item(), (got.argmax(-1) != want.argmax(-1)).sum().item()


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("method", METHODS)
def test_every_way_of_feeding_agrees(method, row, tokens):
    difference, mismatches = differences(row, staged(method=method), tokens)
    assert difference < TOLERANCE
    assert mismatches == 0


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
    model = staged()
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
    model = staged()
    want = logits(model, tokens)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(logits(compiled, tokens), want, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(chunks(compiled, tokens, 70), want, atol=TOLERANCE, rtol=0)


def test_training_with_lora_and_checkpointing(tokens):
    from peft import LoraConfig, get_peft_model

    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        wrapped = get_peft_model(
            pico_model(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        )
        ctxext.patch(wrapped, "dynamic_ntk", 4, granularity=16)
        wrapped.train()
        if checkpointing:
            wrapped.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
            wrapped.enable_input_require_grads()
        loss = wrapped(tokens, labels=tokens, use_cache=False).loss
        # Another forward between this one and its backward must not disturb what checkpointing recomputes.
        logits(wrapped, tokens[:, :100])
        loss.backward()
        gradients.append([p.grad.clone() for p in wrapped.parameters() if p.requires_grad])
    assert all(g.isfinite().all() for g in gradients[0])
    assert any(g.abs().max() > 0 for g in gradients[0])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_gradients_against_finite_differences(tokens):
    """Through the turned keys of earlier stages, in float64."""
    model = pico_model().double()
    ctxext.patch(model, "dynamic_ntk", 4, granularity=16)
    weight = model.model.layers[0].self_attn.k_proj.weight
    ids = tokens[:, :120]
    model(ids, labels=ids, use_cache=False).loss.backward()
    for index in [(0, 0), (5, 17), (40, 90)]:
        step = 1e-2
        values = []
        with torch.no_grad():
            for sign in (1, -1):
                weight[index] += sign * step
                values.append(model(ids, labels=ids, use_cache=False).loss.item())
                weight[index] -= sign * step
        assert weight.grad[index].item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-3, abs=1e-8)


def test_undo_and_patch_again(tokens):
    model = pico_model()
    before = logits(model, tokens)
    ctxext.patch(model, "dynamic_ntk", 4)
    once = logits(model, tokens)
    ctxext.patch(model, "yarn", 4)
    ctxext.patch(model, "dynamic_ntk", 4)
    assert torch.equal(logits(model, tokens), once)
    ctxext.unpatch(model)
    assert torch.equal(logits(model, tokens), before)
    assert "forward" not in model.model.layers[0].self_attn.__dict__


def test_folders_refuse_plain_transformers_and_load_with_ctxext(llama_folder, tmp_path, tokens):
    from transformers import AutoModelForCausalLM

    live = pico_model()
    ctxext.patch(live, "dynamic_yarn", 4, granularity=16)
    out = ctxext.patch_checkpoint(
        llama_folder, tmp_path / "out", method="dynamic_yarn", factor=4, granularity=16
    ).out
    with pytest.raises(KeyError, match=r"needs ctxext\.load"):
        AutoModelForCausalLM.from_pretrained(out)
    loaded = ctxext.load(out).eval()
    assert torch.equal(logits(loaded, tokens), logits(live, tokens))
    assert "KeyError" in (out / "README.md").read_text()


def test_the_static_fallback_is_the_last_stage(llama_folder, tmp_path, tokens):
    """Plain transformers runs it, without a word of ctxext; ctxext.load still runs the stages."""
    from transformers import AutoModelForCausalLM

    options = {"method": "dynamic_ntk", "factor": 4, "fallback": "static"}
    out = ctxext.patch_checkpoint(llama_folder, tmp_path / "out", **options).out
    plain = AutoModelForCausalLM.from_pretrained(out).eval()
    static = pico_model()
    ctxext.patch(static, "ntk", 4)
    # The same frequencies by another float32 formula (divisors instead of a theta).
    torch.testing.assert_close(logits(plain, tokens), logits(static, tokens), atol=5 * TOLERANCE, rtol=0)
    live = pico_model()
    ctxext.patch(live, "dynamic_ntk", 4)
    assert torch.equal(logits(ctxext.load(out).eval(), tokens), logits(live, tokens))
    card = (out / "README.md").read_text()
    assert "runs an approximation" in card
    assert "transformers | 5.24 | approximates" in card
    with pytest.raises(UsageError, match="fallback='hope'"):
        ctxext.patch_checkpoint(llama_folder, tmp_path / "no", method="dynamic_ntk", factor=4, fallback="hope")


def test_copies_and_pickles_stand_alone(tokens):
    import pickle

    model = staged()
    want = logits(model, tokens)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        ctxext.unpatch(model)
        assert torch.equal(logits(other, tokens), want)
        model = staged()


def test_bfloat16_keeps_its_angles(tokens):
    model = staged().to(torch.bfloat16)
    tables = [b for b in model.model.rotary_emb.buffers() if b.is_floating_point()]
    assert {t.dtype for t in tables} == {torch.float32}
    exact = logits(staged(), tokens)
    low = logits(model, tokens).float()
    static = pico_model()
    ctxext.patch(static, "ntk", 4)
    reference = logits(static, tokens)
    error = (low - exact).abs().mean() / exact.std()
    static_error = (logits(static.to(torch.bfloat16), tokens).float() - reference).abs().mean() / reference.std()
    assert error < 1.5 * static_error


def test_what_is_refused(tokens):
    from transformers import DynamicCache

    model = staged()
    filled = DynamicCache(config=model.config)
    with torch.no_grad():
        pico_model()(tokens[:, :20], cache=filled, use_cache=True)
    with pytest.raises(CtxextError, match="filled before the model was patched"):
        model(tokens[:, :5], cache=filled, use_cache=True)
    with pytest.raises(CtxextError, match="offloaded"):
        model(tokens[:, :5], cache=DynamicCache(config=model.config, offloading=True), use_cache=True)
    with torch.no_grad():
        cache = model(tokens[:, :100], use_cache=True).cache
    with pytest.raises(CtxextError, match="can't have gaps"):
        model(tokens[:, :1], cache=cache, position_ids=torch.tensor([[130]]), use_cache=True)
    sliding = pico_model("mistral", sliding_window=16)
    cache = DynamicCache(config=sliding.config)
    with pytest.warns(UserWarning, match="window"):
        ctxext.patch(sliding, "dynamic_ntk", 4)
    with pytest.raises(CtxextError, match="can't turn the keys of a DynamicSlidingWindowLayer"):
        sliding(tokens[:, :5], cache=cache, use_cache=True)
