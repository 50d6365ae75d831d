"""Advice that names an option names one that the command has."""

import json
import re

import pytest
import typer
from conftest import pico_model, run

from ctxext.cli.app import app

DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "rope_parameters": None}
SWITCHING = {
    "rope_scaling": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 16,
        "long_factor": [4.0] * 16,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "max_position_embeddings": 256,
}
YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}
LACKING = {"rope_scaling": {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 64}}
REMOTE = {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "modeling_mine.M"}}
NO_LENGTH = {"max_position_embeddings": None}
FOLDERS = {"dynamic": DYNAMIC, "switching": SWITCHING, "yarn": YARN, "lacking": LACKING, "remote": REMOTE}
FOLDERS["no length"] = NO_LENGTH
COMMANDS = [
    ("patch", "-m", "yarn"),
    ("inspect",),
    ("portability",),
    ("portability", "-m", "yarn"),
    ("export",),
    ("search", "--data", "tiny"),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("advice") / "plain"
    pico_model().save_pretrained(folder)
    return folder


def folder_of(kind, plain, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((plain / "config.json").read_text()) | FOLDERS[kind]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((plain / "model.safetensors").read_bytes())
    return folder


def options_of(command):
    found = typer.main.get_command(app)
    for name in command.split():
        found = found.commands[name]
    return {option for parameter in found.params for option in parameter.opts}


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_hint_names_options_that_there_are(command, kind, plain, tmp_path, monkeypatch, capsys):
    folder = folder_of(kind, plain, tmp_path)
    monkeypatch.chdir(tmp_path)
    name, *rest = command
    _, _, err = run(monkeypatch, capsys, name, folder, *rest)
    hint = err.partition("fix:")[2]
    whose = re.search(r"ctxext (patch|doctor)\b", hint)
    known = options_of(name) | (options_of(whose.group(1)) if whose else set())
    assert set(re.findall(r"--[a-z][a-z-]+", hint)) <= known
    assert "Traceback" not in err


@pytest.mark.parametrize("kind", ["dynamic", "switching"])
def test_inspect_looks_at_a_scaling_without_fixed_frequencies(kind, plain, tmp_path, monkeypatch, capsys):
    folder = folder_of(kind, plain, tmp_path)
    code, out, err = run(monkeypatch, capsys, "inspect", folder, "--json")
    assert code == 0, err
    report = json.loads(out)
    keys = FOLDERS[kind]["rope_scaling"]
    length = 256 if kind == "switching" else 64
    assert report["now"] == {"method": keys["rope_type"], "factor": 4.0, "max_length": length}
    # Theta 10000 over 32 dimensions: the last pair turns once in 2 pi 10000^(30/32) tokens.
    assert report["table"][-1]["wavelength"] == pytest.approx(6.283185307 * 10000 ** (30 / 32))
    assert report["rope"]["trained_length"] == 64


@pytest.mark.parametrize("kind", FOLDERS)
def test_training_names_keys_of_a_recipe(kind, plain, tmp_path, monkeypatch, capsys):
    pytest.importorskip("peft")
    folder = folder_of(kind, plain, tmp_path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"output: {tmp_path / 'run'}\nmodel: {{path: {folder}}}\nmethod: {{name: yarn, factor: 2}}\n"
        "data: {sources: [{path: tiny}], length: 32}\ntrain: {steps: 1, learning_rate: 0.001}\n"
    )
    code, _, err = run(monkeypatch, capsys, "train", recipe)
    assert code == 1
    assert "--" not in err.partition("fix:")[2]
    for key in re.findall(r"model\.([a-z_]+)", err):
        from ctxext.training.recipe import ModelSpec

        assert key in ModelSpec.model_fields
    assert ("set model.existing=" in err) == (kind not in ("remote", "no length")), err
