"""The recipe's eval.commands, before and after a run.

They run as `ctxext eval ... --json` in a process of their own: this package knows no evaluator by name, and a
model being trained and one being measured are never in memory together.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.markup import escape

from .. import terminal
from ..config.write import write_config
from ..errors import CtxextError
from ..files import WEIGHTS, link_or_copy, model_files, read_config, write_json, write_text
from ..folders.lengths import longer_config
from ..rope import Schedule
from .recipe import Recipe


def before(recipe: Recipe, folder: Path, schedule: Schedule | None, out: Path) -> None:
    """Measure the base as the run will patch it."""
    with tempfile.TemporaryDirectory(dir=out, prefix=".before-") as temporary:
        subject = Path(temporary) / "before"
        for relative in model_files(folder):
            link_or_copy(folder / relative, subject / relative, link=relative.suffix in WEIGHTS)
        if schedule is not None:
            config = longer_config(write_config(read_config(folder), schedule), schedule.max_length)
            write_json(subject / "config.json", config)
        measure(recipe.eval.commands, subject, out / "eval-before")


def after(recipe: Recipe, trained: Path, out: Path) -> None:
    """Measure what was trained: an adapter is loaded on its base, patched."""
    measure(recipe.eval.commands, trained, out / "eval-after")


def measure(commands: list[str], model: Path, answers: Path) -> None:
    """Run each command on `model` and keep its JSON document as answers/<number>-<name>.json.

    `answers` appears, or is replaced, when all have run: a kill or a command that fails (CtxextError) leaves it as
    it was, and a resumed run measures again.
    """
    part = answers.with_name(f".{answers.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    for number, command in enumerate(commands, 1):
        name, *rest = shlex.split(command)
        terminal.say("evaluating " + escape(f"{model.name}: {command}"))
        line = [sys.executable, "-m", "ctxext", "eval", name, str(model), *rest, "--json"]
        ran = subprocess.run(line, capture_output=True, encoding="utf-8", errors="replace")
        if ran.returncode:
            raise CtxextError(
                f"the evaluation {command!r} failed: {ran.stderr.strip()[-500:]}",
                hint="mend eval.commands in the recipe; with --resume the training itself isn't repeated",
            )
        write_text(part / f"{number}-{name}.json", ran.stdout)
    shutil.rmtree(answers, ignore_errors=True)
    part.rename(answers)
