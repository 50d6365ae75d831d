"""Configs that ctxext writes: any reader understands them the same way, and the model's own keys stay."""

import json

import pytest
from rope_configs import V4, V5, options

from ctxext import methods
from ctxext.config.read import read_rope, read_schedule
from ctxext.config.rope_parameters import carrier
from ctxext.config.write import write_config
from ctxext.errors import CtxextError
from ctxext.rope import Rope


def v4_reader(config):
    """How code of the transformers 4 era reads a config.json: frequencies and attention scale."""
    import math

    theta = config.get("rope_theta", 10000.0)
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    d = int(head * config.get("partial_rotary_factor", 1.0))
    freqs = [theta ** (-2 * i / d) for i in range(d // 2)]
    scaling = config.get("rope_scaling")
    if not scaling:
        return freqs, 1.0
    kind, s = scaling.get("rope_type", scaling.get("type")), scaling["factor"]
    length = scaling.get("original_max_position_embeddings", config["max_position_embeddings"])
    if kind == "linear":
        return [f / s for f in freqs], 1.0
    if kind == "longrope":
        default = 1.0 if s <= 1 else math.sqrt(1 + math.log(s) / math.log(length))
        scale = scaling.get("attention_factor", default)
        return [f / k for f, k in zip(freqs, scaling["long_factor"], strict=True)], scale
    if kind == "llama3":
        low, high, out = scaling["low_freq_factor"], scaling["high_freq_factor"], []
        for f in freqs:
            r = length * f / (2 * math.pi)
            g = min(1, max(0, (r - low) / (high - low)))
            out.append((1 - g) * f / s + g * f)
        return out, 1.0
    assert kind == "yarn"

    def dim(b):
        return d * math.log(length / (b * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dim(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(dim(scaling.get("beta_slow", 1))), d - 1)
    out = []
    for i, f in enumerate(freqs):
        m = min(1, max(0, (i - low) / (high - low or 0.001)))
        out.append(f / s * m + f * (1 - m))
    return out, scaling.get("attention_factor", 0.1 * math.log(s) + 1)


@pytest.mark.parametrize("source", [V4, V5], ids=["v4", "v5"])
@pytest.mark.parametrize("name", [n for n, m in methods.all_methods().items() if not m.loads.startswith("needs")])
def test_a_v4_reader_sees_the_same_schedule(name, source):
    rope = read_rope(source)
    schedule = methods.schedule(rope, name, 4, **options(name, rope))
    written = json.loads(json.dumps(write_config(source, schedule)))
    freqs, scale = v4_reader(written)
    for got, want in zip(freqs, schedule.stages[0].inv_freq, strict=True):
        assert got == pytest.approx(want, rel=1e-9, abs=1e-17)
    assert scale == pytest.approx(schedule.stages[0].attention_scale, rel=1e-12)
    assert written["max_position_embeddings"] == schedule.max_length == 16384
    assert written["unknown_key"] == {"kept": True}


@pytest.mark.parametrize("name", methods.all_methods())
def test_floats_are_floats_and_the_block_reads_back(name):
    rope = read_rope(V4)
    schedule = methods.schedule(rope, name, 4, **options(name, rope))
    written = json.loads(json.dumps(write_config(V4, schedule)))
    for dialect in ("rope_parameters", "rope_scaling"):
        keys = written[dialect] or {}
        for key in ("factor", "attention_factor", "attn_factor", "rope_theta", "short_mscale"):
            assert isinstance(keys.get(key, 1.0), float), f"{dialect}.{key} would crash vLLM"
    assert read_schedule(written) == schedule
    damaged = {**written, "ctxext": {**written["ctxext"], "digest": "0"}}
    with pytest.raises(CtxextError, match="computes another schedule"):
        read_schedule(damaged)


def test_keys_of_the_model_inside_rope_parameters_are_kept():
    config = {**V5, "rope_parameters": {**V5["rope_parameters"], "mrope_section": [8, 12, 12]}}
    written = write_config(config, methods.schedule(read_rope(config), "yarn", 4))
    assert written["rope_parameters"]["mrope_section"] == [8, 12, 12]


def test_the_carrier_gives_factors_back_as_they_came():
    """Divided into a frequency and out again, one in nine would come as the float64 beside it."""
    for first in range(100, 3300, 32):
        rope = Rope(10000.0, 64, 256)
        factors = [(first + i) / 100 for i in range(32)]
        schedule = methods.schedule(rope, "longrope", 8, long_factor=factors)
        assert carrier(schedule)["long_factor"] == factors


def test_the_carrier_scales_attention_only_if_the_schedule_does():
    rope = read_rope(V4)
    plain = carrier(methods.schedule(rope, "ntk_by_parts", 4))
    assert plain["original_max_position_embeddings"] == 16384
    assert plain["factor"] == plain["attention_factor"] == 1.0
    scaled = carrier(methods.schedule(rope, "longrope", 4, **options("longrope", rope)))
    assert scaled["original_max_position_embeddings"] == 4096
    assert scaled["attention_factor"] == scaled["short_mscale"] == scaled["long_mscale"] > 1


def test_phi3_accepts_only_longrope():
    from transformers import Phi3Config

    config = json.loads(Phi3Config(hidden_size=256, num_attention_heads=8).to_json_string())
    for name in ("pi", "yarn", "llama3", "ntk"):
        written = write_config(config, methods.schedule(read_rope(config), name, 2))
        again = Phi3Config.from_dict(json.loads(json.dumps(written)))
        assert again.rope_parameters["rope_type"] == ("default" if name == "ntk" else "longrope")
