"""RULER's task types (Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?",
2024), generated without any download, at exact lengths.

Prompts, answers and scoring follow upstream. What differs, on purpose:

- a length is exact: prompt tokens (BOS included) + the tokens to generate are the length asked for. Upstream and
the
  harness's port come out up to half short, or too long;
- a sample depends on (task, length, seed, index) alone. Upstream draws from global random state, so that running
  another length first changes the data;
- words are those of the embedded text instead of wonderwords, and the essays are the embedded text or any file;
- the one-shot examples of `vt` and `cwe` are sent, as upstream does (the harness sizes `cwe` for its own, and
drops
  it); `example=False` leaves them out, for models too short for them.
"""

from __future__ import annotations

import math
import random
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...errors import UsageError, nearest
from ...needles import FILLER
from ...needles.exact_length import PADDING
from ..words import words

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
ASK = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What are all the special magic {kind} for {query} mentioned in the provided text? "
    "The special magic {kind} for {query} mentioned in the provided text are"
)
# "assgined" is upstream's spelling, and part of the prompt that published figures were measured with.
TRACK = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above. "
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assgined "
    "the value {value}, they are:"
)
COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list? "
    "Answer: The top 10 words that appear most often in the list are:"
)
FREQUENT = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. {context}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text? "
    "Answer: According to the coded text above, the three most frequently appeared words are:"
)
DOTS = [" ...", " .", ".", " -", "-", ",", *PADDING]


@dataclass
class Draft:
    """A sample whose amount of filler is still open. `render(units, padding)` is the prompt."""

    render: Callable[[int, list[str]], str]
    answers: tuple[str, ...]
    sources: tuple[str, ...] = ()
    upcoming: Callable[[int], Sequence[str]] = lambda units: ()
    pieces: Sequence[str] = tuple(PADDING)


Context = Callable[[random.Random, int, Sequence[str], bool], Draft]


def _insert(units: list[str], placed: Sequence[tuple[float, str]]) -> list[str]:
    """`units` with each text at its fraction; the same fractions keep their order whatever the number of units."""
    result = list(units)
    for where, text in sorted(placed, reverse=True):
        result.insert(int(where * (len(units) + 1)), text)
    return result


def _niah(
    haystack: str, kinds: tuple[str, str] = ("words", "numbers"), keys: int = 1, values: int = 1, ask: int = 1
):
    """Needles in "repeat" (filler lines), "essay" (sentences) or "needle" (other needles) haystacks."""

    def draw(rng: random.Random, kind: str) -> str:
        if kind == "numbers":
            return str(rng.randrange(10**6, 10**7))
        if kind == "uuids":
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))
        return "-".join(rng.choice(words()) for _ in range(2))

    def make(rng: random.Random, length: int, sentences: Sequence[str], example: bool) -> Draft:
        names: list[str] = []
        while len(names) < keys:
            name = draw(rng, kinds[0])
            names += [name] if name not in names else []
        found = {name: [draw(rng, kinds[1]) for _ in range(values)] for name in names}
        placed = [
            (rng.random(), NEEDLE.format(kind=kinds[1], key=name, value=value))
            for name, its in found.items()
            for value in its
        ]
        asked = rng.sample(names, ask)
        answers = tuple(value for name in asked for value in found[name])
        query = asked[0] if ask == 1 else ", ".join(asked[:-1]) + ", and " + asked[-1]
        template, kind = ASK, kinds[1]
        if ask * values == 1:  # upstream's edits for a single answer
            template = template.replace("Some", "A").replace("are", "is").replace("What is all the", "What is the")
            kind = kind.removesuffix("s")
        noise = random.Random(rng.random())
        others: list[str] = []

        def units(count: int) -> list[str]:
            while haystack == "needle" and len(others) < count:
                others.append(NEEDLE.format(kind=kinds[1], key=draw(noise, kinds[0]), value=draw(noise, kinds[1])))
            if haystack == "essay":
                return [sentences[i % len(sentences)] for i in range(count)]
            return [FILLER] * count if haystack == "repeat" else others[:count]

        def render(count: int, padding: list[str]) -> str:
            joint = " " if haystack == "essay" else "\n"
            context = joint.join(_insert(units(count), placed))
            extra = "".join(padding)
            if extra:
                context += extra if haystack == "essay" else "\n" + extra.lstrip(" ")
            return template.format(kind=kind, context=context, query=query)

        def coming(count: int) -> list[str]:
            unit = sentences[count % len(sentences)] if haystack == "essay" else f"{FILLER} {FILLER} {FILLER}"
            return [" " + part for part in unit.split()]

        sources = tuple(
            NEEDLE.format(kind=kinds[1], key=name, value=value) for name in asked for value in found[name]
        )
        return Draft(render, answers, sources, coming)

    return make


def _names(rng: random.Random, count: int, size: int) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        name = "".join(rng.choices(string.ascii_uppercase, k=size))
        found += [name] if name not in found else []
    return found


