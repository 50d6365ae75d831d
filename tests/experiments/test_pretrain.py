"""Training from scratch: the recipe and its mistakes, a run that learns, kill and resume, the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pretraining import RECIPE, ROOT, SMALL, write_corpus

from ctxext.errors import UsageError
from experiments.tiny import __main__ as pretrain


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory) -> Path:
    """The output folder of an uninterrupted run of the small recipe."""
    out = tmp_path_factory.mktemp("run") / "whole"
    pretrain.train(pretrain.load_recipe(RECIPE, SMALL), corpus, out)
    return out


# ---------------------------------------------------------------- recipe


def test_shipped_recipe_is_valid_and_never_trains_beyond_its_context():
    recipe = pretrain.load_recipe(RECIPE)
    assert recipe.model.max_position_embeddings == 256
    assert max(phase.length for phase in recipe.data.phases) == 256


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.hiden_size=3", "model.hiden_size: unknown key, did you mean 'hidden_size'?"),
        ("optimization.learning_rate=-1", "optimization.learning_rate: Input should be greater than 0"),
        ("data.phases.9.length=3", "there is no such section"),
        ("seed", "has no '='"),
        ("tokenizer.vocab_size=100", "tokenizer.vocab_size"),
        ("optimization.tokens_per_step=1000", "is no multiple of"),
        ("optimization.warmup_steps=10000000", "exceed the"),
        ("model.max_position_embeddings=128", "exceeds max_position_embeddings 128"),
        ("data.phases=[{name: x, length: 64, steps: 1, mix: {text: 0.5}}]", "sum to 1"),
        ("data.phases=[{name: x, length: 64, steps: 1, mix: {prose: 1}}]", "data.phases.0.mix.prose"),
        ("data.phases=[{name: x, length: 64, step: 1, mix: {text: 1}}]", "did you mean 'steps'?"),
        ("data.phases=[{name: x, length: 64, steps: 1, mix: {text: 1}, pool: [9, 8]}]", "pool"),
    ],
)
def test_recipe_mistakes_are_named(override, message):
    with pytest.raises(UsageError) as error:
        pretrain.load_recipe(RECIPE, [override])
    assert message in str(error.value)


def test_learning_rate_as_yaml_reads_it():
    # PyYAML reads 2e-5 as a string; the schema must turn it into a number.
    assert pretrain.load_recipe(RECIPE, ["optimization.learning_rate=2e-5"]).optimization.learning_rate == 2e-5


def test_unreadable_recipes(tmp_path):
    with pytest.raises(UsageError, match="can't read"):
        pretrain.load_recipe(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(UsageError, match="is no recipe"):
        pretrain.load_recipe(tmp_path / "list.yaml")


def test_unknown_training_argument_is_a_usage_error(corpus, tmp_path):
    recipe = pretrain.load_recipe(RECIPE, [*SMALL, "optimization.trainer={learning_rat: 1}"])
    with pytest.raises(UsageError, match=r"optimization\.trainer.*learning_rat"):
        pretrain.train(recipe, corpus, tmp_path / "out")


# ---------------------------------------------------------------- training


def test_run_learns(finished):
    state = json.loads((finished / "checkpoints" / "checkpoint-60" / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert len(losses) == 60
    assert losses[29] < losses[0]
    # An untrained model is at ln 400, the size of the vocabulary; sixty steps get below it.
    assert 0 < losses[-1] < 5.99


def test_kill_and_resume_equals_an_uninterrupted_run(corpus, tmp_path, finished):
    import torch
    from safetensors.torch import load_file

    out = tmp_path / "killed"
    command = [sys.executable, "-m", "experiments.tiny", str(RECIPE), *SMALL]
    command += ["--text", str(corpus), "--out", str(out)]
    # The same number of threads as here: it decides the order in which floats are summed.
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen(
        command, env={**os.environ, **threads}, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while pretrain.last_checkpoint(out / "checkpoints") is None:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "model").exists()
    recipe = pretrain.load_recipe(RECIPE, SMALL)
    with pytest.raises(UsageError, match="isn't empty"):
        pretrain.train(recipe, corpus, out)
    with pytest.raises(UsageError, match="another recipe"):
        pretrain.train(pretrain.load_recipe(RECIPE, [*SMALL, "seed=5"]), corpus, out, resume=True)
    with pytest.raises(UsageError, match="holds no run"):
        pretrain.train(recipe, corpus, corpus, resume=True)
    # A checkpoint that the kill cut off is newer, but not used.
    torn = out / "checkpoints" / "checkpoint-59"
    torn.mkdir()
    (torn / "trainer_state.json").write_text('{"epoch": ')
    pretrain.train(recipe, corpus, out, resume=True)
    whole, resumed = (load_file(f / "model" / "model.safetensors") for f in (finished, out))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_command_line_errors(tmp_path):
    with pytest.raises(UsageError, match=r"sed: unknown key, did you mean 'seed'\?"):
        pretrain.main(RECIPE, ["sed=1"], text=tmp_path, out=tmp_path / "o")
    with pytest.raises(UsageError, match="no text at"):
        pretrain.main(RECIPE, text=tmp_path / "no", out=tmp_path / "o")
