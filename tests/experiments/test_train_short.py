"""The whole of "train short, test long" on a recipe of a few steps, and its arithmetic."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from ctxext.errors import CtxextError, UsageError
from experiments.tiny import __main__ as pretrain
from experiments.train_short import __main__ as train_short
from experiments.train_short import length_tests
from experiments.train_short import plots as plots_train_short

RECIPES = Path(__file__).parent.parent.parent / "recipes" / "train-short-test-long"
WORDS = ["in", "the", "beginning", "was", "a", "word", "and", "it", "was", "with", "us", "for", "ever", "amen"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The real recipe folder with fewer steps, two encodings and DroPE, and a text of nothing much."""
    folder = tmp_path_factory.mktemp("recipe")
    recipe = (RECIPES / "model.yaml").read_text()
    for old, new in (
        ("steps: 400", "steps: 2"),
        ("steps: 200, mix", "steps: 2, mix"),
        ("steps: 600", "steps: 8"),
        ("warmup_steps: 50", "warmup_steps: 1"),
        ("decay_steps: 250", "decay_steps: 2"),
        ("save_steps: 300", "save_steps: 1"),
        ("logging_steps: 20", "logging_steps: 1"),
        ("tokens_per_step: 2048", "tokens_per_step: 256"),
        ("num_hidden_layers: 2", "num_hidden_layers: 1"),
        ("held_out: [Ruth, Esther, Ecclesiastes, Lamentations, Ezekiel, Acts]", "held_out: [b]"),
    ):
        assert recipe.count(old) == 1, old
        recipe = recipe.replace(old, new)
    (folder / "model.yaml").write_text(recipe)
    plan = (RECIPES / "encodings.yaml").read_text()
    kept = [line for line in plan.splitlines() if not line.startswith(("sinusoidal", "nope", "t5_bias"))]
    (folder / "encodings.yaml").write_text("\n".join(kept) + "\n")
    for name, count in (("a", 900), ("b", 900)):
        text = " ".join(WORDS[i * 4 % len(WORDS)] + ("." if i % 9 == 0 else "") for i in range(count))
        (folder / f"{name}.txt").write_text(text * 8)
    return folder


@pytest.fixture(scope="module")
def found(folder, tmp_path_factory):
    patch = pytest.MonkeyPatch()
    # Three lengths and two rescues are enough to go through every line.
    patch.setattr(train_short, "MULTIPLES", (0.5, 1, 2))
    patch.setattr(train_short, "RESCUES", ("yarn", "searched"))
    patch.setattr(length_tests, "DEPTHS", (0.5,))
    patch.setattr(train_short, "SEARCH", {"documents": 1, "evaluations": 4})
    patch.setattr("ctxext.evals.temperature.fit.__defaults__", (None, (0.0, 0.1, 0.2)))
    out = tmp_path_factory.mktemp("out")
    yield out, train_short.run_all(folder, str(folder), out, [1], None, 2)
    patch.undo()


def test_everything_is_measured(found):
    _, cells = found
    assert list(cells) == ["rope", "alibi", "drope"]
    rope, alibi, drope = (cells[n]["1"] for n in cells)
    assert set(rope["variants"]) == {"as trained", "crop control", "yarn", "searched"}
    assert set(alibi["variants"]) == {"as trained"}
    assert set(drope["variants"]) == {"as trained", "with temperature"}
    assert [p["length"] for p in rope["variants"]["as trained"]["ppl"]] == [64, 128, 256]
    assert [p["length"] for p in rope["variants"]["yarn"]["passkey"]] == [256]
    # Up to the trained length the crop control is the model itself.
    own, crop = (rope["variants"][name]["ppl"][:2] for name in ("as trained", "crop control"))
    for a, b in zip(own, crop, strict=True):
        assert a["ppl"] == pytest.approx(b["ppl"], rel=1e-4)
    assert 0 <= drope["temperature"]["temperature"] <= 0.2
    assert len(rope["loss"]) == 12


def test_drope_goes_on_from_the_rope_run(found):
    """Its first 9 of 12 steps are the RoPE run's; then the loss is another."""
    _, cells = found
    rope, drope = (dict(map(tuple, cells[n]["1"]["loss"])) for n in ("rope", "drope"))
    assert [rope[s] for s in range(1, 10)] == [drope[s] for s in range(1, 10)]
    assert rope[10] != drope[10]


