"""Run a recipe: transformers' Trainer, peft and accelerate do the work, this file only maps the recipe to them.

The output folder holds

    recipe.yaml     the resolved recipe, with every default
    checkpoints/    to resume from after a kill
    adapter/        the adapter with its rope (or model/, when all weights are trained)
    log.json, loss.png      what the Trainer logged
    eval-before/, eval-after/   answers of the recipe's evaluations, if it asks for any
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

from .. import terminal
from ..config.write import write_config
from ..errors import CtxextError, UsageError, warn
from ..files import read_config
from ..folders import adapter as adapters
from ..folders.patch import longer_tokenizer
from ..folders.source import resolve
from ..rope import Schedule
from . import data, evaluation, loss
from .items import Blocks, Stream, collate
from .recipe import Recipe, check_schedule
from .run_folder import begin, last_checkpoint
from .tuning import build, loraplus_groups, make_schedule, target_of


def train(recipe: Recipe, *, resume: bool = False) -> dict[str, Any]:
    """Run `recipe` and return {"out", "trained", "schedule", "tokens", "seconds", "loss", ...}, JSON-ready.

    resume: go on from the newest whole checkpoint of an earlier, killed run of the same recipe; the weights at
    the end are equal to those of an uninterrupted run. Raises UsageError for a method and a layout or launch that
    don't go together, CtxextError for a base that can't be patched, data that gives no block, a folder of another
    run, or a loss that isn't finite at the end.
    """
    from transformers import AutoTokenizer

    _quiet_off_a_terminal()
    out = Path(recipe.output)
    folder = resolve(recipe.model.path)
    schedule = make_schedule(recipe, folder)
    check_schedule(recipe, schedule)
    target = target_of(recipe, schedule)
    main = int(os.environ.get("RANK", "0")) == 0
    if main:
        begin(out, recipe, resume=resume)
    base = adapters.Base.of(recipe.model.path if recipe.model.path == "tiny" else _lasting(recipe), folder)
    if recipe.eval.before and recipe.eval.commands and main and not (out / "eval-before").exists():
        evaluation.before(recipe, folder, schedule, out)

    set_seed(recipe.seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = build(recipe, folder, schedule)
    if recipe.train.loss == "chunked":
        loss.bind(model, recipe.train.loss_chunk)
    args = arguments(recipe, out, model)
    with args.main_process_first(local=False, desc="tokenising"):
        blocks = _dataset(recipe, tokenizer, target, args.world_size)
    if recipe.data.streaming and args.dataloader_num_workers:
        # A worker can't tell an empty share from an empty stream, and the Trainer takes one for the end.
        next(iter(blocks))
    trainer = _Trainer(
        model=model,
        args=args,
        train_dataset=blocks,
        data_collator=collate,
        recipe=recipe,
        callbacks=[_Progress()],
    )
    trainer.remove_callback(PrinterCallback)
    if not sys.stderr.isatty():
        trainer.remove_callback(ProgressCallback)
    checkpoint = last_checkpoint(out / "checkpoints") if resume else None
    started = time.monotonic()
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    seconds = time.monotonic() - started
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    if losses and not math.isfinite(losses[-1]):
        raise CtxextError(
            f"the loss is {losses[-1]} at the end", hint="lower train.learning_rate, or set train.bf16"
        )
    trained = save(trainer, recipe, folder, base, schedule, out)
    if main:
        (out / "log.json").write_text(json.dumps(trainer.state.log_history, indent=1) + "\n")
        plot_loss(trainer.state.log_history, out / "loss.png")
    answer = {
        "out": str(out),
        "trained": str(trained),
        "schedule": None if schedule is None else adapters.digest(schedule),
        "tokens": recipe.tokens(args.world_size),
        "seconds": round(seconds, 1),
        "resumed_from": checkpoint.name if checkpoint else None,
        "loss": {"first": losses[0], "last": losses[-1]} if losses else None,
    }
    del trainer, model
    if recipe.eval.after and recipe.eval.commands and main:
        evaluation.after(recipe, trained, out)
    return answer


def _quiet_off_a_terminal() -> None:
    """No progress bars of the libraries in a log file."""
    if not sys.stderr.isatty():
        import datasets
        from transformers.utils import logging

        datasets.disable_progress_bars()
        logging.disable_progress_bar()


def _lasting(recipe: Recipe) -> str:
    """The base's name as an adapter can keep it: a path made absolute, a hub id as it is."""
    path = Path(recipe.model.path).expanduser()
    return str(path.resolve()) if path.exists() else recipe.model.path


