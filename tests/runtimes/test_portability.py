"""What runtimes do with a config: the table against their formulas, written out here or run where installed."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import pico_model, run
from pydantic import TypeAdapter

import ctxext
from ctxext import methods
from ctxext.config.architectures import unguarded
from ctxext.config.keys import ROPE_TYPES
from ctxext.config.write import write_config
from ctxext.errors import UsageError
from ctxext.rope import Rope
from ctxext.runtimes.facts import Facts, facts, markdown, read_table, target, target_names
from ctxext.runtimes.portability import features, portability, serve_without_patching, stand_in, verdicts
from experiments.serving import __main__ as serving_ropes

ROPE = Rope(500000.0, 64, 2048)
STATIC = serving_ropes.static_schedules(ROPE, 4)
STAGED = {name: methods.schedule(ROPE, name, 4) for name in ("dynamic_ntk", "dynamic_yarn", "dynamic_pi")}


def written(schedule, model_type="llama", *, runtime="all", **options):
    return write_config(stand_in(ROPE, model_type), schedule, target=target(runtime), **options)


def v5_only(config):
    return {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling", "ctxext")}


def scaled(**keys):
    """A folder that others wrote: trained on 2048, reads 8192."""
    config = stand_in(ROPE) | {"max_position_embeddings": 8192}
    return {k: v for k, v in config.items() if k != "rope_parameters"} | {"rope_scaling": keys}


OTHERS = {
    "dynamic": scaled(rope_type="dynamic", factor=4.0) | {"max_position_embeddings": 2048},
    "whole factor": scaled(rope_type="linear", factor=4),
    "switching": scaled(
        rope_type="longrope",
        short_factor=[1.0] * 32,
        long_factor=[2.0] * 32,
        original_max_position_embeddings=2048,
        attention_factor=1.3,
    ),
    "scale": scaled(
        rope_type="longrope",
        short_factor=[2.0] * 32,
        long_factor=[2.0] * 32,
        original_max_position_embeddings=2048,
        attention_factor=1.3,
    ),
    "yarn without attn_factor": scaled(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=2048, attention_factor=1.5
    ),
    "yarn without truncate": scaled(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=2048, truncate=False
    ),
    "yarn table too short": scaled(rope_type="yarn", factor=2.0, original_max_position_embeddings=2048),
}


FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma")


def all_configs():
    for model_type in FAMILIES:
        for schedule in STATIC.values():
            yield written(schedule, model_type)
            yield v5_only(written(schedule, model_type))
        for schedule in STAGED.values():
            yield written(schedule, model_type)
            yield written(schedule, model_type, fallback="static")
            open_ = unguarded(written(schedule, model_type)) | {"architectures": ["SomeForCausalLM"]}
            yield open_
            yield open_ | {"rope_theta": 500000.0}
        yield from (config | {"model_type": model_type} for config in OTHERS.values())
    for every in (3, 4):
        yield written(methods.schedule(ROPE, "nope", 4, every=every))
    yield written(STATIC["yarn"], "gemma3_text")


def answer(config, runtime):
    return next(v for v in portability(config) if v.runtime == runtime)


def test_every_rule_answers_some_config():
    """No rule is dead, hidden by one before it, or about a runtime that isn't listed."""
    found = [(features(config), config["model_type"]) for config in all_configs()]
    for runtime in facts().runtimes:
        answers = [runtime.rule(words, family) for words, family in found]
        used = {(rule.when, rule.families) for rule in answers if rule}
        assert [rule for rule in runtime.rules if (rule.when, rule.families) not in used] == []


def test_the_table_says_what_its_types_allow():
    """Its values are of the types that the loader names, its words are known, and documents show every rule."""
    typed = TypeAdapter(Facts).validate_python(read_table())
    assert typed.runtimes == tuple(replace(runtime, classes={}) for runtime in facts().runtimes)
    words = {*ROPE_TYPES, "staged", "scaled", *facts().features}
    assert {word for config in all_configs() for word in features(config)} <= words
    for runtime in facts().runtimes:
        assert {word for rule in runtime.rules for word in rule.when} <= words
        for rule in runtime.rules:
            assert f"| {runtime.name} | {', '.join(rule.when)}" in markdown()
            assert f"| {rule.runs} | {rule.note} | {rule.evidence} |" in markdown()


