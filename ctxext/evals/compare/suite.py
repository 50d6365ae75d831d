"""A suite says what `ctxext compare` measures beside perplexity, and how much of it. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from ...errors import UsageError, nearest
from ...training.yaml_recipe import Section
from ...training.yaml_recipe import load as load_yaml

SUITES = Path(__file__).parent / "suites"


class Task(Section):
    """What is asked beside perplexity, at every length or at some."""

    lengths: list[int] | None = Field(None, min_length=1, description="some of --lengths; default all")

    def among(self, lengths: Sequence[int]) -> list[int]:
        """Those of a comparison's lengths that this is asked at."""
        return [length for length in lengths if self.lengths is None or length in self.lengths]


class PasskeySpec(Task):
    """Keys on a grid of depths."""

    depths: int = Field(5, ge=1, description="from 0 (start) to 1 (end); 1 means the middle")
    trials: int = Field(4, ge=1, description="keys per length and depth")
    distractors: int = Field(0, ge=0, le=9, description="other keys in each prompt")

    def places(self) -> list[float]:
        """The depths as fractions."""
        return [i / (self.depths - 1) for i in range(self.depths)] if self.depths > 1 else [0.5]


class RulerSpec(Task):
    """Tasks of RULER's types."""

    tasks: list[str] = Field(min_length=1)
    samples: int = Field(20, ge=1, description="per task and length")
    example: bool = Field(True, description="one-shot examples of vt and cwe")


class Suite(Section):
    """What is measured for every method at every length. A section that is left out isn't measured."""

    documents: int = Field(2, ge=1, description="texts of the longest length for perplexity")
    passkey: PasskeySpec | None = None
    ruler: RulerSpec | None = None

    def check(self, lengths: Sequence[int]) -> None:
        """UsageError if a task is to be asked at a length that isn't compared."""
        for name in ("passkey", "ruler"):
            task = getattr(self, name)
            extra = sorted(set(task.lengths or ()) - set(lengths)) if task else []
            if extra:
                raise UsageError(
                    f"the suite asks {name} at {', '.join(map(str, extra))} tokens, which isn't compared",
                    hint=f"--lengths {','.join(map(str, lengths))} must hold it",
                )


def read_suite(name: str | Path) -> Suite:
    """A suite by its name (`quick`, `report`) or the path of a YAML file; UsageError lists every mistake in it."""
    path = Path(name)
    if not path.suffix:
        path = SUITES / f"{name}.yaml"
        if not path.is_file():
            known = [p.stem for p in SUITES.glob("*.yaml")]
            raise UsageError(f"there is no suite {str(name)!r}", hint=nearest(str(name), known))
    return load_yaml(Suite, path)
