"""What published configs mean: read as transformers runs them, and left as they are by a factor of 1."""

import json

import pytest
import torch
from published_configs import PUBLISHED
from transformers import AutoConfig, AutoModelForCausalLM

import ctxext
from ctxext.config.read import base_rope, native_schedule, read_schedule
from ctxext.errors import CtxextError
from ctxext.folders.doctor import doctor
from ctxext.folders.inspect import inspect_model
from ctxext.live.patch import find_decoder
from ctxext.live.rotary import table_of
from ctxext.rope import unpatched

pytestmark = pytest.mark.filterwarnings("ignore:linear scaling", "ignore:every layer had a sliding window")
PATCHED = [p for p in PUBLISHED if p.refused is None]
REFUSED = [p for p in PUBLISHED if p.refused is not None]


def ids(published):
    return published.name


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Makes a folder of a published config with random weights, once."""
    root, made = tmp_path_factory.mktemp("published"), {}

    def folder(published):
        if published.name not in made:
            path = root / str(len(made))
            torch.manual_seed(0)
            config = AutoConfig.for_model(**published.config)
            # Wide enough weights that angles matter to logits.
            config.initializer_range = 0.2
            model = AutoModelForCausalLM.from_config(config)
            model.save_pretrained(path)
            said = {"architectures": [type(model).__name__], **published.config}
            (path / "config.json").write_text(json.dumps(said))
            made[published.name] = path
        return made[published.name]

    return folder


def logits(path, reads):
    """At the first 48 positions, and at 48 from the first to the last that the model reads."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    tokens = torch.arange(3, 51)[None] * 7 % 128
    with torch.no_grad():
        return [
            model(tokens, position_ids=torch.linspace(0, last, 48).long()[None], use_cache=False).logits
            for last in (47, reads - 1)
        ]


@pytest.mark.parametrize("published", PATCHED, ids=ids)
def test_read_as_transformers_runs_it(published, folders):
    """Its frequencies and scale are those of the stock module; its length is what its makers say."""
    path = folders(published)
    config = json.loads((path / "config.json").read_text())
    native = native_schedule(config)
    assert (native or read_schedule(config)).rope.trained_length == published.reads
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    table, scale = table_of(find_decoder(model).rotary_emb)
    stage = (native or unpatched(base_rope(config))).stages[0]
    assert table.double().tolist() == pytest.approx(list(stage.inv_freq), rel=2e-6, abs=1e-7)
    assert scale == pytest.approx(stage.attention_scale, rel=1e-6)
    assert inspect_model(path, 2)["now"]["max_length"] == published.reads


@pytest.mark.parametrize("published", PATCHED, ids=ids)
def test_a_factor_of_1_changes_nothing(published, folders, tmp_path):
    """To float32's rounding near the start. Far away that rounding is of angles, so of 1e-7 times the position."""
    path = folders(published)
    done = ctxext.patch_checkpoint(path, tmp_path / "out", method="pi", factor=1, existing="compose")
    assert done.schedule.max_length == published.reads
    near, far = logits(path, published.reads)
    then_near, then_far = logits(done.out, published.reads)
    assert (then_near - near).abs().max() < 2e-6 * near.abs().max()
    assert (then_far - far).abs().max() < 0.02 * far.abs().max()


@pytest.mark.parametrize("published", PUBLISHED, ids=ids)
def test_the_doctor_finds_no_fault(published, folders):
    """Nothing that stops or changes the model; and what it mends for other readers' sake changes no logit."""
    path = folders(published)
    assert [f.what for f in doctor(path).findings if f.level == "error"] == []
    if published.refused is None:
        told, before = (path / "config.json").read_bytes(), logits(path, published.reads)
        doctor(path, fix=True)
        mended = logits(path, published.reads)
        (path / "config.json").write_bytes(told)
        (path / "config.json.before-doctor").unlink(missing_ok=True)
        assert all(torch.equal(a, b) for a, b in zip(mended, before, strict=True))


@pytest.mark.parametrize("published", REFUSED, ids=ids)
def test_refused_with_the_reason(published, folders, tmp_path):
    path = folders(published)
    model = AutoModelForCausalLM.from_pretrained(path)
    with pytest.raises(CtxextError, match=published.refused):
        ctxext.patch_checkpoint(path, tmp_path / "out", method="yarn", factor=4, existing="compose")
    with pytest.raises(CtxextError):
        ctxext.patch(model, "yarn", 4, existing="compose")
    assert not (tmp_path / "out").exists()


def test_enough_of_them():
    assert len(PUBLISHED) >= 60
    assert len({p.family for p in PUBLISHED}) >= 40
