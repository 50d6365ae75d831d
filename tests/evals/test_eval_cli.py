"""`ctxext eval`, `ctxext demo` and resumable comparisons, run for real on the embedded model."""

import json

import pytest
from conftest import run

import ctxext
from ctxext.cli.eval_options import parse_lengths
from ctxext.evals import demo
from ctxext.evals.compare import cells as compare
from ctxext.evals.measure import default_lengths
from ctxext.evals.models import TINY_TEXTS, load
from ctxext.text import documents


def test_ppl_of_tiny(monkeypatch, capsys, tmp_path):
    picture = tmp_path / "p.png"
    args = ("eval", "ppl", "tiny", "--method", "yarn", "--factor", 2, "--lengths", "256,512", "--dtype", "float32")
    code, out, err = run(monkeypatch, capsys, *args, "--plot", picture, "--json", "-o", tmp_path / "r.json")
    assert code == 0, err
    document = json.loads(out)
    assert document == json.loads((tmp_path / "r.json").read_text())
    assert document["schedule"]["method"] == "yarn"
    assert [row["length"] for row in document["results"]] == [256, 512]
    assert [row["tokens"] for row in document["results"]] == [255, 511]
    assert document["settings"]["data_sha256"]
    assert document["settings"]["torch"]
    # Below the trained length the control is the unpatched model itself.
    code, plain, _ = run(
        monkeypatch, capsys, "eval", "ppl", "tiny", "--lengths", "256", "--dtype", "float32", "--json"
    )
    unpatched = json.loads(plain)["results"][0]["ppl"]
    assert document["control"]["rows"][0]["ppl"] == pytest.approx(unpatched, rel=1e-5)
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, out, _ = run(monkeypatch, capsys, *args)
    assert code == 0
    assert "against crop" in out


def test_the_control_of_a_patched_folder_is_its_original(monkeypatch, capsys, tmp_path):
    folder = ctxext.patch_checkpoint("tiny", tmp_path / "out", method="pi", factor=2).out
    args = ("--lengths", "512", "--dtype", "float32", "--json")
    _, live, _ = run(monkeypatch, capsys, "eval", "ppl", "tiny", "--method", "pi", "--factor", 2, *args)
    _, stored, _ = run(monkeypatch, capsys, "eval", "ppl", folder, "--data", TINY_TEXTS[0], *args)
    live, stored = json.loads(live), json.loads(stored)
    assert live["results"] == stored["results"]
    assert live["control"] == stored["control"]
    assert live["control"]["rows"][0]["ppl"] < live["results"][0]["ppl"]


def test_sliding_window_option(monkeypatch, capsys, tmp_path):
    (tmp_path / "short.txt").write_text(TINY_TEXTS[0].read_text()[:4000])
    args = (
        "eval",
        "ppl",
        "tiny",
        "--data",
        tmp_path / "short.txt",
        "--lengths",
        "64,128",
        "--stride",
        64,
        "--dtype",
        "float32",
        "--json",
    )
    code, out, err = run(monkeypatch, capsys, *args)
    assert code == 0, err
    short, long = json.loads(out)["results"]
    assert long["ppl"] < short["ppl"]


def test_passkey_of_tiny(monkeypatch, capsys, tmp_path):
    picture = tmp_path / "k.png"
    args = ("eval", "passkey", "tiny", "--lengths", "256,512", "--trials", 2, "--depths", 3, "--dtype", "float32")
    code, out, err = run(monkeypatch, capsys, *args, "--json", "--plot", picture)
    assert code == 0, err
    document = json.loads(out)
    assert [(row["length"], row["depth"]) for row in document["results"]] == [
        (length, depth) for length in (256, 512) for depth in (0.0, 0.5, 1.0)
    ]
    assert [row["trials"] for row in document["lengths"]] == [6, 6]
    assert document["control"]["lengths"][1]["trials"] == 6
    assert picture.exists()
    code, out, _ = run(monkeypatch, capsys, *args)
    assert "passkey" in out


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("ppl", "tiny", "--lengths", "many"), 2, "is not a list of tokens"),
        (("ppl", "tiny", "--lengths", "1"), 2, "at least 2 tokens"),
        (("ppl", "/no/such", "--plot", "curve.pdf"), 2, "can't draw to 'curve.pdf'"),
        (("passkey", "/no/such", "--plot", ""), 2, "can't draw to '.'"),
        (("ppl", "tiny", "--set", "beta_fast=1"), 2, "is an option of a method"),
        (("ppl", "tiny", "--data", "/no/such"), 2, "doesn't exist"),
        (("ppl", "tiny", "--dtype", "int8"), 2, "'int8' is not one of 'auto'"),
        (("ppl", "tiny", "--lengths", "10M"), 2, "is not a list of tokens"),
        (("ppl", "tiny", "--lengths", "900000"), 1, "no text has 900000 tokens"),
        (("passkey", "tiny", "--lengths", "20"), 2, "doesn't fit in 20"),
        (("passkey", "/no/such"), 1, "there is no folder"),
    ],
)
def test_bad_usage(args, code, message, monkeypatch, capsys):
    got, out, err = run(monkeypatch, capsys, "eval", *args)
    assert (got, out) == (code, "")
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


