"""Methods that change the distances between tokens: the rules of their papers, none beyond what was trained."""

import math

import pytest
import torch
from attention_by_hand import LENGTH, agree, rotated
from conftest import logits, pico_model

import ctxext
from ctxext import methods
from ctxext.rope import Rope


def by_distance(table):
    """Logits with the rotary distance that `table` (LENGTH, LENGTH) gives each pair: q R(table) k."""

    def scores(q, k):
        z = rotated(q[:, :, None].expand(-1, -1, LENGTH, -1), torch.tensor(table))
        return (z * k[:, None]).sum(-1) / math.sqrt(32)

    return scores


def self_extend_distance(i, j, window, group):
    """Jin et al. 2024, algorithm 1: neighbour attention below the window, else floored positions, shifted."""
    return i - j if i - j < window else i // group + window - window // group - j // group


def dual_chunk_distance(i, j, chunk, window):
    """An et al. 2024, eq. 2 to 7: intra-chunk, successive-chunk and inter-chunk positions, c = chunk + window."""
    key = j % chunk
    if i // chunk == j // chunk:
        return i % chunk - key
    if i // chunk == j // chunk + 1:
        return min(chunk + i % chunk, chunk + window - 1) - key
    return chunk + window - 1 - key


RULES = {
    "self_extend": (
        {"window": 6, "group": 4},
        lambda i, j: self_extend_distance(i, j, 6, 4),
    ),
    "rerope": ({"window": 7}, lambda i, j: min(i - j, 7)),
    "rerope leaky": ({"window": 7, "step": 4}, lambda i, j: i - j if i - j < 7 else 7 + (i - j - 7) / 4),
    "dual_chunk": ({"chunk": 12, "window": 4}, lambda i, j: dual_chunk_distance(i, j, 12, 4)),
}


@pytest.mark.parametrize("rule", RULES)
def test_distances(rule):
    options, distance = RULES[rule]
    model = pico_model(max_position_embeddings=16)
    ctxext.patch(model, rule.split()[0], 2.5, **options)
    table = [[float(distance(i, j)) if j <= i else 0.0 for j in range(LENGTH)] for i in range(LENGTH)]
    assert max(map(max, table)) <= 15
    agree(model, by_distance(table))


@pytest.mark.parametrize("method", ["self_extend", "rerope", "dual_chunk"])
def test_distances_of_other_families(method, tokens):
    """Neighbouring pairs (Cohere) and a partial rotation (Phi): short text is the model as it was."""
    for family, changes in (("cohere", {}), ("phi", {"num_key_value_heads": 4}), ("qwen3", {"head_dim": 48})):
        model = pico_model(family, **changes)
        before = logits(model, tokens[:, :14])
        long = logits(model, tokens)
        ctxext.patch(model, method, 4)
        torch.testing.assert_close(logits(model, tokens[:, :14]), before, atol=1e-4, rtol=0)
        assert (logits(model, tokens) - long).abs().max() > 0.1


@pytest.mark.parametrize("factor", [1, 1.5, 2, 7, 16])
@pytest.mark.parametrize("length", [64, 100, 8192])
@pytest.mark.parametrize("name", ["self_extend", "rerope", "dual_chunk"])
def test_no_distance_beyond_training(name, length, factor):
    """Every distance up to the target length, by brute force at the last query."""
    schedule = methods.schedule(Rope(1e4, 32, length), name, factor)
    rule, last = schedule.encoding, schedule.max_length - 1
    keys = range(0, last + 1, max(1, last // 3000))
    if name == "self_extend":
        used = [self_extend_distance(last, j, rule.window, int(rule.group)) for j in keys]
    elif name == "rerope":
        used = [min(last - j, rule.window) for j in keys]
    else:
        used = [dual_chunk_distance(last, j, rule.chunk, rule.window) for j in keys]
    assert used == [rule.distance(last, j) for j in keys]
    assert 0 <= max(used) <= length - 1
    assert rule.largest(last + 1) >= max(used)
