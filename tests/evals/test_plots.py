"""What the figures show, read back from their artists."""

from __future__ import annotations

import json

import pytest

from ctxext.errors import UsageError
from ctxext.evals.plots import bucket_curve, passkey_heatmap, ppl_curve
from ctxext.plots import save, tokens

pytest.importorskip("matplotlib")

LENGTHS = [2048, 4096, 8192, 16384]
GOOD = [{"length": n, "ppl": 10.0 - i, "low": 9.0 - i, "high": 11.0 - i} for i, n in enumerate(LENGTHS)]
BAD = [{"length": n, "ppl": value} for n, value in zip(LENGTHS, [10.0, 9.0, 900.0, None], strict=True)]


def drawn(axes, marker: str) -> list[list[float]]:
    return [
        list(map(float, line.get_xdata()))
        for line in axes.lines
        if line.get_marker() == marker and line.get_xdata().size
    ]


def test_diverged_points_are_triangles_on_the_edge():
    figure = ppl_curve({"good": GOOD, "bad": BAD}, trained_length=4096, bound=20, title="t")
    (axes,) = figure.axes
    assert axes.get_ylim()[1] == 20
    assert axes.get_xscale() == "log"
    (triangles,) = [line for line in axes.lines if line.get_marker() == "^"]
    assert list(triangles.get_xdata()) == [8192, 16384]
    assert list(triangles.get_ydata()) == [20, 20]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["good", "bad", "above 20"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2k", "4k", "8k", "16k"]
    assert any("trained length 4k" in text.get_text() for text in axes.texts)


def test_the_bound_keeps_the_control_readable():
    control = [{"length": n, "ppl": 60.0} for n in LENGTHS]
    figure = ppl_curve({"good": GOOD, "bad": BAD}, control=control)
    assert figure.axes[0].get_ylim()[1] > 60
    assert figure.legends[0].get_texts()[2].get_text().startswith("crop control")
    (dashed,) = [line for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    assert dashed.get_color() == "black"


def test_buckets_are_drawn_at_their_middle():
    rows = [{"start": 0, "end": 256, "ppl": 3.0}, {"start": 256, "end": 512, "ppl": 4.0}]
    figure = bucket_curve({"a": rows}, control=rows, trained_length=256, target_length=512)
    assert list(figure.axes[0].lines[0].get_xdata()) == [128, 384]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["0", "256", "512"]


def cells(value, depths=(0.0, 0.5, 1.0)) -> list[dict]:
    return [{"length": n, "depth": depth, "accuracy": value(n, depth)} for n in LENGTHS for depth in depths]


def test_heatmap_colours_are_fixed_and_cells_are_where_they_belong():
    flat = passkey_heatmap({"low": cells(lambda n, d: 0.1)}, trained_length=4096)
    image = flat.axes[0].images[0]
    assert (image.norm.vmin, image.norm.vmax) == (0, 1)
    figure = passkey_heatmap({"a": cells(lambda n, d: d), "b": cells(lambda n, d: 1.0)[:-1]}, trained_length=4096)
    first, second = figure.axes[:2]
    values = first.images[0].get_array()
    assert values.shape == (3, 4)
    assert list(values[:, 0]) == [0, 0.5, 1], "depth 0 is on top"
    assert second.images[0].get_array().mask[2, 3], "an unmeasured cell is blank, not zero"
    (line,) = first.lines
    assert list(line.get_xdata()) == [1.5, 1.5], "between the second and the third length"
    assert {text.get_text() for text in first.texts} == {"0", "50", "100"}
    many = passkey_heatmap({"a": cells(lambda n, d: d, depths=[i / 60 for i in range(61)])})
    assert not many.axes[0].texts


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_files_come_from_json_rows_and_are_reproducible(tmp_path, suffix):
    def once(name):
        rows = json.loads(json.dumps({"good": GOOD, "bad": BAD}))
        return save(ppl_curve(rows, trained_length=4096), tmp_path / (name + suffix)).read_bytes()

    assert once("a") == once("b")
    assert len(once("a")) > 5000


def test_axis_names_are_exact_or_not_shortened():
    assert [tokens(n) for n in (256, 1000, 2048, 12288, 131072, 1048576)] == [
        "256",
        "1000",
        "2k",
        "12k",
        "128k",
        "1M",
    ]


def test_wrong_usage(tmp_path):
    for draw in (lambda: ppl_curve({}), lambda: ppl_curve({"a": []}), lambda: passkey_heatmap({})):
        with pytest.raises(UsageError, match="nothing to draw"):
            draw()
    with pytest.raises(UsageError, match="no finite perplexity"):
        ppl_curve({"a": [{"length": 2, "ppl": None}]})
    with pytest.raises(UsageError, match=r"plot\.pdf"):
        save(ppl_curve({"a": GOOD}), tmp_path / "plot.pdf")


def test_relative_curve_draws_each_series_against_the_control():
    from experiments.smollm2.plots import relative_curve

    control = [{"start": 0, "end": 100, "ppl": 10.0}, {"start": 100, "end": 200, "ppl": 20.0}]
    worse = [{"start": 0, "end": 100, "ppl": 10.5}, {"start": 100, "end": 200, "ppl": 100.0}]
    figure = relative_curve({"worse": worse}, control, trained_length=100)
    line = figure.axes[0].lines[0]
    assert line.get_label() == "worse"
    assert list(line.get_ydata()) == pytest.approx([5.0, 10.0])  # 400 % is cut at the edge
    assert list(figure.axes[0].lines[1].get_xdata()) == [150.0]
