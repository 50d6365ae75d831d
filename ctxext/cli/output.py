"""What commands print: results on stdout, everything else on stderr, plain text off a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape

from ..config.families import SCALED_LAYERS
from ..config.smollm3 import is_written
from ..folders.heads import auto_class
from ..folders.patch import Patched
from ..methods import Method
from ..terminal import main_process, print_table, say


def method_dict(method: Method) -> dict[str, Any]:
    """A method as JSON data."""
    return {
        "name": method.name,
        "title": method.title,
        "summary": method.summary,
        "paper": method.paper,
        "options": [{"name": o.name, "type": o.type_name, "default": o.default} for o in method.options],
        "needs": list(method.needs),
    }


def print_methods(methods: Iterable[Method]) -> None:
    """The methods as a table."""
    rows = []
    for m in methods:
        options = "\n".join(
            f"{o.name}" + (" (needed)" if o.name in m.needs else f"={o.default}") for o in m.options
        )
        rows.append((m.name, m.title, m.summary, options, m.paper))
    print_table("methods", ("name", "called", "what it does", "options (--set)", "source"), rows, left=5)


def methods_markdown(methods: Iterable[Method]) -> str:
    """The methods as a Markdown table, as the README has it."""
    lines = ["| method | what it does | options | plain transformers | source |", "|---|---|---|---|---|"]
    for m in methods:
        options = ", ".join(f"`{o.name}`" for o in m.options)
        lines.append(f"| `{m.name}` | {m.summary} | {options} | {m.loads} | {m.paper} |")
    return "\n".join(lines)


def print_inspection(report: Mapping[str, Any]) -> None:
    """What `ctxext inspect` says about a model."""
    rope, now = report["rope"], report["now"]
    print_table(
        report["model"],
        ("rope", ""),
        [
            ("model type", report["model_type"]),
            ("theta", f"{rope['theta']:g}"),
            ("rotary dimension", f"{rope['dim']} of {report['head_dim']}"),
            ("trained length", f"{rope['trained_length']:,} tokens"),
            ("already scaled by", now["method"] if now["method"] != "none" else "nothing"),
            ("reads", f"{now['max_length']:,} tokens"),
            ("sliding window", report["sliding_window"] or "none"),
        ],
        left=2,
    )
    names = [m["method"] for m in report["methods"]]
    rows = [
        (row["i"], row["turns"], row["wavelength"], *(row["after"][n] for n in names)) for row in report["table"]
    ]
    shown = [[_short(cell) for cell in row] for row in rows]
    target = f"{report['target_length']:,}"
    print_table(
        f"wavelength in tokens by dimension pair, now and after each method at factor {report['factor']:g} "
        f"({target} tokens)",
        ("i", "turns in training", "now", *names),
        shown,
        left=0,
    )
    scales = [("attention scale", *(_short(m["attention_scale"]) for m in report["methods"]))]
    print_table("factor on cos and sin", ("", *names), scales)
    for left_out in report["left_out"]:
        say(f"left out: {left_out['method']} ({escape(left_out['why'])})")
    if report["second_copies"]:
        names = escape(", ".join(report["second_copies"]))
        say(f"not looked at, as it isn't config.json's: {names}; ctxext patch leaves such copies out")


def _short(value: float | int | None) -> str:
    if value is None:
        return "stopped"
    if isinstance(value, int):
        return str(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def patched_dict(done: Patched, *, dry_run: bool) -> dict[str, Any]:
    """What `ctxext patch` did, as JSON data."""
    return {
        "out": str(done.out),
        "written": not dry_run,
        "schedule": done.schedule.to_dict(),
        "config": {k: done.config[k] for k in ("rope_parameters", "rope_theta", "max_position_embeddings")},
        "linked_bytes": done.linked_bytes,
        "copied_bytes": done.copied_bytes,
        "left_out": list(done.left_out),
    }


def print_patched(done: Patched, *, dry_run: bool) -> None:
    """What `ctxext patch` did, for a person."""
    schedule, console = done.schedule, Console(highlight=False, soft_wrap=True)
    length = schedule.rope.trained_length
    console.print(
        f"{'would write' if dry_run else 'wrote'} [bold]{escape(str(done.out))}[/]: "
        f"{schedule.method} x{schedule.factor:g}, {length:,} -> {schedule.max_length:,} tokens"
    )
    keys = done.config["rope_parameters"]
    keys = keys.get(SCALED_LAYERS, keys)
    console.print(f"  rope_type {keys['rope_type']}, theta {keys['rope_theta']:g}")
    if not dry_run:
        console.print(f"  {done.linked_bytes / 1e6:,.1f} MB linked, {done.copied_bytes / 1e6:,.1f} MB copied")
    if done.left_out:
        names = escape(", ".join(done.left_out))
        console.print(f"  left out, as copies that would run without this: {names}")
    if schedule.is_static:
        console.print(f"  load with {auto_class(done.config)}.from_pretrained")
    elif is_written(done.config, schedule):
        console.print("  written as a SmolLM3, which has layers without rotation: load with from_pretrained")
    elif keys["rope_type"].startswith("ctxext"):
        console.print("  load with ctxext.load (plain transformers refuses it)")
    else:
        console.print("  load with ctxext.load (plain transformers runs its last stage at every position)")


def print_estimate(recipe: str, estimate: Mapping[str, Any]) -> None:
    """What `ctxext train --dry-run` says: the resolved recipe as YAML, then what it will need."""
    if main_process():
        print(recipe)
    rows = [("tokens", f"{estimate['tokens']:,}")]
    if estimate["parameters"] is not None:
        share = estimate["trainable"] / estimate["parameters"]
        rows += [
            ("parameters", f"{estimate['parameters']:,}"),
            ("trained", f"{estimate['trainable']:,} ({share:.2%})"),
            *((f"memory: {name}", f"{size:.2f} GiB") for name, size in estimate["memory_gib"].items()),
            ("time", _duration(estimate["hours"] * 3600)),
        ]
    print_table("estimate", ("", ""), rows)
    for note in estimate["notes"]:
        say(escape(note))


def print_trained(done: Mapping[str, Any]) -> None:
    """What `ctxext train` did."""
    loss = done["loss"]
    change = f", loss {loss['first']:.4f} -> {loss['last']:.4f}" if loss else ""
    say(f"trained on {done['tokens']:,} tokens in {_duration(done['seconds'])}{change}")
    where = escape(str(done["trained"]))
    say(f"wrote [bold]{where}[/]: load it with ctxext.load, or write a whole model with ctxext merge")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
