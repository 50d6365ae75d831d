"""The recipe of a fine-tune: its sections, what they may hold, and combinations that are wrong. No torch here."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ConfigDict, Field

from .. import methods
from ..errors import UsageError, nearest
from ..rope import Rope, Schedule
from . import yaml_recipe
from .yaml_recipe import Check, Problem, Section

PACKED_LIMIT = 16384
"""Tokens of a packed block up to which a dense mask of bools (T * T bytes: 256 MiB here) is reasonable."""


class ModelSpec(Section):
    path: str = Field(description="a folder, a hub id, a .gguf file, or tiny")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="of frozen weights; auto: as saved"
    )
    attention: str = Field(default="auto", description="auto: sdpa where the family has it, else eager")
    trained_length: int | None = Field(default=None, ge=2, description="tokens, when config.json says otherwise")
    existing: Literal["refuse", "replace", "compose"] = "refuse"
    trust_remote_code: bool = False


class MethodSpec(Section):
    """A method of `ctxext methods`; every further key is one of its options, checked by its own signature."""

    model_config = ConfigDict(extra="allow")

    name: str
    factor: float = Field(ge=1, allow_inf_nan=False)

    @property
    def params(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Source(Section):
    path: str = Field(description="a file or folder of .txt, .jsonl or .parquet, a hub dataset, passkey, or tiny")
    name: str | None = Field(default=None, description="configuration of a hub dataset")
    split: str = "train"
    column: str = "text"
    weight: float = Field(default=1.0, gt=0, description="share of the blocks, relative to the other sources")
    leave_out: list[str] = Field(default_factory=list, description="files of a folder not to train on, as globs")


class DataSpec(Section):
    sources: list[Source] = Field(min_length=1)
    length: int = Field(ge=16, description="tokens that one sequence of a batch holds: the window")
    layout: Literal["document", "packed"] = Field(
        default="document",
        description="one stretch of one document per block, or whole documents packed by best fit",
    )
    streaming: bool = False
    shuffle_buffer: int = Field(default=1000, ge=1, description="blocks held back to shuffle a stream")
    cache: str | None = Field(default=None, description="folder for tokenised blocks; default: that of datasets")


class PositionSpec(Section):
    kind: Literal["plain", "pose", "random"] = "plain"
    target: int | None = Field(
        default=None, ge=2, description="positions 0 .. target - 1; default: the method's reach"
    )
    chunks: int = Field(default=2, ge=2, description="contiguous pieces of a PoSE window")
    text: Literal["contiguous", "skipped"] = Field(
        default="contiguous", description="skipped: the text of a chunk is as far off as its positions are"
    )
    plain_share: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of blocks that keep positions 0, 1, 2, ...; under a staged method these train with the "
        "original rope, as short windows do in LongRoPE2",
    )


class AdapterSpec(Section):
    kind: Literal["lora", "full"] = "lora"
    r: int = Field(default=16, ge=1)
    alpha: float = Field(default=32, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: Literal["all-linear"] | list[str] = "all-linear"
    layers: list[int] | None = Field(default=None, description="only these layers")
    rslora: bool = Field(default=False, description="scale by alpha / sqrt(r); lower the learning rate")
    dora: bool = Field(default=False, description="decomposed weights; about twice the step time")
    loraplus_ratio: float | None = Field(default=None, ge=1, description="LoRA+: how much faster B learns than A")
    embeddings: bool = Field(default=False, description="train the input embedding too (LongLoRA)")
    norms: bool = Field(default=False, description="train the norms too (LongLoRA)")
    quantize: Literal["4bit"] | None = Field(
        default=None, description="QLoRA: frozen weights in 4 bits; needs a GPU"
    )


class TrainSpec(Section):
    steps: int = Field(ge=1)
    batch_size: int = Field(default=1, ge=1, description="sequences per process and forward")
    accumulation: int = Field(default=1, ge=1)
    learning_rate: float = Field(gt=0)
    schedule: Literal["constant_with_warmup", "constant", "linear", "cosine"] = "constant_with_warmup"
    warmup_steps: int = Field(default=20, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, gt=0, lt=1)
    max_grad_norm: float = Field(default=1.0, gt=0)
    bf16: bool | None = Field(default=None, description="autocast; default: if the frozen weights are bfloat16")
    loss: Literal["chunked", "stock"] = "chunked"
    loss_chunk: int = Field(default=256, ge=1, description="tokens whose logits exist at a time")
    activation_checkpointing: bool = False
    checkpoint_every: int = Field(default=1, ge=1, description="checkpoint every so many layers")
    offload_activations: bool = Field(default=False, description="keep checkpoints in host memory; needs a GPU")
    save_steps: int = Field(default=100, ge=1)
    keep: int = Field(default=2, ge=1, description="checkpoints kept")
    logging_steps: int = Field(default=10, ge=1)
    report_to: str | list[str] = "none"
    trainer: dict[str, Any] = Field(default_factory=dict, description="more TrainingArguments, verbatim")


class EvalSpec(Section):
    """`ctxext eval` commands without the model, such as `passkey --lengths 256,2048`; run by the CLI itself."""

    commands: list[str] = Field(default_factory=list)
    before: bool = True
    after: bool = True


class Recipe(Section):
    output: str = Field(description="folder that the run makes")
    seed: int = 0
    model: ModelSpec
    method: MethodSpec | None = Field(default=None, description="left out: train the checkpoint as it is")
    data: DataSpec
    positions: PositionSpec = Field(default_factory=PositionSpec)
    adapter: AdapterSpec = Field(default_factory=AdapterSpec)
    train: TrainSpec
    eval: EvalSpec = Field(default_factory=EvalSpec)

    def resolved(self) -> str:
        """The recipe with every default, as YAML that `load_recipe` reads back to an equal one."""
        return yaml.safe_dump(self.content(), sort_keys=False, width=110)

    def content(self) -> dict[str, Any]:
        """What `resolved` writes."""
        return self.model_dump(mode="json", exclude_none=True)

    def tokens(self, processes: int = 1) -> int:
        """Tokens that the whole run reads."""
        spec = self.train
        return spec.steps * spec.batch_size * spec.accumulation * processes * self.data.length


def load_recipe(recipe: str | Path | Mapping[str, Any] | Recipe, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe, or take its content, change and check it; UsageError lists every mistake with its line."""
    content = recipe.content() if isinstance(recipe, Recipe) else recipe
    return yaml_recipe.load(Recipe, content, overrides, raw=method_problems, checks=CHECKS)


