"""What the doctor mends: each folder found broken, mended, and then right in transformers."""

import json

import pytest
import torch
from broken_folders import BROKEN, YARN, expected, plain_folder, scaled, variant
from conftest import logits, run

import ctxext
from ctxext.errors import UsageError
from ctxext.folders.doctor import BACKUP, doctor


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return plain_folder(tmp_path_factory.mktemp("doctor") / "plain")


@pytest.mark.parametrize("name", BROKEN)
def test_broken_folders(name, plain, tmp_path, tokens):
    """Found, mended, clean at a second look; and what transformers then runs is the method that was meant."""
    config, drop, files, check, method = BROKEN[name]
    folder = variant(plain, tmp_path, config, drop, **files)
    if name.startswith("LongLoRA"):
        (folder / "trainable_params.bin").write_bytes(b"")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    found = doctor(folder)
    assert check in [f.check for f in found.findings]
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    done = doctor(folder, fix=True)
    assert check in [f.check for f in done.mended]
    assert done.left == []
    assert doctor(folder).findings == []
    for path in folder.glob(f"*{BACKUP}"):
        assert path.read_bytes() == before[path.name.removesuffix(BACKUP)]
    assert (folder / "model.safetensors").read_bytes() == before["model.safetensors"]
    mended = logits(ctxext.load(folder).eval(), tokens)
    if method is not None:
        options = {"long_factor": [2.0] * 16, "attention_factor": 1.0} if method == "longrope" else {}
        assert torch.equal(mended, expected(plain, method, tokens, options))


def test_both_names_of_the_attention_factor_say_the_same(plain, tmp_path, tokens):
    """SGLang's scale is (0.1 ln s + 1) x attn_factor, transformers' is attention_factor."""
    import math

    folder = variant(plain, tmp_path, scaled(**YARN, attn_factor=1.2))
    doctor(folder, fix=True)
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
    done = doctor(out, fix=True)
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
    assert [f.check for f in doctor(out, fix=True).mended] == ["block_and_keys"]
    assert json.loads((out / "config.json").read_text()) == json.loads(want)


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
    found = doctor(folder).findings
    assert [f.check for f in found] == ["adapter_without_rope"]
    assert "trainable_params.bin" in found[0].what
    assert "--context" in found[0].fix
    done = doctor(folder, fix=True, context=256)
    assert done.left == []
    with_rope = logits(ctxext.load(folder).eval(), tokens)
    ctxext.patch(model, "pi", 4)
    assert torch.equal(with_rope, logits(model.eval(), tokens))


def test_a_context_that_was_told(plain, tmp_path, tokens):
    """--context N for a checkpoint whose makers passed the length on the command line."""
    folder = variant(plain, tmp_path)
    assert doctor(folder).findings == []
    assert [f.check for f in doctor(folder, fix=True, context=250).mended] == ["scaling_forgotten"]
    assert torch.equal(logits(ctxext.load(folder).eval(), tokens), expected(plain, "pi", tokens, {}))
    with pytest.raises(UsageError, match="at least 2"):
        doctor(folder, context=1)


def test_links_are_replaced_not_written_through(plain, tmp_path):
    """A snapshot in the hub's cache is links to blobs that other revisions share."""
    folder = variant(plain, tmp_path, scaled(rope_type="linear", factor=4))
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in folder.iterdir():
        (snapshot / path.name).symlink_to(path)
    before = (folder / "config.json").read_bytes()
    assert doctor(snapshot, fix=True).mended
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
