"""What CPUs can not do: sharding by accelerate, context parallel, QLoRA. Skipped, saying so, without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RECIPES = Path(__file__).parents[2] / "recipes"
pytestmark = pytest.mark.gpu


def train(out, launch, *changes):
    recipe = [str(RECIPES / "smoke-cpu.yaml"), f"output={out}", "train.logging_steps=1", *changes]
    ran = subprocess.run([*launch, "-m", "ctxext", "train", *recipe, "--json"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [row["loss"] for row in json.loads((out / "log.json").read_text()) if "loss" in row]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize(
    ("config", "more"),
    [("ddp", []), ("fsdp2", []), ("context-parallel", ["--parallelism_config_cp_size", "2"])],
)
def test_launch_files_train_like_one_process(tmp_path, config, more):
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", *more]
    launch += ["--config_file", str(RECIPES / "accelerate" / f"{config}.yaml")]
    plain = ["positions.kind=plain", "adapter={r: 4}", "train.batch_size=1"]
    accumulation = 1 if config == "context-parallel" else 2
    one = train(tmp_path / "one", [sys.executable], *plain, f"train.accumulation={accumulation}")
    two = train(tmp_path / "two", launch, *plain)
    assert two == pytest.approx(one, rel=2e-2)  # bf16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_qlora(tmp_path):
    pytest.importorskip("bitsandbytes")
    losses = train(tmp_path / "out", [sys.executable], "adapter={quantize: 4bit, r: 8}", "model.dtype=bfloat16")
    assert losses[-1] < 6
