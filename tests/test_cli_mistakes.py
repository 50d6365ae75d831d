"""Mistakes at the command line: a message with the fix, the right exit code, never a traceback."""

import json
import shutil

import pytest
from conftest import run
from gguf import GGUFReader

import ctxext
from ctxext.files import read_config
from ctxext.folders.source import TINY


def failed(monkeypatch, capsys, *words):
    """What a command says that must fail without a traceback, and its exit code; stdout must stay empty."""
    code, out, err = run(monkeypatch, capsys, *words)
    assert out == "", out
    assert "Traceback" not in err
    assert "error: " in err or "Usage:" in err, err
    return code, err


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    from ctxext.folders.gguf_export import export

    folder = tmp_path_factory.mktemp("gguf")
    ctxext.patch_checkpoint("tiny", folder / "yarn", method="yarn", factor=4)
    return export(folder / "yarn", folder / "yarn.gguf").out, export("tiny", folder / "tiny.gguf").out


@pytest.mark.parametrize("setting", ["factor=3", "method=pi", "dtype=float16", "out=elsewhere", "force=true"])
@pytest.mark.parametrize("words", [["patch", "tiny"], ["portability", "tiny"], ["eval", "ppl", "tiny"]])
def test_a_setting_is_never_an_argument_of_ours(monkeypatch, capsys, tmp_path, words, setting):
    monkeypatch.chdir(tmp_path)
    code, err = failed(monkeypatch, capsys, *words, "--method", "yarn", "--set", setting)
    assert code == 2
    assert f"no option '{setting.split('=')[0]}'" in err
    assert not list(tmp_path.iterdir())


def test_places_that_can_not_be_written(monkeypatch, capsys, tmp_path):
    """A file where a folder must be made stops root as well, whom no permission does."""
    (tmp_path / "file").write_text("mine")
    below = tmp_path / "file" / "x"
    for words in (
        ["demo", "-o", below],
        ["compare", "tiny", "--methods", "pi", "--factor", "2", "-o", below],
        ["inspect", "tiny", "--plot", f"{below}.png"],
        ["patch", "tiny", "--method", "pi", "-o", below],
    ):
        code, err = failed(monkeypatch, capsys, *words)
        assert code == 1
        assert "fix: " in err
        assert "Not a directory" in err or "exists" in err or "can't" in err, err
    assert (tmp_path / "file").read_text() == "mine"