def _chain(rng: random.Random, size: int, hops: int = 4) -> tuple[str, list[str], list[tuple[float, str]]]:
    """(value, variables, statements with their fractions in the text)."""
    variables, value = _names(rng, hops + 1, size), str(rng.randrange(10000, 99999))
    lines = [f"VAR {variables[0]} = {value}"]
    lines += [f"VAR {b} = VAR {a} " for a, b in zip(variables, variables[1:], strict=False)]  # noqa: RUF007
    return value, variables, list(zip(sorted(rng.random() for _ in lines), lines, strict=True))


def _tracking(rng: random.Random, length: int, sentences: Sequence[str], example: bool) -> Draft:
    """vt: one chain of four hops in filler lines, after an example with shorter names."""

    def text(count: int, padding: list[str], value: str, variables: list[str], placed) -> str:
        context = " ".join(_insert([FILLER + "\n"] * count, placed)).replace(". \n", ".\n")
        extra = "".join(padding).lstrip(" ")
        context = f"{extra}\n {context}" if extra else context
        return TRACK.format(context=context, value=value, count=len(variables))

    first = ""
    if example:
        value, variables, placed = _chain(rng, 3)
        first = f"{text(10, [], value, variables, placed)} {' '.join(variables)}\n\n\n\n"
    value, variables, placed = _chain(rng, 5)

    def render(count: int, padding: list[str]) -> str:
        return first + text(count, padding, value, variables, placed)

    return Draft(
        render,
        tuple(variables),
        tuple(line.strip() for _, line in placed),
        lambda n: [" " + w for w in FILLER.split()],
    )


def _numbered(entries: Sequence[str]) -> str:
    return " ".join(f"{i}. {entry}" for i, entry in enumerate(entries, start=1))


def _common(rng: random.Random, length: int, sentences: Sequence[str], example: bool) -> Draft:
    """cwe: ten words appear 30 times, the others 3 (6 and 1 below 4,096 tokens, as upstream)."""
    short = length < 4096
    often, seldom = (6, 1) if short else (30, 3)
    first = ""
    vocabulary = list(words())
    if example:
        count, much, few = (20, 3, 1) if short else (40, 10, 3)
        chosen = rng.sample(vocabulary, count)
        entries = chosen[:10] * much + chosen[10:] * few
        rng.shuffle(entries)
        first = COMMON.format(context=_numbered(entries)) + f" {_numbered(chosen[:10])}\n"
    rng.shuffle(vocabulary)
    frequent, others = vocabulary[:10], vocabulary[10:]
    base = [(rng.random(), word) for word in frequent for _ in range(often)]
    order = random.Random(rng.random())
    rare: list[tuple[float, str]] = []

    def render(count: int, padding: list[str]) -> str:
        while len(rare) < count:
            number = len(rare) // seldom
            # Past the vocabulary two words make one, so that no rare word becomes frequent.
            again = number // len(others)
            name = others[number % len(others)] + (others[(number + again) % len(others)] if again else "")
            rare.append((order.random(), name))
        entries = [word for _, word in sorted([*base, *rare[:count]])]
        return first + COMMON.format(context=_numbered(entries) + "".join(padding))

    return Draft(render, tuple(frequent), pieces=DOTS)


def _frequent(rng: random.Random, length: int, sentences: Sequence[str], example: bool) -> Draft:
    """fwe: six-letter words whose counts follow a zeta distribution with exponent 2; the commonest is noise,
    "..."."""
    vocabulary = ["".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(max(8, length // 50))]
    vocabulary[0] = "..."
    order = random.Random(rng.random())
    places: list[list[float]] = [[] for _ in vocabulary]

    def render(count: int, padding: list[str]) -> str:
        # At least 4, 3, 2, 1: below some hundred words the law alone would leave ties at the top.
        entries = []
        for rank, name in enumerate(vocabulary):
            times = max(int(count * (rank + 1) ** -2.0 / (math.pi**2 / 6)), 4 - rank)
            while len(places[rank]) < times:
                places[rank].append(order.random())
            entries += [(where, name) for where in places[rank][: max(times, 0)]]
        return FREQUENT.format(context=" ".join(name for _, name in sorted(entries)) + "".join(padding))

    return Draft(render, tuple(vocabulary[1:4]), pieces=DOTS)


TASKS: dict[str, tuple[int, Context]] = {
    "niah_single_1": (128, _niah("repeat")),
    "niah_single_2": (128, _niah("essay")),
    "niah_multikey_1": (128, _niah("essay", keys=4)),
    "niah_multikey_2": (128, _niah("needle")),
    "niah_multikey_3": (128, _niah("needle", ("uuids", "uuids"))),
    "niah_multivalue": (128, _niah("essay", values=4)),
    "niah_multiquery": (128, _niah("essay", keys=4, ask=4)),
    "vt": (30, _tracking),
    "cwe": (120, _common),
    "fwe": (50, _frequent),
}
"""Name: (tokens to generate, how to draft a sample)."""


def known_tasks(names: Sequence[str]) -> list[str]:
    """The names, checked; UsageError names the nearest task."""
    for name in names:
        if name not in TASKS:
            raise UsageError(f"there is no task {name!r}", hint=nearest(name, TASKS))
    return list(names)