def arguments(recipe: Recipe, out: Path, model: torch.nn.Module) -> TrainingArguments:
    """The recipe as TrainingArguments."""
    spec = recipe.train
    bf16 = spec.bf16
    if bf16 is None:
        bf16 = any(p.dtype == torch.bfloat16 for p in model.parameters())
    if spec.offload_activations and not torch.cuda.is_available():
        raise CtxextError("train.offload_activations needs a GPU", hint="set it to false")
    checkpointing: dict[str, Any] = {}
    if spec.activation_checkpointing:
        how = {"use_reentrant": False, "every_n_layers": spec.checkpoint_every}
        if spec.offload_activations:
            how["offload"] = True
        checkpointing = {"activation_checkpointing": True, "activation_checkpointing_kwargs": how}
    values = {
        "max_steps": spec.steps,
        "per_device_train_batch_size": spec.batch_size,
        "gradient_accumulation_steps": spec.accumulation,
        "learning_rate": spec.learning_rate,
        "lr_scheduler_type": spec.schedule,
        "warmup_steps": spec.warmup_steps if spec.schedule != "constant" else 0,
        "weight_decay": spec.weight_decay,
        "adam_beta1": spec.beta1,
        "adam_beta2": spec.beta2,
        "max_grad_norm": spec.max_grad_norm,
        "bf16": bf16,
        "seed": recipe.seed,
        "save_steps": spec.save_steps,
        "save_total_limit": spec.keep,
        "logging_steps": spec.logging_steps,
        "logging_nan_inf_filter": False,
        "report_to": spec.report_to,
        "use_cpu": not torch.accelerator.is_available(),
        "train_sampling_strategy": "sequential",  # the dataset is in its final order
        "remove_unused_columns": False,
        "prediction_loss_only": True,
        "disable_tqdm": not sys.stderr.isatty(),
        **checkpointing,
    }
    try:
        return TrainingArguments(output_dir=str(out / "checkpoints"), **{**values, **spec.trainer})
    except (TypeError, ValueError) as error:
        raise UsageError(f"train.trainer: {error}") from error


def _dataset(recipe: Recipe, tokenizer: Any, target: int, processes: int) -> Any:
    spec, size = recipe.data, recipe.data.length
    if recipe.positions.kind == "pose" and recipe.positions.text == "skipped":
        size = target
    blocks = data.load_blocks(spec, tokenizer, size, recipe.seed)
    if spec.streaming:
        return Stream(blocks, recipe.positions, spec.length, target, recipe.seed)
    items = recipe.train.steps * recipe.train.batch_size * recipe.train.accumulation * processes
    if items < len(blocks):
        share = items / len(blocks)
        terminal.say(f"{len(blocks):,} blocks of {size:,} tokens; the run reads {share:.0%} of them")
    else:
        terminal.say(f"{len(blocks):,} blocks of {size:,} tokens; each is read {items / len(blocks):.1f} times")
    return Blocks(blocks, recipe.positions, spec.length, target, recipe.seed, items)


class _Trainer(Trainer):
    """The Trainer, with LoRA+'s two learning rates if the recipe has them."""

    def __init__(self, *args: Any, recipe: Recipe, **kwargs: Any):
        self.recipe = recipe
        super().__init__(*args, **kwargs)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        ratio = self.recipe.adapter.loraplus_ratio
        if self.optimizer is None and ratio:
            made, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            decay = self.args.weight_decay
            groups = loraplus_groups(model or self.model, self.args.learning_rate, ratio, decay)
            self.optimizer = made(groups, **options)
        return super().create_optimizer(model)


class _Progress(TrainerCallback):
    """One line per logged step on stderr, from the first process only."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.started, self.first = time.monotonic(), state.global_step

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not logs or "loss" not in logs:
            return
        done = state.global_step - self.first
        left = (time.monotonic() - self.started) / max(done, 1) * (state.max_steps - state.global_step)
        terminal.say(
            f"step {state.global_step}/{state.max_steps}  loss {logs['loss']:.4f}  "
            f"gradient {logs.get('grad_norm', float('nan')):.3g}  {left / 60:.1f} min left"
        )


def save(
    trainer: Trainer, recipe: Recipe, folder: Path, base: adapters.Base, schedule: Schedule | None, out: Path
) -> Path:
    """Write what was trained, with its rope and tokenizer; called by every process. The folder."""
    loss_bound = recipe.train.loss == "chunked"
    if loss_bound:
        loss.release(trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False))
    full = recipe.adapter.kind == "full"
    final = out / ("model" if full else "adapter")
    part = out / f".{final.name}.part"
    trainer.save_model(str(part))
    if trainer.is_world_process_zero():
        (part / "training_args.bin").unlink(missing_ok=True)
        for path in sorted(folder.glob("*token*")) + [folder / n for n in ("vocab.json", "merges.txt")]:
            if path.is_file():
                shutil.copyfile(path, part / path.name)
        if schedule is not None:
            longer = longer_tokenizer(folder, schedule.max_length)
            if longer is not None:
                (part / "tokenizer_config.json").write_text(json.dumps(longer, indent=2) + "\n")
        original = read_config(folder)
        if full:
            config = read_config(part)
            config = {**original, **{k: config[k] for k in ("dtype", "sliding_window") if k in config}}
            config = write_config(config, schedule) if schedule else config
            (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        else:
            adapters.seal(part, base, original, schedule)
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
    return final


def plot_loss(history: list[dict[str, Any]], path: Path) -> None:
    """The logged losses as a curve; a warning instead where matplotlib isn't installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        warn("no loss curve was drawn: pip install 'ctxext[plot]'")
        return
    rows = [(row["step"], row["loss"]) for row in history if "loss" in row]
    figure, axes = plt.subplots(figsize=(6, 3.5))
    axes.plot(*zip(*rows, strict=True), color="#0072b2") if rows else None
    axes.set(xlabel="step", ylabel="training loss, nats per token", title=path.parent.name)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
