"""Texts of an exact number of tokens: whole units of filler first, then single words, every step counted.

A text is always tokenised whole, never pasted from pieces: with sentencepiece the pieces' ids aren't the text's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from . import FILLER

SENTENCES = [sentence + "." for sentence in FILLER.rstrip(".").split(". ")]
# Tried in this order when whole units leave a gap: filler words first, then shorter and attached ones, which
# reach what a tokenizer with few merges can't reach with words.
PADDING = [*(" " + word for word in dict.fromkeys(FILLER.split())), " a", " I", " -", *".!,;?ax"]

Render = Callable[[int, list[str]], str]
"""(units, padding pieces) to the whole text; more units and more padding give more tokens."""


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix of two id lists."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))


class Fitter:
    """Counts and fits for one tokenizer. `bos` is put in front of every text and counted, if it isn't None."""

    def __init__(self, tokenizer, bos: int | None = None):
        self.tokenizer = tokenizer
        self.front = [] if bos is None else [bos]
        self._gains: dict[str, int] = {}

    def ids(self, text: str) -> list[int]:
        """Ids of a whole text, BOS in front if there is one."""
        return self.front + list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def count(self, text: str) -> int:
        """Tokens of a whole text, BOS included."""
        return len(self.ids(text))

    def places(self, text: str, start: int, end: int, ids: list[int]) -> tuple[int, int]:
        """Token indices [first, last + 1) of the characters [start, end) of `text`, whose tokens are `ids`."""
        if not getattr(self.tokenizer, "is_fast", False):
            # No offsets: where the text cut there parts from the whole. A token or two off if its end merges.
            return common_prefix(self.ids(text[:start]), ids), common_prefix(self.ids(text[:end]), ids)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        spans = encoded["offset_mapping"]
        front = len(self.front)
        return front + sum(b <= start for _, b in spans), front + sum(a < end for a, _ in spans)

    def fit(
        self,
        render: Render,
        length: int,
        *,
        rate: float,
        upcoming: Callable[[int], Sequence[str]] = lambda units: (),
        pieces: Sequence[str] = PADDING,
    ) -> tuple[int, list[str]] | None:
        """(units, padding) whose text has exactly `length` tokens, or None if no padding reaches it.

        `rate`: about how many tokens a unit has. `upcoming(units)`: padding that reads best after so many units.
        The text without units and padding must fit; the caller makes sure.
        """
        units = self.largest(lambda n: render(n, []), length, rate)
        for fewer in range(min(units, 3) + 1):
            padding = self._pad(render, length, units - fewer, upcoming, pieces)
            if padding is not None:
                return units - fewer, padding
        return None

    def largest(self, render: Callable[[int], str], length: int, rate: float) -> int:
        """The largest number of units whose text fits in `length`: an estimate, a bracket around it, bisection."""

        def fits(units: int) -> bool:
            return self.count(render(units)) <= length

        low = high = max(0, int((length - self.count(render(0))) / rate))
        step = 1
        while fits(high):
            low, high, step = high, high + step, step * 2
        while low > 0 and not fits(low):
            low, high, step = max(0, low - step), low, step * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _gain(self, piece: str) -> int:
        """How many tokens `piece` adds to a filler text (an estimate: neighbours may merge)."""
        if piece not in self._gains:
            self._gains[piece] = self.count(FILLER + piece) - self.count(FILLER)
        return self._gains[piece]

    def _pad(
        self,
        render: Render,
        length: int,
        units: int,
        upcoming: Callable[[int], Sequence[str]],
        pieces: Sequence[str],
    ) -> list[str] | None:
        """Padding pieces that fill the gap exactly, or None. Each accepted piece is verified on the whole text."""
        padding: list[str] = []
        now = self.count(render(units, padding))
        while now < length:
            # The words of the unit that would come next read best; then whatever fits, large pieces first.
            coming = list(upcoming(units))
            coming = coming[len(padding) : len(padding) + 1] if padding == coming[: len(padding)] else []
            gap = length - now
            rest = sorted((p for p in pieces if 0 < self._gain(p) <= gap), key=lambda p: -self._gain(p))
            unlikely = [piece for piece in pieces if piece not in rest]
            for piece in [*coming, *rest, *unlikely]:
                count = self.count(render(units, [*padding, piece]))
                if now < count <= length:
                    padding.append(piece)
                    now = count
                    break
            else:
                return None
        return padding if now == length else None
