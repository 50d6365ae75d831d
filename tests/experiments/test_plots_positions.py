"""The pictures of docs/positions.md show what runs, and the reports beside them are drawn from plain JSON."""

import pytest
import torch
from conftest import pico_model

from ctxext import methods
from ctxext.live.encoding import live_encoding
from ctxext.rope import Rope
from experiments.drope import __main__ as drope
from experiments.positions import __main__ as plots_positions
from experiments.positions import smollm2 as smollm2_positions

ROPE = Rope(1e4, 32, 64)


@pytest.mark.parametrize(
    ("name", "options"),
    [("self_extend", {}), ("rerope", {}), ("rerope", {"step": 8, "window": 20}), ("dual_chunk", {})],
)
def test_drawn_distances_are_those_that_attention_uses(name, options):
    schedule = methods.schedule(ROPE, name, 4, **options)
    rule = schedule.encoding
    positions = torch.arange(256)
    query, key = positions[:, None], positions[None]
    found, parts = torch.full((256, 256), -1.0), 0
    for part in live_encoding(schedule, pico_model().model).parts():
        holds = part.holds(query, key) & (query >= key)
        found = torch.where(holds, (part.query(query) - part.key(key)).float(), found)
        parts = parts + holds.int()
    assert torch.equal(parts, (query >= key).int())  # each pair in exactly one part
    for i in range(0, 256, 17):
        want = [rule.distance(i, j) for j in range(i + 1)]
        torch.testing.assert_close(found[i, : i + 1], torch.tensor(want).float())
    assert found.max() <= rule.largest(256) <= 63


def test_how_far_hands_turn():
    slow = ROPE.size - 1
    seen = 63 * ROPE.inv_freq()[slow]
    assert plots_positions.sweep(methods.schedule(ROPE, "pi", 4), slow) == pytest.approx(seen, rel=0.02)
    assert plots_positions.sweep(methods.schedule(ROPE, "dual_chunk", 4), slow) == pytest.approx(seen, rel=1e-9)
    assert plots_positions.sweep(methods.schedule(ROPE, "nope", 4), slow) == 0


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    plots_positions.main(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"clock.png", "distances.png", "biases.png"}


def test_drope_report(tmp_path):
    pytest.importorskip("matplotlib")
    lengths = (256, 512, 1024, 2048)
    measures = {
        "ppl": [{"length": n, "ppl": n / 10.0} for n in lengths],
        "passkey": [{"length": n, "accuracy": 0.5} for n in lengths],
    }
    report = {
        "rows": {"unpatched": measures, "crop control": measures, "DroPE": measures, "DroPE, c = 0.1": measures},
        "loss": {"DroPE": [[2, 6.0], [4, 3.0]]},
        "temperature": {"DroPE": {"curve": [{"temperature": c, "ppl": 20 + c} for c in (0.0, 0.1)]}},
    }
    assert "| DroPE | 25.6 | 51.2 | 102.4 | 204.8 | 50% | 50% | 50% | 50% |" in drope.tables(report)
    drope.draw(report, tmp_path / "drope.png")
    assert (tmp_path / "drope.png").read_bytes().startswith(b"\x89PNG")


def test_losses_are_smoothed_but_not_the_spike():
    """The first point stays as it is; later ones are means of their neighbours; a constant stays one."""
    points = [[2 * i + 2, 9.0 if i == 0 else 4.0 + (-1) ** i] for i in range(40)]
    smooth = drope.smooth(points)
    assert smooth[0] == (2, 9.0)
    assert [step for step, _ in smooth] == [step for step, _ in points]
    assert all(abs(loss - 4) < 0.2 for _, loss in smooth[10:-5])
    assert drope.smooth([[1, 2.0], [2, 2.0], [3, 2.0]]) == [(1, 2.0), (2, 2.0), (3, 2.0)]


def test_every_drope_run_is_a_recipe_that_parses():
    from pathlib import Path

    from ctxext.training.recipe import load_recipe

    recipes = Path(__file__).parent.parent.parent / "recipes"
    for name, more in drope.RUNS.values():
        assert load_recipe(recipes / f"{name}.yaml", more).method.factor == drope.FACTOR


def test_docs_have_the_table_of_the_committed_results():
    from pathlib import Path

    from ctxext import files

    root = Path(__file__).parent.parent.parent
    names = (*smollm2_positions.REPLACED, *smollm2_positions.REGROUPED)
    found = {n: files.read_json(root / f"experiments/results/smollm2/positions/{n}.json") for n in names}
    table = smollm2_positions.tables(found, files.read_json(smollm2_positions.STORED)["ppl"])
    assert table in (root / "docs/positions.md").read_text(), f"put this into docs/positions.md:\n{table}"


def test_docs_have_the_table_of_the_committed_drope_report():
    from pathlib import Path

    from ctxext import files

    root = Path(__file__).parent.parent.parent
    table = drope.tables(files.read_json(root / "experiments/results/drope/report.json"))
    assert table in (root / "docs/positions.md").read_text(), f"put this into docs/positions.md:\n{table}"


def test_smollm2_table_stands_beside_the_stored_rows():
    from ctxext import files

    found = {"dual_chunk": {"buckets": [{"ppl": 10.0}, {"ppl": 1234.5}]}}
    table = smollm2_positions.tables(found, files.read_json(smollm2_positions.STORED)["ppl"])
    assert "| yarn x2 | " in table
    assert "| `dual_chunk x2` | 10.00 | 1234 |" in table
