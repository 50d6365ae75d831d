"""Whole runs on the embedded model: what they leave, refuse and evaluate, and which tensors move."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import pico_model, run
from smoke import recipe

import ctxext
from ctxext.errors import CtxextError, UsageError
from ctxext.folders.load import base_model
from ctxext.folders.source import TINY
from ctxext.training.model import add_lora, loraplus_groups
from ctxext.training.model import build as build_model
from ctxext.training.recipe import AdapterSpec, load_recipe
from ctxext.training.run import train

# ---------------------------------------------------------------- a run


def test_a_run_leaves_all_that_it_promises(adapter):
    out, answer = adapter
    assert answer["tokens"] == 8 * 2 * 64
    assert 3 < answer["loss"]["last"] < 6
    assert {p.name for p in out.iterdir()} == {"recipe.yaml", "checkpoints", "adapter", "log.json", "loss.png"}
    saved = {p.name for p in (out / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "config.json", "tokenizer.json"} <= saved
    assert not [n for n in saved if n.endswith(".bin")]
    config = json.loads((out / "adapter" / "config.json").read_text())
    assert config["ctxext"]["method"] == "pi"
    assert config["max_position_embeddings"] == 1024
    again = load_recipe(out / "recipe.yaml")
    assert again.train.steps == 8
    assert len([row for row in json.loads((out / "log.json").read_text()) if "loss" in row]) == 8


def test_a_used_folder_is_not_overwritten(adapter, text, cache):
    out, _ = adapter
    with pytest.raises(UsageError, match=r"(?s)isn't empty.*--resume"):
        train(recipe(out, text, cache))
    with pytest.raises(UsageError, match=r"begun with another recipe: train\.learning_rate differ"):
        train(recipe(out, text, cache, "train.learning_rate=1"), resume=True)


def test_target_beyond_the_method_is_refused(text, cache, tmp_path):
    with pytest.raises(UsageError, match=r"positions\.target 5000 is beyond the 1024 tokens"):
        train(recipe(tmp_path / "out", text, cache, "positions.target=5000"))


def test_unknown_training_arguments_are_named(text, cache, tmp_path):
    with pytest.raises(UsageError, match=r"train\.trainer.*learning_rat"):
        train(recipe(tmp_path / "out", text, cache, "train.trainer={learning_rat: 1}"))


def test_workers_of_an_empty_stream_have_nothing_to_say_but_the_run_does(text, cache, tmp_path):
    changes = ["data.streaming=true", "data.length=4096", "positions={kind: plain}", "method.factor=16"]
    with pytest.raises(CtxextError, match="no document as long as a block"):
        train(recipe(tmp_path / "out", text, cache, *changes, "train.trainer={dataloader_num_workers: 2}"))


@pytest.mark.parametrize("change", ["adapter.quantize=4bit", "train.offload_activations=true"])
def test_what_needs_a_gpu_says_so(text, cache, tmp_path, change):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(CtxextError, match="needs a GPU"):
        train(recipe(tmp_path / "out", text, cache, "train.activation_checkpointing=true", change))


def test_a_failed_evaluation_is_measured_again_on_resume(text, cache, tmp_path, monkeypatch, capsys):
    """Answers count when all commands have given theirs. They run in this process; the next test starts some."""
    from ctxext.training import eval_commands

    def here(line, **options):
        code, printed, err = run(monkeypatch, capsys, *line[3:])
        return SimpleNamespace(returncode=code, stdout=printed, stderr=err)

    monkeypatch.setattr(eval_commands, "subprocess", SimpleNamespace(run=here))

    good, bad = "passkey --lengths 128 --depths 1 --trials 1", "passkey --lengths never"
    out = tmp_path / "out"
    with pytest.raises(CtxextError, match="'passkey --lengths never' failed"):
        train(recipe(out, text, cache, f"eval.commands=['{bad}', '{good}']", "train.steps=1", "eval.after=false"))
    mended = recipe(out, text, cache, f"eval.commands=['{good}']", "train.steps=1", "eval.after=false")
    train(mended, resume=True)
    assert [p.name for p in (out / "eval-before").iterdir()] == ["1-passkey.json"]
    before = (out / "eval-before" / "1-passkey.json").read_bytes()
    with pytest.raises(CtxextError, match="failed"):
        eval_commands.measure([bad], TINY, out / "eval-before")
    assert (out / "eval-before" / "1-passkey.json").read_bytes() == before


def test_evaluations_run_before_and_after(text, cache, tmp_path):
    commands = "eval.commands=['passkey --lengths 128 --depths 1 --trials 1']"
    train(recipe(tmp_path / "out", text, cache, commands, "train.steps=1"))
    answers = [
        json.loads((tmp_path / "out" / f"eval-{when}" / "1-passkey.json").read_text())
        for when in ("before", "after")
    ]
    assert [a["schedule"]["method"] for a in answers] == ["pi", "pi"]
    assert answers[0]["results"][0]["logprob"] != answers[1]["results"][0]["logprob"]


# ---------------------------------------------------------------- what moves


@pytest.mark.parametrize("kind", ["lora", "dora, rslora", "lora+", "full"])
def test_every_trainable_tensor_moves_on_a_bf16_base_and_no_other(text, cache, tmp_path, kind, monkeypatch):
    spec = {
        "lora": "{embeddings: true, norms: true}",
        "dora, rslora": "{dora: true, rslora: true, norms: true}",
        "lora+": "{loraplus_ratio: 16, embeddings: true}",
        "full": "{kind: full}",
    }[kind]
    seen = {}

    def build(*args):
        seen["model"] = model = build_model(*args)
        seen["before"] = {n: p.detach().clone() for n, p in model.named_parameters()}
        return model

    monkeypatch.setattr("ctxext.training.model.build", build)
    # A window of 16 tokens, as bfloat16 is emulated on most CPUs.
    changes = [
        "model.dtype=bfloat16",
        f"adapter={spec}",
        "train.steps=20",
        "train.learning_rate=2e-5",
        "data.length=16",
        "train.save_steps=100",
        "train.activation_checkpointing=true",
    ]
    answer = train(recipe(tmp_path / "out", text, cache, *changes))
    model, trained = seen["model"], []
    for name, parameter in model.named_parameters():
        moved = not torch.equal(parameter, seen["before"][name])
        assert moved == parameter.requires_grad, name
        if parameter.requires_grad:
            trained.append(name)
            assert parameter.dtype == torch.float32, name
            if parameter.dim() == 1 and "norm" in name:
                changed = (parameter != seen["before"][name]).float().mean()
                assert changed > 0.9, name  # in bf16 none would have
        else:
            assert parameter.dtype == torch.bfloat16, name
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    assert base.get_input_embeddings().weight is base.get_output_embeddings().weight
    if kind == "full":
        assert len(trained) == len(seen["before"])
        loaded = ctxext.load(answer["trained"])
        assert loaded.config.ctxext["method"] == "pi"
        assert torch.equal(loaded.model.norm.weight, model.model.norm.weight)
    else:
        assert any("norm" in n for n in trained) == ("norms" in spec)
        assert any("embed_tokens" in n for n in trained) == ("embeddings" in spec)
        assert sum("lora_" in n for n in trained) == 2 * 7 * 3 + (21 if "dora" in kind else 0)


def test_the_estimate_counts_what_is_trained():
    from ctxext.files import read_config
    from ctxext.training.estimate import Shape, trainable_parameters

    shape = Shape({**read_config(TINY), "dtype": "float32"})
    for changes in ({}, {"embeddings": True, "norms": True}, {"dora": True, "r": 4}, {"layers": [0, 2]}):
        spec = AdapterSpec(**changes)
        model = add_lora(base_model(TINY, None), spec)
        count = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert trainable_parameters(spec, shape) == count


def test_loraplus_leaves_norms_and_embedding_at_the_plain_rate():
    model = add_lora(pico_model(), AdapterSpec(embeddings=True, norms=True))
    slow, fast = loraplus_groups(model, 1e-4, 16, 0.0)
    names = {id(p): n for n, p in model.named_parameters()}
    assert all("lora_B" in names[id(p)] for p in fast["params"])
    assert fast["lr"] == pytest.approx(1.6e-3)
    assert {"norm", "embed"} <= {k for k in ("norm", "embed") if any(k in names[id(p)] for p in slow["params"])}


def test_unknown_targets_are_a_usage_error():
    with pytest.raises(UsageError, match="adapter: Target modules"):
        add_lora(pico_model(), AdapterSpec(targets=["query_key_value"]))
