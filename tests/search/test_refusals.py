"""What a search refuses before it has spent anything or left anything behind, and models that others scaled."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from conftest import pico_model, run

import ctxext
from ctxext.config.read import read_schedule
from ctxext.errors import CtxextError, UsageError
from ctxext.files import read_config
from ctxext.folders.load import stored_schedule
from ctxext.folders.patch import patch_checkpoint
from ctxext.folders.source import TINY
from ctxext.search.run import search_factors

SMALL = {"factor": 2, "data": ("tiny",), "documents": 2, "held_out": 1, "evaluations": 4, "dtype": "float32"}
SMALL |= {"strategy": "random"}


def search(out, model="tiny", **changes):
    return search_factors(model, out=out, **{**SMALL, **changes})


def patched(folder, method, factor=2, **more):
    patch_checkpoint("tiny", folder, method=method, factor=factor, **more)
    return folder


def test_a_model_that_answers_nan_is_refused(tmp_path):
    model = ctxext.load("tiny", dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight[3] = math.nan
    folder = tmp_path / "broken"
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    with pytest.raises(CtxextError, match="finite"):
        search(tmp_path / "out", folder)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken"]


def test_wrong_options(tmp_path):
    with pytest.raises(UsageError, match="no search to go on with"):
        search(tmp_path / "none", resume=True)
    for changes, message in (
        ({"data": ()}, "--data"),
        ({"objective": "ppl"}, "perplexity, needle"),
        ({"short": "long"}, "search, original, none"),
        ({"existing": "compose"}, "extend, replace"),
        ({"fallback": "maybe"}, "static, refuse"),
        ({"strategy": "curv"}, "curve"),
        ({"strategy": "curve", "constants": {"surve": 3}}, "survey"),
        ({"factor": 0.5}, "at least 1"),
        ({"documents": 0}, "at least one document"),
        ({"evaluations": 0}, "at least 1"),
        ({"evaluations": 2}, "at least 3"),
        ({"critical": 40}, "0..16"),
        ({"seed": -1}, "0..4294967295"),
        ({"dtype": "half"}, "float16"),
        ({"attention": "flesh"}, "attention 'flesh'"),
        ({"upper": math.inf}, "share"),
        ({"start_tokens": (1000, 2000)}, "1000, 2000 all lie beyond"),
        ({"strategy": "curve", "constants": {"population": 2}}, "population"),
        ({"strategy": "evolution", "constants": {"parents": 0}}, "parent"),
    ):
        with pytest.raises(UsageError) as error:
            search(tmp_path / "wrong", **changes)
        assert message in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["file", "notes", ".", "itself", "model"])
def test_an_output_that_can_not_be_written(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    model = patched(tmp_path / "itself", "yarn")
    patched(tmp_path / "model", "pi")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("mine")
    for force in (False, True):
        if name == "model" and force:
            continue
        with pytest.raises(CtxextError, match=r"exists|not a model folder|holds, the model"):
            search(Path(name), model, force=force)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "itself", "model", "notes"]
    assert stored_schedule(read_config(model)).method == "yarn"


def test_layers_that_can_not_run_stages_are_found_before_the_search(tmp_path):
    more = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 64, "num_hidden_layers": 2}
    model = pico_model("qwen2", max_position_embeddings=256, vocab_size=2048, **more)
    folder = tmp_path / "mixed"
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    with pytest.raises(CtxextError, match=r"full attention.*\n.*--start-tokens 0 --short none"):
        search(tmp_path / "out", folder)
    assert [p.name for p in tmp_path.iterdir()] == ["mixed"]
    report = search(tmp_path / "out", folder, start_tokens=(0,), short="none")
    assert stored_schedule(read_config(tmp_path / "out")).to_dict() == report["schedule"]


def test_what_can_not_be_gone_on_with(tmp_path):
    for name, more, message in (
        ("yarn", {"factor": 2}, "extended to 8 times.*would shorten"),
        ("yarn", {"factor": 16, "trained_length": 128}, "counts from 256 trained tokens, not from 128"),
        ("alibi", {"factor": 8}, "alibi isn't a table"),
        ("drope", {"factor": 8}, "drope isn't a table"),
    ):
        folder = tmp_path / name
        if not folder.exists():
            patched(folder, name, 8)
        with pytest.raises(CtxextError, match=message) as error:
            search(tmp_path / "out", folder, **more)
        assert "--existing replace" in str(error.value)
    assert not (tmp_path / "out.search").exists()


def test_replaced_scaling_is_measured_as_it_was(tmp_path):
    """The row of the model as it was is the folder's own loss, though the search begins from the original rope."""
    folder = patched(tmp_path / "pi", "pi", 2)
    report = search(tmp_path / "out", folder, existing="replace", short="none", start_tokens=(0,))
    text = sorted((TINY.parent / "text").glob("*.txt"))[2].read_text()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = torch.tensor([AutoTokenizer.from_pretrained(TINY)(text, verbose=False)["input_ids"][:512]])
    with torch.no_grad():
        loss = float(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids, labels=ids).loss)
    assert report["rows"][0]["schedule"] == "as it was"
    assert report["rows"][0]["long"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert set(report["seeds"]) == {"pi", "ntk", "yarn"}


def test_a_scaling_that_no_schedule_tells_is_called_by_its_name(tmp_path):
    folder = patched(tmp_path / "alibi", "alibi", 2)
    report = search(tmp_path / "out", folder, existing="replace", short="none")
    assert report["rows"][0]["schedule"] == "unpatched"


def scaled_by_others(folder, length, **keys):
    """The embedded model in a folder whose config.json has a scaling and no block of ctxext's."""
    shutil.copytree(TINY, folder)
    config = read_config(folder)
    config["rope_parameters"] = {"rope_theta": config["rope_parameters"]["rope_theta"], **keys}
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": length}))
    return folder


def test_a_linear_scaling_that_says_its_original_length(tmp_path):
    """What is written is what was searched, and as long: the factor counts from what the weights read."""
    keys = {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 256}
    folder = scaled_by_others(tmp_path / "linear", 512, **keys)
    assert read_schedule(read_config(folder)).rope.trained_length == 256
    report = search(tmp_path / "out", folder, factor=4, evaluations=8)
    written = read_config(tmp_path / "out")
    assert written["max_position_embeddings"] == 2048
    assert stored_schedule(written).to_dict() == report["schedule"]


def test_a_scaling_that_the_weights_were_trained_with(tmp_path):
    """As of Llama 3.1: the factor counts from all that the model reads, and short text stays as it was."""
    from transformers import AutoModelForCausalLM

    bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    folder = scaled_by_others(tmp_path / "native", 256, rope_type="llama3", factor=4.0, **bounds)
    report = search(tmp_path / "out", folder, short="original", start_tokens=(0,))
    assert report["lengths"] == {"long": 512, "short": 256}
    assert set(report["seeds"]) == {"pi", "ntk", "yarn"}
    assert report["short_change"] == 0.0
    ids = torch.arange(3, 203)[None]
    whole, native = ctxext.load(tmp_path / "out"), AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        assert torch.allclose(whole(ids).logits, native(ids).logits, atol=1e-5)
    assert stored_schedule(read_config(tmp_path / "out")).to_dict() == report["schedule"]


def test_a_gguf_is_written_in_the_dtype_that_was_searched(tmp_path, monkeypatch, capsys):
    from safetensors import safe_open

    monkeypatch.setenv("CTXEXT_CACHE", str(tmp_path / "cache"))
    code, _, err = run(monkeypatch, capsys, "export", "tiny", "--to", "gguf", "-o", str(tmp_path / "tiny.gguf"))
    assert code == 0, err
    search(tmp_path / "out", tmp_path / "tiny.gguf", short="none", start_tokens=(0,))
    with safe_open(next((tmp_path / "out").glob("*.safetensors")), "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.float32}  # noqa: SIM118
    assert len(list((tmp_path / "cache" / "gguf").iterdir())) == 1


def test_short_text_keeps_the_attention_scale_that_the_model_reads_it_with(tmp_path):
    folder = patched(tmp_path / "yarn", "yarn", 2)
    scale = stored_schedule(read_config(folder)).stages[0].attention_scale
    assert scale > 1.05
    report = search(tmp_path / "out", folder, factor=4, evaluations=8)
    first, second = report["schedule"]["stages"]
    assert first["attention_scale"] == scale
    assert second["attention_scale"] == pytest.approx(math.sqrt(1 + math.log(4) / math.log(256)))
