"""Documents packed into one row, as transformers' collator does it for flash attention, under other backends."""

import pytest
import torch
from all_models import MODELS
from conftest import logits


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
