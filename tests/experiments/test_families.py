"""A sample of the families matrix; `python -m experiments.families` runs all of it, committed."""

import json
from pathlib import Path

import pytest

from ctxext import methods
from experiments.families.__main__ import families, family_row, markdown

ROOT = Path(__file__).parents[2]
COMMITTED = json.loads((ROOT / "experiments" / "results" / "families.json").read_text())
ROWS = {row["family"]: row for row in COMMITTED["results"]}
# Mixture of experts, partial and interleaved rotary, parallel blocks, a rope per layer type.
PASSING = ["hunyuan_v1_dense", "olmo3", "gpt_oss", "glm4_moe", "persimmon", "nemotron", "ernie4_5", "gemma3_text"]
REFUSED = ["deepseek_v3", "llama4_text", "gpt2", "gemma3", "granite_swa", "mamba", "exaone4"]


@pytest.mark.parametrize("name", PASSING)
def test_passes(name):
    row = family_row(name)
    assert row["status"] == "passes", row
    assert len(row["methods"]) == len(
        [m for m in methods.all_methods().values() if not m.loads.startswith("needs")]
    )
    assert ROWS[name]["status"] == "passes"


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name):
    row = family_row(name)
    assert row["status"] == "refused", row
    assert len(row["why"]) > 20
    assert ROWS[name]["status"] == "refused"


def test_a_family_that_would_be_silently_wrong_is_caught(monkeypatch):
    """The matrix must be able to fail: a patch that reaches nothing, and one that isn't saved."""
    import ctxext

    real = ctxext.patch
    monkeypatch.setattr(ctxext, "patch", lambda model, method, factor, **options: None)
    assert family_row("llama")["status"] == "fails"
    monkeypatch.setattr(ctxext, "patch", real)

    def forgets(model, method, factor, **options):
        schedule = real(model, method, factor, **options)
        if method == "pi":
            model.config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        return schedule

    monkeypatch.setattr(ctxext, "patch", forgets)
    row = family_row("llama")
    assert row["status"] == "fails"
    assert "reloads to other logits" in row["why"]


def test_the_committed_matrix_is_whole_and_has_nothing_wrong():
    import transformers

    if transformers.__version__ == COMMITTED["transformers"]:
        assert sorted(ROWS) == families()
    assert [row for row in ROWS.values() if row["status"] == "fails"] == []
    for row in ROWS.values():
        if row["status"] == "passes":
            assert row["oracle"] < 2e-3
            assert row["smallest_change"] > 1e-3


def test_the_page_is_the_matrix():
    page = (ROOT / "docs" / "families.md").read_text()
    assert page == markdown(COMMITTED["results"], COMMITTED["transformers"])
