"""The live patch: equal to a reload, undone to the bit, working wherever transformers puts a model."""

import copy
import pickle
import warnings

import pytest
import torch
from conftest import logits, pico_model
from torch import nn

import ctxext
from ctxext import methods
from ctxext.errors import CtxextError, CtxextWarning, UsageError

FAMILIES = [
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "olmo", "olmo2", "granite", "smollm3"),
    *("mixtral", "starcoder2", "gpt_neox", "phi", "stablelm", "falcon", "cohere", "cohere2", "glm4", "qwen3_moe"),
]


def options(name, model):
    size = model.base_model.rotary_emb.inv_freq.numel()
    return {"long_factor": [1 + i / 4 for i in range(size)]} if methods.get(name).needs else {}


def family(name):
    changes = {"sliding_window": None} if name == "mistral" else {}
    if name == "granite":
        # Its config class defaults to 1, six times what a head of 32 is usually scaled by; real Granites set it.
        changes |= {"attention_multiplier": 32**-0.5}
    if name in ("mixtral", "qwen3_moe"):
        changes |= {
            "num_local_experts": 4,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "num_experts_per_tok": 2,
        }
        changes |= {"head_dim": None} if name == "mixtral" else {}
    if name in ("falcon", "gpt_neox", "phi", "stablelm"):
        changes |= {"num_key_value_heads": 4, "num_kv_heads": 4, "new_decoder_architecture": True}
    return pico_model(name, **changes)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_equals_its_own_reload(name, tokens, tmp_path):
    """Patched logits differ from unpatched ones and equal those of the saved folder in plain transformers."""
    from transformers import AutoModelForCausalLM

    model = family(name)
    before = logits(model, tokens)
    for method in ("pi", "ntk", "yarn", "longrope"):
        ctxext.patch(model, method, 4, **options(method, model))
        live = logits(model, tokens)
        assert (live - before).abs().max() > 1e-3
        model.save_pretrained(tmp_path / method)
        reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / method).eval()
        assert torch.equal(logits(reloaded, tokens), live)
    ctxext.unpatch(model)
    assert torch.equal(logits(model, tokens), before)


@pytest.mark.parametrize("name", methods.all_methods())
def test_undo_is_exact_and_patching_twice_is_patching_once(name, tokens):
    model = pico_model()
    before, config = logits(model, tokens), model.config.to_dict()
    ctxext.patch(model, name, 4, **options(name, model))
    once = logits(model, tokens)
    ctxext.patch(model, "pi", 2)
    again = ctxext.patch(model, name, 4, **options(name, model))
    assert torch.equal(logits(model, tokens), once)
    assert ctxext.schedule_of(model) == again
    assert model.config.max_position_embeddings == 256
    ctxext.unpatch(model)
    assert torch.equal(logits(model, tokens), before)
    assert model.config.to_dict() == config
    assert ctxext.schedule_of(model) is None
    with pytest.raises(CtxextError, match="isn't patched"):
        ctxext.unpatch(model)


def test_an_instance_only(tokens):
    one, other = pico_model(), pico_model()
    before = logits(other, tokens)
    ctxext.patch(one, "yarn", 4)
    assert torch.equal(logits(other, tokens), before)
    assert torch.equal(logits(pico_model(), tokens), before)


@pytest.mark.parametrize("start_tokens", [0, 8])
def test_frequencies_survive_a_cast(start_tokens, tokens):
    """model.to(bfloat16) before or after the patch leaves angles in float32."""
    factors = [1 + i / 4 for i in range(16)]
    after, before = pico_model(), pico_model()
    kwargs = {"long_factor": factors, "start_tokens": start_tokens}
    ctxext.patch(after, "longrope", 4, **kwargs)
    exact = [b.clone() for b in after.model.rotary_emb.buffers()]
    after = after.to(torch.bfloat16)
    before = before.to(torch.bfloat16)
    ctxext.patch(before, "longrope", 4, **kwargs)
    for model in (after, copy.deepcopy(after), pickle.loads(pickle.dumps(after)), before.half().bfloat16()):
        got = list(model.model.rotary_emb.buffers())
        assert [b.dtype for b in got] == [torch.float32] * len(exact)
        assert all(torch.equal(a, b) for a, b in zip(got, exact, strict=True))
    assert torch.equal(logits(after, tokens), logits(pickle.loads(pickle.dumps(after)), tokens))


