"""Attention of one Llama layer computed by hand in float64: what the formulas of papers are held against."""

import math

import torch

LENGTH = 40


def attention_by_hand(module, hidden, scores):
    """One Llama attention module without its rotation: its output, and its weights (heads, n, n).

    `scores(q, k)` gives logits of (heads, n, d) tensors.
    """
    n, size = hidden.shape[1], module.head_dim
    q, k, v = (
        p(hidden)[0].view(n, -1, size).transpose(0, 1).double()
        for p in (module.q_proj, module.k_proj, module.v_proj)
    )
    k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], 0) for t in (k, v))
    logit = scores(q, k).masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
    weights = logit.softmax(-1)
    mixed = (weights @ v).transpose(0, 1).reshape(1, n, -1)
    return module.o_proj(mixed.float()), weights.float()


def attention_of(model, layer=0, **options):
    """What the patched model's attention gives: (module, its input, its output, its weights) in one forward."""
    module, seen = model.model.layers[layer].self_attn, {}
    hooks = [
        module.register_forward_pre_hook(lambda m, a, k: seen.update(input=k["hidden_states"]), with_kwargs=True),
        module.register_forward_hook(lambda m, a, out: seen.update(output=out[0])),
    ]
    ids = torch.randint(3, 128, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        attentions = model(ids, **options).attentions
    for hook in hooks:
        hook.remove()
    return module, seen["input"], seen["output"], attentions[layer][0] if attentions else None


def agree(model, scores, layer=0):
    module, hidden, output, _ = attention_of(model, layer)
    with torch.no_grad():
        by_hand, weights = attention_by_hand(module, hidden, scores)
    torch.testing.assert_close(output, by_hand, atol=2e-5, rtol=1e-4)
    model.set_attn_implementation("eager")
    shown = attention_of(model, layer, output_attentions=True)[3]
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(shown, weights, atol=1e-5, rtol=1e-4)


def rotated(x, positions, theta=1e4):
    """RoFormer eq. 34 with transformers' pairs: complex numbers a + ib of coordinates i and i + d/2."""
    d = x.shape[-1]
    z = torch.complex(x[..., : d // 2], x[..., d // 2 :])
    f = theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    z = z * torch.exp(1j * positions.double()[..., None] * f)
    return torch.cat((z.real, z.imag), -1)


DISTANCE = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).double()
