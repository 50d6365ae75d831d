"""Every study and benchmark starts by the command that its docstring gives, and says what it takes."""

import runpy
import sys
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
ENTRIES = sorted(p for p in EXPERIMENTS.rglob("*.py") if '__name__ == "__main__"' in p.read_text())


@pytest.mark.parametrize("path", ENTRIES, ids=lambda p: str(p.relative_to(EXPERIMENTS)))
def test_help(path, monkeypatch, capsys):
    parts = path.relative_to(EXPERIMENTS.parent).with_suffix("").parts
    name = ".".join(part for part in parts if part != "__main__")
    assert f"python -m {name} " in path.read_text().replace("\n", " ")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module(name, run_name="__main__", alter_sys=False)
    assert not stopped.value.code
    assert "usage:" in capsys.readouterr().out.lower()


def test_each_study_can_be_started():
    studies = {p.name for p in EXPERIMENTS.iterdir() if p.is_dir() and list(p.glob("*.py"))}
    assert studies == {p.parent.name for p in ENTRIES}
