"""Reading configs of both dialects and writing ones that any reader understands the same way."""

import json
import warnings

import pytest
from rope_configs import V4, V5, options

from ctxext import methods
from ctxext.config.families import require_support, unsupported_reason
from ctxext.config.keys import rope_parameters, sliding_window
from ctxext.config.read import native_schedule, read_rope, read_schedule
from ctxext.config.rope_parameters import Target
from ctxext.config.write import write_config
from ctxext.errors import CtxextError, CtxextWarning, UsageError
from ctxext.rope import Rope


@pytest.mark.parametrize("config", [V4, V5, {**V4, **V5, "head_dim": None}])
def test_both_dialects_read_the_same(config):
    assert read_rope(config) == Rope(500000.0, 64, 4096)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"head_dim": 32}, Rope(5e5, 32, 4096)),
        ({"partial_rotary_factor": 0.5}, Rope(5e5, 32, 4096)),
        ({"rope_theta": None}, Rope(1e4, 64, 4096)),
        ({"model_type": "mixtral", "rope_theta": None}, Rope(1e6, 64, 4096)),
        ({"model_type": "phi"}, Rope(5e5, 32, 4096)),
        (
            {"model_type": "gpt_neox", "rope_theta": None, "rotary_emb_base": 2e4, "rotary_pct": 0.25},
            Rope(2e4, 16, 4096),
        ),
    ],
)
def test_what_a_config_leaves_implicit(change, expected):
    """The family's own defaults apply: theta of Mixtral, the half rotary of Phi, GPT-NeoX's names."""
    assert read_rope({**V4, **change}) == expected


def test_trained_length_can_be_overridden():
    assert read_rope({**V4, "max_position_embeddings": 2048}, trained_length=4096).trained_length == 4096


def test_precedence_is_transformers():
    from transformers import LlamaConfig

    config = {**V5, "rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}}
    ours = rope_parameters(config)
    theirs = LlamaConfig.from_dict(dict(config)).rope_parameters
    assert (
        (ours["rope_type"], ours["rope_theta"]) == (theirs["rope_type"], theirs["rope_theta"]) == ("linear", 1e6)
    )


SCALED = {
    "linear": {"type": "linear", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1 + i / 32 for i in range(32)],
        "long_factor": [1 + i / 32 for i in range(32)],
        "original_max_position_embeddings": 1024,
        "factor": 4.0,
        "attention_factor": 1.1,
    },
}


@pytest.mark.parametrize("kind", SCALED)
def test_already_scaled_is_read_as_transformers_reads_it(kind):
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = {**V4, "rope_scaling": SCALED[kind]}
    stage = read_schedule(config).stages[0]
    rotary = LlamaRotaryEmbedding(LlamaConfig.from_dict(json.loads(json.dumps(config))))
    assert rotary.inv_freq.double().tolist() == pytest.approx(list(stage.inv_freq), rel=2e-6)
    assert rotary.attention_scaling == pytest.approx(stage.attention_scale, rel=1e-6)
    assert isinstance(rotary.inv_freq, torch.Tensor)


@pytest.mark.filterwarnings("ignore:linear scaling")
@pytest.mark.parametrize("kind", SCALED)
def test_already_scaled_is_refused_replaced_or_composed(kind):
    config = {**V4, "rope_scaling": SCALED[kind]}
    with pytest.raises(CtxextError, match="already scaled") as error:
        read_rope(config)
    assert "--existing compose" in str(error.value)
    replaced = read_rope(config, existing="replace")
    assert replaced.ratios == ()
    # Linear scaling says no original length: 4096 is what the model reads with it.
    assert replaced.trained_length == SCALED[kind].get("original_max_position_embeddings", 2048)
    composed = read_rope(config, existing="compose")
    assert composed.trained_length == 4096
    assert composed.inv_freq() == pytest.approx(list(read_schedule(config).stages[0].inv_freq))
    # Extending a scaled rope has no native name: it must not claim one.
    assert methods.schedule(composed, "pi", 2).native is None


@pytest.mark.parametrize("target", [Target(), Target(trained_length_under_linear=True)], ids=["all", "vllm"])
@pytest.mark.parametrize("name", [n for n, m in methods.all_methods().items() if not m.loads.startswith("needs")])
def test_composing_extends_what_the_first_patch_reached(name, target):
    """Whatever stands in max_position_embeddings: for vLLM, linear scaling leaves the trained length there."""
    rope = read_rope(V4)
    first = write_config(V4, methods.schedule(rope, name, 4, **options(name, rope)), target=target)
    assert read_rope(first, existing="compose").trained_length == 16384
    for dialect in ("rope_scaling", "rope_parameters"):
        foreign = {k: v for k, v in first.items() if k not in ("ctxext", dialect)}
        if name not in ("ntk", "theta"):
            assert read_rope(foreign, existing="compose").trained_length == 16384


