"""Scores with shared prefixes and in pieces against one pass, static, staged and refused."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ctxext
from ctxext.errors import CtxextError, UsageError
from ctxext.evals.prefix import PrefixScorer, chunked_nll, length_dependent, why_not
from ctxext.live.head import token_nll, token_scores

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 2.0}
LONGROPE |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def llama(**options) -> LlamaForCausalLM:
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    options = {"max_position_embeddings": 64, **options}
    return LlamaForCausalLM(LlamaConfig(**size, vocab_size=300, initializer_range=0.15, **options)).eval()


def models():
    yield "plain", llama()
    for method, factor in (("yarn", 4), ("dynamic_yarn", 4), ("dynamic_ntk", 3)):
        model = llama()
        ctxext.patch(model, method, factor)
        yield method, model


MODELS = list(models())


def sequences() -> list[list[int]]:
    """Deepest fork first, as a row of passkey prompts; then the same one again, and an unrelated one."""
    draw = torch.Generator().manual_seed(1)
    trunk = torch.randint(3, 300, (200,), generator=draw).tolist()
    found = []
    for fork in (190, 150, 149, 70, 63, 1, 0):
        found.append(trunk[:fork] + torch.randint(3, 300, (200 - fork,), generator=draw).tolist())
    return [*found, found[-1], found[1], found[1][:120]]


@pytest.mark.parametrize("block", [16, 1000])
@pytest.mark.parametrize("model", [model for _, model in MODELS], ids=[name for name, _ in MODELS])
def test_shared_prefixes_change_no_score(model, block):
    scorer = PrefixScorer(model, block=block)
    for ids in sequences():
        positions = range(len(ids) - 5, len(ids))
        own, whole = scorer.scores(ids, positions), token_scores(model, ids, positions)
        torch.testing.assert_close(own.logprob, whole.logprob, atol=2e-4, rtol=1e-4)
        assert torch.equal(own.rank, whole.rank)
        assert torch.equal(own.is_argmax, whole.is_argmax)
    assert scorer.tokens_run < 0.75 * sum(map(len, sequences()))


@pytest.mark.parametrize("prefill", [1, 17, 64, 500])
@pytest.mark.parametrize("model", [model for _, model in MODELS], ids=[name for name, _ in MODELS])
def test_reading_in_pieces_changes_no_score(model, prefill):
    ids = sequences()[0][: 40 if prefill == 1 else 150]
    torch.testing.assert_close(
        chunked_nll(model, ids, prefill, chunk=10), token_nll(model, ids), atol=2e-4, rtol=1e-4
    )


@pytest.mark.parametrize(("parameters", "word"), [(DYNAMIC, "dynamic"), (LONGROPE, "longrope")])
def test_models_whose_keys_depend_on_the_length_are_refused(parameters, word):
    model = llama(rope_parameters=parameters, max_position_embeddings=128)
    assert word in length_dependent(model)
    for call in (lambda: PrefixScorer(model), lambda: chunked_nll(model, [1, 2, 3], 2)):
        with pytest.raises(CtxextError, match=word):
            call()


def test_a_staged_model_is_causal_whatever_its_config_says():
    model = llama()
    ctxext.patch(model, "dynamic_ntk", 4)
    model.config.rope_parameters = dict(DYNAMIC)
    assert length_dependent(model) is None
    assert length_dependent(model.config) is not None


def test_a_sliding_window_keeps_prefixes_from_being_shared():
    model = llama()
    model.config.sliding_window = 32
    assert "keep all keys" in why_not(model)


def test_wrong_usage():
    with pytest.raises(UsageError, match="positions"):
        PrefixScorer(llama()).scores([1, 2, 3], [3])
    with pytest.raises(UsageError, match="pieces"):
        chunked_nll(llama(), [1, 2, 3], 0)
