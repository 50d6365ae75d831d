"""Passkey prompts of exactly L tokens at a depth: filler from repeated sentences or any text, one key or
several."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..errors import CtxextError, UsageError
from . import FILLER, NEEDLE, QUESTION, TASK
from .exact_length import SENTENCES, Fitter, common_prefix

REFERENCE_KEY = "12345"
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


@dataclass(frozen=True)
class Prompt:
    """One passkey prompt with its answer, exactly as the model sees it."""

    text: str
    """Prompt, a space, and the key."""
    key: str
    ids: list[int]
    """All tokens, BOS (if the tokenizer puts one) and answer included: `len(ids)` is the length asked for."""
    answer_start: int
    """Index of the answer's first token; `ids[:answer_start]` is what a generator is given."""
    depth_tokens: int
    """Index of the needle's first token, measured."""
    needle_end: int
    """Index after the needle's last token."""
    rivals: tuple[tuple[int, ...], ...] = ()
    """Answers that would be wrong: the token ids of each distractor's key, in this prompt's place."""


@dataclass(frozen=True)
class Distractor:
    """Another key in the same prompt: at `depth`, asked for under the name `ordinal`."""

    depth: float
    ordinal: str
    key: str


def hashed(*parts: object) -> int:
    """64 bits from a hash of `parts`: a draw that depends on nothing else."""
    return int.from_bytes(hashlib.sha256("|".join(map(str, parts)).encode()).digest()[:8], "big")


def make_key(seed: int, length: int, depth: float, trial: int) -> str:
    """Five digits, 10000 to 99999, from a hash: independent of global random state and of other cells."""
    return str(10000 + hashed(seed, length, f"{depth:.6f}", trial) % 90000)


def make_distractors(
    count: int, seed: int, length: int, depth: float, trial: int
) -> tuple[str, tuple[Distractor, ...]]:
    """The ordinal of the key asked for, and `count` other keys at hashed depths under the other ordinals.

    Ordinals don't follow the order in the text, so that counting needles doesn't help.
    """
    if not 0 <= count < len(ORDINALS):
        raise UsageError(f"distractors must be from 0 to {len(ORDINALS) - 1}, not {count}")
    if not count:
        return "", ()
    cell = (seed, length, f"{depth:.6f}", trial)
    names = sorted(ORDINALS[: count + 1], key=lambda name: hashed(*cell, "ordinal", name))
    taken = {make_key(seed, length, depth, trial)}
    found = []
    for name in names[1:]:
        attempt = 0
        while (key := str(10000 + hashed(*cell, "distractor", name, attempt) % 90000)) in taken:
            attempt += 1
        taken.add(key)
        found.append(Distractor(hashed(*cell, "depth", name) % 1001 / 1000, name, key))
    return names[0], tuple(found)


def sentences_of(text: str) -> list[str]:
    """A text as filler: white space is made single, and it is cut after sentence ends.

    Raises UsageError if there is no text.
    """
    found = [s for s in re.split(r"(?<=[.!?;:])\s+", " ".join(text.split())) if s]
    if not found:
        raise UsageError("the haystack has no text")
    return found


def assemble(fitter: Fitter, prompt: str, needle: str, key: str, rivals: Sequence[str] = ()) -> Prompt:
    """A Prompt from its text: where the answer starts and where the needle lies, in tokens."""
    text = f"{prompt} {key}"
    ids = fitter.ids(text)
    # The answer starts where the tokens of the prompt alone and of prompt + answer part. Usually that is the
    # prompt's end; if the tokenizer merges across it, the merged token belongs to the answer.
    answer_start = common_prefix(fitter.ids(prompt), ids)
    at = prompt.index(needle)
    depth_tokens, needle_end = fitter.places(text, at, at + len(needle), ids)
    assert depth_tokens < needle_end <= answer_start < len(ids)
    wrong = tuple(tuple(fitter.ids(f"{prompt} {rival}")[answer_start:]) for rival in rivals)
    return Prompt(text, key, ids, answer_start, depth_tokens, needle_end, wrong)


def _named(template: str, ordinal: str) -> str:
    return template.replace("pass key", f"{ordinal} pass key") if ordinal else template