def method_problems(content: dict[str, Any]) -> Iterator[Problem]:
    """What is wrong with the method's name and options, one problem for each."""
    section = content.get("method")
    if not isinstance(section, dict) or not isinstance(section.get("name"), str):
        return
    try:
        method = methods.get(section["name"])
    except UsageError as error:
        yield Problem(("method", "name"), f"{error.message}, {error.hint}")
        return
    known = {o.name for o in method.options}
    params = {k: v for k, v in section.items() if k not in ("name", "factor")}
    for name in [k for k in params if k not in known]:
        del params[name]
        hint = nearest(str(name), known | {"factor"})
        yield Problem(("method", name), f"method {method.name!r} has no such option, {hint}")
    while True:
        try:
            method.check(params)
            return
        except UsageError as error:
            name = next((k for k in params if repr(k) in error.message), None)
            yield Problem(("method", name) if name else ("method",), error.message)
            if name is None:
                return
            del params[name]


def is_staged(spec: MethodSpec | None) -> bool:
    """Whether the method has several stages or changes attention, tried on a rope that its options fit."""
    if spec is None or spec.name not in methods.all_methods():
        return False
    method = methods.get(spec.name)
    # Options may be for one model only: lists for its number of frequencies, windows for its length.
    sizes = dict.fromkeys((32, *(len(v) for v in spec.params.values() if isinstance(v, list))))
    for size, power in itertools.product(sizes, range(6, 21)):
        try:
            return _staged(method(Rope(10000.0, 2 * size, 2**power), max(spec.factor, 2.0), **spec.params))
        except (UsageError, ValueError, ArithmeticError):
            continue
    return _staged(method(Rope(10000.0, 64, 4096), 2.0, **dict.fromkeys(method.needs, [1.0] * 32)))


def _staged(schedule: Schedule) -> bool:
    return len(schedule.stages) > 1 or schedule.in_attention


def check_schedule(recipe: Recipe, schedule: Schedule | None) -> None:
    """Raise UsageError if the real schedule has stages where they can't be: a folder may bring them too."""
    if schedule is not None and _staged(schedule):
        for problem in _stages(recipe):
            raise UsageError(f"{'.'.join(map(str, problem.key))}: {problem.message}")


def parallel_sizes() -> tuple[int, int]:
    """(context parallel, Ulysses) processes that `accelerate launch` was configured for."""
    names = ("PARALLELISM_CONFIG_CP_SIZE", "PARALLELISM_CONFIG_SP_SIZE")
    cp, sp = (int(os.environ.get(name) or 1) for name in names)
    return cp, sp


