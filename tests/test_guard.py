"""The guard of folders that only ctxext.load runs: no runtime finds a class or a theta in them; ctxext does."""

import json

import pytest
import torch
from conftest import logits, pico_model, run
from transformers import AutoConfig, AutoModelForCausalLM

import ctxext
from ctxext import methods
from ctxext.config.architectures import architectures
from ctxext.config.rope_parameters import REFUSE
from ctxext.errors import CtxextError
from ctxext.files import read_config
from ctxext.folders.doctor import doctor
from ctxext.rope import Rope

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "phi", "gpt_neox", "mixtral", "granite")


def staged_methods():
    """Every method that is more than a table by default, but those that need lists of the model's size."""
    rope = Rope(10000.0, 32, 64)
    without = {name for name, method in methods.all_methods().items() if not method.needs}
    return sorted(name for name in without if not methods.schedule(rope, name, 4).is_static)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By family a saved pico model, its class's name, and the folder that dynamic_ntk makes of it; made once."""
    made = {}

    def of(family):
        if family not in made:
            root = tmp_path_factory.mktemp("guard")
            model = pico_model(family)
            model.save_pretrained(root / "plain")
            options = {"granularity": 32}
            ctxext.patch_checkpoint(root / "plain", root / "staged", method="dynamic_ntk", factor=4, **options)
            ctxext.patch(model, "dynamic_ntk", 4, **options)
            made[family] = (root, type(model).__name__, model)
        return made[family]

    return of


@pytest.mark.parametrize("family", FAMILIES)
def test_a_staged_folder_names_no_class_and_no_theta(family, folders, tokens):
    root, name, live = folders(family)
    config = json.loads((root / "staged" / "config.json").read_text())
    assert config["architectures"] == [f"Ctxext{name}"]
    assert architectures(config) == architectures(read_config(root / "plain")) == [name]
    for key in ("rope_theta", "rotary_emb_base"):
        assert REFUSE in config.get(key, REFUSE)
    assert "rope_theta" in config
    if family != "phi3":  # whose config class lets no such type be read
        # transformers reads the config, for a tokenizer say, and stops when it builds the model.
        AutoConfig.from_pretrained(root / "staged")
    with pytest.raises(Exception, match="ctxext") as stopped:
        AutoModelForCausalLM.from_pretrained(root / "staged")
    assert not isinstance(stopped.value, CtxextError)
    loaded = ctxext.load(root / "staged").eval()
    assert type(loaded).__name__ == name
    assert torch.equal(logits(loaded, tokens), logits(live, tokens))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_guard_goes_when_the_folder_becomes_a_plain_one(family, folders, tmp_path):
    """Patched again in place of what it says, or written as its last stage."""
    root, name, _ = folders(family)
    plain = ctxext.patch_checkpoint(
        root / "staged", tmp_path / "ntk", method="ntk", factor=2, existing="replace", trained_length=64
    )
    assert plain.config["architectures"] == [name]
    assert plain.config["rope_theta"] == plain.config["rope_parameters"]["rope_theta"]
    want = ctxext.patch_checkpoint(root / "plain", tmp_path / "want", method="ntk", factor=2).config
    assert plain.config == {**want, "transformers_version": plain.config["transformers_version"]}
    AutoModelForCausalLM.from_pretrained(tmp_path / "ntk")
    again = ctxext.patch_checkpoint(
        root / "staged", tmp_path / "again", method="dynamic_ntk", factor=2, existing="replace", trained_length=64
    )
    assert again.config["architectures"] == [f"Ctxext{name}"]
    static = ctxext.patch_checkpoint(
        root / "plain", tmp_path / "static", method="dynamic_ntk", factor=4, fallback="static"
    )
    assert static.config["architectures"] == [name]


@pytest.mark.parametrize("method", staged_methods())
def test_every_method_that_is_more_than_a_table_is_guarded(method, folders, tmp_path):
    root, name, _ = folders("qwen3")
    config = ctxext.patch_checkpoint(root / "plain", tmp_path / "out", method=method, factor=4).config
    assert config["architectures"] == [f"Ctxext{name}"]
    assert f"ctxext {method}" in config["rope_theta"]


def test_nope_in_some_layers_is_guarded_where_transformers_has_no_words_for_it(folders, tmp_path):
    for family, guarded in (("llama", False), ("qwen3", True)):
        root, _, _ = folders(family)
        config = ctxext.patch_checkpoint(
            root / "plain", tmp_path / family, method="nope", factor=4, every=2
        ).config
        assert config["architectures"][0].startswith("Ctxext") == guarded


@pytest.mark.parametrize("family", ["qwen3", "gemma", "phi3", "gpt_neox"])
def test_ctxext_reads_a_guarded_folder(family, folders, monkeypatch, capsys, tmp_path):
    root, _, _ = folders(family)
    assert doctor(root / "staged").findings == []
    for command in (["inspect"], ["portability"], ["doctor"]):
        code, out, err = run(monkeypatch, capsys, *command, root / "staged", "--json")
        assert (code, "Traceback" in err) == (0, False), (command, err)
        assert "dynamic_ntk" in out or command != ["inspect"]
    card = (root / "staged" / "README.md").read_text()
    assert "ctxext.load" in card


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "phi3", "gpt_neox"])
def test_saving_a_live_model_keeps_the_theta_guarded_and_doctor_brings_the_class_back(family, folders, tmp_path):
    """transformers writes the class's name whenever it saves; MLX-LM looks at the theta alone."""
    root, name, live = folders(family)
    plain = pico_model(family)
    for what, model in (("patched", live), ("loaded", ctxext.load(root / "staged"))):
        model.save_pretrained(tmp_path / what)
        saved = json.loads((tmp_path / what / "config.json").read_text())
        assert saved["architectures"] == [name]
        assert REFUSE in saved["rope_theta"]
        doctor(tmp_path / what, fix=True)
        assert read_config(tmp_path / what)["architectures"] == [f"Ctxext{name}"]
        assert doctor(tmp_path / what).findings == []
        ctxext.load(tmp_path / what)
    ctxext.patch(plain, "dynamic_ntk", 4)
    ctxext.unpatch(plain)
    assert REFUSE not in json.dumps(plain.config.to_dict())
    # A table alone is plain transformers' to save.
    ctxext.patch(plain, "ntk", 4)
    plain.save_pretrained(tmp_path / "static")
    assert "ctxext ntk" not in (tmp_path / "static" / "config.json").read_text()
