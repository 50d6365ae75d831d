"""Every method against 50-digit derivations, transformers' own functions, and invariants."""

import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxext import methods
from ctxext.errors import UsageError
from ctxext.rope import Rope, Schedule, unpatched

GOLDEN = json.loads((Path(__file__).parent / "golden" / "methods.json").read_text())


def needed(name, rope, factor):
    """Values for the options that a method can't do without."""
    if "long_factor" in methods.get(name).needs:
        return {"long_factor": [1 + (factor - 1) * (i / rope.size) ** 2 for i in range(rope.size)]}
    return {}


def test_every_method_has_golden_values():
    assert {row["method"] for row in GOLDEN} == set(methods.all_methods())


@pytest.mark.parametrize("name", methods.all_methods())
def test_against_50_digit_derivation(name):
    rows = [row for row in GOLDEN if row["method"] == name]
    assert rows
    for row in rows:
        rope = Rope(row["theta"], row["dim"], row["trained_length"])
        schedule = methods.schedule(rope, name, row["factor"], **row["params"])
        for stage, (start, scale, frequencies) in zip(schedule.stages, row["stages"], strict=True):
            assert stage.start == start
            assert stage.attention_scale == pytest.approx(float(scale), rel=1e-13)
            for got, want in zip(stage.inv_freq, frequencies, strict=True):
                assert got == pytest.approx(float(want), rel=2e-13), row


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3", "longrope", "default"])
def test_against_transformers(kind):
    """transformers computes in float32, hence the tolerance."""
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    name = {"linear": "pi", "default": "ntk"}.get(kind, kind)
    for row in (r for r in GOLDEN if r["method"] == name and len(r["stages"]) == 1):
        rope = Rope(row["theta"], row["dim"], row["trained_length"])
        schedule = methods.schedule(rope, name, row["factor"], **row["params"])
        keys = {"rope_theta": rope.theta, **(schedule.native or {})}
        if kind == "longrope":
            lists = dict.fromkeys(("short_factor", "long_factor"), row["params"]["long_factor"])
            keys |= {"rope_type": kind, "factor": row["factor"], **lists}
            keys["original_max_position_embeddings"] = rope.trained_length
        assert keys["rope_type"] == kind
        if kind == "yarn" and row["params"].get("attention_factor") is None:
            # Let transformers derive its own default, so that ours is checked too.
            del keys["attention_factor"]
        config = LlamaConfig(
            hidden_size=rope.dim * 2,
            num_attention_heads=2,
            head_dim=rope.dim,
            max_position_embeddings=schedule.max_length,
            rope_parameters=keys,
        )
        default = LlamaRotaryEmbedding.compute_default_rope_parameters
        inv_freq, scale = (default if kind == "default" else ROPE_INIT_FUNCTIONS[kind])(config)
        want = torch.tensor(schedule.stages[0].inv_freq, dtype=torch.float64)
        # Blends are sums of a large and a small part, so the float32 error is one of the unscaled frequency.
        base = torch.tensor(rope.geometric(), dtype=torch.float64)
        assert ((inv_freq.double() - want).abs() <= 6e-7 * base).all()
        assert scale == pytest.approx(schedule.stages[0].attention_scale, rel=1e-6)


ropes = st.builds(
    Rope,
    theta=st.floats(100.0, 1e8),
    dim=st.integers(2, 64).map(lambda n: 2 * n),
    trained_length=st.integers(64, 262144),
)


@pytest.mark.parametrize("name", methods.all_methods())
@settings(max_examples=60, deadline=None)
@given(rope=ropes, factor=st.floats(1.0, 64.0))
def test_invariants(name, rope, factor):
    method = methods.get(name)
    schedule = method(rope, factor, **needed(name, rope, factor))
    assert schedule.method == name
    assert schedule.max_length == round(rope.trained_length * factor)
    assert Schedule.from_dict(json.loads(json.dumps(schedule.to_dict()))) == schedule
    for stage in schedule.stages:
        ratios = [f / b for f, b in zip(stage.inv_freq, rope.geometric(), strict=True)]
        smallest = 0.0 if method.replaces_rope or name in ("theta", "longrope") else 1 / schedule.factor
        assert all(smallest - 1e-12 <= r <= 1 + 1e-12 for r in ratios)
        # Slower frequencies are never scaled less than faster ones.
        assert all(b <= a + 1e-12 for a, b in itertools.pairwise(ratios))
        assert math.isfinite(stage.attention_scale)
        assert stage.attention_scale >= 1


@pytest.mark.parametrize("name", [n for n in methods.all_methods() if n.startswith("dynamic")])
@settings(max_examples=60, deadline=None)
@given(rope=ropes, factor=st.floats(1.0, 64.0), steps=st.integers(1, 200))
def test_staged_invariants(name, rope, factor, steps):
    """Stage 0 is the model as it was, up to the trained length; later ones scale ever more, never too little."""
    step = max(1, math.ceil(rope.trained_length * (factor - 1) / steps))
    schedule = methods.schedule(rope, name, factor, granularity=step)
    first, *rest = schedule.stages
    assert first.inv_freq == tuple(rope.geometric())
    assert first.attention_scale == 1
    if rest:
        assert rest[0].start == rope.trained_length
        static = methods.schedule(rope, name.removeprefix("dynamic_"), schedule.factor).stages[0]
        assert rest[-1].inv_freq == pytest.approx(static.inv_freq, rel=1e-9)
        assert rest[-1].attention_scale == pytest.approx(static.attention_scale, rel=1e-9)
    for a, b in itertools.pairwise(schedule.stages):
        assert all(y <= x * (1 + 1e-12) for x, y in zip(a.inv_freq, b.inv_freq, strict=True))
        assert b.attention_scale >= a.attention_scale


