"""`output_attentions=True`: the weights that made the output, or a refusal. (By formula: attention_by_hand.)"""

import pytest
import torch
from all_models import MODELS, is_stock_attention
from conftest import logits

from ctxext.errors import CtxextError


def attended(model, ids, **options):
    """Of the last layer: its weights, its input and its output."""
    module, seen = model.model.layers[-1].self_attn, {}
    hooks = [
        module.register_forward_pre_hook(lambda m, a, k: seen.update(input=k["hidden_states"]), with_kwargs=True),
        module.register_forward_hook(lambda m, a, out: seen.update(output=out[0])),
    ]
    with torch.no_grad():
        out = model(ids, output_attentions=True, **options)
    for hook in hooks:
        hook.remove()
    assert len(out.attentions) == len(model.model.layers)
    return out.attentions[-1], seen["input"], seen["output"]


@pytest.mark.parametrize("name", MODELS)
def test_weights_times_values_are_the_output(name, tokens):
    model = MODELS[name]()
    model.set_attn_implementation("eager")
    weights, hidden, output = attended(model, tokens)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), atol=1e-5, rtol=0)
    assert weights.triu(1).abs().max() == 0
    module = model.model.layers[-1].self_attn
    with torch.no_grad():
        values = module.v_proj(hidden).view(1, 200, -1, 32).transpose(1, 2)
        values = values.repeat_interleave(weights.shape[1] // values.shape[1], 1)
        mixed = module.o_proj((weights @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(mixed, output, atol=1e-5, rtol=1e-4)
    # The same rows with a cache, over changes of stages and rules.
    with torch.no_grad():
        cache = model(tokens[:, :70], use_cache=True).cache
    rest, _, _ = attended(model, tokens[:, 70:], cache=cache, use_cache=True)
    torch.testing.assert_close(rest, weights[:, :, 70:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_backends_without_weights_are_refused(name, tokens):
    """transformers' own attention warns and gives none, as ever."""
    model = MODELS[name]()
    want = logits(model, tokens)
    if is_stock_attention(model):
        assert model(tokens, output_attentions=True).attentions == ()
        return
    with pytest.raises(CtxextError, match="sdpa gives no attention weights"):
        model(tokens, output_attentions=True)
    assert torch.equal(logits(model, tokens), want)