def test_a_second_call_measures_nothing(found, folder, monkeypatch):
    out, cells = found
    monkeypatch.setattr(pretrain, "train", lambda *a, **k: pytest.fail("trained again"))
    monkeypatch.setattr(train_short, "measure", lambda *a, **k: pytest.fail("measured again"))
    assert train_short.run_all(folder, str(folder), out, [1], None, 2) == cells


def test_summary_table_and_pictures(found, tmp_path):
    _, cells = found
    cells = {name: {**seeds, "2": seeds["1"]} for name, seeds in cells.items()}
    summary = plots_train_short.summarise(cells)
    json.dumps(summary)
    point = summary["series"]["RoPE"]["ppl"][0]
    assert point["low"] == pytest.approx(point["mean"]) == pytest.approx(point["high"])
    assert point["seeds"] == 2
    table = plots_train_short.table(summary)
    for label in ("RoPE", "ALiBi", "RoPE→DroPE", "RoPE→DroPE, with temperature", "RoPE, yarn", "crop control"):
        assert f"| {label} |" in table
    pytest.importorskip("matplotlib")
    plots_train_short.draw(summary, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"encodings.png", "rescued.png", "loss.png"}


def test_docs_have_the_tables_of_the_committed_summary():
    root = Path(__file__).parent.parent.parent
    summary = json.loads((root / "experiments/results/train-short/summary.json").read_text())
    docs = (root / "docs/positions.md").read_text()
    for table in plots_train_short.docs_tables(summary):
        assert table in docs, f"put this into docs/positions.md:\n{table}"
    assert (root / "experiments/results/train-short/table.md").read_text() == plots_train_short.table(summary)


def test_interval_is_students_t():
    """Against scipy-free textbook values: 1, 2, 3 has mean 2, s = 1, t(2) = 4.303."""
    got = plots_train_short.interval([1.0, 2.0, 3.0])
    assert got["mean"] == 2
    assert got["high"] - got["mean"] == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert "low" not in plots_train_short.interval([1.0])


def test_copying_counts_what_is_copied():
    """A stub that repeats the token of half a length ago is always right; one that repeats the last never."""
    from conftest import pico_model

    model = pico_model(vocab_size=80, num_hidden_layers=1)

    class Copier(torch.nn.Module):
        back = 32

        def forward(self, ids):
            logits = torch.zeros(*ids.shape, 80)
            logits.scatter_(2, ids.roll(self.back - 1, 1)[..., None], 5.0)
            return logits

    copier = Copier()

    def scores(model, ids, positions, **_):
        from types import SimpleNamespace

        where = torch.tensor(list(positions))
        guess = copier(ids).argmax(-1)[:, where - 1]
        return SimpleNamespace(is_argmax=guess == ids[:, where])

    patch = pytest.MonkeyPatch()
    patch.setattr("ctxext.live.head.token_scores", scores)
    assert length_tests.copying(model, 64, vocabulary=80, rows=2)["accuracy"] == 1
    copier.back = 1
    assert length_tests.copying(model, 64, vocabulary=80, rows=2)["accuracy"] < 0.2
    patch.undo()
    assert length_tests.copying(model, 64, vocabulary=80, rows=2)["tokens"] == 2 * 28


def test_mistakes(folder, tmp_path):
    with pytest.raises(UsageError, match=r"no encodings\.yaml"):
        train_short.read_plan(tmp_path)
    (tmp_path / "encodings.yaml").write_text("drope: {method: drope, from: rope, at: 0.7}\n")
    with pytest.raises(UsageError, match="goes on from 'rope'"):
        train_short.read_plan(tmp_path)
    with pytest.raises(UsageError, match="has no 'rotary'"):
        train_short.run_all(folder, str(folder), tmp_path / "out", [1], ["rotary"], 2)
    shutil.copy(folder / "model.yaml", tmp_path / "model.yaml")
    recipe = (tmp_path / "model.yaml").read_text()
    (tmp_path / "model.yaml").write_text(recipe.replace("save_steps: 1 ", "save_steps: 100 "))
    _, plan = train_short.read_plan(folder)
    with pytest.raises(CtxextError, match="no checkpoint there"):
        train_short.train_one(tmp_path / "model.yaml", plan, "drope", str(folder), tmp_path / "runs", 1)
