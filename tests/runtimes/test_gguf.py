"""GGUF: what is written runs as the schedule says, by ggml's formula written out here and by two other readers."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import logits, pico_model, run

import ctxext
from ctxext import methods
from ctxext.config.read import read_schedule
from ctxext.errors import CtxextError, CtxextWarning, UsageError
from ctxext.folders.gguf_export import export
from ctxext.folders.gguf_patch import patch_gguf
from ctxext.runtimes.gguf_file import read_gguf
from ctxext.runtimes.gguf_rope import gguf_config

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore:the folder has no tokenizer")
DIVISORS = [1 + i / 4 for i in range(16)]
STATIC = [n for n, m in methods.all_methods().items() if not m.loads.startswith("needs")]


def params(name):
    return {"long_factor": DIVISORS} if methods.get(name).needs else {}


def ggml_rope(path, position):
    """cos and sin per pair at a position, by ggml's rope kernel as its source has it, in Python's own floats."""
    reader = gguf.GGUFReader(path)
    arch = reader.get_field("general.architecture").contents()

    def get(key, default):
        field = reader.get_field(f"{arch}.{key}")
        return default if field is None else field.contents()

    n, base = get("rope.dimension_count", None), get("rope.freq_base", 10000.0)
    kind = get("rope.scaling.type", "linear")
    # "scale_linear" is the key of files from before 2023-09; llama.cpp still reads it.
    scale = 1.0 if kind == "none" else 1 / get("rope.scaling.factor", get("rope.scale_linear", 1.0))
    original = get("rope.scaling.original_context_length", get("context_length", None))
    ext = 1.0 if kind == "yarn" else 0.0
    # llama_context: the default mscale of yarn cancels ggml's own, then attn_factor multiplies.
    attn = (0.1 * math.log(1 / scale) + 1) / (1 + 0.1 * math.log(1 / scale)) if ext else 1.0
    attn *= get("rope.scaling.attn_factor", 1.0)
    table = next((t.data.tolist() for t in reader.tensors if t.name == "rope_freqs.weight"), [1.0] * (n // 2))

    def correction(beta):
        return n * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(0, math.floor(correction(32))), min(n - 1, math.ceil(correction(1)))
    out = []
    for i in range(n // 2):
        extrapolated = position * base ** (-2 * i / n) / table[i]
        theta = scale * extrapolated
        m = attn
        if ext:
            mix = 1 - min(1, max(0, (i - low) / max(0.001, high - low)))
            theta = theta * (1 - mix) + extrapolated * mix
            m *= 1 + 0.1 * math.log(1 / scale)
        out.append((math.cos(theta) * m, math.sin(theta) * m))
    return np.array(out).T


def transformers_rope(folder, position):
    """The same from the rotary module that plain transformers builds for the folder."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder))
    cos, sin = rotary(torch.zeros(1), torch.tensor([[position]]))
    half = cos.shape[-1] // 2
    return torch.stack([cos[0, 0, :half], sin[0, 0, :half]]).double().numpy()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("gguf")
    for name in ("llama", "qwen2", "qwen3"):
        model = pico_model(name)
        if name == "qwen2":
            for layer in model.model.layers:
                torch.nn.init.normal_(layer.self_attn.q_proj.bias)
        model.save_pretrained(root / name)
    return root


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", STATIC)
def test_angles_are_transformers(name, family, folders, tmp_path):
    """Every static method on every architecture: the same cos and sin near and far, or a refusal."""
    folder = ctxext.patch_checkpoint(folders / family, tmp_path / "m", method=name, factor=4, **params(name)).out
    if family == "qwen3" and name in ("llama3", "longrope", "nope", "drope", "ntk_by_parts"):
        with pytest.raises(CtxextError, match="reads no frequency table for qwen3"):
            export(folder, tmp_path / "x.gguf")
        assert [p.name for p in tmp_path.iterdir()] == ["m"]
        return
    done = export(folder, tmp_path / "x.gguf", dtype="f32")
    for position in (1, 63, 255):
        np.testing.assert_allclose(
            ggml_rope(done.out, position), transformers_rope(folder, position), atol=3e-5, rtol=0
        )
    assert gguf.GGUFReader(done.out).get_field(f"{done.architecture}.context_length").contents() == 256


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("yarn", {"beta_fast": 8, "beta_slow": 2, "attention_factor": 1.2}),
        ("yarn", {"truncate": False, "mscale": 0.7, "mscale_all_dim": 1.0}),
        ("ntk_by_parts", {"alpha": 0.5, "beta": 4}),
        ("longrope", {"long_factor": DIVISORS, "attention_factor": 1.3}),
    ],
)
def test_options_that_llama_cpps_own_names_would_drop(name, options, folders, tmp_path):
    folder = ctxext.patch_checkpoint(folders / "llama", tmp_path / "m", method=name, factor=4, **options).out
    done = export(folder, tmp_path / "x.gguf", dtype="f32")
    want = transformers_rope(folder, 200)
    np.testing.assert_allclose(ggml_rope(done.out, 200), want, atol=3e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_weights_come_back_through_transformers_reader(family, dtype, folders, tmp_path, tokens):
    from transformers import AutoModelForCausalLM

    done = export(folders / family, tmp_path / "x.gguf", dtype=dtype)
    back = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf").eval()
    source = AutoModelForCausalLM.from_pretrained(folders / family).eval()
    bound = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 1 / 127}[dtype]
    for name, tensor in source.state_dict().items():
        error = (back.state_dict()[name] - tensor).abs().max() / max(tensor.abs().max(), 1e-9)
        assert error <= bound, (name, float(error))
    if dtype == "f32":
        assert torch.equal(logits(back, tokens), logits(source, tokens))
    assert done.tensors == len(read_gguf(done.out).tensors)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_gguf_keeps_its_schedule_when_it_is_read(folders, tmp_path, monkeypatch, tokens):
    """transformers' own reader drops every scaling; ctxext.load of the file runs it, staged schedules included."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("CTXEXT_CACHE", str(tmp_path / "cache"))
    folder = ctxext.patch_checkpoint(folders / "llama", tmp_path / "m", method="yarn", factor=4).out
    out = export(folder, tmp_path / "x.gguf", dtype="f32").out
    want = logits(ctxext.load(folder).eval(), tokens)
    got = logits(ctxext.load(out, dtype=torch.float32).eval(), tokens)
    assert (got - want).abs().max() < 0.5  # read as bfloat16, the default
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf").eval()
    assert (logits(plain, tokens) - want).abs().max() > 2
    staged = ctxext.patch_checkpoint(folders / "llama", tmp_path / "s", method="dynamic_ntk", factor=4).out
    with pytest.raises(CtxextError, match="is more than one frequency table"):
        export(staged, tmp_path / "s.gguf")
    last = export(staged, tmp_path / "s.gguf", dtype="f32", fallback="static")
    assert read_schedule(gguf_config(last.out)).method == "dynamic_ntk"
    ntk = ctxext.patch_checkpoint(folders / "llama", tmp_path / "n", method="ntk", factor=4).out
    np.testing.assert_allclose(ggml_rope(last.out, 200), transformers_rope(ntk, 200), atol=3e-5, rtol=0)


def add_keys(path, out, keys, freqs=None):
    """A GGUF as another converter writes it: ctxext's own block gone, other keys set."""
    from ctxext.runtimes import gguf_file

    reader = gguf_file.read_gguf(path)
    drop = {k for k in reader.fields if k == "ctxext.schedule" or ".rope.scaling." in k}
    with out.open("wb+") as file:
        gguf_file.write_changed(
            reader, path, file, changes=keys, drop=frozenset(drop), table=freqs and ("rope_freqs.weight", freqs)
        )
    return out


