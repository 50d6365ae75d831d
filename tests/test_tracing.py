"""torch.export and torch.jit.trace: a program that is right at other texts and lengths, or a refusal."""

import pytest
import torch
from all_models import MODELS, is_stock_attention
from conftest import logits
from torch import nn

from ctxext.errors import CtxextError


class Logits(nn.Module):
    """What both take: a module from tensors to tensors."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits


def program(model, how, ids):
    with torch.no_grad():
        if how == "trace":
            return torch.jit.trace(Logits(model), (ids,), check_trace=False)
        length = torch.export.Dim("length", min=2, max=256)
        shapes = {"ids": {1: length}}
        return torch.export.export(Logits(model), (ids,), dynamic_shapes=shapes, strict=False).module()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["export", "trace"])
@pytest.mark.parametrize("name", MODELS)
def test_a_program_is_right_at_other_lengths_or_refused(name, how, tokens):
    model = MODELS[name]()
    if not is_stock_attention(model):
        with pytest.raises(CtxextError, match="can't be exported or traced"):
            program(model, how, tokens[:, :90])
        return
    made = program(model, how, tokens[:, :90])
    for ids in (tokens.flip(1), tokens[:, :50]):
        with torch.no_grad():
            torch.testing.assert_close(made(ids), logits(model, ids), atol=5e-5, rtol=0)
