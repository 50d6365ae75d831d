"""The harness's model and tasks: equal to HFLM and to our own evaluators, nothing cut in silence, offline."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch

from ctxext.errors import CtxextError, UsageError
from ctxext.folders.source import TINY

pytest.importorskip("lm_eval")
os.environ.setdefault("LMEVAL_LOG_LEVEL", "ERROR")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM

import ctxext
from ctxext.evals.lm_eval.model import CtxextLM
from ctxext.evals.lm_eval.tasks import (
    TASKS_FOLDER,
    evaluate,
    lengths_of,
    passkey_dataset,
    ruler_dataset,
    tokenizer_of,
)
from ctxext.evals.models import load
from ctxext.evals.passkey import passkey
from ctxext.evals.perplexity import prefix_curve
from ctxext.evals.ruler.run import ruler
from ctxext.evals.words import embedded_text

TEXT = embedded_text()


@pytest.fixture(scope="module")
def subject():
    return load("tiny", method="yarn", factor=4, dtype="float32")


@pytest.fixture(scope="module")
def both(subject):
    options = {"max_length": 1024, "batch_size": 2, "softmax_dtype": "float32"}
    stock = HFLM(pretrained=subject.model, tokenizer=subject.tokenizer, add_bos_token=False, **options)
    return CtxextLM(subject, batch_size=2), stock


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]


def test_log_likelihoods_are_the_harnesss(both):
    own, stock = both
    context = TEXT[:600]
    pairs = [(context, f" {word}") for word in ("and", "in those days", "of", "the", "xylophone")]
    pairs += [(TEXT[1000:1200], TEXT[1200:1500]), ("", "In the beginning"), (context, " and")]
    asked = requests("loglikelihood", pairs)
    for ours, theirs in zip(own.loglikelihood(asked), stock.loglikelihood(asked), strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=2e-3)
        assert ours[1] == theirs[1]


def test_rolling_log_likelihoods_are_the_harnesss(both):
    own, stock = both
    asked = requests("loglikelihood_rolling", [(TEXT[:9000],), (TEXT[20000:20400],)])
    ours, theirs = own.loglikelihood_rolling(asked), stock.loglikelihood_rolling(asked)
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_equal_inputs_run_once(subject):
    lm = CtxextLM(subject, batch_size=1)
    calls = []
    hook = subject.model.model.register_forward_hook(lambda *args: calls.append(1))
    ids = lm.tok_encode(TEXT[:300])
    answers = lm._loglikelihood_tokens([(None, ids, [token]) for token in range(5, 25)], disable_tqdm=True)
    hook.remove()
    assert sum(probability > -20 for probability, _ in answers) > 1
    assert len(calls) <= 5, "one body pass, its head, and at most the proof of the head"


def test_generation_of_a_staged_model():
    staged = load("tiny", method="dynamic_yarn", factor=4, dtype="float32")
    lm = CtxextLM(staged)
    prompt = TEXT[: 4 * 300]
    ids = staged.tokenizer(prompt, return_tensors="pt").input_ids
    assert ids.shape[1] > 256
    with torch.no_grad():
        for _ in range(12):  # the whole prefix again for each token
            ids = torch.cat([ids, staged.model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    (said,) = lm.generate_until(requests("generate_until", [(prompt, {"max_gen_toks": 12, "until": []})]))
    assert said == staged.tokenizer.decode(ids[0, -12:], skip_special_tokens=True)


def test_prompts_that_do_not_fit_are_refused(both):
    lm = both[0]
    long = requests("loglikelihood", [(TEXT[:9000], " and")])
    with pytest.raises(CtxextError, match="doesn't fit in 1025") as error:
        lm.loglikelihood(long)
    assert "truncate=True" in error.value.hint
    with pytest.raises(CtxextError, match="doesn't fit"):
        lm.generate_until(requests("generate_until", [(TEXT[:9000], {"max_gen_toks": 8, "until": []})]))
    cutting = CtxextLM(lm.subject, truncate="True")
    assert cutting.loglikelihood(long)[0][0] < 0


def test_arguments_as_the_command_line_gives_them(tmp_path):
    made = get_model("ctxext").create_from_arg_string(
        "pretrained=tiny,method=yarn,factor=8,beta_fast=16,dtype=float32", {"batch_size": "2", "device": "cuda:0"}
    )
    assert made.max_length == 2048
    assert made.subject.schedule.params["beta_fast"] == 16
    assert made.get_model_info()["ctxext_schedule"]["method"] == "yarn"
    folder = ctxext.patch_checkpoint("tiny", tmp_path / "out", method="dynamic_ntk", factor=2).out
    stored = CtxextLM(str(folder), max_length=300)
    assert stored.max_length == 300
    assert ctxext.schedule_of(stored.model).method == "dynamic_ntk"
    for options, message in (
        ({"nonsense": 1}, "unknown model_args nonsense"),
        ({"method": "yarn", "factor": 2, "beta_fsat": 1}, "beta_fsat"),
        ({"batch_size": "auto"}, "batch_size"),
    ):
        with pytest.raises(UsageError, match=message):
            CtxextLM("tiny", **options)


def test_our_tasks_say_what_our_evaluators_say(subject, tmp_path):
    metadata = {"tokenizer": "tiny", "max_seq_lengths": [400, 1000], "trials": 2, "depths": 3, "samples": 2}
    metadata |= {"example": False, "bucket": 250}
    tasks = ["ctxext_passkey", "ctxext_ppl", "ctxext_niah_single_1", "ctxext_fwe"]
    lm = CtxextLM(subject)
    found = evaluate(lm, tasks, metadata=metadata, out=tmp_path)["results"]
    keyed = passkey(subject.model, subject.tokenizer, [400, 1000], depths=[0, 0.5, 1], trials=2)
    for row in keyed.lengths:
        assert found["ctxext_passkey"][f"acc_{row['length']},none"] == row["accuracy"]
        assert found["ctxext_passkey"][f"logprob_{row['length']},none"] == pytest.approx(row["logprob"], abs=1e-3)
    ids = subject.tokenizer(TEXT, add_special_tokens=False).input_ids
    curve = prefix_curve(subject.model, [ids], [1000], bucket=250)
    assert found["ctxext_ppl"]["ppl,none"] == pytest.approx(curve.rows[0]["ppl"], rel=1e-5)
    assert found["ctxext_ppl"]["nll_500,none"] == pytest.approx(curve.buckets[1]["nll"], abs=0.1)
    grid = {"tasks": ["niah_single_1", "fwe"], "samples": 2, "example": False}
    own = ruler(subject.model, subject.tokenizer, [400, 1000], **grid)
    for row in own.rows:
        assert found[f"ctxext_{row['task']}"][f"score_{row['length']},none"] == row["score"]
    (path,) = tmp_path.rglob("results_*.json")
    stored = json.loads(path.read_text())
    assert {"results", "configs", "versions", "n-shot", "higher_is_better", "n-samples", "config"} <= set(stored)
    assert stored["config"]["ctxext_schedule"]["method"] == "yarn"
    assert stored["higher_is_better"]["ctxext_ppl"]["ppl"] is False


def test_unknown_tasks_and_missing_tokenizers_are_named(both):
    with pytest.raises(CtxextError, match="need a tokenizer") as error:
        tokenizer_of({"trials": 3})
    assert "metadata" in error.value.hint
    assert lengths_of({"max_seq_lengths": "2048,512"}) == [512, 2048]
    assert lengths_of({}) == [4096]
    with pytest.raises(UsageError, match="isn't a folder"):
        evaluate(both[0], ["ctxext_vt"], include_path=["/no/such"])


def test_the_folder_of_tasks_is_complete():
    names = {path.stem for path in TASKS_FOLDER.glob("ctxext_*.yaml")}
    assert {"ctxext_passkey", "ctxext_ppl", "ctxext_vt", "ctxext_cwe", "ctxext_fwe"} <= names
    assert len(names) == 12


@pytest.mark.slow
def test_the_harnesss_own_command_line(tmp_path, monkeypatch, capsys):
    """`python -m ctxext.evals.lm_eval` is `lm_eval` with our model and tasks."""
    from ctxext.evals.lm_eval.__main__ import main

    command = ["lm_eval", "--model", "ctxext", "--tasks", "ctxext_passkey"]
    command += ["--model_args", "pretrained=tiny,method=dynamic_yarn,factor=2,dtype=float32"]
    command += ["--metadata", '{"max_seq_lengths": [300], "trials": 1, "depths": 2}', "--output_path"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [*command, str(tmp_path)])
    assert not main()
    assert "acc_300" in capsys.readouterr().out
    assert list(tmp_path.rglob("results_*.json"))


def test_tasks_that_make_their_own_texts_get_a_tokenizer():
    """The harness's RULER tasks load `pretrained` by transformers, which doesn't know `tiny`."""
    from ctxext.evals.lm_eval.__main__ import with_tokenizer

    line = ["--model", "ctxext", "--model_args", "pretrained=tiny,method=yarn,factor=4", "--tasks", "x"]
    assert with_tokenizer(line) == [*line[:3], f"{line[3]},tokenizer={TINY}", *line[4:]]
    joined = ["--model", "ctxext", f"--model_args={line[3]}", "--tasks=x"]
    assert with_tokenizer(joined) == [*joined[:2], f"{joined[2]},tokenizer={TINY}", joined[3]]
    for other in ("pretrained=some/folder", "pretrained=tiny,tokenizer=mine"):
        assert with_tokenizer(["--model_args", other]) == ["--model_args", other]
        assert with_tokenizer([f"--model_args={other}"]) == [f"--model_args={other}"]


def test_our_tasks_are_on_the_path_unless_another_folder_is():
    from ctxext.evals.lm_eval.__main__ import with_tasks

    ours = ["--include_path", str(TASKS_FOLDER)]
    for line in (["--tasks", "x"], ["run", "--tasks=x"]):
        assert with_tasks(line) == [*line, *ours]
    others = ["--tasks", "x", "--include_path", "/x"], ["--include_path=/x", "--tasks=x"]
    for line in (*others, ["ls", "tasks"], []):
        assert with_tasks(line) == line


def test_a_limit_keeps_every_length(subject):
    """Rows go round the lengths, so that the first few have all of them; what can't be cut is refused."""
    metadata = {"tokenizer": "tiny", "max_seq_lengths": [400, 600], "trials": 2, "depths": 2, "samples": 2}
    rows = passkey_dataset(**metadata)["test"]
    assert [row["length"] for row in rows] == [400, 600] * 4
    assert {row["depth"] for row in rows.select(range(4))} == {0, 1}
    assert [row["length"] for row in ruler_dataset("fwe", **metadata, example=False)["test"]] == [400, 600] * 2
    found = evaluate(CtxextLM(subject), ["ctxext_passkey"], metadata=metadata, limit=2)["results"]
    assert {"acc_400,none", "acc_600,none"} <= set(found["ctxext_passkey"])
    with pytest.raises(UsageError, match="ctxext_ppl can't be limited"):
        evaluate(CtxextLM(subject), ["ctxext_passkey", "ctxext_ppl"], metadata=metadata, limit=2)


@pytest.mark.parametrize("limit", [["--limit", "2"], ["--limit=2"], ["-L", "2"]])
def test_the_harnesss_own_command_line_refuses_such_a_limit(limit, monkeypatch, capsys):
    from ctxext.evals.lm_eval.__main__ import main

    monkeypatch.setattr(sys, "argv", ["lm_eval", "--tasks=ctxext_fwe,ctxext_ppl", *limit])
    assert main() == 2
    assert "ctxext_ppl can't be limited" in capsys.readouterr().err
