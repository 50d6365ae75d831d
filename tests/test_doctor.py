"""Folders broken in the ways that people report: each found, mended, and then right in transformers."""

import json
import shutil

import pytest
import torch
from conftest import logits, pico_model, run

import ctxext
from ctxext import methods
from ctxext.doctor import BACKUP, all_checks, examine
from ctxext.errors import CtxextError, UsageError
from ctxext.resolve import TINY

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LISTS = {"short_factor": [2.0] * 16, "long_factor": [2.0] * 16, "original_max_position_embeddings": 64}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A pico Llama as transformers 4 saved it: theta 500000 at the top, no scaling."""
    folder = tmp_path_factory.mktemp("doctor") / "plain"
    pico_model(rope_parameters={"rope_type": "default", "rope_theta": 500000.0}).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 500000.0, "rope_scaling": None}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 256}))
    (folder / "generation_config.json").write_text("{}")
    return folder


def variant(plain, tmp_path, config=None, drop=(), **files):
    """A copy with other keys in config.json, and other files."""
    folder = tmp_path / "model"
    shutil.copytree(plain, folder)
    found = json.loads((folder / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps({k: v for k, v in found.items() if k not in drop}))
    for name, data in files.items():
        (folder / f"{name}.json").write_text(json.dumps(data))
    return folder


def scaled(length=256, **keys):
    return {"rope_scaling": keys, "max_position_embeddings": length}


# name: (changed config, dropped keys, other files, the check, the method that the mended folder runs at factor 4)
BROKEN = {
    "transformers 5 saved it: rope_parameters alone": (
        {"rope_parameters": {**YARN, "rope_theta": 5e5}, "max_position_embeddings": 256},
        ("rope_theta", "rope_scaling"),
        {},
        "new_dialect_alone",
        "yarn",
    ),
    "transformers 5 saved it: theta alone": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        ("rope_theta", "rope_scaling"),
        {},
        "new_dialect_alone",
        None,
    ),
    "YaRN's own keys: type and finetuned": (
        scaled(type="yarn", factor=4.0, original_max_position_embeddings=64, finetuned=True),
        (),
        {},
        "old_names",
        "yarn",
    ),
    "YaRN's remote code of 2023": (
        scaled(**YARN) | {"auto_map": {"AutoModelForCausalLM": "modeling_llama_yarn.LlamaForCausalLM"}},
        (),
        {},
        "old_remote_code",
        "yarn",
    ),
    "type su": (scaled(type="su", attention_factor=1.0, factor=4.0, **LISTS), (), {}, "old_names", "longrope"),
    "type ntk": ({"rope_scaling": {"type": "ntk", "factor": 4.0}}, (), {}, "old_names", "ntk"),
    "yarn without the original length": (
        scaled(rope_type="yarn", factor=4.0),
        (),
        {},
        "factor_missing",
        "yarn",
    ),
    "yarn without the factor": (
        scaled(rope_type="yarn", original_max_position_embeddings=64),
        (),
        {},
        "factor_missing",
        "yarn",
    ),
    "linear without the factor": (
        scaled(rope_type="linear", original_max_position_embeddings=64),
        (),
        {},
        "factor_missing",
        "pi",
    ),
    "yarn, length not raised": (scaled(64, **YARN), (), {}, "length_not_raised", "yarn"),
    "yarn, length raised twice": (scaled(1024, **YARN), (), {}, "length_not_raised", "yarn"),
    "llama3, length not raised": (
        scaled(64, **YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        (),
        {},
        "length_not_raised",
        "llama3",
    ),
    "an integer factor": (scaled(rope_type="linear", factor=4), (), {}, "whole_factor", "pi"),
    "a factor in quotes": (scaled(rope_type="linear", factor="4.0"), (), {}, "numbers_as_text", "pi"),
    "attn_factor alone, as DeepSeek writes it": (
        scaled(**YARN, attn_factor=1.2),
        (),
        {},
        "attention_factor",
        None,
    ),
    "attention_factor alone": (scaled(**YARN, attention_factor=1.5), (), {}, "attention_factor", None),
    "a null theta inside": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
        ("rope_scaling",),
        {},
        "theta_missing",
        None,
    ),
    "two original lengths": (
        scaled(**YARN | {"original_max_position_embeddings": 128}) | {"original_max_position_embeddings": 64},
        (),
        {},
        "originals_differ",
        "yarn",
    ),
    "two dialects that disagree": (
        scaled(**YARN) | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        (),
        {},
        "dialects_differ",
        "yarn",
    ),
    "a null head_dim": (scaled(**YARN) | {"head_dim": None}, (), {}, "head_dim_null", "yarn"),
    "the tokenizer's old length": (
        scaled(**YARN),
        (),
        {"tokenizer_config": {"model_max_length": 64}},
        "tokenizer_length",
        "yarn",
    ),
    "generation ends at the old length": (
        scaled(**YARN),
        (),
        {"generation_config": {"max_length": 64}},
        "generation_length",
        "yarn",
    ),
    "Mistral's window kept": (
        scaled(**YARN) | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 64},
        (),
        {},
        "window_too_short",
        "yarn",
    ),
    "LongLoRA: scaling never saved": (
        {},
        (),
        {"tokenizer_config": {"model_max_length": 250}},
        "scaling_forgotten",
        "pi",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_folders(name, plain, tmp_path, tokens):
    """Found, mended, clean at a second look; and what transformers then runs is the method that was meant."""
    config, drop, files, check, method = BROKEN[name]
    folder = variant(plain, tmp_path, config, drop, **files)
    if name.startswith("LongLoRA"):
        (folder / "trainable_params.bin").write_bytes(b"")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    found = examine(folder)
    assert check in [f.check for f in found.findings]
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    done = examine(folder, fix=True)
    assert check in [f.check for f in done.mended]
    assert done.left == []
    assert examine(folder).findings == []
    for path in folder.glob(f"*{BACKUP}"):
        assert path.read_bytes() == before[path.name.removesuffix(BACKUP)]
    assert (folder / "model.safetensors").read_bytes() == before["model.safetensors"]
    mended = logits(ctxext.load(folder).eval(), tokens)
    if method is not None:
        options = {"long_factor": [2.0] * 16, "attention_factor": 1.0} if method == "longrope" else {}
        assert torch.equal(mended, expected(plain, method, tokens, options))


def expected(plain, method, tokens, options):
    model = ctxext.load(plain).eval()
    ctxext.patch(model, method, 4, **options)
    return logits(model, tokens)


def test_both_names_of_the_attention_factor_say_the_same(plain, tmp_path, tokens):
    """SGLang's scale is (0.1 ln s + 1) x attn_factor, transformers' is attention_factor."""
    import math

    folder = variant(plain, tmp_path, scaled(**YARN, attn_factor=1.2))
    examine(folder, fix=True)
    usual = 0.1 * math.log(4) + 1
    model = ctxext.load(folder)
    assert model.model.rotary_emb.attention_scaling == pytest.approx(1.2 * usual)


@pytest.mark.parametrize("change", ["hand", "saved", "no block"])
def test_a_folder_of_ours_that_was_changed(change, plain, tmp_path, tokens):
    out = ctxext.patch_checkpoint(plain, tmp_path / "out", method="yarn", factor=4).out
    want = logits(ctxext.load(out).eval(), tokens)
    config = json.loads((out / "config.json").read_text())
    if change == "hand":
        for dialect in ("rope_parameters", "rope_scaling"):
            config[dialect]["factor"] = 8.0
    elif change == "saved":
        ctxext.load(out).save_pretrained(out)
        config = json.loads((out / "config.json").read_text())
        assert "rope_scaling" not in config
    else:
        config["ctxext"]["digest"] = "0" * 16
    (out / "config.json").write_text(json.dumps(config))
    done = examine(out, fix=True)
    assert [f.check for f in done.findings] == ["block_and_keys"]
    assert bool(done.left) == (change == "no block")
    if not done.left:
        assert torch.equal(logits(ctxext.load(out).eval(), tokens), want)


def test_a_staged_folder_whose_refusal_was_edited_away(plain, tmp_path, tokens):
    """Somebody made the KeyError go away: plain transformers then ran no scaling at all."""
    out = ctxext.patch_checkpoint(plain, tmp_path / "out", method="dynamic_ntk", factor=4).out
    want = (out / "config.json").read_text()
    config = json.loads(want)
    config["rope_parameters"]["rope_type"] = config["rope_scaling"]["rope_type"] = "default"
    (out / "config.json").write_text(json.dumps(config))
    assert [f.check for f in examine(out, fix=True).mended] == ["block_and_keys"]
    assert json.loads((out / "config.json").read_text()) == json.loads(want)


UNMENDABLE = {
    "dynamic": (scaled(64, rope_type="dynamic", factor=4.0), "depends_on_the_call"),
    "dynamic that never scales": (
        scaled(256, rope_type="dynamic", factor=4.0, original_max_position_embeddings=64),
        "depends_on_the_call",
    ),
    "switching": (
        scaled(rope_type="longrope", factor=4.0, **LISTS | {"short_factor": [1.0] * 16}),
        "depends_on_the_call",
    ),
    "a list for another model": (
        scaled(rope_type="longrope", factor=4.0, **LISTS | {"long_factor": [2.0] * 8, "short_factor": [2.0] * 8}),
        "lists_of_wrong_length",
    ),
    "an unknown type": (scaled(rope_type="telepathy", factor=4.0), "old_names"),
    "text for a number": (scaled(rope_type="linear", factor="four"), "numbers_as_text"),
    "yarn without anything": (scaled(rope_type="yarn"), "factor_missing"),
    "another kind of rope": ({"model_type": "gpt2"}, "family"),
}


@pytest.mark.parametrize("name", UNMENDABLE)
def test_what_only_a_person_can_choose(name, plain, tmp_path):
    """Explained, left as it is."""
    config, check = UNMENDABLE[name]
    folder = variant(plain, tmp_path, config)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    done = examine(folder, fix=True)
    assert check in [f.check for f in done.left]
    assert all(f.fix for f in done.left)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_cut_weights(plain, tmp_path):
    folder = variant(plain, tmp_path)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-10])
    assert [f.check for f in examine(folder).findings] == ["weights"]


def test_an_adapter_without_rope(plain, tmp_path, tokens):
    """LongLoRA: linear scaling in training, nothing of it in the adapter."""
    peft = pytest.importorskip("peft")
    base = ctxext.load(plain)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    folder = tmp_path / "adapter"
    model.save_pretrained(folder)
    data = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(data | {"base_model_name_or_path": str(plain)}))
    (folder / "trainable_params.bin").write_bytes(b"")
    found = examine(folder).findings
    assert [f.check for f in found] == ["adapter_without_rope"]
    assert "trainable_params.bin" in found[0].what
    assert "--context" in found[0].fix
    done = examine(folder, fix=True, context=256)
    assert done.left == []
    with_rope = logits(ctxext.load(folder).eval(), tokens)
    ctxext.patch(model, "pi", 4)
    assert torch.equal(with_rope, logits(model.eval(), tokens))


def good_folders(plain, tmp_path):
    yield TINY
    yield plain
    for name, method in methods.all_methods().items():
        options = {"long_factor": [1 + i / 4 for i in range(16)]} if method.needs else {}
        for target in ("all", "mlx", "vllm"):
            out = tmp_path / f"{name}-{target}"
            yield ctxext.patch_checkpoint(plain, out, method=name, factor=4, target=target, **options).out
    yield ctxext.patch_checkpoint(plain, tmp_path / "s", method="dynamic_pi", factor=4, fallback="static").out
    llama31 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
    config = scaled(1024, **llama31, low_freq_factor=1.0, high_freq_factor=4.0)
    yield variant(plain, tmp_path, config, tokenizer_config={"model_max_length": 1024})


def test_good_folders_are_left_alone(plain, tmp_path):
    for folder in good_folders(plain, tmp_path):
        before = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.iterdir() if p.is_file()}
        done = examine(folder, fix=True)
        assert done.findings == [], folder
        assert {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.iterdir() if p.is_file()} == before


def test_every_check_is_exercised():
    seen = {check for *_, check, _ in BROKEN.values()} | {check for _, check in UNMENDABLE.values()}
    assert seen | {"weights", "adapter_without_rope", "block_and_keys"} == set(all_checks())


def test_a_context_that_was_told(plain, tmp_path, tokens):
    """--context N for a checkpoint whose makers passed the length on the command line."""
    folder = variant(plain, tmp_path)
    assert examine(folder).findings == []
    assert [f.check for f in examine(folder, fix=True, context=250).mended] == ["scaling_forgotten"]
    assert torch.equal(logits(ctxext.load(folder).eval(), tokens), expected(plain, "pi", tokens, {}))
    with pytest.raises(UsageError, match="at least 2"):
        examine(folder, context=1)


def test_damaged_json(plain, tmp_path):
    folder = variant(plain, tmp_path)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(CtxextError, match=r"tokenizer_config\.json can't be read"):
        examine(folder)


def test_links_are_replaced_not_written_through(plain, tmp_path):
    """A snapshot in the hub's cache is links to blobs that other revisions share."""
    folder = variant(plain, tmp_path, scaled(rope_type="linear", factor=4))
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in folder.iterdir():
        (snapshot / path.name).symlink_to(path)
    before = (folder / "config.json").read_bytes()
    assert examine(snapshot, fix=True).mended
    assert (folder / "config.json").read_bytes() == before
    assert not (snapshot / "config.json").is_symlink()


def test_command(plain, tmp_path, monkeypatch, capsys):
    folder = variant(plain, tmp_path, scaled(rope_type="linear", factor=4))
    code, out, _ = run(monkeypatch, capsys, "doctor", folder)
    assert code == 1
    assert "error: rope_scaling: factor 4 is written as an integer" in out
    code, out, _ = run(monkeypatch, capsys, "doctor", folder, "--fix", "--json")
    assert (code, [f["check"] for f in json.loads(out)["mended"]]) == (0, ["whole_factor"])
    code, out, _ = run(monkeypatch, capsys, "doctor", folder)
    assert (code, "nothing wrong found" in out) == (0, True)
