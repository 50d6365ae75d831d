"""The fitted temperature: the loss is the model's own, the minimum is the curve's, the model comes back."""

import dataclasses
import json

import pytest
import torch
import typer
from stand_ins import byte_bpe
from typer.testing import CliRunner

import ctxext
from ctxext import text
from ctxext.cli.temperature import fit_temperature
from ctxext.errors import UsageError
from ctxext.evals import temperature
from ctxext.evals.models import TINY_TEXTS, load


@pytest.fixture(scope="module")
def subject():
    return load("tiny", dtype="float32")


@pytest.fixture(scope="module")
def documents(subject):
    return text.documents(TINY_TEXTS, subject.tokenizer, 320, 2).ids


def logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def test_the_loss_is_that_of_tokens_beyond_the_trained_length(subject, documents):
    before = logits(subject.model, documents[0])
    found = temperature.fit(subject, documents, "drope", 2, grid=(0.0, 0.1, 0.4))
    assert torch.equal(logits(subject.model, documents[0]), before)
    assert subject.schedule.method == "none"
    assert found["tokens"] == 2 * (320 - 256)
    sharp = load("tiny", dtype="float32").model
    for row in found["curve"]:
        ctxext.patch(sharp, "drope", 2, temperature=row["temperature"])
        losses = []
        for ids in documents:
            picked = logits(sharp, ids)[255:319].log_softmax(-1)
            losses.append(-picked[range(64), ids[256:320]].mean())
        assert row["nll"] == pytest.approx(sum(losses).item() / 2, rel=1e-5)
    best = min(found["curve"], key=lambda row: row["nll"])
    assert found["temperature"] == best["temperature"]
    assert [row["temperature"] for row in found["curve"]] == sorted(row["temperature"] for row in found["curve"])


def test_staged_methods_have_one_too_and_a_patched_model_comes_back(documents):
    subject = load("tiny", dtype="float32", method="yarn", factor=2)
    before = logits(subject.model, documents[0])
    found = temperature.fit(subject, documents, "dynamic_yarn", 2, {"granularity": 64}, grid=(0.0, 0.2, 0.4))
    assert torch.equal(logits(subject.model, documents[0]), before)
    assert subject.schedule.method == "yarn"
    assert len({row["nll"] for row in found["curve"]}) == len(found["curve"]) >= 3


def test_the_vertex_of_a_parabola():
    for a, b, c in ((0.0, 0.1, 0.3), (0.1, 0.2, 0.25)):
        points = [(x, 3 * (x - 0.17) ** 2 + 1) for x in (a, b, c)]
        assert temperature.vertex(points) == pytest.approx(0.17)
    assert temperature.vertex([(0, 1), (1, 1), (2, 1)]) is None


def test_a_minimum_between_grid_points_is_measured(subject, documents, monkeypatch):
    """With a loss that is a parabola with its minimum at 0.17."""
    from ctxext.evals import perplexity

    real = perplexity.prefix_curve

    def parabola(model, docs, lengths, **options):
        curve = real(model, [d[:320] for d in docs[:1]], lengths, **options)
        c = ctxext.schedule_of(model).params["temperature"]
        for row in curve.documents:
            row["length_nll"] = [0.0, 128 * (2 + (c - 0.17) ** 2)]
        return curve

    monkeypatch.setattr(perplexity, "prefix_curve", parabola)
    found = temperature.fit(subject, documents, "drope", 2, grid=(0.0, 0.1, 0.3))
    assert found["temperature"] == pytest.approx(0.17)
    assert len(found["curve"]) == 4


def test_mistakes(subject, documents):
    with pytest.raises(UsageError, match="yarn has no temperature"):
        temperature.fit(subject, documents, "yarn", 2)
    with pytest.raises(UsageError, match="at least three temperatures"):
        temperature.fit(subject, documents, "drope", 2, grid=(0, 1))
    with pytest.raises(UsageError, match="don't reach beyond the 256"):
        temperature.fit(subject, [d[:256] for d in documents], "drope", 2)


def test_the_command(tmp_path):
    app = typer.Typer()
    app.command("fit-temperature")(fit_temperature)
    args = ["tiny", "--factor", "1.25", "--documents", "1", "--grid", "0,0.1,0.2", "--dtype", "float32"]
    ran = CliRunner().invoke(app, [*args, "--json", "-o", str(tmp_path / "c.json")])
    assert ran.exit_code == 0, ran.output
    document = json.loads((tmp_path / "c.json").read_text())
    assert document["temperature"] in [row["temperature"] for row in document["results"]]
    assert document["settings"]["method"] == "drope"
    shown = CliRunner().invoke(app, args)
    assert "nats per token" in shown.output
    assert "use it as --set temperature=" in shown.output
    assert isinstance(CliRunner().invoke(app, [*args[:-4], "--grid", "a,b"]).exception, UsageError)


def test_texts_begin_with_the_tokenizers_bos(subject, documents):
    """As in every other measurement: what is fitted on is what will be read."""
    begins = []
    with_bos = dataclasses.replace(subject, tokenizer=byte_bpe(600, bos=True))
    hook = subject.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: begins.append(kwargs["input_ids"][0, 0].item()), with_kwargs=True
    )
    found = temperature.fit(with_bos, documents, "drope", 2, grid=(0.0, 0.1, 0.4))
    hook.remove()
    assert set(begins) == {0}
    assert found["tokens"] == 2 * (320 - 256)
    ids = [0, *documents[0][:319]]
    ctxext.patch(subject.model, "drope", 2, temperature=0.1)
    picked = logits(subject.model, ids)[255:319].log_softmax(-1)
    ctxext.unpatch(subject.model)
    one = temperature.fit(with_bos, documents[:1], "drope", 2, grid=(0.0, 0.1, 0.4))["curve"]
    (row,) = [row for row in one if row["temperature"] == 0.1]
    assert row["nll"] == pytest.approx(-picked[range(64), ids[256:320]].mean().item(), rel=1e-5)