@pytest.mark.parametrize(
    ("keys", "freqs", "method", "reads"),
    [
        ({}, None, "none", 64),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, None, "pi", 64),
        # Nothing tells whether the length is that before linear scaling: what stands there is what it reads.
        ({"llama.rope.scale_linear": 2.0}, None, "pi", 64),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 16,
            },
            None,
            "yarn",
            64,
        ),
        ({}, (1.0,) * 8 + (8.0,) * 8, "longrope", 64),
    ],
)
def test_scalings_that_others_wrote(keys, freqs, method, reads, folders, tmp_path):
    made = export(folders / "llama", tmp_path / "x.gguf").out
    other = add_keys(made, tmp_path / "other.gguf", keys, freqs)
    schedule = read_schedule(gguf_config(other))
    assert (schedule.method, schedule.max_length) == (method, reads)
    stage = schedule.stages[0]
    for position in (1, 50):
        angles = position * np.array(stage.inv_freq)
        ours = np.stack([np.cos(angles), np.sin(angles)]) * stage.attention_scale
        np.testing.assert_allclose(ours, ggml_rope(other, position), atol=1e-5, rtol=0)


def test_longrope_tables_of_others_are_refused(folders, tmp_path):
    made = export(folders / "llama", tmp_path / "x.gguf").out
    other = add_keys(made, tmp_path / "other.gguf", {"llama.rope.scaling.type": "longrope"})
    with pytest.raises(CtxextError, match="switches by the context size"):
        gguf_config(other)


