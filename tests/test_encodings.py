"""Biases, sinusoids, layers without rotation and temperatures, against the formula of each one's paper.

The formulas are written here anew, or are transformers' own code. Distances have a file of their own
(test_encoding_distances.py).
"""

import math

import numpy as np
import pytest
import torch
from attention_by_hand import DISTANCE, LENGTH, agree, rotated
from conftest import logits, pico_model

import ctxext
from ctxext.methods import alibi
from ctxext.methods.sinusoidal import Sinusoids
from ctxext.methods.t5_bias import T5Bias

# ---------------------------------------------------------------- ALiBi


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (8, [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]),  # the example of section 3
        (16, [2 ** (-(i + 1) / 2) for i in range(16)]),  # "the geometric mean of every pair" for 16 heads
        # The authors' get_slopes: 8 heads' slopes, then every second one of 16 heads'.
        (9, [*(2.0**-i for i in range(1, 9)), 2**-0.5]),
        (12, [*(2.0**-i for i in range(1, 9)), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
        (3, [2**-4, 2**-8, 2**-2]),
    ],
)
def test_alibi_slopes(heads, slopes):
    assert alibi.slopes(heads) == pytest.approx(slopes, rel=1e-14)


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_alibi_attention(heads, backend):
    """softmax(q K / sqrt(d) + m [-(i-1), ..., -1, 0]), section 3, with grouped keys and 6 heads too."""
    model = pico_model(num_attention_heads=heads, num_key_value_heads=2, hidden_size=32 * heads)
    model.set_attn_implementation(backend)
    ctxext.patch(model, "alibi", 4)
    slopes = {4: [2**-2, 2**-4, 2**-6, 2**-8], 6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]}[heads]
    bias = -torch.tensor(slopes, dtype=torch.float64)[:, None, None] * DISTANCE
    agree(model, lambda q, k: q @ k.mT / math.sqrt(32) + bias)


def test_alibi_of_bloom_is_the_same_but_for_a_constant_per_query():
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    for heads in (4, 6, 9, 16):
        theirs = build_alibi_tensor(torch.ones(1, LENGTH), heads, torch.float32)[:, 0]
        ours = torch.tensor(alibi.slopes(heads))[:, None] * torch.arange(LENGTH)
        torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=1e-6)


def test_alibi_far_out_in_bfloat16():
    """At 70,000 tokens, where bfloat16 counts in steps of 512, the nearest keys are still told apart."""
    from ctxext.live.alibi import with_coordinates
    from ctxext.live.encoding import AttentionCall

    positions = torch.arange(70000)[None]
    zero = torch.zeros(1, 9, 70000, 64, dtype=torch.bfloat16)
    call = AttentionCall(
        module=None,
        query=zero[:, :, -1:],
        key=zero[:, :3],
        value=zero[:, :3],
        mask=None,
        queries=positions[:, -1:],
        keys=positions,
        backend="sdpa",
        stock=None,
        options={"scaling": 0.125},
    )
    query, key, _ = with_coordinates(call)
    got = (query[0, :, 0].double() @ key[0, 0].double().T) * 0.125
    want = -torch.tensor(alibi.slopes(9), dtype=torch.float64)[:, None] * positions.flip(1)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=0)


@pytest.mark.parametrize("method", ["alibi", "t5_bias"])
def test_biases_in_bfloat16(method, tokens):
    """As near to float32 as the unpatched model's own bfloat16 is."""
    options = {"start": "alibi"} if method == "t5_bias" else {}
    error = {}
    for name in ("none", method):
        exact, low = pico_model(), pico_model().to(torch.bfloat16)
        for model in (exact, low):
            if name != "none":
                ctxext.patch(model, name, 4, **options)
        want = logits(exact, tokens)
        error[name] = ((logits(low, tokens).float() - want).abs().mean() / want.std()).item()
    assert error[method] < 1.5 * error["none"]


def test_alibi_makes_no_mask(monkeypatch):
    """sdpa is called as by the unpatched model, without a mask, on one more coordinate."""
    model, seen = pico_model(), []
    ctxext.patch(model, "alibi", 4)
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, value, attn_mask=None, **options):
        seen.append((query.shape[-1], key.shape[-1], attn_mask, options["is_causal"]))
        return real(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    logits(model, torch.arange(3, 60)[None])
    assert seen == [(33, 33, None, True)] * 3


def test_alibi_without_a_fused_kernel(monkeypatch, tokens):
    """In bfloat16 plain matrix products would round m j away: the bias goes into a mask then."""
    from ctxext.live import alibi as live

    fused, plain = (pico_model().to(torch.bfloat16) for _ in range(2))
    want = pico_model()
    for model in (fused, plain, want):
        ctxext.patch(model, "alibi", 4)
    want, fused = logits(want, tokens), logits(fused, tokens).float()
    monkeypatch.setattr(live, "_FUSED", [torch.nn.attention.SDPBackend.CUDNN_ATTENTION])
    plain = logits(plain, tokens).float()
    assert not torch.equal(fused, plain)
    assert (plain - want).abs().mean() < 2 * (fused - want).abs().mean()


# ---------------------------------------------------------------- T5


@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (16, 64), (8, 100), (64, 1000)])
def test_t5_buckets_are_those_of_transformers(buckets, farthest):
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(2 * farthest)
    theirs = T5Attention._relative_position_bucket(-distance, False, buckets, farthest)
    ours = T5Bias(buckets, farthest).bucket_of()
    assert [ours[min(d, farthest)] for d in distance.tolist()] == theirs.tolist()


