"""Whole runs on the embedded model: what moves, what resumes, what an adapter refuses, what a merge gives."""

import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from conftest import logits, pico_model, run
from safetensors.torch import load_file

import ctxext
from ctxext import adapters
from ctxext.errors import CtxextError, UsageError
from ctxext.resolve import TINY
from ctxext.training import tuning
from ctxext.training.recipe import AdapterSpec, load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = ["model.dtype=float32", "data.length=64", "train.warmup_steps=0", "train.logging_steps=1"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file of four short documents' worth of the embedded text."""
    path = tmp_path_factory.mktemp("text") / "ruth.txt"
    path.write_text((TINY.parent / "text" / "kjv-ruth.txt").read_text()[:8000])
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def recipe(out, text, cache, *changes):
    overrides = [f"output={out}", f"data.sources=[{{path: {text}}}]", f"data.cache={cache}", *SMALL, *changes]
    return load_recipe(RECIPES / "smoke-cpu.yaml", overrides)


@pytest.fixture(scope="module")
def adapter(text, cache, tmp_path_factory):
    """A run of 8 steps with everything trainable that can be, and what it answered."""
    from ctxext.training.run import train

    out = tmp_path_factory.mktemp("run") / "out"
    return out, train(recipe(out, text, cache))


def weights(out, name="adapter/adapter_model.safetensors"):
    return load_file(out / name)


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
    from ctxext.training.run import train

    out, _ = adapter
    with pytest.raises(UsageError, match=r"(?s)isn't empty.*--resume"):
        train(recipe(out, text, cache))
    with pytest.raises(UsageError, match=r"begun with another recipe: train\.learning_rate differ"):
        train(recipe(out, text, cache, "train.learning_rate=1"), resume=True)


def test_target_beyond_the_method_is_refused(text, cache, tmp_path):
    from ctxext.training.run import train

    with pytest.raises(UsageError, match=r"positions\.target 5000 is beyond the 1024 tokens"):
        train(recipe(tmp_path / "out", text, cache, "positions.target=5000"))


def test_unknown_training_arguments_are_named(text, cache, tmp_path):
    from ctxext.training.run import train

    with pytest.raises(UsageError, match=r"train\.trainer.*learning_rat"):
        train(recipe(tmp_path / "out", text, cache, "train.trainer={learning_rat: 1}"))


@pytest.mark.parametrize("change", ["adapter.quantize=4bit", "train.offload_activations=true"])
def test_what_needs_a_gpu_says_so(text, cache, tmp_path, change):
    from ctxext.training.run import train

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(CtxextError, match="needs a GPU"):
        train(recipe(tmp_path / "out", text, cache, "train.activation_checkpointing=true", change))


# ---------------------------------------------------------------- what moves


@pytest.mark.parametrize("kind", ["lora", "dora, rslora", "lora+", "full"])
def test_every_trainable_tensor_moves_on_a_bf16_base_and_no_other(text, cache, tmp_path, kind, monkeypatch):
    from ctxext.training import run

    spec = {
        "lora": "{embeddings: true, norms: true}",
        "dora, rslora": "{dora: true, rslora: true, norms: true}",
        "lora+": "{loraplus_ratio: 16, embeddings: true}",
        "full": "{kind: full}",
    }[kind]
    seen = {}

    def build(*args):
        seen["model"] = model = tuning.build(*args)
        seen["before"] = {n: p.detach().clone() for n, p in model.named_parameters()}
        return model

    monkeypatch.setattr(run, "build", build)
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
    answer = run.train(recipe(tmp_path / "out", text, cache, *changes))
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
    from ctxext.checkpoint import read_config
    from ctxext.training.estimate import Shape, trainable_parameters

    shape = Shape({**read_config(TINY), "dtype": "float32"})
    for changes in ({}, {"embeddings": True, "norms": True}, {"dora": True, "r": 4}, {"layers": [0, 2]}):
        spec = AdapterSpec(**changes)
        model = tuning.add_lora(adapters.base_model(TINY, None), spec)
        count = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert trainable_parameters(spec, shape) == count


def test_loraplus_leaves_norms_and_embedding_at_the_plain_rate():
    model = tuning.add_lora(pico_model(), AdapterSpec(embeddings=True, norms=True))
    slow, fast = tuning.loraplus_groups(model, 1e-4, 16, 0.0)
    names = {id(p): n for n, p in model.named_parameters()}
    assert all("lora_B" in names[id(p)] for p in fast["params"])
    assert fast["lr"] == pytest.approx(1.6e-3)
    assert {"norm", "embed"} <= {k for k in ("norm", "embed") if any(k in names[id(p)] for p in slow["params"])}


def test_unknown_targets_are_a_usage_error():
    with pytest.raises(UsageError, match="adapter: Target modules"):
        tuning.add_lora(pico_model(), AdapterSpec(targets=["query_key_value"]))


# ---------------------------------------------------------------- kill and resume

KILLED = """
import os, signal, sys
from transformers import TrainerCallback
from ctxext.training import run
from ctxext.training.recipe import load_recipe

def on_step_end(self, args, state, control, **kwargs):
    if state.global_step == 5:
        os.kill(os.getpid(), signal.SIGKILL)

run._Progress.on_step_end = on_step_end
run.train(load_recipe(sys.argv[1], sys.argv[2:]))
"""


@pytest.mark.parametrize("streaming", [False, True], ids=["files", "stream"])
def test_kill_and_resume_equals_an_uninterrupted_run(text, cache, tmp_path, streaming):
    from ctxext.training.run import train

    changes = [
        f"data.streaming={str(streaming).lower()}",
        "data.shuffle_buffer=20",
        "train.save_steps=2",
        "train.accumulation=2",
        "adapter.dropout=0.1",
    ]
    whole = recipe(tmp_path / "whole", text, cache, *changes)
    train(whole)
    cut = recipe(tmp_path / "cut", text, cache, *changes)
    (tmp_path / "cut.yaml").write_text(cut.resolved())
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "cut.yaml")], capture_output=True, text=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "cut" / "adapter").exists()
    answer = train(cut, resume=True)
    assert answer["resumed_from"] == "checkpoint-4"
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert set(first) == set(second)
    assert all(torch.equal(first[name], second[name]) for name in first)
    history = [json.loads((tmp_path / n / "log.json").read_text()) for n in ("whole", "cut")]
    assert [r["loss"] for r in history[0] if "loss" in r] == [r["loss"] for r in history[1] if "loss" in r]


