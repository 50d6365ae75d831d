"""What a model was trained with (Rope) and what it should run (Schedule). Plain data, no torch.

Rotary position embedding turns the i-th pair of query and key coordinates at position p by the angle
p * theta^(-2i/d) (Su et al. 2021, "RoFormer", arXiv:2104.09864, eq. 15). Every method in ctxext is a
function from a Rope and a factor to a Schedule: which angles to use instead, from which query position on.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ..errors import UsageError
from .encodings import Encoding


def _finite(value: float, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"{what} must be a finite number, got {value!r}")
    return float(value)


def _from_dict(cls, data: Mapping[str, Any]):
    """Build a frozen dataclass from its dict; a field this version doesn't know is an error, not a loss."""
    unknown = set(data) - {f.name for f in fields(cls)}
    if unknown:
        raise UsageError(
            f"{cls.__name__} has no field {', '.join(sorted(unknown))}",
            hint="it was written by a newer ctxext; upgrade to read it",
        )
    return cls(**data)


@dataclass(frozen=True)
class Rope:
    """The rotary embedding that a checkpoint was trained with.

    theta: base of the geometric progression of frequencies.
    dim: number of rotated coordinates per head (even; less than the head size when rotary is partial).
    trained_length: tokens that a training sequence held; positions 0 .. trained_length - 1 were seen.
    ratios: per frequency, what the checkpoint's own scaling already multiplied it by; empty if none.
    attention_scale: what its own scaling multiplies cos and sin by.
    """

    theta: float
    dim: int
    trained_length: int
    ratios: tuple[float, ...] = ()
    attention_scale: float = 1.0

    def __post_init__(self):
        object.__setattr__(self, "theta", _finite(self.theta, "rope theta"))
        object.__setattr__(self, "ratios", tuple(self.ratios))
        if self.theta <= 1:
            raise UsageError(f"rope theta must be greater than 1, got {self.theta}")
        if self.dim < 2 or self.dim % 2:
            raise UsageError(f"the rotary dimension must be even and at least 2, got {self.dim}")
        if self.trained_length < 2:
            raise UsageError(f"the trained length must be at least 2 tokens, got {self.trained_length}")
        if self.ratios and len(self.ratios) != self.size:
            raise UsageError(f"{len(self.ratios)} ratios given for {self.size} frequencies")

    @property
    def size(self) -> int:
        """Number of frequencies, dim / 2."""
        return self.dim // 2

    def geometric(self) -> list[float]:
        """theta^(-2i/d) for i in 0 .. d/2 - 1, in radians per token, without any scaling."""
        return [self.theta ** (-2 * i / self.dim) for i in range(self.size)]

    def inv_freq(self) -> list[float]:
        """The frequencies that the checkpoint runs with, in radians per token."""
        base = self.geometric()
        return [f * r for f, r in zip(base, self.ratios, strict=True)] if self.ratios else base

    def turns(self) -> list[float]:
        """Full turns that each frequency makes over the trained length (r(d) in YaRN, eq. 17)."""
        return [self.trained_length * f / (2 * math.pi) for f in self.geometric()]


@dataclass(frozen=True)
class Stage:
    """Frequencies that a query at position `start` or later uses, against all keys.

    inv_freq: radians per token. attention_scale multiplies cos and sin, so it acts squared on logits.
    """

    start: int
    inv_freq: tuple[float, ...]
    attention_scale: float = 1.0

    def __post_init__(self):
        object.__setattr__(self, "inv_freq", tuple(_finite(f, "a frequency") for f in self.inv_freq))
        object.__setattr__(self, "attention_scale", _finite(self.attention_scale, "the attention scale"))
        if any(f < 0 for f in self.inv_freq):
            raise UsageError("a frequency is negative")
        if self.attention_scale <= 0:
            raise UsageError(f"the attention scale must be positive, got {self.attention_scale}")


