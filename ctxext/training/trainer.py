"""A recipe as transformers' Trainer has it: arguments, data, optimiser, progress, and what is kept at the end."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments

from .. import plots, terminal
from ..config.write import write_config
from ..errors import CtxextError, UsageError, warn
from ..files import read_config, write_json
from ..folders import adapter as adapters
from ..folders.lengths import longer_config, longer_files
from ..rope import Schedule
from . import data, loss
from .model import loraplus_groups
from .recipe import Recipe
from .sequences import Blocks, Stream, Windows, collate


def arguments(recipe: Recipe, out: Path, model: nn.Module) -> TrainingArguments:
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


def sequences(recipe: Recipe, tokenizer: Any, *, target: int, processes: int) -> Blocks | Stream:
    """What the run reads, in its final order."""
    spec, size = recipe.data, recipe.data.length
    if recipe.positions.kind == "pose" and recipe.positions.text == "skipped":
        size = target
    blocks = data.load_blocks(spec, tokenizer, size, recipe.seed)
    windows = Windows(recipe.positions, spec.length, target, recipe.seed)
    if spec.streaming:
        return Stream(blocks, windows)
    items = recipe.train.steps * recipe.train.batch_size * recipe.train.accumulation * processes
    if items < len(blocks):
        share = items / len(blocks)
        terminal.say(f"{len(blocks):,} blocks of {size:,} tokens; the run reads {share:.0%} of them")
    else:
        terminal.say(f"{len(blocks):,} blocks of {size:,} tokens; each is read {items / len(blocks):.1f} times")
    return Blocks(blocks, windows, items)


class RecipeTrainer(Trainer):
    """The Trainer, with LoRA+'s two learning rates if the recipe has them, and one line per logged step."""

    def __init__(self, recipe: Recipe, model: nn.Module, args: TrainingArguments, data: Blocks | Stream):
        self.recipe = recipe
        super().__init__(
            model=model, args=args, train_dataset=data, data_collator=collate, callbacks=[_Progress()]
        )
        self.remove_callback(PrinterCallback)
        if not sys.stderr.isatty():
            self.remove_callback(ProgressCallback)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        ratio = self.recipe.adapter.loraplus_ratio
        if self.optimizer is None and ratio:
            trained: Any = model or self.model
            made, options = self.get_optimizer_cls_and_kwargs(self.args, trained)
            groups = loraplus_groups(trained, self.args.learning_rate, ratio, self.args.weight_decay)
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
    trainer: Trainer,
    recipe: Recipe,
    folder: Path,
    out: Path,
    *,
    base: adapters.Base,
    schedule: Schedule | None,
) -> Path:
    """Write what was trained, with its rope and tokenizer; called by every process. The folder.

    folder: the base's, base: what an adapter remembers of it.
    """
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
            for name, longer in longer_files(part, schedule.max_length).items():
                write_json(part / name, longer)
        original = read_config(folder)
        if full:
            config = read_config(part)
            config = {**original, **{k: config[k] for k in ("dtype", "sliding_window") if k in config}}
            config = longer_config(write_config(config, schedule), schedule.max_length) if schedule else config
            write_json(part / "config.json", config)
        else:
            adapters.seal(part, base, original, schedule)
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
    return final


def plot_loss(history: list[dict[str, Any]], path: Path) -> None:
    """The logged losses as a curve; a warning instead where matplotlib isn't installed."""
    rows = [(row["step"], row["loss"]) for row in history if "loss" in row]
    try:
        with plots.figure(6, 3.5) as figure:
            axes = figure.add_subplot()
            if rows:
                axes.plot(*zip(*rows, strict=True), color=plots.COLOURS[0])
            axes.set(xlabel="step", ylabel="training loss, nats per token", title=path.parent.name)
        plots.save(figure, path)
    except CtxextError:
        warn("no loss curve was drawn: pip install 'ctxext[plot]'")
