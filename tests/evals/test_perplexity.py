"""Perplexity against YaRN's definition and against naive per-token windows, both written here with full logits."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch.nn import functional as F
from transformers import Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from ctxext.errors import CtxextError, CtxextWarning, UsageError
from ctxext.evals.perplexity import compare, crop_control, length_dependent, prefix_curve, sliding_window

VOCAB, BOS = 300, 1


def llama(**options) -> LlamaForCausalLM:
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    options = {"max_position_embeddings": 64, **options}
    # A wide initialisation, so that the context matters to the scores.
    config = LlamaConfig(**size, vocab_size=VOCAB, initializer_range=0.15, bos_token_id=BOS, **options)
    return LlamaForCausalLM(config).eval()


def docs(*lengths: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


@torch.no_grad()
def full_nll(model, ids: list[int]) -> torch.Tensor:
    """[T-1] in float64 from the logits of the whole sequence."""
    logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
    return F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").double()


@torch.no_grad()
def yarn_perplexity(model, documents, max_length, stride, bos, truncate):
    """YaRN's eval/perplexity.py in short: `model(ids, labels=)`, mean of window means, BOS in every window."""
    losses = []
    width = max_length - 1 if bos else max_length
    for document in documents:
        ids = document[:width] if truncate else document
        step = width if truncate else stride
        previous = 0
        for begin in range(0, len(ids), step):
            end = min(begin + width, len(ids))
            window = ([bos] if bos else []) + ids[begin:end]
            labels = torch.tensor([window])
            labels[:, : -(end - previous)] = -100
            losses.append(float(model(torch.tensor([window]), labels=labels, use_cache=False).loss))
            previous = end
            if end == len(ids):
                break
    return math.exp(sum(losses) / len(losses)), len(losses)


@pytest.mark.parametrize("bos", [None, BOS])
@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize(
    ("lengths", "window", "stride"),
    [([150, 97], 32, 8), ([20, 131], 48, 11), ([40], 40, 1), ([64, 65, 66], 64, 63), ([33], 512, 256)],
)
def test_sliding_window_is_yarns(lengths, window, stride, bos, truncate):
    model, documents = llama(), docs(*lengths)
    expected, windows = yarn_perplexity(model, documents, window, stride, bos, truncate)
    own = sliding_window(
        model, documents, window, stride, bos=bos, aggregation="window", truncate=truncate, chunk=13
    )
    assert own["windows"] == windows
    assert own["ppl"] == pytest.approx(expected, rel=1e-6)


def test_sliding_window_token_weighted_counts_every_token_once():
    model, documents = llama(), docs(150, 20)
    own = sliding_window(model, documents, 32, 8, bos=BOS)
    assert own["tokens"] == 170
    # One window per document: the plain NLL of everything.
    whole = sliding_window(model, documents, 200, 100)
    expected = torch.cat([full_nll(model, document) for document in documents])
    assert whole["tokens"] == 149 + 19
    assert whole["nll"] == pytest.approx(float(expected.mean()), rel=1e-6)


@pytest.mark.parametrize("bos", [None, BOS])
def test_prefix_curve_equals_one_forward_per_length(bos):
    model, documents, lengths = llama(), docs(128, 200), [16, 50, 128]
    curve = prefix_curve(model, documents, lengths, bucket=32, bos=bos, chunk=10)
    front = [bos] if bos else []
    for row in curve.rows:
        alone = torch.cat([full_nll(model, (front + document)[: row["length"]]) for document in documents])
        assert row["tokens"] == len(alone) == 2 * (row["length"] - 1)
        assert row["nll"] == pytest.approx(float(alone.mean()), rel=1e-5)
        assert row["ppl"] == pytest.approx(math.exp(row["nll"]))
    together = torch.stack([full_nll(model, (front + document)[:128]) for document in documents])
    assert [(row["start"], row["end"]) for row in curve.buckets] == [(0, 32), (32, 64), (64, 96), (96, 128)]
    for row in curve.buckets:
        inside = together[:, max(row["start"], 1) - 1 : row["end"] - 1]
        assert row["tokens"] == inside.numel()
        assert row["nll"] == pytest.approx(float(inside.mean()), rel=1e-5)


