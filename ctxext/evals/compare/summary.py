"""One row per method and length out of a comparison's cells, with the gain over cropping; CSV, JSONL, one
table."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ... import files
from ...plots import tokens
from ..perplexity import Curve, compare
from .cells import CROP

COLUMNS = (
    *("label", "method", "factor", "length", "past_trained", "ppl", "ppl_all", "gain", "gain_low", "gain_high"),
    *("loses", "passkey", "passkey_low", "passkey_high", "passkey_trials", "ruler", "ruler_samples"),
)
Documents = Mapping[str, Mapping[str, Any]]


def rows(
    ppl: Documents,
    passkey: Mapping[int, Documents],
    ruler: Mapping[int, Documents],
    lengths: Sequence[int],
    trained: int,
) -> list[dict[str, Any]]:
    """Rows in the order of `ppl`'s labels and of `lengths`; what wasn't measured is None.

    "ppl": of the last position bucket that ends at the length, where the length shows; "ppl_all": of all positions
    up to it. "gain": nats per token by which a method is better there than the crop control on the same tokens
    (paired over documents, with a 95 % interval from two documents on); "loses": it is past the trained length
    and worse.
    """
    control = ppl.get(CROP)
    found = []
    for label, document in ppl.items():
        gaps = {} if control is None or label == CROP else _gaps(document, control)
        buckets = {row["end"]: row for row in document["buckets"]}
        whole = {row["length"]: row for row in document["results"]}
        for length in lengths:
            gap = gaps.get(length, {}) if length > trained else {}
            keyed = _pooled(passkey.get(length, {}).get(label), length)
            tasks = _pooled(ruler.get(length, {}).get(label), length)
            schedule = document["schedule"] or {}
            found.append(
                {
                    "label": label,
                    "method": None if label == CROP else schedule.get("method", "none"),
                    "factor": schedule.get("factor", 1.0),
                    "length": length,
                    "past_trained": length > trained,
                    "ppl": buckets[length]["ppl"],
                    "ppl_all": whole[length]["ppl"],
                    "gain": -gap["difference"] if gap else None,
                    "gain_low": -gap["high"] if gap.get("high") is not None else None,
                    "gain_high": -gap["low"] if gap.get("low") is not None else None,
                    "loses": gap["difference"] > 0 if gap else None,
                    "passkey": keyed.get("accuracy"),
                    "passkey_low": keyed.get("low"),
                    "passkey_high": keyed.get("high"),
                    "passkey_trials": keyed.get("trials"),
                    "ruler": tasks.get("score"),
                    "ruler_samples": tasks.get("samples"),
                }
            )
    return found


def _gaps(document: Mapping[str, Any], control: Mapping[str, Any]) -> dict[int, dict]:
    curves = [Curve(d["results"], d["buckets"], d["per_document"]) for d in (document, control)]
    return {row["end"]: row for row in compare(*curves)["buckets"]}


def _pooled(document: Mapping[str, Any] | None, length: int) -> dict[str, Any]:
    if document is None:
        return {}
    row = next(row for row in document["lengths"] if row["length"] == length)
    if "score" in row:
        row = row | {"samples": sum(r["samples"] for r in document["results"] if r["length"] == length)}
    return row


def headline(table: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader must know first: at each length past the trained one, who beats cropping and who doesn't.

    A difference whose interval holds 0 is called neither a gain nor a loss.
    """
    said = []
    for length in sorted({row["length"] for row in table if row["gain"] is not None}):
        here = sorted(
            (r for r in table if r["length"] == length and r["gain"] is not None), key=lambda r: -r["gain"]
        )
        told = [r for r in here if r["gain_low"] is None or r["gain_low"] > 0 or r["gain_high"] < 0]
        wins, loses = [r for r in told if not r["loses"]], [r for r in told if r["loses"]]
        even = [r for r in here if r not in told]
        parts = []
        if wins:
            parts.append("better than cropping: " + ", ".join(f"{r['label']} ({r['gain']:+.3f})" for r in wins))
        else:
            parts.append("nothing beats cropping to the trained length, which costs nothing")
        if even:
            parts.append("not told apart from it: " + ", ".join(r["label"] for r in even))
        if loses:
            parts.append("worse: " + ", ".join(f"{r['label']} ({r['gain']:+.3f})" for r in loses))
        said.append(f"At {length:,} tokens, nats per token: " + "; ".join(parts) + ".")
    return said or [
        "No length is past the trained one, so nothing was extended and there is no crop to compare with."
    ]


def write(table: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """rows.jsonl, rows.csv, and perplexity.csv in the form of YaRN's tables: a row per model, a column per
    length."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(files.dumps(row, indent=None) + "\n" for row in table)
    files.write_text(folder / "rows.jsonl", lines)
    with (folder / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(table)
    lengths = sorted({row["length"] for row in table})
    with (folder / "perplexity.csv").open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(["", *lengths])
        for label in dict.fromkeys(row["label"] for row in table):
            mine = {row["length"]: row["ppl_all"] for row in table if row["label"] == label}
            out.writerow([label, *(f"{mine[length]:.4f}" for length in lengths)])


def grid(table: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The table that is shown, as (head, lines): a line per label, and per length a column of each kind that was
    measured."""
    columns = [name for name in ("ppl", "gain", "passkey", "ruler") if any(row[name] is not None for row in table)]
    lengths = sorted({row["length"] for row in table})
    lines: dict[str, list[str]] = {}
    for row in table:
        shown = _shown(row)
        lines.setdefault(row["label"], [row["label"]]).extend(shown[name] for name in columns)
    return ["", *(f"{name} {tokens(n)}" for n in lengths for name in columns)], list(lines.values())


def _shown(row: Mapping[str, Any]) -> dict[str, str]:
    ppl, loses = row["ppl"], " loses" if row["loses"] else ""
    return {
        "ppl": "-" if ppl is None else f"{ppl:.2f}" if ppl < 1000 else f"{ppl:.3g}",
        "gain": "" if row["gain"] is None else f"{row['gain']:+.3f}{loses}",
        "passkey": "" if row["passkey"] is None else f"{row['passkey']:.0%}",
        "ruler": "" if row["ruler"] is None else f"{row['ruler']:.0%}",
    }
