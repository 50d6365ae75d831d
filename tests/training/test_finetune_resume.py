"""A run that is killed and resumed, or spread over two processes, trains as one that is neither."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from smoke import recipe, weights, write_text

from ctxext.training.run import train


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


# ---------------------------------------------------------------- kill and resume

KILLED = """
import os, signal, sys
from transformers import TrainerCallback
from ctxext.training import trainer
from ctxext.training.run import train

def on_step_end(self, args, state, control, **kwargs):
    if state.global_step == 5:
        os.kill(os.getpid(), signal.SIGKILL)

trainer._Progress.on_step_end = on_step_end
train(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("streaming", "workers"), [(False, 0), (True, 0), (True, 2)], ids=["files", "stream", "stream by workers"]
)
def test_kill_and_resume_equals_an_uninterrupted_run(text, cache, tmp_path, streaming, workers):
    changes = [
        f"data.streaming={str(streaming).lower()}",
        "data.shuffle_buffer=20",
        "train.save_steps=2",
        "train.accumulation=2",
        "adapter.dropout=0.1",
        f"train.trainer={{dataloader_num_workers: {workers}}}",
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
