"""Key tokens and context gain against naive per-token windows, and on models whose answer is known."""

from __future__ import annotations

import math

import pytest
import torch
from stand_ins import ByteTokenizer, byte_bpe, random_llama
from torch.nn import functional as F
from transformers import MistralConfig, MistralForCausalLM

from ctxext.errors import CtxextError, UsageError
from ctxext.evals.longppl import key_mask, longppl, matching
from ctxext.evals.models import load
from ctxext.evals.words import embedded_text
from ctxext.needles.prompts import PromptBuilder
from ctxext.text import Text

TEXT = Text("acts", embedded_text()[:6000])


@torch.no_grad()
def last_nll(model, ids: list[int]) -> float:
    logits = model(torch.tensor([ids]), use_cache=False).logits[0, -2].float()
    return float(F.cross_entropy(logits[None], torch.tensor(ids[-1:])))


@pytest.mark.parametrize("bos", [None, 0])
@pytest.mark.parametrize("stride", [1, 7])
def test_against_one_window_per_token(bos, stride):
    """Windows as upstream's `find_key_token` has them: they begin at every `stride`-th token, and a target is
    scored in the last one that leaves it `short` tokens before it."""
    model, tokenizer = random_llama(600), byte_bpe(600, bos=bos is not None)
    short, length = 24, 61
    # Thresholds at which a model with random weights has key tokens.
    found = longppl(
        model, tokenizer, [TEXT], length=length, short=short, stride=stride, gain=0.1, loss=7.5, bucket=20, bos=bos
    )
    ids = ([] if bos is None else [bos]) + tokenizer(TEXT.text, add_special_tokens=False).input_ids
    ids = ids[:length]
    full, little = [], []
    for target in range(1, length):
        full.append(last_nll(model, ids[: target + 1]))
        start = max(0, target - short) // stride * stride
        window = ids[start : target + 1]
        if start and bos is not None:
            window = [bos, *window[1:]]
        little.append(last_nll(model, window))
    keys = [s - f > 0.1 and f < 7.5 for f, s in zip(full, little, strict=True)]
    assert 2 < sum(keys) < 40
    assert found.key_tokens == sum(keys)
    chosen = [f for f, key in zip(full, keys, strict=True) if key]
    assert found.longppl == pytest.approx(math.exp(sum(chosen) / len(chosen)), rel=1e-4)
    assert found.tokens == length - 1
    assert found.ppl == pytest.approx(math.exp(sum(full) / len(full)), rel=1e-4)
    assert [(row["start"], row["end"]) for row in found.gains] == [(0, 20), (20, 40), (40, 60), (60, 61)]
    for row in found.gains:
        part = slice(max(row["start"], 1) - 1, row["end"] - 1)
        gain = (sum(little[part]) - sum(full[part])) / len(full[part])
        assert row["gain"] == pytest.approx(gain, abs=1e-4)
    assert found.gains[0]["gain"] == pytest.approx(0, abs=1e-6)


def test_a_model_that_sees_a_window_only_gains_nothing_from_more():
    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        sliding_window=16,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    model = MistralForCausalLM(config).eval()
    found = longppl(model, ByteTokenizer(), [TEXT], length=400, short=64, stride=16, gain=0.01, loss=99, bucket=64)
    for row in found.gains:
        assert row["gain"] == pytest.approx(0, abs=1e-4)
    assert (found.key_tokens, found.longppl) == (0, None)


def test_the_digits_of_a_passkey_are_key_tokens():
    """A model that retrieves: the key in the answer can't be known from a short context."""
    subject = load("tiny", dtype="float32")
    builder = PromptBuilder(subject.tokenizer)
    texts = [Text(key, builder.build(256, 0.3, key).text) for key in ("48213", "90617", "23456")]
    found = longppl(subject.model, subject.tokenizer, texts, length=256, short=64)
    assert found.key_tokens >= 6
    assert found.longppl < 2
    assert found.low <= found.longppl <= found.high
    assert found.ppl > 1.5 * found.longppl or found.gains[-1]["gain"] > 0.05
    own = longppl(
        subject.model,
        subject.tokenizer,
        texts,
        length=256,
        short=64,
        judge=subject.model,
        judge_tokenizer=subject.tokenizer,
    )
    assert own.longppl == pytest.approx(found.longppl, rel=1e-5)
    assert own.key_tokens == found.key_tokens


def test_tokens_are_matched_by_characters():
    ours = [(0, 0), (0, 4), (4, 6), (6, 10), (10, 11), (12, 15)]
    keys = [(3, 4), (5, 7), (11, 12)]
    brute = [any(a < d and c < b for c, d in keys) for a, b in ours]
    assert matching(ours, keys).tolist() == brute == [False, True, True, True, False, False]
    assert not matching(ours, []).any()
    first, second = byte_bpe(500, bos=False), byte_bpe(700, bos=True)
    judged = longppl(
        random_llama(600),
        first,
        [TEXT],
        length=100,
        short=30,
        gain=0.1,
        loss=9,
        judge=random_llama(800),
        judge_tokenizer=second,
        judge_bos=0,
    )
    assert 0 < judged.key_tokens < 99
    assert judged.settings["judge"] == "LlamaForCausalLM"


def test_upstreams_thresholds():
    full, short = torch.tensor([1.0, 1.9, 2.1, 0.5]), torch.tensor([3.1, 3.8, 6.0, 2.6])
    assert key_mask(full, short).tolist() == [True, False, False, True]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"length": 60}, CtxextError, "no more than the short context"),
        ({"length": 80}, CtxextError, "no more than the short context"),
        ({"stride": 0}, UsageError, "must be at least 1 token"),
        ({"judge": random_llama()}, UsageError, "comes with its tokenizer"),
        ({"texts": []}, UsageError, "no texts"),
        ({"judge": random_llama(), "judge_tokenizer": ByteTokenizer()}, CtxextError, "fast tokenizer"),
    ],
)
def test_wrong_usage(options, error, message):
    options = {"texts": [TEXT], "length": 200, "short": 64, **options}
    with pytest.raises(error, match=message):
        longppl(random_llama(), ByteTokenizer(), **options)