def sections(path):
    """Raw bytes of every key and of every tensor's data."""
    reader = gguf.GGUFReader(path)
    keys = {
        name: b"".join(p.tobytes() for p in field.parts)
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    return (
        keys,
        {t.name: t.data.tobytes() for t in reader.tensors},
        {t.name: t.data_offset for t in reader.tensors},
    )


@pytest.mark.parametrize("name", STATIC)
def test_patching_a_quantised_file(name, folders, tmp_path):
    """Weights and every other key byte for byte; the angles are those of the patched folder."""
    plain = export(folders / "llama", tmp_path / "plain.gguf", dtype="q8_0").out
    source = add_keys(plain, tmp_path / "q.gguf", {"mine.own": "kept", "llama.unheard_of": 7})
    done = patch_gguf(source, tmp_path / "out.gguf", method=name, factor=4, **params(name))
    folder = ctxext.patch_checkpoint(folders / "llama", tmp_path / "m", method=name, factor=4, **params(name)).out
    want = transformers_rope(folder, 200)
    np.testing.assert_allclose(ggml_rope(done.out, 200), want, atol=3e-5, rtol=0)
    (before, weights, _), (after, same, _) = sections(source), sections(done.out)
    assert {k: v for k, v in same.items() if k != "rope_freqs.weight"} == weights
    changed = {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)}
    assert changed <= {k for k in after if ".rope." in k} | {"llama.context_length", "ctxext.schedule"}
    assert after["mine.own"] == before["mine.own"]
    # Again on top: refused, replaced in place (the table is there now), composed.
    with pytest.raises(CtxextError, match="already scaled"):
        patch_gguf(done.out, tmp_path / "again.gguf", method="pi", factor=2)
    replaced = patch_gguf(done.out, tmp_path / "again.gguf", method="pi", factor=2, existing="replace")
    half = ctxext.patch_checkpoint(folders / "llama", tmp_path / "pi", method="pi", factor=2).out
    want = transformers_rope(half, 100)
    np.testing.assert_allclose(ggml_rope(replaced.out, 100), want, atol=3e-5, rtol=0)


