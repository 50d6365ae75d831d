"""`ctxext compare`: the report leads with the crop, resumes, fits a budget, and is shared by processes."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_eval_cli import run

from ctxext.errors import CtxextError, UsageError
from ctxext.evals.compare import summary
from ctxext.evals.compare.budget import Plan, Speed, cost, fit, measure_speed, parse_budget
from ctxext.evals.compare.cells import claim
from ctxext.evals.compare.run import bucket_of, parse_methods
from ctxext.evals.compare.suite import PasskeySpec, RulerSpec, Suite, read_suite
from ctxext.evals.models import load

SUITE = """\
documents: 2
passkey: {depths: 2, trials: 1}
ruler: {tasks: [fwe], samples: 1, lengths: [512]}
"""


@pytest.fixture
def suite_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(SUITE)
    return path


def command(suite, out, *more):
    return (
        *(
            "compare",
            "tiny",
            "--methods",
            "pi,dynamic_yarn:granularity=128",
            "--factor",
            2,
            "--lengths",
            "256,512",
        ),
        *("--dtype", "float32", "--suite", suite, "-o", out, *more),
    )


def test_compare_end_to_end(monkeypatch, capsys, tmp_path, suite_file):
    out = tmp_path / "report"
    code, shown, err = run(monkeypatch, capsys, *command(suite_file, out))
    assert code == 0, err
    assert err.index("At 512 tokens") < err.index("report:")
    assert "loses" in shown
    labels = ["crop control", "unpatched", "pi x2", "dynamic_yarn:granularity=128 x2"]
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert [(row["label"], row["length"]) for row in rows] == [(name, n) for name in labels for n in (256, 512)]
    by = {(row["label"], row["length"]): row for row in rows}
    crop, pi = by["crop control", 512], by["pi x2", 512]
    assert pi["loses"] is (pi["gain"] < 0) is True
    assert pi["gain_low"] <= pi["gain"] <= pi["gain_high"]
    import math

    assert pi["gain"] == pytest.approx(math.log(crop["ppl"] / pi["ppl"]), abs=1e-6)
    assert (crop["gain"], crop["loses"], by["pi x2", 256]["gain"]) == (None, None, None)
    # A staged schedule reads short text as the unpatched model does.
    assert by[labels[3], 256]["ppl"] == pytest.approx(by["unpatched", 256]["ppl"], rel=1e-5)
    assert by["unpatched", 256]["passkey"] == 1
    assert (by["pi x2", 512]["ruler"], by["pi x2", 256]["ruler"]) == (0, None)
    with (out / "rows.csv").open() as file:
        assert [row["label"] for row in csv.DictReader(file)] == [row["label"] for row in rows]
    assert (out / "perplexity.csv").read_text().splitlines()[0] == ",256,512"

    page = (out / "report.html").read_text()
    lead = page.index("At 512 tokens")
    assert lead < page.index("<table>") < page.index("Perplexity by position") < page.index("Exact settings")
    for needed in (
        "class=loses",
        "data_sha256",
        "llama.cpp (ctxext export)",
        "granularity",
        "llama.cpp",
        "RULER-type tasks",
    ):
        assert needed in page
    assert page.count("data:image/svg+xml;base64,") == 3
    assert not re.search(r"(src|href)=.?https?:", page), "the file must need nothing else"
    embedded = re.search(r"<script type=application/json id=rows>(.*?)</script>", page)[1]
    assert json.loads(embedded.replace("<\\/", "</")) == rows

    # A second run reads every cell back; a deleted one is measured again, alone.
    code, again, err = run(monkeypatch, capsys, *command(suite_file, out, "--json"))
    assert code == 0
    assert "measuring" not in err
    assert json.loads(again)["rows"] == rows
    next((out / "cells").glob("passkey-pi-x2-*.json")).unlink()
    _, _, err = run(monkeypatch, capsys, *command(suite_file, out))
    assert re.findall("measuring (.*)", err) == ["passkey, pi x2"]


@pytest.mark.slow
def test_processes_share_the_cells(tmp_path, suite_file):
    """As accelerate launch starts them; every cell is measured by exactly one."""
    out = tmp_path / "report"
    arguments = [str(a) for a in command(suite_file, out, "--json")]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "ctxext", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
        )
        for rank in range(2)
    ]
    ended = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    cells = list((out / "cells").glob("*.json"))
    # ppl: crop and three; passkey and ruler: the same at 512, passkey: three at 256.
    assert len(cells) == 4 + 2 * 4 + 3
    assert not list((out / "cells").glob(".*.lock"))
    assert (out / "report.html").is_file()
    assert len(json.loads(ended[0][0])["rows"]) == 8
    assert ended[1][0] == "", "only the first process prints"


def test_a_lock_is_held_by_one(tmp_path):
    with claim(tmp_path / "a", wait=True) as first, claim(tmp_path / "a", wait=False) as second:
        assert (first, second) == (True, False)
    with claim(tmp_path / "a", wait=False) as again:
        assert again


def row(label: str, length: int, gain: float | None, low: float | None = None, high: float | None = None) -> dict:
    return {"label": label, "length": length, "gain": gain, "gain_low": low, "gain_high": high, "loses": gain < 0}


def test_the_headline_says_who_loses_and_what_is_not_told_apart():
    table = [row("a", 8, 0.2, 0.1, 0.3), row("b", 8, -0.1, -0.2, -0.05), row("c", 8, -0.01, -0.1, 0.1)]
    (said,) = summary.headline(table)
    assert "better than cropping: a (+0.200)" in said
    assert "not told apart from it: c" in said
    assert said.endswith("worse: b (-0.100).")
    assert "nothing beats cropping" in summary.headline([row("b", 8, -0.1)])[0]
    assert "nothing was extended" in summary.headline([{"label": "a", "length": 8, "gain": None}])[0]


# --- budget and suites ------------------------------------------------------------------------------------------


def test_a_budget_drops_what_hurts_least_and_says_so():
    suite = Suite(
        documents=8, passkey=PasskeySpec(depths=11, trials=20), ruler=RulerSpec(tasks=["vt", "fwe"], samples=50)
    )
    whole, speed = Plan(suite, (1024, 2048, 4096)), Speed(1e-4, 1e-8, 1e-3)
    price = cost(suite, whole.lengths, 4, 1024, 64, speed)
    assert fit(whole, price, 4, 1024, 64, speed).dropped == ()
    seen = []
    for share in (0.5, 0.1, 0.02, 0.005):
        plan = fit(whole, share * price, 4, 1024, 64, speed)
        assert plan.estimate <= share * price
        assert plan.dropped
        assert any(length > 1024 for length in plan.lengths), "a comparison without extension compares nothing"
        seen.append(len(plan.dropped))
        assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert seen == sorted(seen)
    assert suite.passkey.trials == 20, "the suite asked for isn't changed"
    assert any("trials 20 -> " in sentence for sentence in fit(whole, price / 3, 4, 1024, 64, speed).dropped)
    with pytest.raises(CtxextError, match="even the smallest"):
        fit(whole, 1e-4, 4, 1024, 64, speed)


def test_speed_is_measured():
    subject = load("tiny", dtype="float32")
    speed = measure_speed(subject.model, 256)
    assert 0 < speed.prefill(256) < speed.prefill(2048)
    assert speed.step > 0


def test_a_budget_on_the_command_line(monkeypatch, capsys, tmp_path):
    args = ("compare", "tiny", "--methods", "pi", "--factor", 4, "--lengths", "256,512,1024", "--dtype", "float32")
    args = (*args, "--suite", "report", "--budget", "4s", "-o", tmp_path, "--json")
    code, out, err = run(monkeypatch, capsys, *args)
    assert code == 0, err
    assert "dropped" in err
    answer = json.loads(out)
    assert answer["dropped"]
    assert "To fit the budget this was dropped" in (tmp_path / "report.html").read_text()
    # The plan is kept: going on under another load doesn't choose other cells.
    code, out, err = run(monkeypatch, capsys, *args)
    assert "measuring" not in err
    assert json.loads(out)["plan"] == answer["plan"]


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400)])
def test_durations(text, seconds):
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "ten", "5d", "-3m"])
def test_wrong_durations(text):
    with pytest.raises(UsageError, match="no duration"):
        parse_budget(text)


def test_suites_are_validated(tmp_path):
    assert read_suite("quick").passkey.trials == 4
    assert read_suite("report").ruler.samples == 50
    suites = Path(__file__).parents[2] / "evals" / "suites"
    assert read_suite(suites / "smollm2.yaml").passkey.lengths == [2048, 12288]
    with pytest.raises(UsageError, match="no suite") as error:
        read_suite("quik")
    assert "quick" in error.value.hint
    path = tmp_path / "s.yaml"
    path.write_text("documents: 0\npasskey:\n  trails: 4\n")
    with pytest.raises(UsageError) as error:
        read_suite(path)
    assert f"{path}:1: documents" in error.value.message
    assert f"{path}:3: passkey.trails" in error.value.message
    assert "trials" in error.value.message


def test_a_task_at_some_lengths_only():
    suite = Suite(passkey=PasskeySpec(trials=4, lengths=[1024, 4096]))
    suite.check([1024, 2048, 4096])
    with pytest.raises(UsageError, match="passkey at 4096 tokens, which isn't compared"):
        suite.check([1024, 2048])
    speed = Speed(1e-4, 1e-8, 1e-3)
    everywhere = suite.model_copy(update={"passkey": PasskeySpec(trials=4)})
    prices = [cost(s, (1024, 2048, 4096), 3, 1024, 64, speed) for s in (suite, everywhere)]
    assert prices[0] < prices[1]
    assert cost(suite, (1024, 4096), 3, 1024, 64, speed) == pytest.approx(prices[0])


def test_methods_and_lengths_are_checked_at_once():
    first, second = parse_methods("pi, yarn:beta_fast=16:beta_slow=2", 4)
    assert (first.label, first.params) == ("pi x4", {})
    assert second.params == {"beta_fast": 16, "beta_slow": 2}
    for wrong, message in (
        ("pi,pi", "none twice"),
        ("", "at least one"),
        ("yran", "yran"),
        ("yarn:beta_fsat=1", "beta_"),
    ):
        with pytest.raises(UsageError, match=message):
            parse_methods(wrong, 4)
    assert bucket_of([4096, 6144, 12288]) == 2048
    with pytest.raises(UsageError, match="common step"):
        bucket_of([4096, 6143])
