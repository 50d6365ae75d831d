"""Tables of fine-tunes, from run folders as `ctxext train` leaves them."""

import json

import pytest
import yaml

from ctxext.errors import CtxextError, UsageError
from experiments.smollm2 import tuned


def ppl(values, control=None):
    def buckets(numbers):
        return [{"start": 256 * i, "end": 256 * (i + 1), "ppl": v} for i, v in enumerate(numbers)]

    return {"buckets": buckets(values), "results": []} | (
        {"control": {"buckets": buckets(control)}} if control else {}
    )


def passkey(values):
    return {"lengths": [{"length": 256 * (i + 1), "correct": v, "trials": 20} for i, v in enumerate(values)]}


def run(folder, before, after, keys=(3, 0)):
    for when, values in (("before", before), ("after", after)):
        (folder / f"eval-{when}").mkdir(parents=True)
        (folder / f"eval-{when}" / "1-ppl.json").write_text(json.dumps(ppl(values)))
        (folder / f"eval-{when}" / "2-passkey.json").write_text(json.dumps(passkey(keys)))
    (folder / "log.json").write_text(
        json.dumps([{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.5}, {"runtime": 1}])
    )
    (folder / "recipe.yaml").write_text(
        "output: /somewhere/pi\ndata: {sources: [{path: /a/b/book.txt}]}\neval: [ppl --data /a/b --out x/y]\n"
    )
    return folder


def test_before_and_after_beside_the_crop(tmp_path, capsys):
    first = run(tmp_path / "pi-8x", [293.4, 120.25], [25.4, 21.0])
    (tmp_path / "crop.json").write_text(json.dumps(ppl([1.0, 2.0], control=[17.0, 19.5])))
    out = tmp_path / "out"
    tuned.main([first], out, beside=[f"crop control={tmp_path / 'crop.json'}"], trained_length=256)
    shown = (out / "tables.md").read_text()
    assert shown.splitlines()[0] == "| perplexity at position | 256 | 512 |"
    assert "| crop control | 17.00 | 19.50 |" in shown
    assert "| pi-8x, before | 293 | 120 |" in shown
    assert "| pi-8x, after | 25.40 | 21.00 |" in shown
    assert "| pi-8x, after | 3/20 | 0/20 |" in shown
    assert shown.strip() == capsys.readouterr().out.strip()
    assert (out / "tuned.png").stat().st_size > 10_000
    kept = yaml.safe_load((out / "recipes" / "pi-8x.yaml").read_text())
    assert kept == {
        "output": "pi",
        "data": {"sources": [{"path": "book.txt"}]},
        "eval": ["ppl --data b --out x/y"],
    }


def test_runs_measured_at_other_places_are_refused(tmp_path):
    one, other = run(tmp_path / "a", [1.0, 2.0], [1.0, 2.0]), run(tmp_path / "b", [1.0], [1.0])
    with pytest.raises(UsageError, match="same places"):
        tuned.tables(tuned.read_run(one) + tuned.read_run(other))


def test_what_is_no_finished_run_is_said(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CtxextError, match="it has no log"):
        tuned.read_run(tmp_path / "empty")
    (tmp_path / "empty" / "log.json").write_text("[]")
    with pytest.raises(CtxextError, match="no evaluation"):
        tuned.read_run(tmp_path / "empty")
    with pytest.raises(UsageError, match="LABEL=FILE"):
        tuned.read_beside("crop.json")
