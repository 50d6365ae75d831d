"""The README tells the truth: its commands and its Python run, its method table is the registry's."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ctxext import methods
from ctxext.cli.output import methods_markdown

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.S | re.M)


def commands():
    lines = [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines()]
    return [line.split("#")[0].strip() for line in lines if line.startswith("ctxext")]


def test_commands_run(tmp_path, monkeypatch):
    """In order, in an empty folder, as a reader would type them."""
    assert len(commands()) >= 4
    for command in commands():
        code = f"import sys; sys.argv = {shlex.split(command)!r}; from ctxext.cli.app import main; main()"
        ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert ran.returncode == 0, f"{command}\n{ran.stderr[-2000:]}"
        assert ran.stdout


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_runs(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = dict(methods._REGISTRY)
    try:
        exec(compile(blocks("python")[number], f"README block {number}", "exec"), {})
    finally:
        methods._REGISTRY.clear()
        methods._REGISTRY.update(known)


def test_method_table_is_the_registry():
    table = methods_markdown(methods.all_methods().values())
    assert table in README, f"put this into the README:\n{table}"


def test_pictures_and_files_exist():
    links = re.findall(r"!?\[[^\]]*\]\(([^)#]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link
