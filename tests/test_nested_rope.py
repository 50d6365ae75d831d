"""One rope per type of layer (Gemma 3, OLMo 3): the full-attention layers are scaled, the sliding ones stay."""

import json

import pytest
import torch
from conftest import logits, pico_model

import ctxext
from ctxext import methods
from ctxext.config.read import read_rope
from ctxext.errors import CtxextError
from ctxext.runtimes.portability import portability

FAMILIES = ("gemma3_text", "olmo3")
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


def model(family):
    made = pico_model(family, layer_types=KINDS, sliding_window=32)
    assert set(made.config.rope_parameters) == {"sliding_attention", "full_attention"}
    return made


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [n for n, m in methods.all_methods().items() if not m.loads.startswith("needs")])
def test_live_equals_folder_equals_transformers_by_hand(name, family, tokens, tmp_path):
    from transformers import AutoModelForCausalLM

    live = model(family)
    live.save_pretrained(tmp_path / "m")
    before = logits(live, tokens)
    local = live.model.rotary_emb.sliding_attention_inv_freq.clone()
    options = {"long_factor": [1 + i / 4 for i in range(16)]} if methods.get(name).needs else {}
    schedule = ctxext.patch(live, name, 4, **options)
    after = logits(live, tokens)
    assert (after - before).abs().max() > 1e-3
    assert torch.equal(live.model.rotary_emb.sliding_attention_inv_freq, local)
    table = live.model.rotary_emb.full_attention_inv_freq.double()
    torch.testing.assert_close(table, torch.tensor(schedule.stages[0].inv_freq).double(), rtol=3e-6, atol=1e-9)
    done = ctxext.patch_checkpoint(tmp_path / "m", tmp_path / "out", method=name, factor=4, **options)
    assert done.schedule == schedule
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(done.out).eval(), tokens), after)
    config = json.loads((done.out / "config.json").read_text())
    assert config["rope_parameters"]["sliding_attention"] == live.config.rope_parameters["sliding_attention"]
    assert read_rope(config, existing="replace") == schedule.rope
    ctxext.unpatch(live)
    assert torch.equal(logits(live, tokens), before)


def test_yarn_without_truncate_isnt_lost(tokens):
    """transformers reads truncate from the top of a nested dict; so this goes as a table."""
    live = model("gemma3_text")
    schedule = ctxext.patch(live, "yarn", 4, truncate=False)
    table = live.model.rotary_emb.full_attention_inv_freq.double()
    torch.testing.assert_close(table, torch.tensor(schedule.stages[0].inv_freq).double(), rtol=3e-6, atol=1e-9)
    rope = live.config.rope_parameters["full_attention"]
    assert (rope["rope_type"], live.model.rotary_emb.full_attention_attention_scaling) == (
        "longrope",
        schedule.stages[0].attention_scale,
    )


def test_gemma3_as_transformers_4_saved_it(tokens, tmp_path):
    """rope_theta for the full layers, rope_local_base_freq for the sliding ones, scaling flat."""
    made = model("gemma3_text")
    made.save_pretrained(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    theta = config["rope_parameters"]["full_attention"]["rope_theta"]
    local = config.pop("rope_parameters")["sliding_attention"]["rope_theta"]
    assert theta != local
    config |= {"rope_theta": theta, "rope_local_base_freq": local, "rope_scaling": None}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    out = ctxext.patch_checkpoint(tmp_path / "m", tmp_path / "out", method="yarn", factor=4).out
    ctxext.patch(made, "yarn", 4)
    assert torch.equal(logits(ctxext.load(out).eval(), tokens), logits(made, tokens))
    config |= {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "max_position_embeddings": 256}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CtxextError, match="already scaled: pi, factor 4"):
        ctxext.patch_checkpoint(tmp_path / "m", tmp_path / "out2", method="yarn", factor=4)


def test_what_needs_one_rope_for_all_layers(tmp_path):
    live = model("gemma3_text")
    live.save_pretrained(tmp_path / "m")
    with pytest.raises(CtxextError, match="needs full attention in every layer"):
        ctxext.patch(live, "dynamic_ntk", 4)
    with pytest.raises(CtxextError, match="one per layer type"):
        ctxext.patch(live, "longrope", 4, long_factor=[2.0] * 16, start_tokens=4)
    with pytest.raises(CtxextError, match="needs full attention in every layer"):
        ctxext.patch_checkpoint(tmp_path / "m", tmp_path / "out", method="dynamic_ntk", factor=4)
    assert not (tmp_path / "out").exists()
    out = ctxext.patch_checkpoint(tmp_path / "m", tmp_path / "out", method="yarn", factor=4).out
    answers = {v.runtime: v.runs for v in portability(json.loads((out / "config.json").read_text()))}
    assert (answers["transformers"], answers["vLLM"]) == ("exact", "unchecked")
