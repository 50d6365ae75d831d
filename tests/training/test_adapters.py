"""Adapters: loaded with their rope, refused on another base or schedule, and merged into a plain folder."""

import json
import shutil
import warnings

import pytest
import torch
from conftest import logits, pico_model, run
from safetensors.torch import load_file
from smoke import RECIPES, recipe

import ctxext
from ctxext.errors import CtxextError
from ctxext.folders import adapter as adapters
from ctxext.folders.source import TINY
from ctxext.training.run import train

# ---------------------------------------------------------------- adapters


def test_an_adapter_loads_on_its_base_with_its_rope(adapter):
    out, _ = adapter
    model = ctxext.load(out / "adapter")
    assert ctxext.schedule_of(model).method == "pi"
    adapters.check(model, out / "adapter")
    ids = torch.arange(3, 43)[None]
    plain = ctxext.load(TINY)
    ctxext.patch(plain, "pi", 4)
    assert (logits(model, ids) - logits(plain, ids)).abs().max() > 0.01  # the adapter does something
    same = ctxext.load(out / "adapter", base=TINY)
    assert torch.equal(logits(same, ids), logits(model, ids))


def test_another_base_is_refused(adapter, tmp_path):
    out, _ = adapter
    pico_model().save_pretrained(tmp_path / "other")
    with pytest.raises(CtxextError, match="was trained on other weights"):
        ctxext.load(out / "adapter", base=tmp_path / "other")
    shutil.copytree(TINY, tmp_path / "changed")
    tensors = load_file(tmp_path / "changed" / "model.safetensors")
    from safetensors.torch import save_file

    tensors["model.norm.weight"][0] += 1
    save_file(tensors, tmp_path / "changed" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CtxextError, match="was trained on other weights"):
        ctxext.load(out / "adapter", base=tmp_path / "changed")
    with pytest.raises(CtxextError, match="isn't at"):
        ctxext.load(out / "adapter", base=tmp_path / "nowhere")


def test_another_schedule_is_refused(adapter, tmp_path):
    out, _ = adapter
    ctxext.patch_checkpoint("tiny", tmp_path / "yarn", method="yarn", factor=4)
    with pytest.raises(CtxextError, match="runs yarn x4, the adapter was trained with pi x4"):
        ctxext.load(out / "adapter", base=tmp_path / "yarn")
    ctxext.patch_checkpoint("tiny", tmp_path / "pi", method="pi", factor=4)
    ids = torch.arange(3, 43)[None]
    same = ctxext.load(out / "adapter", base=tmp_path / "pi")
    assert torch.equal(logits(same, ids), logits(ctxext.load(out / "adapter"), ids))
    shutil.copytree(out / "adapter", tmp_path / "edited")
    shutil.copyfile(tmp_path / "yarn" / "config.json", tmp_path / "edited" / "config.json")
    with pytest.raises(CtxextError, match="another schedule than its config"):
        ctxext.load(tmp_path / "edited")


def test_an_adapter_is_no_model_to_patch(adapter, tmp_path):
    out, _ = adapter
    with pytest.raises(CtxextError, match="is an adapter, not a whole model"):
        ctxext.patch_checkpoint(out / "adapter", tmp_path / "out", method="yarn", factor=4)
    with pytest.raises(CtxextError, match="it isn't an adapter that ctxext wrote"):
        adapters.read_adapter(TINY)


