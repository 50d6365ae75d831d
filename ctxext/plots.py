"""The style of all figures, and writing them. matplotlib is imported inside, without pyplot: no global state, no
display."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import UsageError, require

# Okabe and Ito's palette, without its yellow, which is too pale for lines: safe for colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F")
# Of another number than the colours, so that the pair stays unique. "^" means "above the edge" here.
MARKERS = "osDvPX<>hp*"
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E5E5E5",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "ctxext",  # the same rows give the same file
    "svg.fonttype": "none",
}


def matplotlib() -> Any:
    """The module; CtxextError if it isn't installed."""
    require("a plot", "plot", "matplotlib")
    import matplotlib
    import matplotlib.figure

    return matplotlib


@contextmanager
def figure(width: float, height: float, **style: Any) -> Iterator[Any]:
    """An empty Figure of so many inches, to be filled inside the block in the style of all, changed by `style`."""
    module = matplotlib()
    with module.rc_context(STYLE | style):
        yield module.figure.Figure(figsize=(width, height), layout="constrained", dpi=150)


def tokens(length: float) -> str:
    """A length as people write it: 256, 2k, 12k, 128k, 1M; exact or not shortened.

    >>> [tokens(n) for n in (256, 1000, 2048, 12288, 131072, 1048576)]
    ['256', '1000', '2k', '12k', '128k', '1M']
    """
    whole = int(length)
    for unit, letter in ((1 << 20, "M"), (1 << 10, "k")):
        if whole >= unit and whole % unit == 0:
            return f"{whole // unit}{letter}"
    return str(whole)


def save(figure: Any, path: str | Path) -> Path:
    """Write a .png (150 dpi) or .svg; other suffixes are an error. The file doesn't carry a date."""
    path = drawable(path)
    kind = path.suffix.lower()
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib().rc_context(STYLE):
        metadata = {"Date": None} if kind == ".svg" else {"Software": None}
        figure.savefig(path, format=kind[1:], dpi=150, metadata=metadata, facecolor="white")
    return path


def drawable(path: str | Path) -> Path:
    """`path`, if pictures can be written with its suffix (else UsageError) and at all (else CtxextError)."""
    path = Path(path)
    if path.suffix.lower() not in (".png", ".svg"):
        raise UsageError(f"can't draw to {str(path)!r}", hint="name it .png or .svg")
    require("a plot", "plot", "matplotlib")
    return path
