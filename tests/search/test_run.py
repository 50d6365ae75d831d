"""Whole searches on the embedded model: the folder, the log, kills, several processes."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import logits, run

import ctxext
from ctxext.files import read_config
from ctxext.folders.load import stored_schedule
from ctxext.folders.source import TINY
from ctxext.search.run import search_factors

# Two documents of 512 tokens, three full evaluations beyond the seeds.
SMALL = {"factor": 2, "data": ("tiny",), "documents": 2, "held_out": 1, "evaluations": 6, "dtype": "float32"}


def search(out, model="tiny", **changes):
    return search_factors(model, out=out, **{**SMALL, **changes})


def lines(folder):
    return (folder / "log.jsonl").read_text().splitlines()


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    out = tmp_path_factory.mktemp("search") / "searched"
    return out, search(out)


def test_folder_log_report_pictures(searched):
    out, report = searched
    schedule = stored_schedule(read_config(out))
    assert schedule.method == "longrope"
    assert schedule.max_length == 512
    assert len(schedule.params["long_factor"]) == len(schedule.params["short_factor"]) == 16
    assert {p.name for p in (out / "search").iterdir()} >= {"log.jsonl", "report.json"}
    assert json.loads((out / "search" / "report.json").read_text()) == report
    if pytest.importorskip("matplotlib"):
        assert (out / "search" / "fitness.png").stat().st_size > 5000
        assert (out / "search" / "factors.png").stat().st_size > 5000
    first, *rest = map(json.loads, lines(out / "search"))
    assert first["settings"]["strategy"] == "curve"
    long = [r for r in rest if r["phase"] == "long"]
    best = min((r for r in long if r["best"] is not None), key=lambda r: r["best"])
    assert math.exp(best["best"]) == report["best"]
    assert report["tokens"] == sum(512 * len(r["documents"]) for r in long) + report["tokens_short"]
    assert report["best"] <= min(report["seeds"].values())
    # The search for short factors found better ones, kept or not.
    short = [r for r in rest if r["phase"] == "short"]
    full = [sum(r["nll"]) for r in short if len(r["documents"]) == 2]
    assert short[-1]["best"] < full[0] / 2
    assert not out.with_name("searched.search").exists()
    assert "How the factors were found" in (out / "README.md").read_text()


def test_report_is_measured_right(searched):
    """The loss at both lengths, measured once more from the folder with transformers' own loss."""
    out, report = searched
    from transformers import AutoTokenizer

    text = sorted((TINY.parent / "text").glob("*.txt"))[2].read_text()
    ids = torch.tensor([AutoTokenizer.from_pretrained(TINY)(text, verbose=False)["input_ids"][:512]])
    rows = {row["schedule"]: row for row in report["rows"]}
    assert list(rows) == ["as it was", "pi", "ntk", "yarn", "searched", "searched, in plain transformers"]
    from transformers import AutoModelForCausalLM

    whole = ctxext.load(out, dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    for name, model in (("searched", whole), ("searched, in plain transformers", plain)):
        for key, part in (("long", ids), ("short", ids[:, :256])):
            with torch.no_grad():
                loss = float(model(part, labels=part).loss)
            assert rows[name][key] == pytest.approx(math.exp(loss), rel=1e-4)
    change = rows["searched"]["short"] / rows["as it was"]["short"] - 1
    assert report["short_change"] == pytest.approx(change)
    assert change <= 0.005


def test_without_start_tokens_plain_transformers_runs_it_to_the_bit(tmp_path, tokens):
    from transformers import AutoModelForCausalLM

    report = search(tmp_path / "out", start_tokens=(0,), short="none", held_out=0)
    assert report["schedule"]["start_tokens"] == 0
    assert report["checked_on"] == "the documents of the search"
    assert [row["schedule"] for row in report["rows"]][-1] == "searched"
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    live = ctxext.load("tiny", dtype=torch.float32)
    ctxext.patch(live, "longrope", 2, long_factor=report["schedule"]["params"]["long_factor"])
    ids = tokens.repeat(1, 2)
    want = logits(live, ids)
    assert torch.equal(logits(plain, ids), want)
    assert torch.equal(logits(ctxext.load(tmp_path / "out", dtype=torch.float32), ids), want)
    keys = read_config(tmp_path / "out")["rope_parameters"]
    assert keys["rope_type"] == "longrope"
    assert keys["short_factor"] == keys["long_factor"]
    assert keys["long_factor"] == report["schedule"]["params"]["long_factor"]


def test_short_factors_that_fit_two_documents_alone_are_not_kept(searched, monkeypatch):
    """A search that ends with bad short factors: those that it began with read other text better."""
    import ctxext.search.run as module

    phase = module._Search._phase

    def spoiled(self, name, *args):
        evaluator = phase(self, name, *args)
        if name == "short":
            evaluator.best = evaluator.space.candidate([1.2] * 16, evaluator.best.start_tokens)
        return evaluator

    monkeypatch.setattr(module._Search, "_phase", spoiled)
    monkeypatch.setattr(module._Search, "_write", lambda *args: None)
    out, _ = searched
    report = search(out.with_name("spoiled"), upper=2.0)
    assert report["schedule"]["params"]["short_factor"] == [1.0] * 16


def test_killed_and_resumed_is_uninterrupted(searched, tmp_path, monkeypatch, capsys):
    """SIGKILL in the middle of the log, by its own command; then --resume."""
    uninterrupted, report = searched
    out = tmp_path / "killed"
    words = ["search", "tiny", "--factor", "2", "--data", "tiny", "--documents", "2", "--held-out", "1"]
    words += ["--evaluations", "6", "--dtype", "float32", "-o", str(out)]
    process = subprocess.Popen([sys.executable, "-m", "ctxext", *words], stderr=subprocess.PIPE)
    log = tmp_path / "killed.search" / "log.jsonl"
    while process.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") > 4):
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, process.stderr.read()
    assert not out.exists()
    done = len(log.read_text().splitlines())
    code, _, err = run(monkeypatch, capsys, *words)
    assert code == 2
    assert "--resume" in err
    code, answer, err = run(monkeypatch, capsys, *words, "--resume", "--json")
    assert code == 0, err
    assert lines(out / "search") == lines(uninterrupted / "search")
    assert 4 < done < len(lines(out / "search"))
    assert json.loads(answer) == {**report, "out": str(out)}


def test_two_processes_find_the_same(searched, tmp_path):
    pytest.importorskip("accelerate")
    uninterrupted, report = searched
    out = tmp_path / "two"
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "-m", "ctxext"]
    words = ["search", "tiny", "--factor", "2", "--data", "tiny", "--documents", "2", "--held-out", "1"]
    words += ["--evaluations", "6", "--dtype", "float32", "-o", str(out), "--json"]
    ran = subprocess.run([*launch, *words], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert json.loads(ran.stdout) == {**report, "out": str(out)}
    assert lines(out / "search") == lines(uninterrupted / "search")


def test_searches_again_from_a_searched_folder(searched, tmp_path):
    out, report = searched
    again = search(tmp_path / "again", out, factor=4, evaluations=7)
    assert again["schedule"]["max_length"] == 1024
    assert again["schedule"]["rope"] == report["schedule"]["rope"]
    assert again["seeds"].keys() == {
        "pi",
        "ntk",
        "yarn",
        "previous",
        *(f"previous, {n}" for n in ("pi", "ntk", "yarn")),
    }
    assert again["best"] <= min(again["seeds"].values())
    assert stored_schedule(read_config(tmp_path / "again")).factor == 4
    assert json.loads(lines(tmp_path / "again" / "search")[0])["settings"]["factor"] == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again"]
    # The short factors start from both what the model was and what it became.
    assert again["short_change"] <= 0.005


@pytest.mark.parametrize("objective", ["needle"])
def test_needle_objective(tmp_path, objective):
    report = search(tmp_path / "out", objective=objective, short="original", strategy="evolution")
    assert report["settings"]["objective"] == "needle"
    assert report["schedule"]["params"]["short_factor"] == [1.0] * 16
    assert report["short_change"] == 0.0
    assert report["best"] <= min(report["seeds"].values())
    # A few digits: the model has been trained on the task.
    assert report["best"] < 20


def test_critical_dimension(tmp_path):
    report = search(tmp_path / "out", critical=-1, short="none", held_out=0, strategy="random")
    assert min(report["schedule"]["params"]["long_factor"][7:]) >= 2


def test_help_is_light():
    heavy = {"torch", "numpy", "cma", "datasets"}
    code = f"import sys, ctxext.cli.search; print(sorted({heavy} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("words", [["--start-tokens", "a,b"], ["--set", "survey=many"], ["--strategy", "curv"]])
def test_wrong_words_on_the_command_line(monkeypatch, capsys, words):
    code, out, err = run(monkeypatch, capsys, "search", "tiny", "--data", "tiny", *words)
    assert code == 2
    assert out == ""
    assert "Traceback" not in err
