"""What is known of the runtimes: facts.yaml, typed. It says what its words mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from ..config.rope_parameters import ANY, Target
from ..errors import UsageError, nearest

Runs = Literal["exact", "approximates", "misread", "refused", "unchecked"]
Evidence = Literal["run", "source"]


@dataclass(frozen=True)
class Rule:
    """What a runtime does with a config that has all of the features `when`."""

    when: tuple[str, ...]
    runs: Runs
    evidence: Evidence
    note: str = ""


@dataclass(frozen=True)
class Runtime:
    """A program that runs model folders, and the rules that are tried in their order; see facts.yaml."""

    name: str
    date: str
    evidence: Evidence
    command: str
    rules: tuple[Rule, ...]
    version: str = ""
    target: str | None = None
    traits: Target = ANY
    reads: Mapping[str, Evidence] = field(default_factory=dict)
    ignores: Mapping[str, Evidence] = field(default_factory=dict)
    beside_native: str = ""

    @property
    def program(self) -> str:
        """Its name without the way that a folder comes to it."""
        return self.name.partition(" (")[0]

    def rule(self, features: frozenset[str]) -> Rule | None:
        """The rule that answers for a config with these features; None: exact."""
        return next((rule for rule in self.rules if features.issuperset(rule.when)), None)


@dataclass(frozen=True)
class Facts:
    """The table: what each feature word means, and the runtimes in the order in which they are shown."""

    features: Mapping[str, str]
    runtimes: tuple[Runtime, ...]


def read_table() -> dict[str, Any]:
    """facts.yaml as it stands."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(
        files(__name__.rpartition(".")[0]).joinpath("facts.yaml").read_text(encoding="utf-8"), Loader=loader
    )


@cache
def facts() -> Facts:
    """The table; read once."""
    table = read_table()
    return Facts(table["features"], tuple(_runtime(data) for data in table["runtimes"]))


def _runtime(data: dict[str, Any]) -> Runtime:
    rules = tuple(Rule(**{**rule, "when": tuple(rule["when"])}) for rule in data["rules"])
    return Runtime(**{**data, "rules": rules, "traits": Target(**data.get("traits", {}))})


def runtime(name: str) -> Runtime:
    """The runtime of that name."""
    return next(found for found in facts().runtimes if found.name == name)


def targets() -> dict[str, Target]:
    """Every choice of --target with what it needs, "all" first."""
    return {"all": ANY} | {r.target: r.traits for r in facts().runtimes if r.target}


def target_names() -> tuple[str, ...]:
    """The choices of --target."""
    return tuple(targets())


def target(name: str) -> Target:
    """What the runtime of that name needs of a folder; UsageError with the nearest name if there is none."""
    known = targets()
    if name not in known:
        raise UsageError(f"there is no target={name!r}", hint=nearest(name, known))
    return known[name]


def readers(key: str) -> str:
    """Who reads a key of config.json, as "A, B and C"."""
    return listed(r.program for r in facts().runtimes if key in r.reads)


def ignorers(key: str) -> str:
    """Who is known to ignore a key of config.json, as "A, B and C"."""
    return listed(r.program for r in facts().runtimes if key in r.ignores)


def affected_by(*features: str) -> list[str]:
    """The programs that have a rule for just these features of a config."""
    return [r.program for r in facts().runtimes if any(set(rule.when) == set(features) for rule in r.rules)]


def listed(names: Any) -> str:
    """ "A, B and C" """
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def markdown() -> str:
    """The table for documents: the runtimes, what each makes of which config, and what the words mean."""
    known = facts()
    rows = [_row("runtime", "version", "known by", "to serve"), "|---|---|---|---|"]
    rows += [_row(r.name, r.version or r.date, r.evidence, f"`{r.command}`") for r in known.runtimes]
    rows += ["", _row("runtime", "config", "", "note", "known by"), "|---|---|---|---|---|"]
    for r in known.runtimes:
        rows += [_row(r.name, ", ".join(rule.when), rule.runs, rule.note, rule.evidence) for rule in r.rules]
        rows.append(_row(r.name, "all else", "exact", "", r.evidence))
    rows += ["", _row("config", "that is"), "|---|---|", *(_row(*word) for word in known.features.items())]
    return "\n".join(rows)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
