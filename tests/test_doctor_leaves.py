"""What the doctor leaves as it is: what only a person can choose, what can't be mended, and good folders."""

import pytest
from broken_folders import BROKEN, UNMENDABLE, plain_folder, scaled, variant

import ctxext
from ctxext import methods
from ctxext.errors import CtxextError
from ctxext.folders.doctor import all_checks, doctor
from ctxext.folders.source import TINY


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return plain_folder(tmp_path_factory.mktemp("doctor") / "plain")


@pytest.mark.parametrize("name", UNMENDABLE)
def test_what_only_a_person_can_choose(name, plain, tmp_path):
    """Explained, left as it is."""
    config, check = UNMENDABLE[name]
    folder = variant(plain, tmp_path, config)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    done = doctor(folder, fix=True)
    assert check in [f.check for f in done.left]
    assert all(f.fix for f in done.left)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_cut_weights(plain, tmp_path):
    folder = variant(plain, tmp_path)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-10])
    assert [f.check for f in doctor(folder).findings] == ["weights"]


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
        done = doctor(folder, fix=True)
        assert done.findings == [], folder
        assert {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.iterdir() if p.is_file()} == before


def test_every_check_is_exercised():
    seen = {check for *_, check, _ in BROKEN.values()} | {check for _, check in UNMENDABLE.values()}
    assert seen | {"weights", "adapter_without_rope", "block_and_keys", "copies_unscaled"} == set(all_checks())


def test_damaged_json(plain, tmp_path):
    folder = variant(plain, tmp_path)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(CtxextError, match=r"tokenizer_config\.json can't be read"):
        doctor(folder)