@pytest.mark.parametrize("bucket", [1, 7, 40, 64, 1000])
def test_buckets_add_up_to_the_total(bucket):
    curve = prefix_curve(llama(), docs(64, 64), [64], bucket=bucket)
    assert sum(row["tokens"] for row in curve.buckets) == curve.rows[0]["tokens"] == 126
    total = sum(row["tokens"] * row["nll"] for row in curve.buckets)
    assert total == pytest.approx(curve.rows[0]["tokens"] * curve.rows[0]["nll"], rel=1e-12)
    for document in curve.documents:
        assert len(document["bucket_nll"]) == len(curve.buckets)
        assert sum(document["bucket_nll"]) == pytest.approx(document["length_nll"][0], rel=1e-12)


@pytest.mark.parametrize("bos", [None, BOS])
@pytest.mark.parametrize("length", [20, 24, 25, 61])
def test_crop_control_with_stride_one_is_one_window_per_token(bos, length):
    model, trained, documents = llama(), 24, docs(61, 80)
    curve = crop_control(model, documents, [20, length], trained, stride=1, bucket=10, bos=bos, batch_size=4)
    front = [bos] if bos else []
    naive = []
    for document in documents:
        sequence = (front + document)[:length]
        scores = []
        for target in range(1, length):
            if target < trained:
                window = sequence[: target + 1]
            else:
                window = front + sequence[target + 1 - trained + len(front) : target + 1]
                assert len(window) == trained
            scores.append(full_nll(model, window)[-1])
        naive.append(torch.stack(scores))
    for row in curve.buckets:
        inside = torch.stack([scores[max(row["start"], 1) - 1 : row["end"] - 1] for scores in naive])
        assert row["nll"] == pytest.approx(float(inside.mean()), rel=1e-5)
    assert curve.rows[-1]["nll"] == pytest.approx(float(torch.stack(naive).mean()), rel=1e-5)


