"""Markdown tables of results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """The first `left` columns are text, the others numbers.

    >>> print(table(["", "ppl"], [["pi", "8.29"]]), end="")
    | | ppl |
    |---|--:|
    | pi | 8.29 |
    """
    lines = [f"| {' | '.join(head)} |".replace("|  |", "| |")]
    lines.append("|" + "---|" * left + "--:|" * (len(head) - left))
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def short(value: float, digits: int = 2, whole_from: float = 1000) -> str:
    """A perplexity: with `digits`, or without any where it is so large that they say nothing.

    >>> short(8.294), short(1234.5)
    ('8.29', '1234')
    """
    return f"{value:.{digits}f}" if value < whole_from else f"{value:.0f}"