def own_table(schedule):
    stage = schedule.stages[0]
    return np.array(stage.inv_freq), stage.attention_scale


def yarn_ramp(keys, factor, fast, slow, truncate, dim, theta):
    """Frequencies of YaRN's reference code, from the keys of a config."""
    original = keys["original_max_position_embeddings"]

    def dimension(turns):
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(fast), dimension(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    base = theta ** (-np.arange(0, dim, 2) / dim)
    return base / factor * ramp + base * (1 - ramp)


def mlx(config):
    """mlx_lm.models.rope_utils as of 2026-08, from reading: v4 keys; no attention_factor, no truncate."""
    keys, theta, dim = config["rope_scaling"] or {}, config["rope_theta"], config["head_dim"]
    base = theta ** (-np.arange(0, dim, 2) / dim)
    kind = keys.get("type") or keys.get("rope_type", "default")
    if kind == "default":
        return base, 1.0
    if kind == "linear":
        return base / keys["factor"], 1.0
    if kind == "llama3":
        return llama3(keys, base), 1.0
    if kind == "yarn":
        freqs = yarn_ramp(keys, keys["factor"], keys["beta_fast"], keys["beta_slow"], True, dim, theta)
        return freqs, 0.1 * keys.get("mscale", 1) * math.log(keys["factor"]) + 1
    assert kind == "longrope"
    return base / np.array(keys["long_factor"]), by_lengths(config, keys)


def exllama(config):
    """exllamav3's rope as of 2026-08, from reading: yarn's factor is the ratio of lengths."""
    keys, theta, dim = config["rope_scaling"] or {}, config["rope_theta"], config["head_dim"]
    if keys.get("rope_type") != "yarn":
        return mlx(config)
    factor = config["max_position_embeddings"] / keys["original_max_position_embeddings"]
    freqs = yarn_ramp(keys, factor, keys["beta_fast"], keys["beta_slow"], keys["truncate"], dim, theta)
    return freqs, keys["attention_factor"]


def by_lengths(config, keys):
    ratio = config["max_position_embeddings"] / keys["original_max_position_embeddings"]
    return (
        math.sqrt(1 + math.log(ratio) / math.log(keys["original_max_position_embeddings"])) if ratio > 1 else 1.0
    )


def llama3(keys, base):
    length, low, high = keys["original_max_position_embeddings"], keys["low_freq_factor"], keys["high_freq_factor"]
    wave = 2 * math.pi / base
    smooth = np.clip((length / wave - low) / (high - low), 0, 1)
    return (1 - smooth) * base / keys["factor"] + smooth * base


@pytest.mark.parametrize("target", target_names())
@pytest.mark.parametrize("name", STATIC)
def test_exact_means_the_same_table(name, target):
    """By the formulas of MLX-LM and ExLlamaV3, on the folder that each target writes."""
    schedule = STATIC[name]
    config = written(schedule, runtime=target)
    freqs, scale = own_table(schedule)
    for runtime, table in (("MLX-LM", mlx), ("ExLlamaV3", exllama)):
        got, got_scale = table(config)
        same = np.allclose(got, freqs, rtol=1e-5, atol=1e-18) and abs(got_scale - scale) < 1e-4
        # NoPE's frequencies are as good as zero: 1e-18 of a turn.
        assert (answer(config, runtime).runs == "exact") == same, (runtime, got_scale, scale)


def test_target_mlx_makes_yarn_with_options_exact():
    schedule = STATIC["yarn, own options"]
    assert answer(written(schedule), "MLX-LM").runs == "misread"
    config = written(schedule, runtime="mlx")
    assert config["rope_parameters"]["rope_type"] == "longrope"
    for runtime in ("transformers", "vLLM", "SGLang", "MLX-LM", "ExLlamaV3", "llama.cpp (ctxext export)"):
        assert answer(config, runtime).runs == "exact"


def test_target_vllm_leaves_linears_length():
    """vLLM multiplies max_position_embeddings by a linear factor; transformers doesn't look at it."""
    pi = STATIC["pi"]
    assert "max-model-len" in answer(written(pi), "vLLM").note
    config = written(pi, runtime="vllm")
    assert config["max_position_embeddings"] * config["rope_parameters"]["factor"] == pi.max_length
    assert answer(config, "vLLM").note == ""
    assert answer(config, "vLLM").command.endswith(f"--max-model-len {pi.max_length}")
    with pytest.raises(UsageError, match="target='onnx'"):
        written(pi, runtime="onnx")


def test_the_carrier_says_its_scale_in_every_way():
    """attention_factor, the mscale keys, and the two lengths through LongRoPE's formula."""
    for schedule in STATIC.values():
        keys = written(schedule)["rope_parameters"]
        if keys["rope_type"] == "longrope":
            scale = schedule.stages[0].attention_scale
            assert by_lengths({"max_position_embeddings": schedule.max_length}, keys) == pytest.approx(
                scale, abs=1e-4
            )
            assert keys["attention_factor"] == scale
            assert keys.get("long_mscale", 1.0) == scale


def test_folders_of_others():
    assert answer(OTHERS["dynamic"], "transformers").runs == "misread"
    assert answer(OTHERS["whole factor"], "vLLM").runs == "refused"
    assert answer(OTHERS["yarn table too short"], "vLLM").runs == "refused"
    assert answer(OTHERS["yarn table too short"], "ExLlamaV3").runs == "misread"
    assert answer(OTHERS["yarn without attn_factor"], "SGLang").runs == "misread"
    assert answer(OTHERS["switching"], "SGLang").runs == "misread"
    for schedule in STATIC.values():
        config = v5_only(written(schedule))
        assert answer(config, "MLX-LM").runs == "misread"
        assert answer(config, "transformers").runs == "exact"
    for schedule in STAGED.values():
        runs = {v.runtime: v.runs for v in verdicts(schedule)}
        assert set(runs.values()) == {"refused"}
        runs = {v.runtime: v.runs for v in verdicts(schedule, fallback="static")}
        assert {runs[name] for name in ("transformers", "vLLM", "SGLang")} == {"approximates"}


@pytest.mark.parametrize(
    ("runtime", "unscaled", "scaled"),
    [
        # By each one's own source: SGLang's calls get_rope without a scaling, MLX-LM's builds nn.RoPE.
        ("SGLang", ("gemma", "mixtral", "starcoder2"), ("olmo2", "phi3", "qwen3_moe")),
        ("MLX-LM", ("cohere", "mixtral", "qwen3_moe"), ("olmo2", "granite")),
        ("mistral.rs", (), ()),
        ("vLLM", (), ("gemma", "mixtral", "qwen3_moe", "phi", "starcoder2")),
    ],
)
def test_families_whose_class_is_given_no_scaling(runtime, unscaled, scaled):
    """Misread with a scaling, exact without; read from source, never said to be run; nothing said of the rest."""
    for family in unscaled:
        found = answer(written(STATIC["yarn"], family), runtime)
        assert (found.runs, found.evidence) == ("misread", "source")
        assert family in found.note
        # What changes theta alone needs no scaling.
        assert answer(written(STATIC["ntk"], family), runtime).runs == "exact"
    for family in scaled:
        found = answer(written(STATIC["pi"], family), runtime)
        assert (found.runs, found.evidence) == ("exact", "source")
        assert answer(written(STAGED["dynamic_pi"], family), runtime).runs == "refused"
    found = answer(written(STATIC["yarn"], "dbrx"), runtime)
    assert (found.runs, found.evidence) == ("unchecked", "source")


def test_flags_for_the_unpatched_model():
    lines = serve_without_patching(STATIC["yarn"], written(STATIC["yarn"]), "m")
    assert "--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 2048" in lines["llama.cpp"]
    assert json.loads(lines["vLLM"].split("'")[1])["rope_parameters"]["rope_type"] == "yarn"
    assert "--rope-freq-base" in serve_without_patching(STATIC["ntk"], written(STATIC["ntk"]), "m")["llama.cpp"]
    assert "llama.cpp" not in serve_without_patching(STATIC["nope"], written(STATIC["nope"]), "m")
    assert serve_without_patching(STAGED["dynamic_pi"], {}, "m") == {}


def test_command(monkeypatch, capsys, tmp_path):
    pico_model().save_pretrained(tmp_path / "m")
    folder = ctxext.patch_checkpoint(tmp_path / "m", tmp_path / "out", method="ntk_by_parts", factor=4).out
    code, out, _ = run(monkeypatch, capsys, "portability", folder, "--json")
    found = {r["runtime"]: r for r in json.loads(out)["results"]}
    assert code == 0
    assert found["vLLM"]["runs"] == "exact"
    assert found["vLLM"]["command"] == f"vllm serve {folder} --max-model-len 256"
    assert found["llama.cpp (its own converter)"]["runs"] == "misread"
    assert {"version", "evidence", "note"} <= found["MLX-LM"].keys()
    code, out, _ = run(monkeypatch, capsys, "portability", "--method", "yarn", "--factor", 4)
    assert (code, "vllm serve FOLDER --max-model-len 32768" in out) == (0, True)
    code, out, _ = run(monkeypatch, capsys, "portability", tmp_path / "m", "--method", "dynamic_ntk", "--json")
    assert {r["runs"] for r in json.loads(out)["results"]} == {"refused"}
    assert not list(tmp_path.glob("*dynamic*"))
    code, _, err = run(monkeypatch, capsys, "portability")
    assert (code, "give a MODEL, or --method" in err) == (2, True)
    # The same table is in the card.
    card = (folder / "README.md").read_text()
    assert "| vLLM | 0.32.0 | exact |  | run |" in card
    assert "vllm serve this-folder --max-model-len 256" in card


def serving(name):
    """The server's own rope package: CTXEXT_VLLM or CTXEXT_SGLANG names its sources, else it must be installed."""
    sources = os.environ.get(f"CTXEXT_{name.upper()}")
    if sources is None:
        pytest.importorskip(name)
    return Path(sources) if sources else None


@pytest.mark.parametrize(("name", "runtime"), [("vllm", "vLLM"), ("sglang", "SGLang")])
def test_the_servers_own_tables(name, runtime):
    """Everything that the table calls exact is equal, over all positions; this prints the version that it saw."""
    sources = serving(name)
    print(name, serving_ropes.version(name, sources))
    rows = serving_ropes.compare(name, sources, rope=ROPE)
    assert [row["method"] for row in rows] == list(STATIC)
    for row in rows:
        assert answer(written(STATIC[row["method"]]), runtime).runs == "exact"
        assert row["max_difference"] < 1e-6, row


@pytest.mark.parametrize(
    ("case", "name", "runtime"),
    [
        ("whole factor", "vllm", "vLLM"),
        ("whole factor", "sglang", "SGLang"),
        ("yarn without attn_factor", "sglang", "SGLang"),
        ("yarn table too short", "vllm", "vLLM"),
        ("scale", "vllm", "vLLM"),
        ("scale", "sglang", "SGLang"),
        ("dynamic", "vllm", "vLLM"),
        ("dynamic", "sglang", "SGLang"),
    ],
)
def test_what_the_table_says_of_others_is_so(case, name, runtime):
    """Where it says misread or refused, the server's own code raises or differs from transformers."""
    config = OTHERS[case]
    assert answer(config, runtime).runs != "exact"
    ours = config | {"rope_parameters": config["rope_scaling"] | {"rope_theta": config["rope_theta"]}}
    with serving_ropes.rope_package(name, serving(name)) as package:
        try:
            theirs = serving_ropes.table(name, package, ours, 8192)
        except TypeError:
            return
    if theirs.shape[1] < 8192:
        return
    # A call of 1,024 tokens isn't scaled at all by transformers' dynamic type.
    length = 1024 if case == "dynamic" else 8192
    want = serving_ropes.transformers_table(config, length)
    assert (theirs[:, :length] - want).abs().max() > 0.1
