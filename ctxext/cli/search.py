"""`ctxext search`: parse, search, print. Everything heavy is imported inside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .. import terminal
from ..errors import UsageError
from ..folders.source import ModelDtype
from ..methods.settings import parse_settings
from ..search.options import Existing, Fallback, Objective, Short
from ..search.space import START_TOKENS
from ..search.strategies import all_strategies
from .eval_options import Attention
from .options import Factor, Json, Model, Set, TrainedLength

# The names of the files in search/strategies, for the help, completion and errors.
if TYPE_CHECKING:
    Strategy = str
else:
    Strategy = Literal[tuple(all_strategies())]


def search(
    model: Model,
    factor: Factor = 4.0,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", help="Text: a file, a folder, a hub data set, or `tiny`. May be given again."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Folder to write; default MODEL-longrope-FACTORx.")
    ] = None,
    strategy: Annotated[
        Strategy,
        typer.Option(help="curve: few parameters, CMA-ES, racing. evolution: the paper's. random: the control."),
    ] = "curve",
    settings: Set = None,
    objective: Annotated[
        Objective,
        typer.Option(help="perplexity of all tokens, or needle: of hidden keys alone (LongRoPE2)."),
    ] = "perplexity",
    documents: Annotated[int, typer.Option(help="Texts of the target length to search on.", min=1)] = 5,
    held_out: Annotated[int, typer.Option(help="Further ones to check the result with.", min=0)] = 5,
    short: Annotated[
        Short,
        typer.Option(
            help="What reads positions below the trained length: search (factors of its own), original, or none "
            "(the long factors, which every runtime can do)."
        ),
    ] = "search",
    evaluations: Annotated[
        int | None, typer.Option(help="Stop each search after so many full evaluations, at all documents.", min=1)
    ] = None,
    start_tokens: Annotated[
        str, typer.Option(help="Values that n-hat may take, as 0,4,16; 0 for plain transformers.")
    ] = ",".join(map(str, START_TOKENS)),
    upper: Annotated[float, typer.Option(help="Largest factor, as a share of --factor.")] = 1.25,
    step: Annotated[float, typer.Option(help="Grid of the factors.")] = 0.01,
    critical: Annotated[
        int | None,
        typer.Option(
            "--critical-dim",
            help="LongRoPE2's constraint: frequencies from this index on are divided by --factor at least. "
            "-1: those that made no full turn in training.",
        ),
    ] = None,
    attention_factor: Annotated[
        float | None, typer.Option(help="On cos and sin; default sqrt(1 + ln s / ln L).", min=0.01)
    ] = None,
    seed: int = 0,
    dtype: Annotated[ModelDtype, typer.Option(help="Of the model while it is searched on.")] = "auto",
    attention: Attention = "auto",
    trained_length: TrainedLength = None,
    existing: Annotated[
        Existing,
        typer.Option(
            help="If the model is scaled already: extend (start from that too; --factor counts from the "
            "original length all the same) or replace."
        ),
    ] = "extend",
    fallback: Annotated[
        Fallback,
        typer.Option(help="What plain transformers runs of start tokens and short factors: static, or refuse."),
    ] = "static",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from OUT.search/log.jsonl.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the folder if it exists.")] = False,
    json: Json = False,
) -> None:
    """Search LongRoPE's factors for a model and write the patched folder, the log and pictures.

    `accelerate launch -m ctxext search ...` divides the work among processes and finds the same.
    """
    from ..search.run import search_factors

    report = search_factors(
        model,
        factor=factor,
        data=data or [],
        out=out,
        strategy=strategy,
        constants=parse_settings(settings),
        objective=objective,
        documents=documents,
        held_out=held_out,
        short=short,
        evaluations=evaluations,
        start_tokens=_numbers(start_tokens),
        upper=upper,
        step=step,
        critical=critical,
        attention_factor=attention_factor,
        seed=seed,
        dtype=dtype,
        attention=attention,
        trained_length=trained_length,
        existing=existing,
        fallback=fallback,
        resume=resume,
        force=force,
        watch=_watch,
    )
    if json:
        terminal.print_json(report)
    else:
        _print(report)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--start-tokens {text!r} is not a list of numbers", hint="for example 0,4,16") from None


@contextmanager
def _watch(evaluator: Any) -> Iterator[None]:
    """A bar with the best so far on a terminal; elsewhere nothing."""
    import math
    import sys

    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True, quiet=evaluator.world.rank > 0), transient=True) as bar:
        task = bar.add_task("searching", total=None)

        def show(record: Mapping[str, Any]) -> None:
            best = "" if record["best"] is None else f", best perplexity {math.exp(record['best']):.3f}"
            tried = (
                f"{len(evaluator.values)} candidates, {record['tokens'] / evaluator.full_cost():.0f} evaluations"
            )
            bar.update(task, description=f"{record['phase']} factors: {tried}{best}")

        evaluator.on_value = show
        yield


def _print(report: Mapping[str, Any]) -> None:
    from ..search.report import lost, measure

    lengths, settings, without = report["lengths"], report["settings"], lost(report)
    terminal.print_table(
        f"{measure(report)} on {report['checked_on']}",
        ("schedule", f"at {lengths['long']:,} tokens", f"plain text at {lengths['short']:,}"),
        [(r["schedule"], f"{r['long']:.3f}", f"{r['short']:.3f}") for r in report["rows"]],
    )
    spent = f"{report['full_evaluations']:.0f} full evaluations, {report['tokens']:,} model tokens"
    before = report["rows"][0]["schedule"]
    cost = f"{report['short_change']:+.2%} in perplexity, beside the model {before}"
    terminal.say(f"{settings['strategy']}: {spent}; short text costs {cost}")
    if without:
        terminal.say(without)
    terminal.say(f"wrote [bold]{terminal.escape(report['out'])}[/], log and pictures in its search/")