@pytest.mark.parametrize("stride", [3, 8, 23])
def test_crop_control_scores_each_target_with_the_promised_context(stride):
    model, trained, length = llama(), 24, 83
    (document,) = docs(length)
    curve = crop_control(model, [document], [length], trained, stride=stride, bucket=1)
    assert [row["start"] for row in curve.buckets] == list(range(1, length))
    for row in curve.buckets:
        target = row["start"]
        end = length if target >= trained else trained
        if target >= trained:
            end = min(trained + ((target - trained) // stride + 1) * stride, length)
        begin = max(0, end - trained)
        assert target < trained or trained - stride <= target - begin <= trained - 1
        assert row["nll"] == pytest.approx(float(full_nll(model, document[begin : target + 1])[-1]), rel=2e-5)


def test_below_the_trained_length_the_crop_control_is_the_prefix_curve():
    model, documents = llama(), docs(64, 64)
    prefix = prefix_curve(model, documents, [16, 32, 64], bucket=16)
    crop = crop_control(model, documents, [16, 32, 64], 32, bucket=16)
    for own, other in zip(prefix.rows[:2] + prefix.buckets[:2], crop.rows[:2] + crop.buckets[:2], strict=True):
        assert own["nll"] == pytest.approx(other["nll"], rel=1e-6)
        assert own["tokens"] == other["tokens"]
    gaps = compare(prefix, crop)
    assert [row["length"] for row in gaps["lengths"]] == [16, 32, 64]
    assert gaps["buckets"][0]["difference"] == pytest.approx(0, abs=1e-6)
    last = gaps["buckets"][-1]
    assert last["difference"] == pytest.approx(prefix.buckets[-1]["nll"] - crop.buckets[-1]["nll"], abs=1e-9)
    assert last["low"] <= last["difference"] <= last["high"]


def test_intervals_need_two_documents_and_are_reproducible():
    model = llama()
    one = prefix_curve(model, docs(64), [64])
    assert "low" not in one.rows[0]
    first, again = (prefix_curve(model, docs(64, 64, 64), [32, 64], seed=3) for _ in range(2))
    assert first == again
    assert first.rows[0]["low"] <= first.rows[0]["ppl"] <= first.rows[0]["high"]


def test_short_documents_are_refused_or_skipped_with_a_word():
    model, documents = llama(), docs(64, 30, 64)
    with pytest.raises(CtxextError, match=r"1 \(30 tokens\)"):
        prefix_curve(model, documents, [32, 64])
    with pytest.warns(CtxextWarning, match="2 documents are left"):
        curve = prefix_curve(model, documents, [32, 64], short="skip")
    assert len(curve.documents) == 2
    with pytest.raises(CtxextError, match="shorter than 64"):
        prefix_curve(model, docs(30), [64], short="skip")
    # BOS takes a place, so 63 tokens make a sequence of 64.
    assert prefix_curve(model, docs(63), [64], bos=BOS).rows[0]["tokens"] == 63


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 2.0}


@pytest.mark.parametrize(
    ("parameters", "word"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "dynamic"),
        ({**LONGROPE, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}, "two tables"),
        ({**LONGROPE, "short_factor": [2.0] * 8, "long_factor": [2.0] * 8}, None),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}, None),
    ],
)
def test_one_prefill_for_all_lengths_needs_a_causal_schedule(parameters, word):
    model = llama(rope_parameters=parameters, max_position_embeddings=128 if "longrope" in str(parameters) else 64)
    documents = docs(200)
    if word is None:
        assert length_dependent(model.config) is None
        prefix_curve(model, documents, [32, 128])
        return
    assert word in length_dependent(model.config)
    with pytest.raises(CtxextError, match=word) as error:
        prefix_curve(model, documents, [32, 128])
    assert "one length per call" in error.value.hint
    # One length per call is one forward of that length, whatever the model saw before.
    prefix_curve(model, documents, [200])
    alone = prefix_curve(model, documents, [90])
    fresh = llama(rope_parameters=parameters, max_position_embeddings=model.config.max_position_embeddings)
    assert alone.rows[0]["nll"] == pytest.approx(float(full_nll(fresh, documents[0][:90]).mean()), rel=1e-6)


def test_nested_rope_parameters_are_looked_into():
    config = Gemma3TextConfig(num_hidden_layers=2)
    assert length_dependent(config) is None
    config.rope_parameters["full_attention"] = {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0}
    assert "dynamic" in length_dependent(config)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, d: prefix_curve(m, d, []), "lengths"),
        (lambda m, d: prefix_curve(m, d, [1]), "lengths"),
        (lambda m, d: prefix_curve(m, [], [8]), "no documents"),
        (lambda m, d: prefix_curve(m, d, [8], short="shorten"), "short"),
        (lambda m, d: crop_control(m, d, [60], 24, stride=24), "stride"),
        (lambda m, d: crop_control(m, d, [60], 24, stride=23, bos=BOS), "stride"),
        (lambda m, d: crop_control(m, d, [60], 1), "trained_length"),
        (lambda m, d: sliding_window(m, d, 32, 33), "stride"),
        (lambda m, d: sliding_window(m, d, 32, 8, aggregation="mean"), "aggregation"),
        (lambda m, d: sliding_window(m, [[5]], 32, 8), "nothing to score"),
        (lambda m, d: compare(prefix_curve(m, d, [32]), prefix_curve(m, d, [48])), "differ"),
    ],
)
def test_wrong_usage(call, message):
    with pytest.raises(UsageError, match=message):
        call(llama(), docs(64))