def _changed(spec: Section) -> set[str]:
    """Fields that were given another value than their default."""
    fields = type(spec).model_fields
    return {name for name in spec.model_fields_set if getattr(spec, name) != fields[name].default}


def _positions(recipe: Recipe) -> Iterator[Problem]:
    spec, data = recipe.positions, recipe.data
    if spec.kind == "plain":
        for name in sorted({"target", "plain_share"} & _changed(spec)):
            yield Problem(("positions", name), "plain positions have none, choose kind pose or random")
        return
    if data.layout == "packed":
        yield Problem(
            ("positions", "kind"),
            f"{spec.kind} needs one document per block (data.layout: document): with several, the mask that keeps "
            "a skipped window whole would join them",
        )
    if "flash" in recipe.model.attention:
        yield Problem(
            ("model", "attention"),
            f"flash attention cuts {spec.kind} windows into documents at each skip, choose sdpa or flex_attention",
        )
    if spec.target is not None and spec.target <= data.length:
        yield Problem(("positions", "target"), f"must be longer than the window of {data.length} tokens")
    if spec.target is None and recipe.method is None:
        yield Problem(("positions", "target"), "say how far positions go, as there is no method to tell")
    if spec.kind == "pose" and spec.chunks > data.length:
        yield Problem(("positions", "chunks"), f"a window of {data.length} tokens can't have so many chunks")
    if spec.kind == "random" and spec.text == "skipped":
        yield Problem(("positions", "text"), "skipped text is for PoSE chunks")


def _packing(recipe: Recipe) -> Iterator[Problem]:
    data, attention = recipe.data, recipe.model.attention
    if data.layout != "packed":
        return
    if "flash" not in attention and data.length > PACKED_LIMIT:
        yield Problem(
            ("data", "layout"),
            f"packing {data.length} tokens with {attention} builds a mask of {data.length**2 / 2**30:.1f} GiB, "
            f"{PACKED_LIMIT} tokens are the limit: choose layout document, or model.attention flash_attention_2",
        )


def _stages(recipe: Recipe) -> Iterator[Problem]:
    """Where a method with stages, or with attention of its own, goes wrong."""
    cp, sp = parallel_sizes()
    if recipe.data.layout == "packed" and "flash" in recipe.model.attention:
        yield Problem(("data", "layout"), "packed documents in flash attention can't cross the stages of a method")
    if cp > 1:
        yield Problem(
            ("method", "name"), "this method needs all keys of a query in one place, not context parallel"
        )
    if sp > 1:
        yield Problem(("method", "name"), "this method needs whole sequences, not Ulysses")


def _method(recipe: Recipe) -> Iterator[Problem]:
    if is_staged(recipe.method):
        yield from _stages(recipe)


def _adapter(recipe: Recipe) -> Iterator[Problem]:
    spec = recipe.adapter
    if spec.kind == "full":
        for name in sorted(_changed(spec) - {"kind"}):
            yield Problem(("adapter", name), "has no meaning when all weights are trained (kind: full)")


def _memory(recipe: Recipe) -> Iterator[Problem]:
    if recipe.train.offload_activations and not recipe.train.activation_checkpointing:
        yield Problem(("train", "offload_activations"), "needs activation_checkpointing: true")


def _launch(recipe: Recipe) -> Iterator[Problem]:
    cp, sp = parallel_sizes()
    data = recipe.data
    if cp > 1:
        if data.layout == "packed":
            yield Problem(("data", "layout"), "context parallel drops the mask that keeps packed documents apart")
        if recipe.model.attention not in ("auto", "sdpa"):
            yield Problem(("model", "attention"), "context parallel runs with sdpa only")
        if data.length % (2 * cp):
            yield Problem(("data", "length"), f"must be a multiple of {2 * cp} for context parallel over {cp}")
    if sp > 1:
        if data.layout == "packed" and "flash" not in recipe.model.attention:
            yield Problem(("data", "layout"), "Ulysses can pack with flash attention only")
        if data.length % sp:
            yield Problem(("data", "length"), f"must be a multiple of {sp} for Ulysses over {sp}")


CHECKS = (
    Check(("model", "method", "data", "positions"), _positions),
    Check(("model", "method", "data"), _packing),
    Check(("model", "method", "data"), _method),
    Check(("adapter",), _adapter),
    Check(("train",), _memory),
    Check(("model", "method", "data"), _launch),
)