def test_patch_errors(folders, tmp_path, monkeypatch, capsys):
    source = export(folders / "llama", tmp_path / "x.gguf", dtype="q8_0").out
    with pytest.raises(CtxextError, match="is the file to patch"):
        patch_gguf(source, source, method="pi", factor=2, force=True)
    patch_gguf(source, tmp_path / "y.gguf", method="pi", factor=2)
    with pytest.raises(CtxextError, match="exists already"):
        patch_gguf(source, tmp_path / "y.gguf", method="pi", factor=2)
    patch_gguf(source, tmp_path / "y.gguf", method="pi", factor=2, force=True)
    with pytest.raises(CtxextError, match="is a folder"):
        patch_gguf(source, tmp_path, method="pi", factor=2, force=True)
    with pytest.raises(UsageError, match="did you mean 'beta_fast'"):
        patch_gguf(source, tmp_path / "z.gguf", method="yarn", factor=2, beta_fsat=1)
    with pytest.raises(CtxextError, match="is more than one frequency table"):
        patch_gguf(source, tmp_path / "z.gguf", method="dynamic_pi", factor=2)
    with pytest.raises(CtxextError, match="is more than one frequency table") as error:
        patch_gguf(source, tmp_path / "z.gguf", method="alibi", factor=2)
    assert "fallback" not in error.value.hint
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(source.read_bytes()[:3000])
    with pytest.raises(CtxextError, match="isn't a whole GGUF"):
        patch_gguf(cut, tmp_path / "z.gguf", method="pi", factor=2)
    big = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    big.write_header_to_file()
    big.write_kv_data_to_file()
    big.write_tensors_to_file()
    big.close()
    with pytest.raises(CtxextError, match="big-endian"):
        patch_gguf(tmp_path / "big.gguf", tmp_path / "z.gguf", method="pi", factor=2)
    part = add_keys(source, tmp_path / "part.gguf", {"split.count": 3})
    with pytest.raises(CtxextError, match="one part of several"):
        patch_gguf(part, tmp_path / "z.gguf", method="pi", factor=2)
    gemma = add_keys(source, tmp_path / "gemma.gguf", {"general.architecture": "gemma2"})
    with pytest.raises(CtxextError, match="architecture 'gemma2'"):
        patch_gguf(gemma, tmp_path / "z.gguf", method="pi", factor=2)
    assert not (tmp_path / "z.gguf").exists()
    args = ("patch", source, "--in-gguf", "--method", "yarn", "--factor", 4, "-o", tmp_path / "z.gguf")
    code, out, _ = run(monkeypatch, capsys, *args, "--json", "--dry-run")
    assert (code, json.loads(out)["written"], len(json.loads(out)["rope_freqs"])) == (0, False, 16)
    assert not (tmp_path / "z.gguf").exists()
    code, out, _ = run(monkeypatch, capsys, *args)
    assert code == 0
    assert "-c 256" in out


def test_export_errors(folders, tmp_path, monkeypatch, capsys):
    with pytest.raises(UsageError, match="dtype='q4'"):
        export(folders / "llama", tmp_path / "x.gguf", dtype="q4")
    pico_model("gemma").save_pretrained(tmp_path / "gemma")
    with pytest.raises(CtxextError, match="can't export gemma"):
        export(tmp_path / "gemma", tmp_path / "x.gguf")
    config = json.loads((folders / "llama" / "config.json").read_text())
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "model.safetensors").write_bytes((folders / "llama" / "model.safetensors").read_bytes())
    (odd / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    with pytest.raises(CtxextError, match="uses silu, this model gelu"):
        export(odd, tmp_path / "x.gguf")
    (odd / "config.json").write_text(json.dumps(config | {"partial_rotary_factor": 0.5}))
    with pytest.raises(CtxextError, match="turns whole heads, this model 16"):
        export(odd, tmp_path / "x.gguf")
    (odd / "config.json").write_text(json.dumps(config | {"model_type": "mistral", "sliding_window": 16}))
    with pytest.warns(CtxextWarning, match="sliding window of 16"):
        export(odd, tmp_path / "w.gguf")
    code, _, err = run(monkeypatch, capsys, "export", folders / "llama", "--to", "onnx")
    assert code == 2
    assert "--to" in err
    assert "gguf" in err
    code, out, _ = run(monkeypatch, capsys, "export", folders / "llama", "-o", tmp_path / "c.gguf", "--json")
    assert (code, json.loads(out)["architecture"]) == (0, "llama")


def test_pytorch_weights_and_tied_heads(tmp_path):
    model = pico_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    state = dict(model.state_dict()) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    torch.save(state, tmp_path / "m" / "pytorch_model.bin")
    done = export(tmp_path / "m", tmp_path / "x.gguf", dtype="f32")
    names = {t.name: t for t in read_gguf(done.out).tensors}
    assert "output.weight" not in names
    assert np.array_equal(names["token_embd.weight"].data, model.model.embed_tokens.weight.detach().numpy())
    assert done.tensors == 29