def test_t5_attention():
    model = pico_model()
    ctxext.patch(model, "t5_bias", 4, buckets=8, max_distance=20)
    table = model.model.ctxext_bias.table
    with torch.no_grad():
        table.normal_(generator=torch.Generator().manual_seed(3))
    # Raffel et al., section 2.1: one bucket per distance up to 4, then logarithmic to 20, the rest in the last.
    bucket = [min(d if d < 4 else 4 + int(4 * math.log(d / 4) / math.log(5)), 7) for d in range(LENGTH)]
    bias = table.detach().double().T[:, torch.tensor(bucket)[DISTANCE.clamp(min=0).long()]]
    for layer in range(3):
        agree(model, lambda q, k: q @ k.mT / math.sqrt(32) + bias, layer)


def test_a_t5_table_may_start_as_alibi():
    model, steep = pico_model(), pico_model()
    ctxext.patch(model, "t5_bias", 4, buckets=32, start="alibi")
    ctxext.patch(steep, "alibi", 4)
    ids = torch.randint(3, 128, (1, 16), generator=torch.Generator().manual_seed(2))
    # 32 buckets hold the distances below 16 one by one.
    torch.testing.assert_close(logits(model, ids), logits(steep, ids), atol=1e-4, rtol=0)


# ---------------------------------------------------------------- sinusoids, NoPE, temperature


def test_sinusoid_periods():
    """2 pi 10000^(2i/d) at d = 128: from 2 pi to almost 10000 times 2 pi (Vaswani et al., section 3.5)."""
    periods = [2 * math.pi / f for f in Sinusoids().frequencies(128)]
    assert periods[0] == pytest.approx(6.3, abs=0.05)
    assert periods[32] == pytest.approx(628.3, abs=0.05)
    assert periods[63] == pytest.approx(54410, abs=1)
    assert len(periods) == 64


def test_sinusoids_are_added_to_the_embeddings(tokens):
    """The paper's table by numpy, given to an unpatched NoPE model as inputs_embeds."""
    model, plain = pico_model(), pico_model()
    ctxext.patch(model, "sinusoidal", 4, scale=0.3)
    ctxext.patch(plain, "nope", 4)
    table = np.empty((200, 128))
    for pos in range(200):
        for i in range(64):
            table[pos, 2 * i] = math.sin(pos / 10000 ** (2 * i / 128))
            table[pos, 2 * i + 1] = math.cos(pos / 10000 ** (2 * i / 128))
    with torch.no_grad():
        embedded = plain.model.embed_tokens(tokens) + 0.3 * torch.tensor(table, dtype=torch.float32)
        want = plain(inputs_embeds=embedded).logits
    torch.testing.assert_close(logits(model, tokens), want, atol=1e-4, rtol=0)


def test_rotary_logits_depend_on_distance_alone():
    """RoFormer eq. 16, through a live model: the same tokens 37 positions further on give the same logits."""
    model = pico_model()
    ids = torch.randint(3, 128, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        moved = model(ids, position_ids=torch.arange(LENGTH)[None] + 37).logits
    torch.testing.assert_close(moved, logits(model, ids), atol=1e-4, rtol=0)
    agree(
        model, lambda q, k: rotated(q, torch.arange(LENGTH)) @ rotated(k, torch.arange(LENGTH)).mT / math.sqrt(32)
    )


def test_nope_attention_sees_a_set():
    """One layer without position: the last query's output doesn't change when the keys before it are permuted."""
    model = pico_model(num_hidden_layers=1)
    ids = torch.randint(3, 128, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    mixed = torch.cat(
        (ids[:, torch.randperm(LENGTH - 1, generator=torch.Generator().manual_seed(0))], ids[:, -1:]), 1
    )
    assert (logits(model, ids) - logits(model, mixed))[:, -1].abs().max() > 0.1
    ctxext.patch(model, "nope", 4)
    torch.testing.assert_close(logits(model, ids)[:, -1], logits(model, mixed)[:, -1], atol=1e-5, rtol=0)
    agree(model, lambda q, k: q @ k.mT / math.sqrt(32))


def test_nope_in_some_layers():
    model = pico_model(num_hidden_layers=4)
    ctxext.patch(model, "nope", 4, every=2)
    here = torch.arange(LENGTH)
    for layer, scores in enumerate(
        [
            lambda q, k: rotated(q, here) @ rotated(k, here).mT / math.sqrt(32),
            lambda q, k: q @ k.mT / math.sqrt(32),
        ]
        * 2
    ):
        agree(model, scores, layer)
    listed = pico_model(num_hidden_layers=4)
    ctxext.patch(listed, "nope", 4, layers=[1, 3])
    ids = torch.arange(3, 60)[None]
    assert torch.equal(logits(listed, ids), logits(model, ids))


def test_temperature_by_query_position():
    """DroPE: logits times 1 + c ln(n / L), n tokens up to the query, beyond L = 16 trained ones."""
    model = pico_model(max_position_embeddings=16)
    ctxext.patch(model, "drope", 4, temperature=0.4)
    times = torch.tensor([1 + 0.4 * math.log(max(n, 16) / 16) for n in range(1, LENGTH + 1)], dtype=torch.float64)
    assert times[15] == 1
    agree(model, lambda q, k: times[:, None] * (q @ k.mT) / math.sqrt(32))
