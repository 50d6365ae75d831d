"""Random models, a folder of each for every method, and what transformers makes of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ctxext
from ctxext import methods
from ctxext.config.architectures import unguarded
from ctxext.files import read_config, read_json, write_json
from ctxext.folders.source import resolve
from ctxext.rope import Rope, Schedule
from ctxext.text import load_texts
from experiments.serving.__main__ import static_schedules

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma")
# theta: nobody's default, so that a runtime that doesn't read it is seen.
TRAINED, FACTOR, DIM, THETA = 1024, 4, 32, 500000.0
LENGTHS = (200, 1500)
# The unpatched model: only where it runs exactly does another answer say something about a scaling.
CONTROL = "none"
# Some refuse a prompt that is longer than what an unpatched config says.
_LONGER = {"max_position_embeddings": TRAINED * FACTOR}
# What others write, in the keys of before transformers 5.
OTHERS: dict[str, dict[str, Any]] = {
    "linear, whole factor": {"rope_type": "linear", "factor": FACTOR},
    "yarn, attention_factor alone": {
        "rope_type": "yarn",
        "factor": float(FACTOR),
        "original_max_position_embeddings": TRAINED,
        "attention_factor": 1.3,
    },
    "longrope, attention_factor alone": {
        "rope_type": "longrope",
        "factor": float(FACTOR),
        "original_max_position_embeddings": TRAINED,
        "short_factor": [2.0] * (DIM // 2),
        "long_factor": [2.0] * (DIM // 2),
        "attention_factor": 1.3,
    },
}
# Two tokens whose scores are as near as this are as good as one another.
NEAR = 1e-2


@dataclass(frozen=True)
class Job:
    """A folder for a runtime: of which family and method; target: the --target that it was patched for."""

    family: str
    method: str
    target: str
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.family}, {self.method}, {self.target}"


def cases() -> dict[str, Schedule]:
    """What a folder may say: no scaling, every static method, stages, layers that don't rotate."""
    rope = Rope(THETA, DIM, TRAINED)
    staged = {name: methods.schedule(rope, name, FACTOR) for name in ("dynamic_yarn", "rerope")}
    return (
        static_schedules(rope, FACTOR)
        | staged
        | {"nope, every 4th": methods.schedule(rope, "nope", FACTOR, every=4)}
    )


def base(family: str, folder: Path) -> None:
    """Save a random model of 4 layers with the embedded tokenizer (1,024 tokens)."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=DIM,
        max_position_embeddings=TRAINED,
        initializer_range=0.15,
        tie_word_embeddings=family == "gemma",
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        **({"sliding_window": None} if family == "mistral" else {}),
    )
    AutoModelForCausalLM.from_config(config).eval().save_pretrained(folder)
    for path in resolve("tiny").iterdir():
        if path.name.startswith("tokenizer"):
            shutil.copy(path, folder)
    # CTranslate2 needs one for some families.
    settings = read_json(folder / "tokenizer_config.json")
    write_json(folder / "tokenizer_config.json", settings | {"unk_token": settings["eos_token"]})


def jobs(root: Path, target: str, families: Iterable[str] = FAMILIES, only: str = "") -> Iterator[Job]:
    """The folders, written under `root`; for a target other than "all" also those that it writes otherwise.

    Beside them what transformers 5 saves of some (rope_parameters alone) and what others write. only: a part of
    the method's name; the control is there always.
    """
    for family in families:
        source = root / family
        base(family, source)
        for method, schedule in cases().items():
            configs = []
            for wanted in dict.fromkeys(("all", target)):
                out = root / f"{family}-{method}-{wanted}".replace(", ", "-").replace(" ", "-")
                options = {"method": schedule.method, "factor": FACTOR, "method_options": schedule.params}
                ctxext.patch_checkpoint(source, out, target=wanted, **options)
                if (config := read_config(out)) not in configs:
                    configs.append(config)
                    if only in method:
                        yield Job(family, method, wanted, out)
        for method in ("none", "yarn", "pi", "ntk", "dynamic_yarn"):
            patched = source if method == "none" else root / f"{family}-{method}-all"
            changes: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {f"{method}, v5 keys": as_saved}
            if method == "none":
                changes |= {CONTROL: as_of_v4} | {name: scaled_by(keys) for name, keys in OTHERS.items()}
            if method == "dynamic_yarn":
                changes |= {"dynamic_yarn, no guard": as_of_0_1, "dynamic_yarn, saved live": as_saved_live}
            for name, change in changes.items():
                if only in name or name == CONTROL:
                    out = root / f"{family}-{name}".replace(", ", "-").replace(" ", "-")
                    shutil.copytree(patched, out)
                    (out / "config.json").write_text(json.dumps(change(read_config(out))), encoding="utf-8")
                    yield Job(family, name, "all", out)


def as_of_v4(config: dict[str, Any]) -> dict[str, Any]:
    """The config of an unpatched model as it was saved before transformers 5."""
    kept = {k: v for k, v in config.items() if k != "rope_parameters"}
    return kept | {"rope_theta": config["rope_parameters"]["rope_theta"], "rope_scaling": None} | _LONGER


def scaled_by(keys: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Makes the config of an unpatched model one that others scaled, in the keys of before transformers 5."""
    return lambda config: as_of_v4(config) | {"rope_scaling": keys}


