"""What a staged schedule must survive: training, undoing, folders, copies and casts; and what it refuses."""

import copy
import json

import pytest
import torch
from conftest import logits, pico_model
from feeding import TOLERANCE
from staged_models import staged

import ctxext
from ctxext.errors import CtxextError, UsageError


def test_training_with_lora_and_checkpointing(tokens):
    from peft import LoraConfig, get_peft_model

    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        wrapped = get_peft_model(
            pico_model(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        )
        ctxext.patch(wrapped, "dynamic_ntk", 4, granularity=16)
        wrapped.train()
        if checkpointing:
            wrapped.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
            wrapped.enable_input_require_grads()
        loss = wrapped(tokens, labels=tokens, use_cache=False).loss
        # Another forward between this one and its backward must not disturb what checkpointing recomputes.
        logits(wrapped, tokens[:, :100])
        loss.backward()
        gradients.append([p.grad.clone() for p in wrapped.parameters() if p.requires_grad])
    assert all(g.isfinite().all() for g in gradients[0])
    assert any(g.abs().max() > 0 for g in gradients[0])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_gradients_against_finite_differences(tokens):
    """Through the turned keys of earlier stages, in float64."""
    model = pico_model().double()
    ctxext.patch(model, "dynamic_ntk", 4, granularity=16)
    weight = model.model.layers[0].self_attn.k_proj.weight
    ids = tokens[:, :120]
    model(ids, labels=ids, use_cache=False).loss.backward()
    for index in [(0, 0), (5, 17), (40, 90)]:
        step = 1e-2
        values = []
        with torch.no_grad():
            for sign in (1, -1):
                weight[index] += sign * step
                values.append(model(ids, labels=ids, use_cache=False).loss.item())
                weight[index] -= sign * step
        assert weight.grad[index].item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-3, abs=1e-8)


def test_undo_and_patch_again(tokens):
    model = pico_model()
    before = logits(model, tokens)
    ctxext.patch(model, "dynamic_ntk", 4)
    once = logits(model, tokens)
    ctxext.patch(model, "yarn", 4)
    ctxext.patch(model, "dynamic_ntk", 4)
    assert torch.equal(logits(model, tokens), once)
    ctxext.unpatch(model)
    assert torch.equal(logits(model, tokens), before)
    assert "forward" not in model.model.layers[0].self_attn.__dict__


def test_folders_refuse_plain_transformers_and_load_with_ctxext(llama_folder, tmp_path, tokens):
    from transformers import AutoModelForCausalLM

    live = pico_model()
    ctxext.patch(live, "dynamic_yarn", 4, granularity=16)
    out = ctxext.patch_checkpoint(
        llama_folder, tmp_path / "out", method="dynamic_yarn", factor=4, granularity=16
    ).out
    with pytest.raises(KeyError, match=r"needs ctxext\.load"):
        AutoModelForCausalLM.from_pretrained(out)
    loaded = ctxext.load(out).eval()
    assert torch.equal(logits(loaded, tokens), logits(live, tokens))
    assert "KeyError" in (out / "README.md").read_text()


