"""`ctxext fit-temperature`: parse, fit, print."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import terminal
from ..errors import UsageError
from .eval_options import Attention, Data, ModelDtype, Out, emit
from .options import Existing, Json, Model, Set, TrainedLength, method_settings


def fit_temperature(
    model: Model,
    method: Annotated[str, typer.Option(help="A method with a temperature, by `ctxext methods`.")] = "drope",
    factor: Annotated[float, typer.Option("--factor", "-f", help="Times the trained length, to be read.")] = 4.0,
    settings: Set = None,
    data: Data = None,
    documents: Annotated[int, typer.Option(help="Texts of the target length.", min=1)] = 4,
    grid: Annotated[str | None, typer.Option(help="Temperatures to try, such as 0,0.1,0.2.")] = None,
    dtype: ModelDtype = "auto",
    attention: Attention = "auto",
    trained_length: TrainedLength = None,
    existing: Existing = "refuse",
    out: Out = None,
    json: Json = False,
) -> None:
    """Fit the temperature c of queries beyond the trained length, 1 + c ln(n / L), on held-out text."""
    from .. import files, text
    from ..evals import results
    from ..evals.models import load, texts_for
    from ..evals.temperature import GRID, fit

    try:
        tried = [float(c) for c in grid.split(",")] if grid else GRID
    except ValueError:
        raise UsageError(
            f"--grid {grid!r} is not a list of numbers", hint="for example --grid 0,0.1,0.2"
        ) from None
    paths = texts_for(model, data)
    subject = load(model, dtype=dtype, attention=attention, trained_length=trained_length, existing=existing)
    length = round(subject.trained_length * factor)
    docs = text.documents(paths, subject.tokenizer, length, documents)
    params = method_settings(method, settings)
    found = fit(subject, docs.ids, method, factor, params, tried)
    more = {"method": method, "factor": factor, "params": params, "documents": len(docs.ids)}
    document = results.result_document(
        subject.name, None, more, found["curve"], model=subject.model, data_sha256=docs.sha256, **found
    )
    if out:
        files.write_json(out, document)
        terminal.say(f"written to {terminal.escape(str(out))}")
    if json:
        emit(document)
    else:
        rows = [(f"{row['temperature']:.3g}", f"{row['nll']:.4f}", f"{row['ppl']:.2f}") for row in found["curve"]]
        title = f"{subject.name}, {method}: loss of tokens {subject.trained_length:,} to {length:,} by temperature"
        terminal.print_table(title, ("c", "nats per token", "perplexity"), rows, left=0)
        end = "; the largest that was tried" if found["temperature"] == max(tried) else ""
        terminal.say(
            f"c = {found['temperature']:.3g}{end}: use it as --set temperature={found['temperature']:.3g}"
        )