def test_start_tokens_keep_the_original_angles(tokens):
    """Against angles computed here: position p turns by p f for p < n-hat, by p f / lambda from there on."""
    model = pico_model()
    factors = [1 + i / 4 for i in range(16)]
    schedule = ctxext.patch(model, "longrope", 4, long_factor=factors, start_tokens=8)
    assert not schedule.is_static
    positions = torch.arange(20)[None]
    cos, sin = model.model.rotary_emb(torch.zeros(1, dtype=torch.float64), positions)
    base = torch.tensor(schedule.rope.geometric(), dtype=torch.float64)
    frequencies = torch.where(positions[0, :, None] < 8, base, base / torch.tensor(factors))
    angles = positions[0, :, None] * frequencies
    scale = schedule.stages[0].attention_scale
    torch.testing.assert_close(cos[0, :, :16], angles.cos() * scale, atol=2e-6, rtol=0)
    torch.testing.assert_close(sin[0, :, 16:], angles.sin() * scale, atol=2e-6, rtol=0)
    # With every position a start token only the attention scale is left.
    ctxext.patch(model, "longrope", 4, long_factor=factors, start_tokens=1000, attention_factor=1.0)
    live = logits(model, tokens)
    ctxext.unpatch(model)
    torch.testing.assert_close(live, logits(model, tokens), atol=1e-5, rtol=0)


def test_under_torch_compile(tokens):
    model = pico_model()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    before = logits(compiled, tokens)
    ctxext.patch(compiled, "yarn", 4)
    torch.testing.assert_close(logits(compiled, tokens), logits(model, tokens), atol=1e-5, rtol=0)
    assert (logits(compiled, tokens) - before).abs().max() > 1e-3
    ctxext.patch(compiled, "longrope", 4, long_factor=[1 + i / 4 for i in range(16)], start_tokens=4)
    torch.testing.assert_close(logits(compiled, tokens), logits(model, tokens), atol=1e-5, rtol=0)


def test_inside_peft_and_with_gradient_checkpointing(tokens):
    from peft import LoraConfig, get_peft_model

    plain = pico_model()
    ctxext.patch(plain, "yarn", 4)
    expected = logits(plain, tokens)
    wrapped = get_peft_model(pico_model(), LoraConfig(r=4, target_modules="all-linear"))
    ctxext.patch(wrapped, "yarn", 4)
    assert torch.equal(logits(wrapped, tokens), expected)
    gradients = []
    for checkpointing in (False, True):
        wrapped.train()
        if checkpointing:
            wrapped.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
            wrapped.enable_input_require_grads()
            ctxext.patch(wrapped, "yarn", 4)
        wrapped.zero_grad()
        wrapped(tokens, labels=tokens).loss.backward()
        gradients.append([p.grad.clone() for p in wrapped.parameters() if p.grad is not None])
    assert gradients[0]
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(*gradients, strict=True))


def test_after_a_device_map_with_offload(tokens, tmp_path):
    from transformers import AutoModelForCausalLM

    pico_model().save_pretrained(tmp_path / "m")
    plain = pico_model()
    ctxext.patch(plain, "yarn", 4)
    placement = {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.layers.2": "disk",
    }
    placement |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", device_map=placement, offload_folder=tmp_path / "off"
    ).eval()
    ctxext.patch(model, "yarn", 4)
    assert torch.equal(logits(model, tokens), logits(plain, tokens))


def test_a_sliding_window_of_every_layer_is_removed_and_given_back(tokens):
    model = pico_model("mistral", sliding_window=16)
    before = logits(model, tokens)
    with pytest.warns(CtxextWarning, match="sliding window of 16 tokens"):
        ctxext.patch(model, "yarn", 4)
    reference = pico_model("mistral", sliding_window=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CtxextWarning)
        ctxext.patch(reference, "yarn", 4)
    assert torch.equal(logits(model, tokens), logits(reference, tokens))
    ctxext.unpatch(model)
    assert model.config.sliding_window == 16
    assert torch.equal(logits(model, tokens), before)