@pytest.mark.parametrize("method", ["dynamic_ntk", "self_extend"])
@pytest.mark.parametrize("model_type", ["phi3", "phimoe"])
def test_families_that_check_the_type_when_they_save(model_type, method, tmp_path, tokens):
    """Their config classes save nothing but longrope: it must be one that plain transformers won't run."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from ctxext.folders.doctor import doctor

    pico_model(model_type).save_pretrained(tmp_path / "plain")
    model = ctxext.load(tmp_path / "plain").eval()
    unpatched = logits(model, tokens)
    before = model.config.rope_parameters
    ctxext.patch(model, method, 4)
    want = logits(model, tokens)
    model.save_pretrained(tmp_path / "saved")
    for read in (AutoModelForCausalLM, AutoConfig):
        with pytest.raises(Exception, match=r"needs ctxext\.load"):
            read.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(ctxext.load(tmp_path / "saved").eval(), tokens), want)
    ctxext.unpatch(model)
    assert model.config.rope_parameters == before
    assert torch.equal(logits(model, tokens), unpatched)
    # The doctor brings it to the form that ctxext writes itself.
    ctxext.patch_checkpoint(tmp_path / "plain", tmp_path / "out", method=method, factor=4)
    with pytest.raises(Exception, match=r"needs ctxext\.load"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert [f.check for f in doctor(tmp_path / "saved", fix=True).mended] == ["block_and_keys"]
    configs = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("saved", "out")]
    assert configs[0]["rope_parameters"] == configs[1]["rope_parameters"]
    assert torch.equal(logits(ctxext.load(tmp_path / "saved").eval(), tokens), want)


def test_the_static_fallback_is_the_last_stage(llama_folder, tmp_path, tokens):
    """Plain transformers runs it, without a word of ctxext; ctxext.load still runs the stages."""
    from transformers import AutoModelForCausalLM

    options = {"method": "dynamic_ntk", "factor": 4, "fallback": "static"}
    out = ctxext.patch_checkpoint(llama_folder, tmp_path / "out", **options).out
    plain = AutoModelForCausalLM.from_pretrained(out).eval()
    static = pico_model()
    ctxext.patch(static, "ntk", 4)
    # The same frequencies by another float32 formula (divisors instead of a theta).
    torch.testing.assert_close(logits(plain, tokens), logits(static, tokens), atol=5 * TOLERANCE, rtol=0)
    live = pico_model()
    ctxext.patch(live, "dynamic_ntk", 4)
    assert torch.equal(logits(ctxext.load(out).eval(), tokens), logits(live, tokens))
    card = (out / "README.md").read_text()
    assert "runs an approximation" in card
    assert "transformers | 5.24 | approximates" in card
    with pytest.raises(UsageError, match="fallback='hope'"):
        ctxext.patch_checkpoint(llama_folder, tmp_path / "no", method="dynamic_ntk", factor=4, fallback="hope")


def test_copies_and_pickles_stand_alone(tokens):
    import pickle

    model = staged()
    want = logits(model, tokens)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        ctxext.unpatch(model)
        assert torch.equal(logits(other, tokens), want)
        model = staged()


def test_bfloat16_keeps_its_angles(tokens):
    model = staged().to(torch.bfloat16)
    tables = [b for b in model.model.rotary_emb.buffers() if b.is_floating_point()]
    assert {t.dtype for t in tables} == {torch.float32}
    exact = logits(staged(), tokens)
    low = logits(model, tokens).float()
    static = pico_model()
    ctxext.patch(static, "ntk", 4)
    reference = logits(static, tokens)
    error = (low - exact).abs().mean() / exact.std()
    static_error = (logits(static.to(torch.bfloat16), tokens).float() - reference).abs().mean() / reference.std()
    assert error < 1.5 * static_error


def test_what_is_refused(tokens):
    from transformers import DynamicCache

    model = staged()
    filled = DynamicCache(config=model.config)
    with torch.no_grad():
        pico_model()(tokens[:, :20], cache=filled, use_cache=True)
    with pytest.raises(CtxextError, match="filled before the model was patched"):
        model(tokens[:, :5], cache=filled, use_cache=True)
    with pytest.raises(CtxextError, match="offloaded"):
        model(tokens[:, :5], cache=DynamicCache(config=model.config, offloading=True), use_cache=True)
    with torch.no_grad():
        cache = model(tokens[:, :100], use_cache=True).cache
    cache.layers[0].keys, cache.layers[0].values = (
        t[:, :, 10:] for t in (cache.layers[0].keys, cache.layers[0].values)
    )
    with pytest.raises(CtxextError, match="taken or put in from outside"):
        model(tokens[:, :1], cache=cache, use_cache=True)
    sliding = pico_model("mistral", sliding_window=16)
    cache = DynamicCache(config=sliding.config)
    with pytest.warns(UserWarning, match="window"):
        ctxext.patch(sliding, "dynamic_ntk", 4)
    with pytest.raises(CtxextError, match="can't turn the keys of a DynamicSlidingWindowLayer"):
        sliding(tokens[:, :5], cache=cache, use_cache=True)
