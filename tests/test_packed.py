"""Documents packed into one row, as transformers' collator does it for flash attention, under other backends."""

import pytest
import torch
from conftest import logits, pico_model
from encoded_models import METHODS, patched
from staged_models import METHODS as STAGED
from staged_models import staged

import ctxext
from ctxext.errors import CtxextError


def yarn():
    model = pico_model()
    ctxext.patch(model, "yarn", 4)
    return model


MODELS = {name: (lambda name=name: patched(name)) for name in METHODS}
MODELS |= {name: (lambda name=name: staged(method=name)) for name in STAGED}
MODELS["yarn"] = yarn


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_are_what_each_is_alone(name, backend, tokens):
    from transformers import DataCollatorWithFlattening

    model = MODELS[name]()
    model.set_attn_implementation(backend)
    parts = [tokens[0, :110], tokens[0, 110:140], tokens[0, 60:150]]
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True)([{"input_ids": p.tolist()} for p in parts])
    assert "cu_seq_lens_q" in batch
    batch.pop("labels")
    with torch.no_grad():
        got = model(**batch, use_cache=False).logits
    want = torch.cat([logits(model, p[None]) for p in parts], 1)
    assert (got - want).abs().max() < 5e-5


@pytest.mark.parametrize("how", ["export", "trace"])
@pytest.mark.parametrize("method", STAGED)
def test_staged_models_say_that_they_cannot_be_exported(method, how, tokens):
    model = staged(method=method)
    model.config.return_dict = False
    run = {"export": lambda: torch.export.export(model, (tokens,), strict=False)}
    run["trace"] = lambda: torch.jit.trace(model, (tokens,))
    with pytest.raises(CtxextError, match="can't be exported"):
        run[how]()