@pytest.mark.parametrize("name", [n for n, m in methods.all_methods().items() if not m.replaces_rope])
@settings(max_examples=30, deadline=None)
@given(rope=ropes)
def test_factor_one_is_the_identity(name, rope):
    stage = methods.get(name)(rope, 1, **needed(name, rope, 1)).stages[0]
    assert stage.attention_scale == 1
    for got, want in zip(stage.inv_freq, rope.geometric(), strict=True):
        assert got == pytest.approx(want, rel=1e-12)


def test_nope_stops_everything_at_any_factor():
    assert set(methods.schedule(Rope(1e4, 8, 64), "nope", 1).stages[0].inv_freq) == {0.0}


@pytest.mark.parametrize("factor", [0.5, 0, -1, math.nan, math.inf, "8", None, True])
def test_bad_factors(factor):
    with pytest.raises(UsageError, match="factor must be"):
        methods.schedule(Rope(1e4, 8, 64), "pi", factor)


def test_misspelt_names_get_the_nearest():
    rope = Rope(1e4, 8, 64)
    with pytest.raises(UsageError, match="did you mean 'beta_fast'"):
        methods.schedule(rope, "yarn", 2, beta_fsat=16)
    with pytest.raises(UsageError, match="did you mean 'yarn'"):
        methods.get("yran")
    with pytest.raises(UsageError, match="takes no options"):
        methods.schedule(rope, "pi", 2, anything=1)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("yarn", {"beta_fast": "many"}, "must be float"),
        ("yarn", {"truncate": 1.5}, "must be bool"),
        ("yarn", {"beta_fast": math.inf}, "must be float"),
        ("yarn", {"beta_fast": 1, "beta_slow": 2}, "0 < beta_slow < beta_fast"),
        ("ntk_by_parts", {"alpha": 0}, "0 < alpha < beta"),
        ("theta", {"base": 10}, "below the model's theta"),
        ("longrope", {}, "needs long_factor"),
        ("longrope", {"long_factor": [1.0, 2.0]}, "long_factor has 2 values, the model has 4"),
        ("longrope", {"long_factor": [1, 1, 0, 1]}, "must be positive"),
        ("longrope", {"long_factor": [1, 1, "x", 1]}, "must be float"),
        ("longrope", {"long_factor": [1, 1, 1, 1], "start_tokens": -1}, "must not be negative"),
        ("longrope", {"long_factor": [1, 1, 1, 1], "start_tokens": 1.5}, "must be int"),
        ("yarn", {"attention_factor": -1}, "must be positive"),
        ("dynamic_ntk", {"granularity": 0}, "at least 1 token"),
        ("dynamic_ntk", {"strength": 0.5}, "strength must be at least 1"),
        ("dynamic_yarn", {"temperature": -1}, "must not be negative"),
        ("longrope", {"long_factor": [1, 1, 1, 1], "short_factor": [1]}, "short_factor has 1 values"),
    ],
)
def test_bad_options(name, params, message):
    with pytest.raises(UsageError, match=message):
        methods.schedule(Rope(1e4, 8, 64), name, 2, **params)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"theta": math.nan}, "finite"),
        ({"theta": 0.5}, "greater than 1"),
        ({"dim": 7}, "even"),
        ({"trained_length": 0}, "at least 2"),
        ({"ratios": (1.0,)}, "1 ratios given for 4"),
    ],
)
def test_bad_ropes(kwargs, message):
    with pytest.raises(UsageError, match=message):
        Rope(**{"theta": 1e4, "dim": 8, "trained_length": 64} | kwargs)


def test_schedule_of_a_newer_version_is_refused():
    data = unpatched(Rope(1e4, 8, 64)).to_dict() | {"novelty": 1}
    with pytest.raises(UsageError, match="has no field novelty"):
        Schedule.from_dict(data)


def test_factor_is_snapped_to_whole_tokens():
    """Runtimes recompute the factor from the two lengths; a factor that they can't reach would differ."""
    schedule = methods.schedule(Rope(1e4, 8, 100), "pi", 1.333)
    assert schedule.max_length == 133
    assert schedule.factor == 1.33


def test_composition_multiplies():
    """PI after PI is PI by the product."""
    rope = Rope(1e4, 8, 64)
    first = methods.schedule(rope, "pi", 2)
    ratios = tuple(f / g for f, g in zip(first.stages[0].inv_freq, rope.geometric(), strict=True))
    second = methods.schedule(Rope(1e4, 8, 128, ratios), "pi", 4)
    assert second.native is None
    for got, want in zip(second.stages[0].inv_freq, rope.geometric(), strict=True):
        assert got == pytest.approx(want / 8, rel=1e-12)
