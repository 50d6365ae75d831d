"""Run a recipe: transformers' Trainer, peft and accelerate do the work, this package only maps the recipe to them.

The output folder holds

    recipe.yaml     the resolved recipe, with every default
    checkpoints/    to resume from after a kill
    adapter/        the adapter with its rope (or model/, when all weights are trained)
    log.json, loss.png      what the Trainer logged
    eval-before/, eval-after/   answers of the recipe's evaluations, if it asks for any
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import terminal
from ..config.block import digest
from ..errors import CtxextError, require
from ..files import write_json
from ..folders.adapter import Base
from ..folders.load import load_tokenizer
from ..folders.source import resolve
from . import eval_commands
from .recipe import Recipe, check_schedule, load_recipe
from .resume import begin, last_checkpoint


def train(
    recipe: str | Path | Mapping[str, Any] | Recipe, overrides: Sequence[str] = (), *, resume: bool = False
) -> dict[str, Any]:
    """Fine-tune a model by a recipe; {"out", "trained", "schedule", "tokens", "seconds", "loss", ...}, JSON-ready.

    recipe: a YAML file, its content, or a checked Recipe. overrides: changes of it, `section.key=value`.
    resume: go on from the newest whole checkpoint of an earlier, killed run of the same recipe; the weights at the
    end are equal to those of an uninterrupted run. Called by every process of `accelerate launch` alike.
    Raises UsageError for mistakes in the recipe, and for a method and a layout or launch that don't go together,
    CtxextError for a missing package, a base that can't be patched, data that gives no block, a folder of another
    run, or a loss that isn't finite at the end.
    """
    checked = load_recipe(recipe, overrides)
    require("training", "train", "accelerate", "datasets", "peft")
    try:
        return _train(checked, resume)
    except UnicodeDecodeError as error:  # far inside a streamed file
        raise CtxextError(
            f"a data source isn't UTF-8 text: {error}", hint="convert it to UTF-8, or leave it out"
        ) from error


def _train(recipe: Recipe, resume: bool) -> dict[str, Any]:
    """`train` for a recipe that is right by itself."""
    from transformers import set_seed

    from . import loss
    from .model import build, make_schedule, target_of
    from .trainer import RecipeTrainer, arguments, plot_loss, save, sequences

    _quiet_off_a_terminal()
    out = Path(recipe.output)
    folder = resolve(recipe.model.path)
    schedule = make_schedule(recipe, folder)
    check_schedule(recipe, schedule)
    target = target_of(recipe, schedule)
    main = terminal.main_process()
    if main:
        begin(out, recipe, resume=resume)
    base = Base.of(recipe.model.path if recipe.model.path == "tiny" else _lasting(recipe), folder)
    if recipe.eval.before and recipe.eval.commands and main and not (out / "eval-before").exists():
        eval_commands.before(recipe, folder, schedule, out)

    set_seed(recipe.seed)
    tokenizer = load_tokenizer(folder)
    model = build(recipe, folder, schedule)
    if recipe.train.loss == "chunked":
        loss.bind(model, recipe.train.loss_chunk)
    args = arguments(recipe, out, model)
    with args.main_process_first(local=False, desc="tokenising"):
        blocks = sequences(recipe, tokenizer, target=target, processes=args.world_size)
    if recipe.data.streaming and args.dataloader_num_workers:
        # A worker can't tell an empty share from an empty stream, and the Trainer takes one for the end.
        next(iter(blocks))
    trainer = RecipeTrainer(recipe, model, args, blocks)
    checkpoint = last_checkpoint(out / "checkpoints") if resume else None
    started = time.monotonic()
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    seconds = time.monotonic() - started
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    if losses and not math.isfinite(losses[-1]):
        raise CtxextError(
            f"the loss is {losses[-1]} at the end", hint="lower train.learning_rate, or set train.bf16"
        )
    trained = save(trainer, recipe, folder, out, base=base, schedule=schedule)
    if main:
        write_json(out / "log.json", trainer.state.log_history, indent=1)
        plot_loss(trainer.state.log_history, out / "loss.png")
    answer = {
        "out": str(out),
        "trained": str(trained),
        "schedule": None if schedule is None else digest(schedule),
        "tokens": recipe.tokens(args.world_size),
        "seconds": round(seconds, 1),
        "resumed_from": checkpoint.name if checkpoint else None,
        "loss": {"first": losses[0], "last": losses[-1]} if losses else None,
    }
    del trainer, model
    if recipe.eval.after and recipe.eval.commands and main:
        eval_commands.after(recipe, trained, out)
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
