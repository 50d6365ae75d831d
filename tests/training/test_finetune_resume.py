"""A run that is killed and resumed, or spread over two processes, trains as one that is neither."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from smoke import recipe, weights

from ctxext.training.run import train

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
for path in sys.argv[1:]:  # each run is a process of its own, that has all imported already
    run = os.fork()
    if not run:
        train(path)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(run, 0)[1]))
"""
WAYS = {"files": (False, 0), "stream": (True, 0), "stream by workers": (True, 2)}


@pytest.fixture(scope="module")
def killed(text, cache, tmp_path_factory):
    """A folder with runs of five steps that were killed, by name, and their recipes."""
    root, recipes = tmp_path_factory.mktemp("killed"), {}
    for name, (streaming, workers) in WAYS.items():
        changes = [
            f"data.streaming={str(streaming).lower()}",
            "data.shuffle_buffer=20",
            "train.save_steps=2",
            "train.accumulation=2",
            "adapter.dropout=0.1",
            f"train.trainer={{dataloader_num_workers: {workers}}}",
        ]
        recipes[name] = recipe(root / name, text, cache, *changes)
        (root / f"{name}.yaml").write_text(recipes[name].resolved())
    command = [sys.executable, "-c", KILLED, *(str(root / f"{name}.yaml") for name in WAYS)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.stdout.split() == [str(-signal.SIGKILL)] * len(WAYS), ran.stderr
    return root, recipes


@pytest.mark.parametrize("name", WAYS)
def test_kill_and_resume_equals_an_uninterrupted_run(killed, tmp_path, name):
    root, recipes = killed
    cut, whole = root / name, tmp_path / "whole"
    assert not (cut / "adapter").exists()
    train(recipes[name], [f"output={whole}"])
    answer = train(recipes[name], resume=True)
    assert answer["resumed_from"] == "checkpoint-4"
    first, second = weights(whole), weights(cut)
    assert set(first) == set(second)
    assert all(torch.equal(first[name], second[name]) for name in first)
    history = [json.loads((out / "log.json").read_text()) for out in (whole, cut)]
    assert [r["loss"] for r in history[0] if "loss" in r] == [r["loss"] for r in history[1] if "loss" in r]


# ---------------------------------------------------------------- several processes


BOTH = """
import os, sys
from ctxext.cli.app import main
for path in sys.argv[1:]:
    sys.argv = ["ctxext", "train", path, "--json"]
    try:
        main()
    except SystemExit as stop:
        if stop.code:
            raise
    if os.environ["RANK"] == "0":
        print()
"""


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
    kinds = ("stock", "chunked")
    for kind in kinds:
        here = [*common, f"train.loss={kind}", "train.loss_chunk=10"]
        train(recipe(tmp_path / f"{kind}-1", text, cache, *here, "train.accumulation=4"))
        two = recipe(tmp_path / f"{kind}-2", text, cache, *here, "train.accumulation=2")
        (tmp_path / f"{kind}.yaml").write_text(two.resolved())
    (tmp_path / "both.py").write_text(BOTH)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launch, str(tmp_path / "both.py"), *(str(tmp_path / f"{kind}.yaml") for kind in kinds)]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ran.returncode == 0, ran.stderr[-2000:]
    # One document for each: only rank 0 prints.
    assert [json.loads(d)["tokens"] for d in ran.stdout.split("\n\n")[:-1]] == [2 * 2 * 2 * 32] * 2, ran.stdout
    assert ran.stderr.count("step 2/2") == 2
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