def test_a_patch_without_effect_is_an_error(tokens):
    """A decoder that ignores the module it carries, as when transformers moves the rotary elsewhere."""
    model = pico_model()
    before = logits(model, tokens)

    class Deaf(type(model.model)):
        def forward(self, input_ids, position_ids=None, **kwargs):
            hidden = self.embed_tokens(input_ids)
            angles = self.hidden_rotary[0](hidden, position_ids)
            for layer in self.layers:
                hidden = layer(hidden, position_embeddings=angles, position_ids=position_ids)
            return hidden

    model.model.hidden_rotary = [copy.deepcopy(model.model.rotary_emb)]
    original = type(model.model)
    model.model.__class__ = Deaf
    with pytest.raises(CtxextError, match="no effect"):
        ctxext.patch(model, "yarn", 4)
    model.model.__class__ = original
    assert torch.equal(logits(model, tokens), before)
    assert ctxext.schedule_of(model) is None


def test_a_rotary_per_layer_is_refused():
    model = pico_model()
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    with pytest.raises(CtxextError, match="4 rotary modules"):
        ctxext.patch(model, "yarn", 4)


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama4_text"])
def test_other_families_are_refused_with_the_reason(name):
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    keys = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "ffn_dim": 64}
    keys |= {"n_embd": 64, "n_layer": 2, "n_head": 4, "intermediate_size": 64, "intermediate_size_mlp": 64}
    keys |= {"word_embed_proj_dim": 64, "num_key_value_heads": 4, "head_dim": 16, "pad_token_id": 0}
    keys |= {"bos_token_id": 1, "eos_token_id": 2, "num_local_experts": 2}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**keys))
    with pytest.raises(CtxextError, match="can't patch this model"):
        ctxext.patch(model, "yarn", 4)


def test_not_a_model_and_bad_options_leave_the_model_alone(tokens):
    model = pico_model()
    before = logits(model, tokens)
    with pytest.raises(CtxextError, match="no rotary_emb module"):
        ctxext.patch(nn.Linear(2, 2), "yarn", 4)
    for bad in ({"beta_fast": -1}, {"nosuch": 1}):
        with pytest.raises(UsageError):
            ctxext.patch(model, "yarn", 4, **bad)
    with pytest.raises(UsageError):
        ctxext.patch(model, "yarn", 0.5)
    assert torch.equal(logits(model, tokens), before)


@pytest.mark.filterwarnings("ignore:linear scaling")
def test_already_scaled_checkpoints(tokens):
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    model = pico_model(rope_parameters=scaled, max_position_embeddings=128)
    with pytest.raises(CtxextError, match="already scaled"):
        ctxext.patch(model, "pi", 2)
    composed = ctxext.patch(model, "pi", 2, existing="compose")
    assert composed.max_length == 128 * 2
    live = logits(model, tokens)
    reference = pico_model()
    ctxext.patch(reference, "pi", 4)
    torch.testing.assert_close(live, logits(reference, tokens), atol=1e-5, rtol=0)


def test_ministral3_keeps_what_its_attention_reads(tokens, tmp_path):
    """A temperature by position from two keys of rope_parameters; a dict without them is a TypeError there."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}
    model = pico_model("ministral3", rope_parameters={**rope, "original_max_position_embeddings": 64})
    for method in ("ntk", "pi", "yarn", "nope"):
        ctxext.patch(model, method, 4)
        assert model.config.rope_parameters["original_max_position_embeddings"] == 64
        assert model.config.rope_parameters["llama_4_scaling_beta"] == 0.1
        model.save_pretrained(tmp_path / method)
        assert torch.equal(logits(ctxext.load(tmp_path / method).eval(), tokens), logits(model, tokens))


@pytest.mark.parametrize("method", ["yarn", "dynamic_ntk", "self_extend", "alibi", "t5_bias"])
def test_under_another_default_dtype(method, tokens):
    """A program that makes its models in bfloat16 by torch.set_default_dtype."""
    want, model = pico_model(), pico_model()
    ctxext.patch(want, method, 4)
    torch.set_default_dtype(torch.bfloat16)
    try:
        ctxext.patch(model, method, 4)
    finally:
        torch.set_default_dtype(torch.float32)
    if method != "t5_bias":  # its table is made in the default dtype, as every new module is
        assert torch.equal(logits(model, tokens), logits(want, tokens))
