"""What is known of the runtimes: facts.yaml, typed, which says what its words mean.

families.json says beside it whose model classes pass a scaling on. It is made from the runtimes' sources by
experiments/serving/families.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal, cast

from ..config.rope_parameters import ANY, Target
from ..errors import UsageError, nearest

Runs = Literal["exact", "approximates", "misread", "refused", "unchecked"]
Evidence = Literal["run", "source"]
Passes = Literal["scaled", "unscaled", "mixed", "transformers"]
"""What a runtime's class for a family does with the config's scaling: gives it to every rope, to none, to some, or
leaves all to transformers' own class."""


@dataclass(frozen=True)
class Rule:
    """What a runtime does with a config that has all of the features `when`, in these families (none: in all)."""

    when: tuple[str, ...]
    runs: Runs
    evidence: Evidence
    note: str = ""
    families: tuple[str, ...] = ()


@dataclass(frozen=True)
class Runtime:
    """A program that runs model folders, and the rules that are tried in their order; see facts.yaml.

    families: for which the rules are known by `evidence`; none: for all.
    """

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
    families: tuple[str, ...] = ()
    classes: Mapping[str, Passes] = field(default_factory=dict)

    @property
    def program(self) -> str:
        """Its name without the way that a folder comes to it."""
        return self.name.partition(" (")[0]

    def rule(self, features: frozenset[str], family: str) -> Rule | None:
        """The rule that answers for a config of a family with these features; None: exact."""
        fits = (r for r in self.rules if features.issuperset(r.when) and (not r.families or family in r.families))
        found = next(fits, None)
        if not self.families or family in self.families:
            return found
        # Of a family that nobody ran, what is known is read from sources.
        passes = self.classes.get(family)
        if "staged" in features:
            return found and replace(found, evidence="source")
        if passes == "transformers":
            theirs = runtime("transformers").rule(features, family)
            return replace(theirs or Rule((), "exact", "source", "by its Transformers backend"), evidence="source")
        if passes == "scaled":
            return replace(found, evidence="source") if found else Rule((), "exact", "source")
        if passes == "unscaled" and "scaled" in features:
            return Rule((), "misread", "source", f"its class for {family} is given no scaling: runs unscaled")
        if passes == "unscaled":
            return replace(found, evidence="source") if found else Rule((), "exact", "source")
        return Rule((), "unchecked", "source", f"known for {listed(self.families)} only")


@dataclass(frozen=True)
class Facts:
    """The table: what each feature word means, and the runtimes in the order in which they are shown."""

    features: Mapping[str, str]
    runtimes: tuple[Runtime, ...]


def read_table() -> dict[str, Any]:
    """facts.yaml as it stands."""
    import yaml

    return yaml.load(_text("facts.yaml"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def read_classes() -> dict[str, dict[str, Any]]:
    """families.json as it stands: by runtime its version, and families by what their class does with a scaling."""
    return json.loads(_text("families.json"))


def _text(name: str) -> str:
    return files(__name__.rpartition(".")[0]).joinpath(name).read_text(encoding="utf-8")


@cache
def facts() -> Facts:
    """The table; read once."""
    table = read_table()
    classes = read_classes()
    runtimes = (_runtime(data, classes.get(data["name"], {})) for data in table["runtimes"])
    return Facts(table["features"], tuple(runtimes))


def _runtime(data: dict[str, Any], classes: dict[str, Any]) -> Runtime:
    lists = ({k: tuple(r.get(k, ())) for k in ("when", "families")} for r in data["rules"])
    rules = tuple(Rule(**{**rule, **of}) for rule, of in zip(data["rules"], lists, strict=True))
    passes = {f: cast(Passes, k) for k, found in classes.items() if isinstance(found, list) for f in found}
    return Runtime(
        **{
            **data,
            "rules": rules,
            "traits": Target(**data.get("traits", {})),
            "families": tuple(data.get("families", ())),
            "classes": passes,
        }
    )


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
        for rule in r.rules:
            of = f" ({listed(rule.families)})" if rule.families else ""
            rows.append(_row(r.name, ", ".join(rule.when) + of, rule.runs, rule.note, rule.evidence))
        of = f" of {listed(r.families)}" if r.families else ""
        rows.append(_row(r.name, f"all else{of}", "exact", "", r.evidence))
        for passes in ("scaled", "transformers", "unscaled"):
            found = sorted(family for family, said in r.classes.items() if said == passes)
            if found:
                rows.append(_row(r.name, ", ".join(found), _BY_CLASS[passes], "", "source"))
        if r.families:
            rows.append(_row(r.name, "other families", "unchecked", "", ""))
    rows += ["", _row("config", "that is"), "|---|---|", *(_row(*word) for word in known.features.items())]
    return "\n".join(rows)


_BY_CLASS = {
    "scaled": "as above",
    "transformers": "as transformers",
    "unscaled": "misread if there is a scaling",
}


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
