"""The chunked loss against transformers' own, in value and gradients."""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import pico_model

from ctxext.errors import CtxextError
from ctxext.folders.source import TINY
from ctxext.training import loss

# Heads that do something to the logits: capped, divided, multiplied, biased or tied.
FAMILIES = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("gemma2", {"final_logit_softcapping": 5.0, "sliding_window": 64}),
    ("granite", {"logits_scaling": 4.0, "embedding_multiplier": 2.0}),
    ("cohere", {"logit_scale": 0.25}),
    ("phi", {}),  # its head has a bias
]


def batch():
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 128, (2, 45), generator=generator)
    labels = ids.clone()
    labels[0, 7:19] = -100
    return {"input_ids": ids, "labels": labels}


def value_and_gradients(model, **more):
    model.zero_grad()
    value = model(**batch(), **more, use_cache=False).loss
    value.backward()
    return value.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("items", [None, 300, torch.tensor(300)], ids=["mean", "items", "tensor items"])
@pytest.mark.parametrize(("family", "changes"), FAMILIES, ids=[f"{f}-{i}" for i, (f, _) in enumerate(FAMILIES)])
def test_equal_to_the_stock_loss(family, changes, items):
    model = pico_model(family, **changes).train()
    more = {} if items is None else {"num_items_in_batch": items}
    want, stock = value_and_gradients(model, **more)
    loss.bind(model, chunk=16)
    got, chunked = value_and_gradients(model, **more)
    assert torch.allclose(got, want, rtol=1e-6, atol=1e-6)
    assert set(chunked) == set(stock)
    for name, gradient in stock.items():
        assert torch.allclose(chunked[name], gradient, rtol=1e-5, atol=1e-6), name
    loss.release(model)
    assert "forward" not in model.__dict__


def test_only_the_instance_and_only_with_labels(tokens):
    model, other = pico_model(), pico_model()
    want = model(tokens).logits
    loss.bind(model)
    assert torch.equal(model(tokens).logits, want)
    assert other(tokens, labels=tokens).logits is not None
    assert model(tokens, labels=tokens).logits is None
    assert "forward" not in other.__dict__


def test_without_gradients_and_with_shifted_labels(tokens):
    model = pico_model()
    want = model(tokens, labels=tokens).loss
    loss.bind(model, chunk=64)
    shifted = torch.nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:]
    with torch.no_grad():
        assert torch.allclose(model(tokens, labels=tokens).loss, want, atol=1e-6)
        assert torch.allclose(model(tokens, labels=tokens, shift_labels=shifted).loss, want, atol=1e-6)


def test_no_whole_logits_exist():
    """Nothing as large as tokens x vocabulary is ever made, forward or backward."""
    model = pico_model(vocab_size=4096).train()
    loss.bind(model, chunk=16)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() > 1 and 4096 in out.shape:
                largest = max(largest, out.numel() // 4096)
            return out

    with Watch():
        model(**{k: v.repeat(1, 10) for k, v in batch().items()}, use_cache=False).loss.backward()
    assert largest <= 128  # the weights themselves are 128 wide; the batch has 900 tokens


def test_under_lora_and_activation_checkpointing():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(pico_model(), peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    model.train()
    want, stock = value_and_gradients(model)
    loss.bind(model, chunk=16)
    model.activation_checkpointing_enable()
    got, chunked = value_and_gradients(model)
    assert torch.allclose(got, want, atol=1e-6)
    assert all(torch.allclose(chunked[name], g, rtol=1e-5, atol=1e-6) for name, g in stock.items())


def test_losses_that_it_does_not_know_are_refused():
    model = pico_model()
    loss.bind(model)
    with pytest.raises(CtxextError, match="wrapped already"):
        loss.bind(model)
    other = pico_model()
    other.loss_function = lambda *args, **kwargs: 0
    with pytest.raises(CtxextError, match="a loss of its own"):
        loss.bind(other)
    with pytest.raises(CtxextError, match="no decoder"):
        loss.bind(pico_model().model)


SHARDED = """
import itertools, json, sys
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig
from ctxext.training import loss
from ctxext.training.sequences import collate
from ctxext.training.recipe import AdapterSpec
from ctxext.training.model import add_lora

out, *folders = sys.argv[1:]
dist.init_process_group("gloo")
answer = {}
for folder, kind in itertools.product(folders, ("stock", "chunked")):
    spread = DistributedConfig(fsdp_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=spread)
    torch.manual_seed(0)
    model = add_lora(model, AdapterSpec()).train()
    if kind == "chunked":
        loss.bind(model, 10)
    rows = [[3 + (7 * i + j) % 120 for j in range(40)] for i in range(6)]
    args = TrainingArguments(
        output_dir=out, max_steps=3, per_device_train_batch_size=1, learning_rate=1e-2, logging_steps=1,
        train_sampling_strategy="sequential", save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=True, remove_unused_columns=False,
    )
    items = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model=model, args=args, train_dataset=items, data_collator=collate)
    trainer.train()
    kinds = {type(p).__name__ for p in model.parameters() if not p.requires_grad}
    answer[f"{folder} {kind}"] = [sorted(kinds), [r["loss"] for r in trainer.state.log_history if "loss" in r]]
if dist.get_rank() == 0:
    print("ANSWER", json.dumps(answer), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_sharded_weights(llama_folder, tmp_path):
    """transformers' own FSDP2 over gloo, head untied (sharded by itself) and tied: stock's loss, step by step."""
    (tmp_path / "sharded.py").write_text(SHARDED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(tmp_path / "sharded.py"), str(tmp_path / "out"), str(llama_folder), str(TINY)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr[-2000:]
    answer = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("ANSWER"))[7:])
    for folder in (llama_folder, TINY):
        stock, chunked = answer[f"{folder} stock"], answer[f"{folder} chunked"]
        assert "DTensor" in stock[0]
        assert "DTensor" in chunked[0]
        assert chunked[1] == pytest.approx(stock[1], rel=1e-6)