def test_names_are_not_markup(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("[red]a", "m[/]odel"):
        code, out, err = run(monkeypatch, capsys, "patch", "tiny", "--method", "pi", "-o", name)
        assert code == 0, err
        assert f"wrote {name}:" in out
        assert read_config(tmp_path / name)["max_position_embeddings"] == 1024
    code, out, err = run(monkeypatch, capsys, "inspect", "[red]a", "--json")
    assert code == 0, err


def test_dry_run_refuses_what_the_run_would(monkeypatch, capsys, tmp_path, gguf):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    for model in ("tiny", gguf[1]):
        words = ["patch", model, "--method", "pi", "-o", tmp_path / "out", "--dry-run"]
        assert "exists already" in failed(monkeypatch, capsys, *words)[1]
        assert "not a model folder" in failed(monkeypatch, capsys, *words, "--force")[1]
        more = ["--method", "pi", "--dry-run", "--dtype", "half"]
        assert failed(monkeypatch, capsys, "patch", model, *more)[0] == 2


def test_contradictions(monkeypatch, capsys, tmp_path, gguf):
    words = ["patch", gguf[1], "--method", "pi", "--in-gguf", "--target", "mlx", "-o", tmp_path / "x.gguf"]
    assert failed(monkeypatch, capsys, *words)[0] == 2
    assert failed(monkeypatch, capsys, "methods", "--markdown", "--json")[0] == 2
    assert failed(monkeypatch, capsys, "inspect", "tiny", "--plot", "x.txt")[0] == 2
    assert "there is no folder" in failed(monkeypatch, capsys, "merge", tmp_path / "none", "-o", tmp_path / "m")[1]
    code, err = failed(monkeypatch, capsys, "eval", "ppl", "tiny", "--lengths", "64", "--attention", "flesh")
    assert code == 2
    assert "attention 'flesh'" in err


def test_inspect_at_a_factor_that_makes_many_stages(monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys, "inspect", "tiny", "--factor", "1000", "--json")
    assert code == 0, err
    left = {entry["method"] for entry in json.loads(out)["left_out"]}
    assert left >= {"dynamic_pi", "dynamic_ntk", "dynamic_yarn"}


def test_a_gguf_is_read_by_its_header(monkeypatch, capsys, tmp_path, gguf):
    """Nothing is converted to look at it: its weights may be larger than memory."""
    monkeypatch.setenv("CTXEXT_CACHE", str(tmp_path / "cache"))
    scaled, plain = gguf
    for file, transformers in ((scaled, "misread"), (plain, "exact")):
        code, out, err = run(monkeypatch, capsys, "portability", file, "--json")
        assert code == 0, err
        found = {v["runtime"]: v for v in json.loads(out)["results"]}
        assert found["llama.cpp"]["runs"] == "exact"
        assert found["llama.cpp"]["command"] == f"llama-server -m {file} -c {1024 if file == scaled else 256}"
        assert found["transformers"]["runs"] == transformers
        assert found["vLLM"]["runs"] == "unchecked"
        code, out, err = run(monkeypatch, capsys, "inspect", file, "--json")
        assert code == 0, err
        assert json.loads(out)["now"]["method"] == ("yarn" if file == scaled else "none")
    words = ["--method", "yarn", "--factor", "4", "--json"]
    code, out, err = run(monkeypatch, capsys, "portability", plain, *words)
    assert code == 0, err
    assert "tiny-yarn-4x" in json.loads(out)["results"][1]["command"]
    code, out, err = run(monkeypatch, capsys, "patch", plain, *words, "--dry-run", "-o", tmp_path / "new")
    assert code == 0, err
    assert not (tmp_path / "cache").exists()
    # And the preview is what is written.
    written = ctxext.patch_checkpoint(plain, tmp_path / "new", method="yarn", factor=4)
    keys = ("rope_parameters", "rope_theta", "max_position_embeddings")
    assert json.loads(out)["config"] == json.loads(json.dumps({k: written.config[k] for k in keys}))
    assert GGUFReader(plain).tensors


def test_portability_without_a_model_says_what_it_supposes(monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys, "portability", "--method", "ntk_by_parts", "--factor", "8")
    assert code == 0
    assert "theta 500000, 128 rotary dimensions, trained on 8,192 tokens" in err
    assert "hf-overrides" not in out
    code, out, err = run(monkeypatch, capsys, "portability", "tiny", "--method", "ntk_by_parts", "--factor", "8")
    assert code == 0
    assert "vllm serve tiny " in out
    assert "hf-overrides" in out
    assert "vllm serve tiny-ntk_by_parts-8x" in out


def test_portability_of_a_rope_type_that_nobody_knows(monkeypatch, capsys, tmp_path):
    folder = tmp_path / "wonder"
    shutil.copytree(TINY, folder)
    config = read_config(folder)
    for kind in ("wonder", ["yarn"]):
        config["rope_parameters"] = {**config["rope_parameters"], "rope_type": kind}
        (folder / "config.json").write_text(json.dumps(config))
        assert "rope type" in failed(monkeypatch, capsys, "portability", folder)[1]


BROKEN = {
    "empty": None,
    "length": {"max_position_embeddings": "many"},
    "negative length": {"max_position_embeddings": -5},
    "no length": {"max_position_embeddings": 0},
    "rope": {"rope_parameters": "yarn"},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 0.5}},
    "width": {"hidden_size": "abc", "head_dim": None},
    "heads": {"num_attention_heads": None, "head_dim": None},
    "window": {"sliding_window": "x"},
    "type": {"model_type": 5},
    "factor": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": "two"}},
}


@pytest.mark.parametrize("name", BROKEN)
def test_configs_that_no_command_can_use(monkeypatch, capsys, tmp_path, name):
    """The commands say what is wrong, and so does the doctor, whose word push takes."""
    folder = tmp_path / "broken"
    shutil.copytree(TINY, folder)
    config = {} if BROKEN[name] is None else {**read_config(folder), **BROKEN[name]}
    (folder / "config.json").write_text(json.dumps(config))
    for words in (["inspect"], ["patch", "--method", "pi", "--dry-run"], ["portability"]):
        code, _ = failed(monkeypatch, capsys, words[0], folder, *words[1:])
        assert code in (1, 2)
    code, out, _ = run(monkeypatch, capsys, "doctor", folder)
    assert code == 1, out
    assert "error: " in out
    assert "error(s)" in failed(monkeypatch, capsys, "push", folder, "a/b", "--dry-run")[1]


def test_the_doctor_reads_folders(monkeypatch, capsys, tmp_path, gguf):
    monkeypatch.setenv("CTXEXT_CACHE", str(tmp_path / "cache"))
    for words in (["doctor", gguf[0]], ["doctor", gguf[0], "--fix"], ["push", gguf[0], "a/b", "--dry-run"]):
        assert "is a GGUF file" in failed(monkeypatch, capsys, *words)[1]
    assert not (tmp_path / "cache").exists()
