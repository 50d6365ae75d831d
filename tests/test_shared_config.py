"""One config object in several models, and several holders in one model."""

import copy
from typing import Any

import pytest
import torch
from conftest import logits, pico_config, pico_model

import ctxext
from ctxext.errors import CtxextError


def twins():
    from transformers import LlamaForCausalLM

    first = pico_model()
    second = LlamaForCausalLM(first.config).eval()
    second.load_state_dict(first.state_dict())
    return first, second


@pytest.mark.parametrize("method", ["yarn", "dynamic_ntk", "alibi"])
@pytest.mark.parametrize("inner", [False, True])
def test_a_patch_leaves_the_config_of_other_models(method, inner, tokens, tmp_path):
    from transformers import AutoModelForCausalLM

    first, second = twins()
    want, config = logits(second, tokens), copy.deepcopy(second.config.to_dict())
    ctxext.patch(first.model if inner else first, method, 4)
    assert second.config.to_dict() == config
    assert first.config is first.model.config
    assert first.config.max_position_embeddings == 256
    second.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), tokens), want)
    ctxext.patch(second, method, 2)
    ctxext.unpatch(first.model if inner else first)
    assert first.config is first.model.config
    assert first.config.to_dict() == config
    assert second.config.max_position_embeddings == 128
    assert torch.equal(logits(first, tokens), want)


def test_a_model_built_from_a_patched_one_keeps_its_config(tokens, tmp_path):
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    first = pico_model()
    ctxext.patch(first, "yarn", 4)
    second = LlamaForCausalLM(first.config).eval()
    want = logits(second, tokens)
    ctxext.unpatch(first)
    second.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), tokens), want)


def test_settings_made_while_patched_outlive_the_patch():
    model = pico_model()
    ctxext.patch(model, "yarn", 4)
    model.config.use_cache = False
    model.config.pad_token_id = 7
    ctxext.unpatch(model)
    assert (model.config.use_cache, model.config.pad_token_id) == (False, 7)
    assert model.config.max_position_embeddings == 64


@pytest.mark.parametrize("through", ["wrapper", "model", "decoder"])
def test_a_wrapper_sees_the_patch_and_its_end_whoever_is_patched(through):
    peft = pytest.importorskip("peft")
    model = pico_model()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    handle = {"wrapper": wrapped, "model": model, "decoder": model.model}[through]
    ctxext.patch(handle, "yarn", 4)
    assert wrapped.config is model.config is model.model.config
    assert wrapped.config.max_position_embeddings == 256
    ctxext.unpatch(handle)
    assert wrapped.config is model.config is model.model.config
    assert wrapped.config.max_position_embeddings == 64


def test_a_config_inside_another_is_patched_there_for_one_model_alone():
    from torch import nn
    from transformers import LlamaForCausalLM, LlavaConfig

    outer: Any = LlavaConfig(text_config=pico_config())

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = outer
            self.language_model = LlamaForCausalLM(outer.text_config)

    first, second = Whole(), Whole()
    ctxext.patch(first.language_model, "yarn", 4)
    assert first.config.text_config is first.language_model.config
    assert first.config.text_config.max_position_embeddings == 256
    assert second.config.text_config is second.language_model.config
    assert second.config.text_config.max_position_embeddings == 64
    ctxext.unpatch(first)
    assert first.config.text_config is first.language_model.config
    assert first.config.text_config.max_position_embeddings == 64


@pytest.mark.parametrize("method", ["yarn", "dynamic_ntk", "t5_bias"])
def test_a_patch_made_in_inference_mode_can_be_trained_with(method, tokens):
    model = pico_model()
    with torch.inference_mode():
        ctxext.patch(model, method, 4)
        inside = model(tokens).logits
    out = model(tokens, labels=tokens)
    torch.testing.assert_close(out.logits, inside.clone(), atol=1e-4, rtol=0)
    out.loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("method", ["yarn", "dynamic_ntk", "alibi", "t5_bias", "rerope"])
def test_a_model_without_weights_is_told_to_load_them_first(method, tokens):
    with torch.device("meta"):
        model = pico_model()
    config = model.config.to_dict()
    with pytest.raises(CtxextError, match="meta device") as refused:
        ctxext.patch(model, method, 4)
    assert "load the weights" in str(refused.value.hint)
    assert model.config.to_dict() == config
    assert ctxext.schedule_of(model) is None


def test_models_in_one_container_keep_their_own_config():
    """A policy and its reference, as trainers hold them."""
    from torch import nn

    first, second = twins()
    both = nn.ModuleDict({"policy": first, "reference": second})
    ctxext.patch(first, "yarn", 4)
    assert second.config is second.model.config
    assert second.config.max_position_embeddings == 64
    ctxext.patch(both["reference"], "yarn", 2)
    ctxext.unpatch(first)
    assert first.config.max_position_embeddings == 64
    assert second.config.max_position_embeddings == 128


@pytest.mark.parametrize("method", ["yarn", "dynamic_ntk", "alibi"])
def test_the_config_of_a_model_alone_stays_the_same_object(method, monkeypatch):
    """And nothing searches the heap of the process for others that hold it."""
    model = pico_model()
    monkeypatch.setattr("ctxext.live.undo._parts", None)
    known = id(model.config)
    for factor in (4, 2):
        ctxext.patch(model, method, factor)
        assert id(model.config) == known
    ctxext.unpatch(model)
    assert id(model.config) == known