def as_saved(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers 5 saves of a loaded folder."""
    return {k: v for k, v in unguarded(config).items() if k not in ("rope_theta", "rope_scaling")} | _LONGER


def as_saved_live(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers 5 saves of a model that ctxext holds: the class's own name, and the guard's theta."""
    return as_saved(config) | {"rope_theta": config["rope_theta"]}


def as_of_0_1(config: dict[str, Any]) -> dict[str, Any]:
    """A staged folder without the guard, as ctxext 0.1 wrote it."""
    return unguarded(config) | {"rope_theta": THETA}


def prompts() -> list[dict[str, Any]]:
    """Texts of LENGTHS tokens: `ids`, and the `text` that gives them again."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve("tiny"))
    folder = Path(ctxext.__file__).parent / "assets" / "text"
    text = max((text.text for text in load_texts(folder)), key=len)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    made = []
    for length in LENGTHS:
        # Where a word is cut the text gives other ids: begin elsewhere.
        start = next(s for s in range(len(ids)) if _same(tokenizer, ids[s : s + length]))
        chosen = ids[start : start + length]
        made.append({"ids": chosen, "text": tokenizer.decode(chosen)})
    return made


def _same(tokenizer: Any, ids: list[int]) -> bool:
    return tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"] == ids


@torch.no_grad()
def compared(job: Job, answers: list[Mapping[str, Any]], asked: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest difference of a log-probability to transformers', and changed top tokens, over all prompts."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job.folder, dtype=torch.float32).eval()
    largest, changed, tokens = 0.0, 0, 0
    for answer, prompt in zip(answers, asked, strict=True):
        ids, written = prompt["ids"], answer.get("generated")
        whole = ids if written is None else ids + written
        scores = model(torch.tensor([whole]), use_cache=False).logits[0].double().log_softmax(-1)[:-1]
        start = 0 if written is None else len(ids) - 1
        scores, nexts = scores[start:], torch.tensor(whole[start + 1 :])
        best = nexts if written is not None else torch.tensor(answer["tokens"])
        rows = torch.arange(len(nexts))
        behind = scores.max(-1).values - scores[rows, best]
        changed += int((behind > NEAR).sum())
        tokens += len(nexts)
        if "logprobs" in answer:
            theirs = torch.tensor(answer["logprobs"], dtype=torch.float64)
            largest = max(largest, float((theirs - scores[rows, nexts]).abs().max()))
    return {"max_difference": largest, "changed": changed, "tokens": tokens}