@pytest.mark.filterwarnings("ignore:linear scaling")
@pytest.mark.parametrize(
    ("length", "scaling", "reached"),
    [
        # LLaMA-2-7B-32K: the length with the scaling stands in max_position_embeddings.
        (32768, {"type": "linear", "factor": 8.0}, 32768),
        # What Qwen's cards say to add: the length isn't raised, or was rounded up before.
        (40960, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        # Llama 3.1 reads further than the factor times the original length.
        (131072, {**SCALED["llama3"], "original_max_position_embeddings": 8192}, 131072),
        (8192, {**SCALED["llama3"], "original_max_position_embeddings": 8192}, 65536),
        (131072, {**SCALED["longrope"], "original_max_position_embeddings": 4096}, 131072),
    ],
)
def test_composing_extends_what_a_foreign_scaling_reached(length, scaling, reached):
    config = {**V4, "max_position_embeddings": length, "rope_scaling": scaling}
    assert read_rope(config, existing="compose").trained_length == reached


def test_both_conventions_of_linear_scaling():
    """Vicuna 16k keeps the trained length in max_position_embeddings; where nothing tells, it is said."""
    vicuna = {**V4, "rope_scaling": {"type": "linear", "factor": 4.0}}
    with pytest.warns(CtxextWarning, match="--trained-length 16384"):
        assert read_rope(vicuna, existing="compose").trained_length == 4096
    assert read_rope(vicuna, trained_length=16384, existing="compose").trained_length == 16384
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told = {**vicuna, "max_sequence_length": 16384}
        assert read_rope(told, existing="compose").trained_length == 16384
        assert read_rope(told, existing="replace").trained_length == 4096
    assert native_schedule(told).rope.trained_length == 16384


def test_scaling_without_fixed_frequencies():
    dynamic = {**V4, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    switching = {**V4, "rope_scaling": {**SCALED["longrope"], "short_factor": [1.0] * 32}}
    for config in (dynamic, switching):
        with pytest.raises(CtxextError, match="--existing replace"):
            read_rope(config)
        assert read_rope(config, existing="replace").ratios == ()
    with pytest.raises(UsageError, match="existing='destroy'"):
        read_rope(V4, existing="destroy")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"hidden_size": 1}, "no model_type"),
        ({"model_type": "gpt2"}, "no rotary embedding of the standard kind"),
        ({"model_type": "falcon", "alibi": True}, "no rotary embedding"),
        ({"model_type": "gemma3_text", "layer_types": ["chunked_attention"]}, "layers of type chunked_attention"),
        ({"model_type": "llama4_text"}, "complex"),
        ({"model_type": "deepseek_v3", "qk_rope_head_dim": 64}, "latent attention"),
        ({"model_type": "llava", "text_config": {}}, "multimodal"),
        ({"model_type": "nosuchmodel"}, "no model type 'nosuchmodel'"),
    ],
)
def test_unsupported_families_say_why(config, reason):
    assert reason in unsupported_reason(config)
    with pytest.raises(CtxextError, match="can't patch this model"):
        require_support(config)


def test_remote_code_needs_permission():
    config = {"model_type": "nosuchmodel", "auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}
    with pytest.raises(CtxextError, match="its own modelling code") as error:
        require_support(config)
    assert "--trust-remote-code" in str(error.value)
    require_support(config, trust_remote_code=True)


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, 4096),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, None),
        ({"model_type": "gemma2", "sliding_window": 4096}, None),
        ({"model_type": "gemma2", "sliding_window": 16, "layer_types": ["sliding_attention"] * 2}, 16),
        (
            {"model_type": "qwen3", "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
            None,
        ),
    ],
)
def test_sliding_window_counts_only_if_every_layer_has_it(config, window):
    assert sliding_window(config) == window


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_position_embeddings": None}, "--trained-length"),
        ({"hidden_size": None}, "neither head_dim nor hidden_size"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "full_attention": {}}}, "no rope in its config"),
        ({"rope_scaling": {"full_attention": ["yarn"], "sliding_attention": {}}}, "full_attention .* no object"),
        ({"rope_scaling": "linear"}, "rope_scaling .* 'linear', which is no object"),
        ({"rope_scaling": [["type", "linear"]]}, "rope_scaling .* is no object"),
        ({"rope_theta": None, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3 .*low_freq_factor"),
        ({"rope_theta": None, "rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, "longrope .*short_fac"),
        ({"rope_theta": "many"}, "rope_theta .* 'many', which is no number"),
        ({"rope_scaling": {"type": "linear", "factor": "4.0"}}, "factor .* '4.0', which is no number"),
        ({"max_position_embeddings": "4096"}, "max_position_embeddings .* '4096', which is no number"),
        ({"rope_scaling": {**SCALED["yarn"], "original_max_position_embeddings": "1024"}}, "'1024', which is no"),
        ({"rope_scaling": {**SCALED["longrope"], "long_factor": 2, "short_factor": 2}}, "must be list.*, got 2"),
    ],
)
@pytest.mark.parametrize("existing", ["refuse", "compose"])
def test_damaged_configs(change, message, existing):
    with pytest.raises(CtxextError, match=message):
        read_rope({**V4, **change}, existing=existing)


@pytest.mark.parametrize(
    "scaling", [{"rope_type": "llama3", "factor": 8.0}, {"rope_type": "longrope", "factor": 8.0}, {"factor": 4.0}]
)
def test_a_damaged_scaling_can_be_replaced(scaling):
    """Nothing of it is needed, and theta comes from the config class."""
    config = {**V4, "rope_theta": None, "rope_scaling": scaling}
    assert read_rope(config, existing="replace") == Rope(10000.0, 64, 4096)
