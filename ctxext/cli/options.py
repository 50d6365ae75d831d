"""Command-line arguments that several commands share, spelled once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..config import read, rope_parameters
from ..errors import UsageError
from ..folders import source
from ..methods.settings import parse_settings
from ..runtimes.facts import target_names

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder, a hub id, a .gguf file, or `tiny`, the embedded model.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, everything else on stderr.")]
TrainedLength = Annotated[
    int | None, typer.Option(help="Tokens the model was trained on, when its config says otherwise.", min=2)
]
Existing = Annotated[
    read.Existing,
    typer.Option(help="If the checkpoint is already scaled; replace starts over."),
]
Fallback = Annotated[
    rope_parameters.Fallback,
    typer.Option(
        help="If plain transformers can't run the schedule: refuse to load, or static, an approximation."
    ),
]
if TYPE_CHECKING:
    TargetName = str
else:
    TargetName = Literal[tuple(target_names())]
Target = Annotated[TargetName, typer.Option(help="The runtime that comes first if one form can't suit all.")]
Dtype = Annotated[source.SourceDtype, typer.Option(help="Type that a .gguf's weights are dequantised to.")]
TrustRemoteCode = Annotated[bool, typer.Option(help="Patch a model that brings its own code.")]
Factor = Annotated[float, typer.Option("--factor", "-f", help="Times the trained length to reach.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A method option; @FILE reads a JSON value from a file."),
]


def _complete_method(incomplete: str) -> list[str]:
    from ..methods import all_methods

    return [name for name in all_methods() if name.startswith(incomplete)]


def _known_method(name: str | None) -> str | None:
    from .. import methods

    if name is not None:
        try:
            methods.get(name)
        except UsageError as error:
            raise typer.BadParameter(f"{error.message}: {error.hint}") from None
    return name


MethodName = Annotated[
    str,
    typer.Option(
        "--method", "-m", help="See `ctxext methods`.", callback=_known_method, autocompletion=_complete_method
    ),
]
OptionalMethod = Annotated[
    str | None,
    typer.Option(
        "--method",
        "-m",
        help="Patch the loaded model first; see `ctxext methods`.",
        callback=_known_method,
        autocompletion=_complete_method,
    ),
]


def method_settings(method: str | None, settings: list[str] | None) -> dict[str, Any]:
    """`parse_settings` for the options of a method: what it doesn't know never passes for an argument of ours.

    Raises UsageError for an option that the method doesn't have, one that it needs, or one without a method.
    """
    from ..methods import get

    values = parse_settings(settings)
    if method is not None:
        get(method).check(values)
    elif values:
        raise UsageError(f"--set {next(iter(values))} is an option of a method", hint="say which with --method")
    return values
