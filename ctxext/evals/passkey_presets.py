"""The passkey prompts of five published evaluations, string for string, with their own length control.

All but RULER's share the text of Mohtashami and Jaggi ("Landmark Attention", 2023). What differs is where filler
may be cut, how a length in tokens is turned into an amount of filler, and which keys are drawn. They are here
for comparison with published figures; their lengths are approximate, as they were, and rows say how many tokens
a prompt really had. For anything else use `needles.prompts.PromptBuilder`, which hits a length exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import UsageError, nearest
from ..needles import FILLER, NEEDLE, QUESTION, TASK
from ..needles.exact_length import Fitter
from ..needles.prompts import Prompt, assemble, hashed
from . import PresetName
from .words import word

Count = Callable[[int], int]
"""An amount of filler to the tokens of the prompt, without the answer."""


@dataclass(frozen=True)
class Preset:
    """One published form.

    `text(size, depth, key)` is (prompt, needle) for an amount of filler in the form's own unit; `size(length,
    count)` its rule from a length in tokens to that amount. `keys`: the smallest and largest key. The random
    depth of the originals is the grid's depth here, which is one of the values that they could draw.
    """

    name: PresetName
    source: str
    keys: tuple[int, int]
    text: Callable[[int, float, str], tuple[str, str]]
    size: Callable[[int, Count], int]


def _characters(size: int, depth: float, key: str) -> tuple[str, str]:
    """Filler joined by spaces and cut at any character; after the needle it starts anew."""
    filler = " ".join([FILLER] * (size // len(FILLER) + 2))
    before = int(depth * size)
    needle = NEEDLE.format(key=key)
    return "\n".join([TASK, filler[:before], needle, filler[: size - before], QUESTION]), needle


def _repeats(size: int, depth: float, key: str) -> tuple[str, str]:
    """Whole fillers without a space between them."""
    before = int(depth * size)
    needle = NEEDLE.format(key=key)
    return "\n".join([TASK, FILLER * before, needle, FILLER * (size - before), QUESTION]), needle


def _ruler(size: int, depth: float, key: str) -> tuple[str, str]:
    """niah_single_1: fillers on lines, a needle with a named key, seven digits."""
    name = f"{word('niah', key, 0)}-{word('niah', key, 1)}"
    needle = f"One of the special magic numbers for {name} is: {key}."
    lines = [FILLER] * size
    lines.insert(int(depth * size), needle)
    context = "\n".join(lines)
    return (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the number afterwards.\n{context}\n"
        f"What is the special magic number for {name} mentioned in the provided text? "
        f"The special magic number for {name} mentioned in the provided text is"
    ), needle


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest n <= most that fits, for a monotone test; 0 if none does."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _any_character(length: int, count: Count) -> int:
    return _largest(16 * length, lambda n: count(n) < length)


def _yarn_steps(length: int, count: Count) -> int:
    """128 characters more until the target is reached; the one before that."""
    return 128 * _largest(length // 8, lambda n: count(128 * n) < length)


def _ruler_steps(length: int, count: Count) -> int:
    """25 lines at a time (5 below 4,096 tokens) while prompt and 128 tokens to generate fit."""
    step = 25 if length >= 4096 else 5
    return step * max(1, _largest(length // step, lambda n: count(step * n) + 128 <= length))


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("landmark", "Mohtashami and Jaggi, 2023: run_test.py", (1, 50000), _characters, _any_character),
        Preset("yarn", "Peng et al., 2023: eval/passkey.py", (1, 50000), _characters, _yarn_steps),
        Preset(
            "longlora",
            "Chen et al., 2023: passkey_retrivial.py",
            (1, 49999),
            _characters,
            lambda length, count: int(3.75 * length // 1024 * 1024),
        ),
        Preset(
            "pose",
            "Zhu et al., 2023: test_passkey.py",
            (1, 50000),
            _repeats,
            lambda length, count: (length - 32 - 26 - 11) // 25,
        ),
        Preset("ruler", "Hsieh et al., 2024: niah_single_1", (10**6, 10**7 - 1), _ruler, _ruler_steps),
    )
}


def preset(name: str) -> Preset:
    """A preset by name; UsageError names the nearest."""
    if name not in PRESETS:
        raise UsageError(f"there is no passkey preset {name!r}", hint=nearest(name, PRESETS))
    return PRESETS[name]


class PresetBuilder:
    """Builds the prompts of one preset for one tokenizer; same calls as `PromptBuilder`."""

    def __init__(self, name: str, tokenizer, bos: int | None = None):
        self.preset = preset(name)
        self._fitter = Fitter(tokenizer, bos)
        self._sizes: dict[int, int] = {}

    def key(self, seed: int, length: int, depth: float, trial: int) -> str:
        """A key from the preset's range, from a hash of the cell."""
        low, high = self.preset.keys
        return str(low + hashed(self.preset.name, seed, length, f"{depth:.6f}", trial) % (high - low + 1))

    def build(self, length: int, depth: float, key: str) -> Prompt:
        """The preset's prompt for a length in tokens; `len(prompt.ids)` says what it came to."""
        if not 0 <= depth <= 1:
            raise UsageError(f"depth must be from 0 (start) to 1 (end), not {depth}")
        if length not in self._sizes:
            probe = str(self.preset.keys[1] // 2)

            def count(size: int) -> int:
                return self._fitter.count(self.preset.text(size, 0.5, probe)[0])

            size = self.preset.size(length, count)
            if size < 1 or count(0) >= length:
                raise UsageError(
                    f"the {self.preset.name} prompt doesn't fit in {length} tokens", hint="ask for longer lengths"
                )
            self._sizes[length] = size
        prompt, needle = self.preset.text(self._sizes[length], depth, key)
        return assemble(self._fitter, prompt, needle, key)