class PromptBuilder:
    """Builds prompts of exactly `length` tokens at `depth` for one tokenizer.

    The plan of a cell (how many sentences, which padding) is searched once, with a reference key, and verified for
    each other key, since keys may take different numbers of tokens. `haystack`: sentences of a running text
    instead of the usual five; it begins anew only where it ends.
    """

    def __init__(self, tokenizer, bos: int | None = None, haystack: Sequence[str] | None = None):
        self._fitter = Fitter(tokenizer, bos)
        self._filler = list(haystack or SENTENCES)
        self._runs = bool(haystack)
        self._plans: dict[tuple[int, float], tuple[int, list[str]] | None] = {}
        if haystack:
            some = self._filler[:64]
            self._rate = max(1.0, self.count(" ".join(some)) / len(some))
        else:
            self._rate = max(1.0, (self.count(" ".join([FILLER] * 4)) - self.count(" ".join([FILLER] * 2))) / 10)

    def ids(self, text: str) -> list[int]:
        """Ids of a whole text, BOS in front if the builder was given one."""
        return self._fitter.ids(text)

    def count(self, text: str) -> int:
        """Tokens of a whole text, BOS included."""
        return self._fitter.count(text)

    def _text(
        self,
        sentences: int,
        padding: list[str],
        depth: float,
        key: str,
        ordinal: str = "",
        distractors: Sequence[Distractor] = (),
    ) -> str:
        """The prompt without the answer: each needle after its depth of the sentences, padding on the longest
        side."""
        needles = [(depth, 0, _named(NEEDLE, ordinal).format(key=key))]
        needles += [(d.depth, 1, _named(NEEDLE, d.ordinal).format(key=d.key)) for d in distractors]
        needles.sort()
        cuts = [0, *(round(sentences * place) for place, _, _ in needles), sentences]
        # The usual sentences begin anew after a needle, as in published prompts; a haystack is read on.
        parts = [
            " ".join(self._filler[(i + start * self._runs) % len(self._filler)] for i in range(end - start))
            for start, end in pairwise(cuts)
        ]
        sizes = [end - start for start, end in pairwise(cuts)]
        longest = sizes.index(max(sizes))
        parts[longest] = (parts[longest] + "".join(padding)).lstrip(" ")
        lines = [TASK, parts[0]]
        for (_, _, needle), part in zip(needles, parts[1:], strict=True):
            lines += [needle, part]
        return "\n".join([*lines, _named(QUESTION, ordinal)])

    def _count(self, plan: tuple[int, list[str]], key: str, *rest) -> int:
        return self.count(f"{self._text(*plan, *rest)} {key}")

    def minimum(
        self,
        depth: float = 0.5,
        key: str = REFERENCE_KEY,
        ordinal: str = "",
        distractors: Sequence[Distractor] = (),
    ) -> int:
        """Tokens of the shortest prompt, which has no filler at all."""
        return self._count((0, []), key, depth, key, ordinal, distractors)

    def build(
        self,
        length: int,
        depth: float,
        key: str,
        ordinal: str = "",
        distractors: Sequence[Distractor] = (),
    ) -> Prompt:
        """A prompt whose tokens, answer included, are exactly `length`.

        `ordinal` and `distractors`: see `make_distractors`. Raises UsageError if `length` can't hold the prompt,
        CtxextError if this tokenizer can't hit it.
        """
        if not 0 <= depth <= 1:
            raise UsageError(f"depth must be from 0 (start) to 1 (end), not {depth}")
        plan = self._plan(length, depth, key, ordinal, distractors)
        prompt = self._text(*plan, depth, key, ordinal, distractors)
        needle = _named(NEEDLE, ordinal).format(key=key)
        found = assemble(self._fitter, prompt, needle, key, [d.key for d in distractors])
        assert len(found.ids) == length
        return found

    def _plan(self, length, depth, key, ordinal, distractors) -> tuple[int, list[str]]:
        """(whole sentences, padding) for this key: that of the reference key if it fits, else one of its own.

        So it depends on the arguments alone, whatever was built before.
        """
        least = self.minimum(depth, key, ordinal, distractors)
        if length < least:
            raise UsageError(
                f"a passkey prompt has at least {least} tokens with this tokenizer, so it doesn't fit in {length}",
                hint=f"ask for lengths from {least}",
            )
        plan = None
        if not distractors:
            shared = (length - least + self.minimum(depth), depth)
            if shared not in self._plans:
                self._plans[shared] = self._search(shared[0], depth, REFERENCE_KEY, "", ())
            plan = self._plans[shared]
        if plan is None or self._count(plan, key, depth, key, ordinal, distractors) != length:
            plan = self._search(length, depth, key, ordinal, distractors)
        if plan is None:
            raise CtxextError(
                f"no filler gives exactly {length} tokens at depth {depth} with this tokenizer",
                hint="a neighbouring length may work",
            )
        return plan

    def _search(self, length, depth, key, ordinal, distractors) -> tuple[int, list[str]] | None:
        return self._fitter.fit(
            lambda units, padding: f"{self._text(units, padding, depth, key, ordinal, distractors)} {key}",
            length,
            rate=self._rate,
            upcoming=lambda units: [" " + word for word in self._filler[units % len(self._filler)].split()],
        )
