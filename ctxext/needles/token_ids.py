"""Passkeys hidden in token ids: documents to train on, and needles in texts that are tokenised already.

Built from ids: equal to tokenising the whole text, except where a text is cut inside a word.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from ..errors import UsageError
from . import NEEDLE, QUESTION, TASK
from .exact_length import SENTENCES


def hide_key(ids: Sequence[int], tokenizer: Any, key: str, place: float) -> tuple[list[int], int]:
    """A text with `key` hidden in it and the question for it at its end; and the index of the answer's start.

    The length stays the same: the text gives up its end. A BOS in front stays there. `place`: from 0 (start) to 1
    (end) of what is left of the text. Raises UsageError if the needle doesn't fit.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    start = [tokenizer.bos_token_id] if ids[0] == tokenizer.bos_token_id else []
    head = [*start, *encode(TASK + "\n")]
    needle, question = encode("\n" + NEEDLE.format(key=key) + "\n"), encode("\n" + QUESTION)
    answer = encode(" " + key)
    text = ids[len(start) :]
    room = len(ids) - len(head) - len(needle) - len(question) - len(answer)
    if room < 0:
        raise UsageError(f"a needle with its question needs {len(ids) - room} tokens, not {len(ids)}")
    at = round(room * place)
    whole = [*head, *text[:at], *needle, *text[at:room], *question, *answer]
    return whole, len(whole) - len(answer)


class PasskeyRows:
    """Passkey documents whose filler is the usual sentences or the given texts, drawn by a caller's generator."""

    def __init__(self, tokenizer: Any, documents: dict[str, str]):
        def encode(text: str) -> list[int]:
            # verbose: a whole book is longer than the model's context, and that is no mistake here
            return tokenizer.encode(text, add_special_tokens=False, verbose=False)

        self.tokenizer, self.encode = tokenizer, encode
        self.eos = tokenizer.eos_token_id
        self.stream = [t for text in documents.values() for t in [*encode(text), self.eos]]
        if len(self.stream) < 2:
            raise UsageError("the training text is empty", hint="give --text a file with text in it")
        self.first = encode(SENTENCES[0])
        # A sentence in the middle of a line begins with its space.
        self.sentences = [encode(" " + s) for s in SENTENCES]
        self.task = encode(TASK)
        self.newline = encode("\n")
        self.question = encode("\n" + QUESTION)

    def text(self, rng: random.Random, length: int) -> list[int]:
        """A slice of the training text; it wraps around at the end."""
        start = rng.randrange(len(self.stream))
        ids = self.stream[start : start + length]
        while len(ids) < length:
            ids += self.stream[: length - len(ids)]
        return ids

    def passkey(self, rng: random.Random, length: int) -> list[int]:
        """One passkey document, answer included, of at most `length` tokens (six times in ten exactly).

        The depth is uniform. The task sentence is left out where it doesn't fit, and one time in ten.
        Built from token ids: equal to tokenising the whole text, except where filler is cut inside a word.
        """
        key = str(rng.randint(10000, 99999))
        needle = [*self.newline, *self.encode(NEEDLE.format(key=key)), *self.newline]
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
