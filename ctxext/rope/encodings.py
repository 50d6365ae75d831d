"""What a schedule may have beside its frequencies: one position encoding that no frequency table can express.

Each kind is a frozen dataclass, defined beside its method (`methods/alibi.py` has `Alibi`): plain data and the
paper's formulas, no torch. The class of the live model that runs it is in `ctxext.live`. Subclassing `Encoding`
with a `kind` is all the registration there is: a schedule is read back from JSON by that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from ..errors import UsageError


@dataclass(frozen=True)
class Encoding:
    """Base of all kinds.

    kind: its name in JSON. in_attention: attention itself is another, so that every layer must have full attention
    and a cache layer holds keys that only this encoding can read.
    """

    kind: ClassVar[str] = ""
    in_attention: ClassVar[bool] = True
    _kinds: ClassVar[dict[str, type[Encoding]]] = {}

    def __init_subclass__(cls, *, kind: str = "", **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if not kind:
            return  # a base of several kinds
        known = Encoding._kinds.get(kind)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise RuntimeError(f"two encodings are called {kind!r}")
        cls.kind = kind
        Encoding._kinds[kind] = cls

    def describe(self, trained_length: int) -> str:
        """A sentence for the model card."""
        raise NotImplementedError(f"{type(self).__name__} has no description")

    def static_scale(self, length: int, trained_length: int) -> float | None:
        """The factor on attention logits that comes near this encoding at `length` tokens, for runtimes that know
        frequency tables only; None if no table comes near."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """Its fields and its kind, JSON-ready."""
        return {"kind": self.kind, **asdict(self)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Encoding:
        """The encoding that `to_dict` described; UsageError for a kind or field that this version doesn't know."""
        values = dict(data)
        cls = Encoding._kinds.get(values.pop("kind", ""))
        if cls is None or set(values) - {f.name for f in fields(cls)}:
            what = f"no encoding {data.get('kind')!r}" if cls is None else f"{cls.__name__} has no such fields"
            raise UsageError(
                f"{what} in this version", hint="it was written by a newer ctxext; upgrade to read it"
            )
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


@dataclass(frozen=True)
class Distances(Encoding):
    """Base of the rules by which far keys get other rotary distances than their own, the nearest `window` not.

    The schedule keeps the frequencies that the model was trained with.
    """

    window: int

    def __post_init__(self) -> None:
        at_least(self.window, 1, "the window")

    def distance(self, query: int, key: int) -> float:
        """The rotary distance that a query at position `query` gives a key at `key`, both in tokens."""
        raise NotImplementedError

    def largest(self, length: int) -> float:
        """The largest distance that a text of `length` tokens uses; seen in training if below its length."""
        raise NotImplementedError

    def describe(self, trained_length: int) -> str:
        exact = f"exact below {self.window} tokens, then kept in what was trained"
        return f"Rotary distances follow {self.kind}: {exact}."

    def check_reach(self, target: int, trained: int) -> None:
        """Raise UsageError unless every distance in `target` tokens was seen in training on `trained`."""
        largest = self.largest(target)
        if largest > trained - 1:
            raise UsageError(
                f"at {target} tokens this uses distances up to {largest:g}, the model was trained on {trained} "
                "tokens",
                hint="a smaller window, or a larger group or step",
            )


def at_least(value: float, least: float, what: str) -> None:
    """Raise UsageError if `value` is below `least`."""
    if value < least:
        raise UsageError(f"{what} must be at least {least}, got {value}")