# ---------------------------------------------------------------- several processes


def test_chunked_and_stock_loss_train_alike_on_one_process_and_on_two(text, cache, tmp_path):
    """Plain gradient descent, so that the weights differ as the gradients do, with accumulation."""
    from ctxext.training.run import train

    common = [
        "train.trainer={optim: sgd}",
        "train.steps=2",
        "train.max_grad_norm=1000",
        "train.batch_size=1",
        "train.learning_rate=0.1",
        "data.length=32",
    ]
    for kind in ("stock", "chunked"):
        here = [*common, f"train.loss={kind}", "train.loss_chunk=10"]
        train(recipe(tmp_path / f"{kind}-1", text, cache, *here, "train.accumulation=4"))
        two = recipe(tmp_path / f"{kind}-2", text, cache, *here, "train.accumulation=2")
        (tmp_path / "two.yaml").write_text(two.resolved())
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        ran = subprocess.run(
            [*launch, "-m", "ctxext", "train", str(tmp_path / "two.yaml"), "--json"],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
        assert json.loads(ran.stdout)["tokens"] == 2 * 2 * 2 * 32  # one document: only rank 0 prints
        assert ran.stderr.count("step 2/2") == 1
    expected = weights(tmp_path / "stock-1")
    logs = {}
    for name in ("stock-1", "chunked-1", "stock-2", "chunked-2"):
        for key, value in weights(tmp_path / name).items():
            assert torch.allclose(value, expected[key], atol=1e-6), (name, key)
        logs[name] = [r for r in json.loads((tmp_path / name / "log.json").read_text()) if "loss" in r]
    for name, rows in logs.items():
        for row, want in zip(rows, logs["stock-1"], strict=True):
            assert row["loss"] == pytest.approx(want["loss"], rel=1e-6), name
            assert row["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5), name


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
    from ctxext.training.run import train

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


def test_evaluations_run_before_and_after(text, cache, tmp_path):
    from ctxext.training.run import train

    commands = "eval.commands=['passkey --lengths 128 --depths 1 --trials 1']"
    train(recipe(tmp_path / "out", text, cache, commands, "train.steps=1"))
    answers = [
        json.loads((tmp_path / "out" / f"eval-{when}" / "1-passkey.json").read_text())
        for when in ("before", "after")
    ]
    assert [a["schedule"]["method"] for a in answers] == ["pi", "pi"]
    assert answers[0]["results"][0]["logprob"] != answers[1]["results"][0]["logprob"]
