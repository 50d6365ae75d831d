"""Attention by default: sdpa where a family has it, else eager, and said once; what isn't there: a clear error."""

import json
import shutil

import pytest
import torch
import transformers
from conftest import pico_config, run
from transformers import AutoModelForCausalLM

import ctxext
from ctxext.errors import CtxextWarning, UsageError
from ctxext.evals import models
from ctxext.folders.source import TINY

FAMILIES = {
    "gemma2": {"sliding_window": 64, "query_pre_attn_scalar": 32},
    "vaultgemma": {"sliding_window": 64, "query_pre_attn_scalar": 32},
    "gpt_oss": {"sliding_window": 64, "num_local_experts": 2, "num_experts_per_tok": 1},
    "llama": {},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """By family a pico model of `tiny`'s words, made once."""
    made = {}

    def of(family):
        if family not in made:
            out = made[family] = tmp_path_factory.mktemp(family) / family
            config = pico_config(family, vocab_size=1024, max_position_embeddings=256, **FAMILIES[family])
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config, attn_implementation="eager").save_pretrained(out)
            saved = json.loads((out / "config.json").read_text())
            if family == "gpt_oss":  # born scaled, which is another matter
                saved["rope_parameters"] = {"rope_type": "default", "rope_theta": 150000.0}
            (out / "config.json").write_text(json.dumps(saved))
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(TINY / name, out)
        return made[family]

    return of


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("In the beginning God created the heaven and the earth. " * 400)
    return path


def commands(text, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"output: {tmp_path / 'run'}\nmodel: {{path: MODEL}}\nmethod: {{name: yarn, factor: 2}}\n"
        f"data: {{sources: [{{path: {text}}}], length: 32, cache: {tmp_path / 'cache'}}}\n"
        "train: {steps: 1, learning_rate: 0.001}\n"
    )
    return {
        "ppl": ["eval", "ppl", "MODEL", "--data", text, "--lengths", "64"],
        "passkey": ["eval", "passkey", "MODEL", "--lengths", "100", "--trials", "1"],
        "compare": [
            "compare",
            "MODEL",
            "--data",
            text,
            "--lengths",
            "128",
            "--methods",
            "pi",
            "-o",
            tmp_path / "r",
        ],
        "train": ["train", recipe, "model.path=MODEL"],
    }


@pytest.mark.parametrize("command", ["ppl", "passkey", "compare", "train"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_runs_on_every_family(family, command, folder, text, tmp_path, monkeypatch, capsys):
    if command == "compare" and family not in ("gemma2", "llama"):
        pytest.skip("one family without sdpa will do")
    pytest.importorskip("peft")
    where = str(folder(family))
    words = [str(word).replace("MODEL", where) for word in commands(text, tmp_path)[command]]
    code, _, err = run(monkeypatch, capsys, *words)
    assert code == 0, err
    # Once, and only where the class of transformers has none.
    config = transformers.AutoConfig.from_pretrained(where)
    has = transformers.AutoModelForCausalLM._model_mapping[type(config)]._supports_sdpa
    assert has == (family == "llama")
    assert err.count("transformers has no sdpa for") == (0 if has else 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_is_what_it_says(family, folder):
    subject = models.load(folder(family))
    assert subject.identity()["attention"] == ("sdpa" if family == "llama" else "eager")


@pytest.mark.parametrize("command", ["ppl", "passkey", "compare", "train"])
@pytest.mark.parametrize("wanted", ["sdpa", "flash_attention_2", "sdp"])
def test_what_can_not_be_had_is_an_error_that_says_so(
    wanted, command, folder, text, tmp_path, monkeypatch, capsys
):
    where = str(folder("gemma2"))
    words = [str(word).replace("MODEL", where) for word in commands(text, tmp_path)[command]]
    words += [f"model.attention={wanted}"] if command == "train" else ["--attention", wanted]
    code, _, err = run(monkeypatch, capsys, *words)
    assert code == 2
    assert f"attention {wanted!r} can't be had" in err
    assert "eager" in err
    assert "Traceback" not in err
    if wanted == "flash_attention_2":
        assert "installed" in err


@pytest.mark.parametrize("method", ["yarn", "dynamic_yarn"])
def test_folders_of_ours_say_it_too(method, folder, tmp_path):
    out = ctxext.patch_checkpoint(folder("llama"), tmp_path / "out", method=method, factor=2).out
    assert ctxext.load(out, attn_implementation="auto").config._attn_implementation == "sdpa"
    with pytest.raises(UsageError, match="'flash_attention_2' can't be had"):
        ctxext.load(out, attn_implementation="flash_attention_2")


def test_other_errors_are_not_taken_for_it(folder):
    """A ValueError of another kind stays what it is, whatever attention was asked for."""
    with pytest.raises(ValueError, match="state_dict") as other:
        ctxext.load(folder("llama"), attn_implementation="eager", state_dict={})
    assert not isinstance(other.value, UsageError)


def test_eager_asked_for_says_nothing(folder, recwarn):
    models.load(folder("gemma2"), attention="eager")
    assert not [w for w in recwarn if issubclass(w.category, CtxextWarning)]