@dataclass(frozen=True)
class Schedule:
    """What a model should run: one or more stages, and what a frequency table can't express.

    stages: ordered by `start`; the first starts at 0. One stage is static; several are causal dynamic
        scaling, because the stage belongs to the query's position and not to the length of the call.
    max_length: tokens that the schedule is meant for.
    start_tokens: the first so many positions keep the original angles (n-hat in LongRoPE, eq. 3).
    native: how transformers spells this static schedule in `rope_parameters`, when it has a name for it.
    method, factor, params: how it was made; params hold every option with its value.
    encoding: what no frequency table can express; None if there is nothing of the kind.
    """

    rope: Rope
    stages: tuple[Stage, ...]
    max_length: int
    method: str = ""
    factor: float = 1.0
    params: Mapping[str, Any] = field(default_factory=dict)
    start_tokens: int = 0
    native: Mapping[str, Any] | None = None
    encoding: Encoding | None = None

    def __post_init__(self):
        object.__setattr__(self, "stages", tuple(self.stages))
        starts = [stage.start for stage in self.stages]
        if not starts or starts[0] != 0 or any(b <= a for a, b in itertools.pairwise(starts)):
            raise UsageError(f"stages must start at 0 and ascend, got {starts}")
        if any(len(stage.inv_freq) != self.rope.size for stage in self.stages):
            raise UsageError(f"every stage needs {self.rope.size} frequencies")
        if self.start_tokens < 0:
            raise UsageError(f"start_tokens must not be negative, got {self.start_tokens}")
        if self.encoding and (len(self.stages) > 1 or self.start_tokens):
            raise UsageError(f"{self.encoding.kind} can't be combined with stages or start tokens")

    @property
    def in_attention(self) -> bool:
        """Whether attention itself is another: a bias, a temperature, a rule for distances."""
        return self.encoding is not None and self.encoding.in_attention

    @property
    def is_static(self) -> bool:
        """One stage and nothing else: a plain frequency table, which stock transformers can run."""
        return len(self.stages) == 1 and not self.start_tokens and self.encoding is None

    @property
    def has_approximation(self) -> bool:
        """Whether a frequency table comes near this schedule at its furthest position."""
        return self.encoding is None or self._encoding_scale() is not None

    def _encoding_scale(self) -> float | None:
        return self.encoding.static_scale(self.max_length, self.rope.trained_length) if self.encoding else 1.0

    def table_alone(self) -> Schedule:
        """Its frequencies and stages without what they can't express."""
        return replace(self, start_tokens=0, encoding=None)

    def static_approximation(self) -> Schedule:
        """One stage, the furthest, for every position: what a runtime without stages can do for long text.

        It reads short text worse than this schedule does, and has no start tokens. A temperature by position
        becomes that of the furthest one. Raises UsageError where no frequency table comes near.
        """
        scale = self._encoding_scale()
        if scale is None:
            raise UsageError(
                f"no frequency table comes near {self.method}",
                hint="leave out --fallback static, and load the folder with ctxext.load",
            )
        last = self.stages[-1]
        # cos and sin are on queries and keys, so their scale acts squared.
        last = replace(last, start=0, attention_scale=last.attention_scale * math.sqrt(scale))
        native = self.native if self.is_static else None
        return replace(self, stages=(last,), start_tokens=0, encoding=None, native=native)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; `from_dict` gives an equal Schedule back, to the last bit."""
        data = asdict(replace(self, encoding=None))
        data["encoding"] = self.encoding and self.encoding.to_dict()
        return json.loads(json.dumps(data, allow_nan=False))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Schedule:
        data = dict(data)
        data["rope"] = _from_dict(Rope, data["rope"])
        data["stages"] = tuple(_from_dict(Stage, stage) for stage in data["stages"])
        if data.get("encoding") is not None:
            data["encoding"] = Encoding.from_dict(data["encoding"])
        return _from_dict(cls, data)


def static(
    rope: Rope,
    factor: float,
    ratios: Sequence[float],
    *,
    attention_scale: float = 1.0,
    start_tokens: int = 0,
    native: Mapping[str, Any] | None = None,
) -> Schedule:
    """A one-stage schedule that multiplies each frequency of `rope` by its ratio.

    On a checkpoint that is already scaled the ratios compose with its own, and `native`, which describes
    the ratios alone, no longer describes the whole: it is dropped.
    """
    if len(ratios) != rope.size:
        raise UsageError(f"{len(ratios)} ratios given for {rope.size} frequencies")
    composed = bool(rope.ratios) or rope.attention_scale != 1.0
    inv_freq = tuple(f * r for f, r in zip(rope.inv_freq(), ratios, strict=True))
    return Schedule(
        rope=rope,
        stages=(Stage(0, inv_freq, rope.attention_scale * attention_scale),),
        max_length=target_length(rope, factor),
        factor=factor,
        start_tokens=start_tokens,
        native=None if composed else native,
    )


def target_length(rope: Rope, factor: float) -> int:
    """Tokens that `factor` asks for: the trained length times the factor, rounded to the nearest token."""
    return round(rope.trained_length * factor)


def unpatched(rope: Rope) -> Schedule:
    """The checkpoint as it is, as a Schedule."""
    return replace(static(rope, 1.0, [1.0] * rope.size, native={"rope_type": "default"}), method="none")
