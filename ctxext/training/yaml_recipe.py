"""A YAML file as a checked pydantic recipe: every mistake at once, each with its file and line. No torch here."""

from __future__ import annotations

import copy
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from ..errors import UsageError, nearest

Key = tuple[str | int, ...]
R = TypeVar("R", bound=BaseModel)


class Section(BaseModel):
    """A part of a recipe; a key that it doesn't know is an error, not a silent loss."""

    model_config = ConfigDict(extra="forbid")


class Problem(NamedTuple):
    """One mistake: the key it is about (empty for the whole file) and what is wrong."""

    key: Key
    message: str


class Check(NamedTuple):
    """A rule across sections, `run(recipe) -> problems`; skipped while one of `needs` is itself invalid."""

    needs: tuple[str, ...]
    run: Callable[[Any], Iterable[Problem]]


def load(
    model: type[R],
    source: str | Path | Mapping[str, Any],
    overrides: Iterable[str] = (),
    *,
    raw: Callable[[dict[str, Any]], Iterable[Problem]] | None = None,
    checks: Iterable[Check] = (),
) -> R:
    """A YAML file, or the content of one, as a `model`.

    overrides: `section.key=value`, the value being YAML; a number as part of the key indexes a list. raw: more
    checks on the plain content, before pydantic sees it. Raises UsageError that lists all problems, each as
    `file:line: key: what is wrong`.
    """
    name = "the recipe" if isinstance(source, Mapping) else str(source)
    content, lines = (copy.deepcopy(dict(source)), {}) if isinstance(source, Mapping) else _read(Path(source))
    problems: list[Problem] = [Problem((), message) for message in lines.pop("duplicates", [])]
    for override in overrides:
        key = _override(content, override)
        for known in [k for k in lines if k[: len(key)] == key]:
            del lines[known]
        lines[key] = f"override {override!r}"
    if raw:
        problems += raw(content)
    recipe, found = _validate(model, content)
    problems += found
    broken = {p.key[0] for p in found if p.key}
    for check in checks:
        if not any(p.key == () for p in found) and not broken & set(check.needs):
            problems += check.run(recipe)
    if problems:
        raise UsageError("\n".join(_spell(name, lines, p) for p in problems))
    return recipe


def _read(path: Path) -> tuple[dict[str, Any], dict[Any, Any]]:
    """(content, line of each key). Repeated keys, of which YAML would keep the last, are under "duplicates"."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"can't read the recipe {path}: {getattr(error, 'strerror', error)}") from error
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        lines: dict[Any, Any] = {}
        duplicates: list[str] = []
        _walk(root, (), lines, duplicates)
        content = loader.construct_document(root) if root is not None else None
    except yaml.YAMLError as error:
        raise UsageError(f"{path} isn't YAML: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} is no recipe", hint="it needs sections such as model, data and train")
    if duplicates:
        lines["duplicates"] = duplicates
    return content, lines


def _walk(node: Any, key: Key, lines: dict[Any, Any], duplicates: list[str]) -> None:
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for name, value in node.value:
            here = (*key, name.value)
            if name.value in seen:
                duplicates.append(f"line {name.start_mark.line + 1}: {_dotted(here)} is given twice")
            seen.add(name.value)
            lines[here] = name.start_mark.line + 1
            _walk(value, here, lines, duplicates)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            lines[(*key, i)] = value.start_mark.line + 1
            _walk(value, (*key, i), lines, duplicates)


def _override(content: dict[str, Any], override: str) -> Key:
    """Put one `section.key=value` into `content`; the key that it changed."""
    dotted, equals, value = override.partition("=")
    if not equals:
        raise UsageError(f"override {override!r} has no '='", hint="write section.key=value")
    *parents, last = dotted.split(".")
    node: Any = content
    key: list[str | int] = []
    try:
        for part in parents:
            if isinstance(node, list):
                node = node[int(part)]
                key.append(int(part))
            else:
                if node.get(part) is None:
                    node[part] = {}
                node = node[part]
                key.append(part)
        parsed = yaml.safe_load(value)
        if isinstance(node, list):
            node[int(last)] = parsed
            return (*key, int(last))
        if not isinstance(node, dict):
            raise TypeError
        node[last] = parsed
        return (*key, last)
    except (AttributeError, TypeError, ValueError, IndexError):
        raise UsageError(f"override {override!r}: there is no such section") from None
    except yaml.YAMLError as error:
        raise UsageError(f"override {override!r}: the value isn't YAML: {error}") from error


def _validate(model: type[R], content: dict[str, Any]) -> tuple[R, list[Problem]]:
    """The recipe and pydantic's problems. With problems, the recipe holds the valid sections only."""
    try:
        return model.model_validate(content), []
    except ValidationError as error:
        problems = [Problem(tuple(e["loc"]), _explain(model, e)) for e in error.errors()]
    valid = {}
    for name, field in model.model_fields.items():
        if name in {p.key[0] for p in problems if p.key}:
            continue
        if name in content:
            valid[name] = TypeAdapter(field.rebuild_annotation()).validate_python(content[name])
        else:
            valid[name] = field.get_default(call_default_factory=True)
    return model.model_construct(**valid), problems


def _explain(model: type[BaseModel], error: Mapping[str, Any]) -> str:
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return "unknown key, " + nearest(str(error["loc"][-1]), _fields_at(model, error["loc"][:-1]))
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        choices = error["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        close = nearest(error["input"], choices)
        return f"{message}, got {error['input']!r}" + (f"; {close}" if close.startswith("did") else "")
    return message


def _fields_at(model: type[BaseModel], loc: Iterable[str | int]) -> Iterable[str]:
    """Names of the fields of the section at `loc`."""
    now: Any = model
    for part in loc:
        if isinstance(part, str) and isinstance(now, type) and part in getattr(now, "model_fields", {}):
            now = _section_of(now.model_fields[part].annotation)
    return getattr(now, "model_fields", {})


def _section_of(annotation: Any) -> Any:
    """The Section inside list[...], dict[..., ...] or `... | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in typing.get_args(annotation):
        found = _section_of(inner)
        if found is not None:
            return found
    return None


def _spell(file: str, lines: dict[Any, Any], problem: Problem) -> str:
    """`file:line: key: message`; the line is that of the nearest enclosing key that the file has."""
    key = problem.key
    while key and key not in lines:
        key = key[:-1]
    line = lines.get(key)
    where = f"{file}:{line}" if isinstance(line, int) else f"{file} ({line})" if line else file
    return f"{where}: " + (f"{_dotted(problem.key)}: " if problem.key else "") + problem.message


def _dotted(key: Key) -> str:
    return ".".join(map(str, key))