def test_plain_peft_warns_and_the_live_model_can_be_checked(adapter):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    out, _ = adapter
    with pytest.warns(UserWarning, match=r"Unexpected keyword arguments \['ctxext'\]"):
        wrong = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(TINY), out / "adapter")
    with pytest.raises(CtxextError, match="runs none x1, the adapter was trained with pi x4"):
        adapters.check(wrong, out / "adapter")
    with pytest.raises(OSError, match=r"model\.safetensors"):  # transformers alone can't load it at all
        AutoModelForCausalLM.from_pretrained(out / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ctxext.load(out / "adapter")


def test_the_fingerprint_does_not_depend_on_sharding(tmp_path):
    model = pico_model()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="200KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    assert adapters.fingerprint(tmp_path / "one") == adapters.fingerprint(tmp_path / "many")


# ---------------------------------------------------------------- merging


def test_a_merged_folder_is_the_adapter_for_plain_transformers(adapter, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out, _ = adapter
    done = ctxext.merge(out / "adapter", tmp_path / "merged", dtype="float32")
    assert done.rounding < 1e-4
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert type(plain).__name__ == "LlamaForCausalLM"
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    ids = torch.arange(3, 300)[None]
    assert torch.allclose(
        logits(plain, ids), logits(ctxext.load(out / "adapter", dtype="float32"), ids), atol=1e-4
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").model_max_length == 1024
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "with the adapter `adapter` added" in card
    assert "nothing was trained" not in card
    with pytest.raises(CtxextError, match="exists already"):
        ctxext.merge(out / "adapter", tmp_path / "merged")


def test_staged_untouched_and_composed_from_training_to_merge(text, cache, tmp_path):
    ids = torch.arange(3, 400)[None]
    ctxext.patch_checkpoint("tiny", tmp_path / "yarn", method="yarn", factor=2)
    cases = {
        "staged": ["method.name=dynamic_yarn"],
        "control": ["method=null"],
        "composed": [f"model.path={tmp_path / 'yarn'}", "model.existing=compose", "method.factor=2"],
    }
    for name, change in cases.items():
        more = ["positions.target=1024", "train.steps=2", "adapter={r: 2}"]
        train(recipe(tmp_path / name, text, cache, *change, *more))
        model = ctxext.load(tmp_path / name / "adapter", dtype="float32")
        schedule = ctxext.schedule_of(model)
        wanted = {"staged": "dynamic_yarn", "control": None, "composed": "pi"}[name]
        assert (schedule.method if schedule else None) == wanted
        ctxext.merge(tmp_path / name / "adapter", tmp_path / f"{name}-merged", dtype="float32")
        merged = ctxext.load(tmp_path / f"{name}-merged")
        assert torch.allclose(logits(merged, ids), logits(model, ids), atol=1e-4)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_family_that_checks_the_type_when_it_saves(kind, text, cache, tmp_path):
    """Phi-3's config class lets nothing but longrope be written: checkpoints, the end of a run and merging."""
    from transformers import AutoModelForCausalLM

    base = tmp_path / "base"
    pico_model("phi3", vocab_size=1024, num_hidden_layers=1).save_pretrained(base)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, base / name)
    changes = [f"model.path={base}", "method={name: dynamic_ntk, factor: 2}", f"adapter={{kind: {kind}}}"]
    changes += ["positions={kind: plain}", "train.steps=2", "train.save_steps=1"]
    trained = train(recipe(tmp_path / "run", text, cache, *changes))["trained"]
    model = ctxext.load(trained).eval()
    assert ctxext.schedule_of(model).method == "dynamic_ntk"
    if kind == "lora":
        trained = ctxext.merge(trained, tmp_path / "merged").out
    with pytest.raises(Exception, match=r"needs ctxext\.load"):
        AutoModelForCausalLM.from_pretrained(trained)
    assert ctxext.schedule_of(ctxext.load(trained)).method == "dynamic_ntk"


def test_commands(adapter, monkeypatch, capsys, tmp_path):
    out, _ = adapter
    code, printed, err = run(monkeypatch, capsys, "merge", out / "adapter", "-o", tmp_path / "merged", "--json")
    assert code == 0, err
    assert json.loads(printed)["schedule"]["method"] == "pi"
    dry = ("train", RECIPES / "smoke-cpu.yaml", "--dry-run")
    code, printed, _ = run(monkeypatch, capsys, *dry, "train.steps=3", "--json")
    assert code == 0
    assert json.loads(printed)["tokens"] == 3 * 2 * 128
    code, printed, _ = run(monkeypatch, capsys, *dry)
    assert code == 0
    assert "loss_chunk: 256" in printed
    code, _, err = run(monkeypatch, capsys, "train", RECIPES / "smoke-cpu.yaml", "train.stps=3", "data.lenth=1")
    assert code == 2
    assert "did you mean 'steps'?" in err
    assert "did you mean 'length'?" in err
    code, _, err = run(monkeypatch, capsys, "merge", TINY, "-o", tmp_path / "no")
    assert code == 1
    assert "isn't an adapter that ctxext wrote" in err
