"""Every command of the documentation runs, or at least is one that there is.

What stands in a `console` block runs, in order, in a folder of the page's own that holds the recipes. What stands
in a `sh` block or inside a sentence (hubs, servers, hours) is parsed by the real command line and not run.
"""

import re
import shlex
import sys
import warnings

import pytest
import typer
from pages import PAGES, ROOT, blocks, lines, name_of

from ctxext import methods
from ctxext.cli import app
from ctxext.methods import registry

PLACEHOLDERS = ("...", "[", "…")
COMMANDS = typer.main.get_command(app.app)


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command line as a shell would, in this process; its output."""

    def run(command):
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
        try:
            app.main()
            code = 0
        except SystemExit as stopped:
            code = stopped.code or 0
        out, err = capsys.readouterr()
        assert code == 0, f"{command}\n{err[-2000:]}"
        return out

    return run


def transcripts(page):
    """(command, the output that the page shows under it) of the console blocks."""
    for block in blocks(page, "console"):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, shown = part.partition("\n")
            yield command.split(" #")[0].strip(), shown.strip()


def same(shown, printed):
    """Word for word, and figures within 2 %: another processor adds up in another order."""
    shown, printed = ([line.split() for line in text.split("\n")] for text in (shown, printed.strip()))
    number = re.compile(r"[-+]?[\d,]*\.?\d+")
    for a, b in zip(shown, printed, strict=True):
        assert [number.sub("#", word) for word in a] == [number.sub("#", word) for word in b]
        figures = [[float(x.replace(",", "")) for x in number.findall(" ".join(line))] for line in (a, b)]
        assert figures[0] == pytest.approx(figures[1], rel=0.02)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "console")], ids=name_of)
def test_console_blocks_run(page, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    for command, shown in transcripts(page):
        assert command.startswith("ctxext "), (
            f"{command}: what isn't ctxext can't be run here, put it into a sh block"
        )
        printed = run(command)
        if shown:
            same(shown, printed)


def mistake(arguments):
    """What the command line finds wrong with these arguments, without running them; None if nothing.

    A sentence may leave something out (`ctxext doctor --fix`); an option that isn't there is a mistake.
    """
    command = COMMANDS
    try:
        context = command.make_context("ctxext", list(arguments))
        while hasattr(command, "commands"):
            name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
            context = command.make_context(name, rest, parent=context)
    except Exception as error:
        return None if type(error).__name__ in ("MissingParameter", "BadOptionUsage") else error.format_message()
    return None


def unrun(page):
    """Commands of ctxext in sh blocks and inside sentences and tables."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    inline = [code for code in re.findall(r"`([^`\n]+)`", text) if code.startswith("ctxext ")]
    for line in [*lines(page, "sh"), *inline]:
        for part in re.split(r"&&|\|", line):
            found = re.search(r"(?:^|-m )ctxext (\S.*)", part.strip())
            if found and not part.startswith("pip"):
                yield found[1]


@pytest.mark.parametrize("page", [p for p in PAGES if list(unrun(p))], ids=name_of)
def test_other_commands_parse(page):
    for line in unrun(page):
        words = shlex.split(line)
        assert words[0] in COMMANDS.commands, f"ctxext {line}"
        whole = len(words) > 1 and not any(mark in line for mark in PLACEHOLDERS)
        if whole and not (words[0] == "eval" and len(words) == 2):
            wrong = mistake(words)
            assert wrong is None, f"ctxext {line}: {wrong}"


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "sh")], ids=name_of)
def test_scripts_and_modules_exist(page):
    for line in lines(page, "sh"):
        module = re.search(r"python -m ([\w.]+)", line)
        script = re.search(r"python (\S+\.py)", line)
        recipe = re.search(r"(?:recipes|evals)/\S+\.yaml", line)
        if module:
            path = ROOT / module[1].replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), line
        for found in (script and script[1], recipe and recipe[0]):
            assert found is None or (ROOT / found).is_file(), line


PYTHON = [(page, code) for page in PAGES for code in blocks(page, "python")]


@pytest.mark.parametrize(("page", "code"), PYTHON, ids=[name_of(p) for p, _ in PYTHON])
def test_python_blocks_run(page, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    methods.all_methods()
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    exec(compile(code, name_of(page), "exec"), {})
