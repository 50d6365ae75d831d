"""Models that aren't causal: embeddings, rewards and classifiers keep their head in every folder."""

import json
import shutil

import pytest
import torch
import transformers
from conftest import pico_config, run

import ctxext
from ctxext.errors import CtxextError
from ctxext.folders.heads import auto_class

HEADS = {
    "AutoModel": ["llama", "mistral", "qwen3"],
    "AutoModelForSequenceClassification": ["llama", "qwen2"],
    "AutoModelForTokenClassification": ["llama", "gemma"],
    "AutoModelForQuestionAnswering": ["llama"],
}
MODELS = [(auto, family) for auto, families in HEADS.items() for family in families]


def saved(auto, family, folder):
    torch.manual_seed(0)
    more = {"num_labels": 5} if "Classification" in auto else {}
    model = getattr(transformers, auto).from_config(pico_config(family, **more)).eval()
    model.save_pretrained(folder)
    return model


def answer(model, tokens):
    with torch.no_grad():
        out = model(tokens)
    return out.last_hidden_state if hasattr(out, "last_hidden_state") else out[0]


@pytest.mark.parametrize("method", ["yarn", "dynamic_ntk", "self_extend"])
@pytest.mark.parametrize(("auto", "family"), MODELS)
def test_a_folder_loads_with_its_own_head(auto, family, method, tmp_path, tokens):
    """Against the same class loaded by plain transformers and patched live."""
    saved(auto, family, tmp_path / "source")
    live = getattr(transformers, auto).from_pretrained(tmp_path / "source").eval()
    ctxext.patch(live, method, 4)
    out = ctxext.patch_checkpoint(tmp_path / "source", tmp_path / "out", method=method, factor=4).out
    loaded, info = ctxext.load(out, output_loading_info=True)
    assert type(loaded) is type(live)
    assert not info["missing_keys"]
    assert torch.equal(answer(loaded, tokens), answer(live, tokens))
    card = (out / "README.md").read_text()
    assert f"`{auto}" in card if method == "yarn" else f"as {auto} would" in card
    if method == "yarn":
        assert torch.equal(answer(getattr(transformers, auto).from_pretrained(out), tokens), answer(live, tokens))


def test_layers_without_rotation_keep_the_head(tmp_path, tokens):
    """They are written as SmolLM3, which has the same heads."""
    saved("AutoModelForSequenceClassification", "llama", tmp_path / "source")
    live = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "source").eval()
    ctxext.patch(live, "nope", 2, every=2)
    out = ctxext.patch_checkpoint(tmp_path / "source", tmp_path / "out", method="nope", factor=2, every=2).out
    loaded = ctxext.load(out)
    assert type(loaded).__name__ == "SmolLM3ForSequenceClassification"
    torch.testing.assert_close(answer(loaded, tokens), answer(live, tokens), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("config", "auto"),
    [
        ({}, "AutoModelForCausalLM"),
        ({"architectures": None}, "AutoModelForCausalLM"),
        ({"architectures": ["LLaMAForCausalLM"]}, "AutoModelForCausalLM"),
        ({"architectures": ["RoFormerModel"]}, "AutoModel"),
        ({"architectures": ["Qwen2ForRewardModel"]}, "AutoModelForRewardModel"),
        (
            {
                "architectures": ["Qwen2ForRewardModel"],
                "auto_map": {"AutoConfig": "c.Qwen2Config", "AutoModel": "modeling_rm.Qwen2ForRewardModel"},
            },
            "AutoModel",
        ),
        (
            {
                "architectures": ["MineForCausalLM"],
                "auto_map": {"AutoModel": "m.MineModel", "AutoModelForCausalLM": "owner/code--m.MineForCausalLM"},
            },
            "AutoModelForCausalLM",
        ),
    ],
)
def test_the_class_by_config_json(config, auto):
    assert auto_class(config) == auto


def test_a_head_that_transformers_has_no_class_for(llama_folder, tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(llama_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForRewardModel"]}))
    with pytest.raises(CtxextError, match="LlamaForRewardModel is no class of transformers"):
        ctxext.load(folder)


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    """A reward model of `tiny`'s words."""
    from ctxext.folders.source import TINY

    folder = tmp_path_factory.mktemp("reward") / "reward"
    config = transformers.AutoConfig.from_pretrained(TINY)
    config.num_labels = 1
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    return folder


@pytest.mark.parametrize(
    "command",
    [
        ("eval", "ppl", "MODEL", "--data", "README.md", "--lengths", "64"),
        ("eval", "passkey", "MODEL", "--lengths", "100"),
        ("compare", "MODEL", "--data", "README.md", "--lengths", "64"),
        ("fit-temperature", "MODEL", "--data", "README.md"),
        ("search", "MODEL", "--data", "README.md"),
        ("export", "MODEL"),
        ("train", "RECIPE"),
        ("train", "RECIPE", "--dry-run"),
    ],
    ids=" ".join,
)
def test_what_needs_next_tokens_says_so(command, reward, tmp_path, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    text.write_text("words " * 2000)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"output: {tmp_path / 'run'}\nmodel: {{path: {reward}}}\n"
        f"data: {{sources: [{{path: {text}}}], length: 32}}\n"
        "method: {name: yarn, factor: 2}\ntrain: {steps: 1, learning_rate: 0.001}\n"
    )
    monkeypatch.chdir(tmp_path)
    names = {"MODEL": str(reward), "RECIPE": str(recipe), "README.md": str(text)}
    code, _, err = run(monkeypatch, capsys, *(names.get(word, word) for word in command))
    assert code == 1
    assert "needs a model that predicts next tokens" in err
    assert "LlamaForSequenceClassification" in err
    assert "Traceback" not in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["recipe.yaml", "text.txt"]
