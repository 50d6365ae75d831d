"""The tables of `ctxext eval`, each from a result document alone."""

from __future__ import annotations

from typing import Any

from .. import terminal


def _name(document: dict[str, Any]) -> str:
    return document["model"] + ("" if not document["schedule"] else f" {document['schedule']['method']}")


def print_ppl(document: dict[str, Any]) -> None:
    """Perplexity by length and by position, beside the crop control; then the difference to an earlier run."""
    name = _name(document)
    control = document.get("control", {})
    parts = [("perplexity by length", document["results"], control.get("rows"), lambda r: f"{r['length']:,}")]
    if "buckets" in document:
        place = lambda r: f"{r['start']:,}-{r['end']:,}"  # noqa: E731
        parts.append(("perplexity by position", document["buckets"], control.get("buckets"), place))
    for title, rows, against, place in parts:
        table = []
        for i, row in enumerate(rows):
            interval = f"{row['low']:.2f}-{row['high']:.2f}" if row.get("low") is not None else ""
            cells = [place(row), f"{row['tokens']:,}", f"{row['ppl']:.3f}", interval]
            if against:
                cells += [f"{against[i]['ppl']:.3f}", _verdict(row["ppl"], against[i]["ppl"])]
            table.append(cells)
        columns = ["tokens in context" if "length" in title else "position", "scored", "ppl", "95 %"]
        terminal.print_table(f"{name}: {title}", columns + (["crop", "against crop"] if against else []), table)

    other = terminal.escape(document.get("against", {}).get("model", ""))
    for row in document.get("against", {}).get("buckets", []):
        interval = "" if row["low"] is None else f" ({row['low']:+.4f} to {row['high']:+.4f})"
        place = f"{row['start']:,}-{row['end']:,}"
        terminal.say(f"{place} against {other}: {row['difference']:+.4f} nats{interval}")


def _verdict(ppl_value: float, control: float) -> str:
    """Relative difference to the control; below half a per mille they are the same text read the same way."""
    change = ppl_value / control - 1
    return "=" if abs(change) < 5e-4 else f"{change:+.1%}" + (" loses" if change > 0 else "")


def print_passkey(document: dict[str, Any]) -> None:
    """Keys found by length, and by depth."""
    name = _name(document)
    control = document.get("control", {}).get("lengths")
    places = document["settings"]["depths"]
    table = []
    for i, row in enumerate(document["lengths"]):
        cells = [r for r in document["results"] if r["length"] == row["length"]]
        line = [f"{row['length']:,}", f"{row['correct']}/{row['trials']}", f"{row['accuracy']:.1%}"]
        line += [f"{row['low']:.0%}-{row['high']:.0%}"]
        line += [f"{control[i]['accuracy']:.0%}"] if control else []
        table.append(line + [f"{cell['accuracy']:.0%}" for cell in cells])
    columns = ["tokens", "correct", "accuracy", "95 %"] + (["crop"] if control else [])
    terminal.print_table(f"{name}: passkey", [*columns, *(f"at {p:.0%}" for p in places)], table)


def print_ruler(document: dict[str, Any]) -> None:
    """Scores by task and length, their means, and the effective length."""
    control = {(r["task"], r["length"]): r for r in document.get("control", {}).get("rows", [])}
    table = []
    for row in document["results"]:
        line = [row["task"], f"{row['length']:,}", row["samples"], f"{row['score']:.0%}"]
        line.append(f"{row['low']:.0%}-{row['high']:.0%}")
        table.append(line + ([f"{control[row['task'], row['length']]['score']:.0%}"] if control else []))
    table += [
        ["mean", f"{r['length']:,}", "", f"{r['score']:.0%}", ""] + [""] * bool(control)
        for r in document["lengths"]
    ]
    effective = document["effective_length"]
    title = f"{_name(document)}: effective length {f'{effective:,}' if effective else 'none'}"
    columns = ["task", "tokens", "samples", "score", "95 %"] + (["crop"] if control else [])
    terminal.print_table(title, columns, table)


def print_longppl(document: dict[str, Any]) -> None:
    """LongPPL in the title, context gain by position."""
    row = document["results"][0]
    shown = "no key tokens" if row["longppl"] is None else f"LongPPL {row['longppl']:.3f}"
    title = (
        f"{_name(document)}: {shown} on {row['key_tokens']:,} of {row['tokens']:,} tokens; ppl {row['ppl']:.3f}"
    )
    table = [
        [f"{g['start']:,}-{g['end']:,}", *(f"{g[k]:.4f}" for k in ("short", "full")), f"{g['gain']:+.4f}"]
        for g in document["gains"]
    ]
    terminal.print_table(title, ["position", "nll, short context", "nll, all of it", "context gain"], table)
