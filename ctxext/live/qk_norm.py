"""Norms of queries and keys that a schedule adds to a model, with learned weights.

Henry et al. 2020, arXiv:2010.04245, as DroPE's authors use them: the RMS is that of all heads of a token together,
as in OLMo 2. They bound the logits, so that recalibration stands a higher learning rate. A new norm has weights of
1, which is another model until it's trained. transformers has no config key for it in a Llama.
"""

from __future__ import annotations

import torch
from torch import nn

from ..rope.encodings import QueryKeyNorm

NORMS = "ctxext_qk_norm"
"""Where a decoder holds the norms of all its layers; weights files have them under this name."""


class QKNorm(nn.Module):
    """The weights of every layer: query (layers, heads * head size), key (layers, key heads * head size)."""

    def __init__(self, norm: QueryKeyNorm, layers: int, heads: int, key_heads: int, head_size: int):
        super().__init__()
        self.epsilon = norm.epsilon
        self.query = nn.Parameter(torch.ones(layers, heads * head_size))
        self.key = nn.Parameter(torch.ones(layers, key_heads * head_size))

    def forward(self, query: torch.Tensor, key: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys of one layer, each (batch, heads, tokens, head size), normed.

        Keys come from the cache as they were projected, so all of them are normed in every call.
        """
        return self._normed(query, self.query[layer]), self._normed(key, self.key[layer])

    def _normed(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        exact = states.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean((1, 3), keepdim=True) + self.epsilon)
        return (exact * weight.float().view(1, states.shape[1], 1, -1)).to(states.dtype)