def test_other_models_need_data(monkeypatch, capsys, llama_folder):
    code, out, err = run(monkeypatch, capsys, "eval", "ppl", llama_folder)
    assert (code, out) == (2, "")
    assert "no text to measure on" in err


def test_default_lengths():
    assert default_lengths(256, 1024) == [128, 256, 512, 1024]
    assert default_lengths(256, 256) == [128, 256, 512]
    assert default_lengths(256, 768) == [128, 256, 512, 768]
    assert default_lengths(256, 384) == [128, 256, 384]
    assert default_lengths(256, 192) == [128, 256, 512]
    assert parse_lengths("2k,512,512") == [512, 2048]


def test_demo_end_to_end(monkeypatch, capsys, tmp_path):
    """The whole command at its smallest, up to 4x; a second run reads every cell back."""
    assert demo.FACTORS == (1, 2, 4, 8)
    monkeypatch.setattr(demo, "FACTORS", (1, 2, 4))
    monkeypatch.setattr(demo, "DEPTHS", (0.0, 1.0))
    args = ("demo", "-o", tmp_path / "d", "--documents", 2, "--trials", 1)
    code, out, err = run(monkeypatch, capsys, *args)
    assert code == 0, err
    for name in ("unpatched", "crop control", "yarn", "self_extend"):
        assert name in out
    assert "measuring" in err
    for picture in ("perplexity.png", "passkey.png"):
        assert (tmp_path / "d" / picture).read_bytes().startswith(b"\x89PNG")
    code, again, err = run(monkeypatch, capsys, *args, "--json")
    assert code == 0
    assert "measuring" not in err
    report = json.loads(again)
    assert [row["length"] for row in report["rows"]["yarn"]] == [512, 1024]
    assert [row["length"] for row in report["rows"]["unpatched"]] == [256, 512, 1024]
    assert report == json.loads((tmp_path / "d" / "demo.json").read_text())
    # The textbook picture: the unpatched model falls apart, the crop control doesn't.
    assert report["rows"]["unpatched"][-1]["ppl"] > 1.5 * report["rows"]["crop control"][-1]["ppl"]


def test_cells_resume_and_leave_the_model_as_it_was(tmp_path):
    subject = load("tiny", dtype="float32")
    docs = documents(TINY_TEXTS, subject.tokenizer, 512, 1)
    said = []
    cells = compare.Cells(subject, tmp_path, on_cell=said.append)
    variants = [compare.UNPATCHED, compare.Variant("pi x2", "pi", 2)]
    found = cells.ppl(variants, docs, [256, 512], bucket=256, bos=None)
    assert said == ["ppl, crop control", "ppl, unpatched", "ppl, pi x2"]
    assert ctxext.schedule_of(subject.model) is None
    assert found["pi x2"]["schedule"]["method"] == "pi"
    assert found["unpatched"]["schedule"] is None
    again = cells.ppl([*variants, compare.Variant("pi x4", "pi", 4)], docs, [256, 512], bucket=256, bos=None)
    assert said[3:] == ["ppl, pi x4"]
    assert {k: again[k] for k in found} == found
    cells.ppl(variants, docs, [512], bucket=256, bos=None)
    assert said[4:] == ["ppl, crop control", "ppl, unpatched", "ppl, pi x2"], "other settings are other cells"
