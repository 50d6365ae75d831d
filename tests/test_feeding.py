"""The invariants matrix: however a text is fed to a model under any method, its logits are the same.

The oracle is one forward without a cache, given the same positions and masks (feeding.py).
"""

import pytest
from all_models import MODELS, is_stock_attention
from feeding import HOLES, NOT_CAUSAL, ROWS, differences

from ctxext.errors import CtxextError

TOLERANCE = 5e-5


@pytest.mark.parametrize("row", [*ROWS, *HOLES])
@pytest.mark.parametrize("name", MODELS)
def test_every_way_of_feeding_agrees(name, row, tokens):
    difference, mismatches = differences(row, MODELS[name](), tokens)
    assert difference < TOLERANCE
    assert mismatches == 0


@pytest.mark.parametrize("row", NOT_CAUSAL)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_that_see_later_ones(name, row, tokens):
    """Fine where attention is the model's own, refused where another is defined for causal attention only."""
    model = MODELS[name]()
    if is_stock_attention(model):
        assert differences(row, model, tokens)[0] < TOLERANCE
        return
    with pytest.raises(CtxextError, match="see later ones"):
        differences(row, model, tokens)
