"""The invariants matrix for encodings beyond frequencies: however a text is fed, the logits are the same.

The rows are those of the staged schedules (test_staged.py). Then what a patch must survive: every family and
backend, training, adapters, folders, copies, casts.
"""

import copy
import pickle

import pytest
import torch
from conftest import logits, pico_model
from test_patching import FAMILIES, family
from test_staged import ROWS, TOLERANCE, chunks, decode, differences

import ctxext
from ctxext import methods
from ctxext.errors import CtxextError, UsageError

METHODS = {
    "alibi": {},
    "t5_bias": {"buckets": 16, "max_distance": 100},
    "sinusoidal": {"scale": 0.5},
    "nope": {"every": 2},
    "drope": {"temperature": 0.3},
    "drope qk_norm": {"temperature": 0.3, "qk_norm": True},
    "self_extend": {"window": 16, "group": 6},
    "rerope": {"window": 24},
    "rerope leaky": {"window": 24, "step": 8},
    "dual_chunk": {"chunk": 40, "window": 10},
}
SHAPES = {
    "mha": ("llama", {"num_key_value_heads": 4}),
    "qwen3-wide-heads": ("qwen3", {"head_dim": 48}),
    "cohere-neighbours": ("cohere", {}),
    "phi-partial": ("phi", {"num_key_value_heads": 4}),
}


def patched(method, model=None, **changes):
    """A two-layer pico model that runs `method` at 4 times its 64 tokens; what is learned gets random values."""
    model = pico_model(num_hidden_layers=2, **changes) if model is None else model
    ctxext.patch(model, method.split()[0], 4, **METHODS[method])
    for name, parameter in model.named_parameters():
        if "ctxext_" in name:
            with torch.no_grad():
                parameter.normal_(generator=torch.Generator().manual_seed(3))
    return model


def test_every_method_that_changes_attention_is_here():
    """A method that is more than a frequency table or stages needs its rows."""
    from ctxext.rope import Rope

    rope = Rope(1e4, 32, 64)
    made = {m.name: m(rope, 2, **dict.fromkeys(m.needs, [1.0] * 16)) for m in methods.all_methods().values()}
    assert {n for n, s in made.items() if s.beyond_table} <= {name.split()[0] for name in METHODS}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("method", METHODS)
def test_every_way_of_feeding_agrees(method, row, tokens):
    difference, mismatches = differences(row, patched(method), tokens)
    assert difference < TOLERANCE
    assert mismatches == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", METHODS)
def test_every_shape_agrees(method, shape, tokens):
    name, changes = SHAPES[shape]
    model = patched(method, pico_model(name, num_hidden_layers=2, **changes))
    for row in ("chunks of 50", "left padding", "static cache"):
        difference, mismatches = differences(row, model, tokens)
        assert difference < TOLERANCE
        assert mismatches == 0


@pytest.mark.parametrize("method", ["t5_bias", "self_extend", "rerope leaky", "dual_chunk"])
def test_blocks_of_queries_change_nothing(method, tokens, monkeypatch):
    """A long text is read some queries at a time, so that no heads x L x L tensor exists."""
    model = patched(method)
    want = logits(model, tokens)
    monkeypatch.setattr("ctxext.biases.BLOCK", 4 * 200 * 30)
    torch.testing.assert_close(logits(model, tokens), want, atol=TOLERANCE, rtol=0)
    for row in ("chunks of 50", "left padding", "static cache"):
        assert differences(row, model, tokens)[0] < TOLERANCE


def test_left_padding_in_small_chunks(tokens):
    """The first chunks of the short row hold nothing but pads."""
    short = tokens[:, :60].flip(1)
    batch = torch.cat((torch.cat((torch.zeros(1, 140, dtype=torch.long), short), 1), tokens))
    mask = torch.ones_like(batch)
    mask[0, :140] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for method in METHODS:
        model, parts, cache = patched(method), [], None
        with torch.no_grad():
            for a in range(0, 200, 40):
                part = slice(a, a + 40)
                out = model(
                    batch[:, part],
                    attention_mask=mask[:, : a + 40],
                    position_ids=positions[:, part],
                    cache=cache,
                    use_cache=True,
                )
                cache = out.cache
                parts.append(out.logits)
        got = torch.cat(parts, 1)
        torch.testing.assert_close(got[:1, 140:], logits(model, short), atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(got[1:], logits(model, tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_agrees_or_is_refused(name, tokens):
    """One method of each mechanism: a bias by coordinates, one by a mask, distances, layers, inputs."""
    model = family(name)
    plain = logits(model, tokens)
    for method in ("alibi", "t5_bias", "dual_chunk", "nope", "sinusoidal"):
        refused = name in ("gemma2", "cohere2", "falcon") and method in ("alibi", "t5_bias", "dual_chunk")
        if refused:
            with pytest.raises(CtxextError, match=r"full attention in every layer|computes attention itself"):
                patched(method, model)
            assert torch.equal(logits(model, tokens), plain)
            continue
        patched(method, model)
        whole = logits(model, tokens)
        assert (whole - plain).abs().max() > 1e-2
        torch.testing.assert_close(chunks(model, tokens, 70), whole, atol=TOLERANCE, rtol=0)
        ctxext.unpatch(model)
        assert torch.equal(logits(model, tokens), plain)


@pytest.mark.parametrize("method", METHODS)
def test_backends(method, tokens):
    model = patched(method)
    want = logits(model, tokens)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(logits(model, tokens), want, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(chunks(model, tokens, 90), want, atol=TOLERANCE, rtol=0)
    with torch.no_grad():
        assert (model(tokens, output_attentions=True).attentions is not None) or "_" in method


@pytest.mark.parametrize("method", ["alibi", "t5_bias", "self_extend"])
def test_flex_attention(method, tokens):
    """Without its compiler, which takes half a minute for each shape on a CPU."""
    model = patched(method)
    want = logits(model, tokens)
    model.set_attn_implementation("flex_attention")
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(logits(model, tokens), want, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(chunks(model, tokens, 90), want, atol=TOLERANCE, rtol=0)


def test_generation_with_and_without_a_cache(tokens):
    prompt = torch.cat((tokens[:, :60], tokens[:, 60:120]))
    mask = torch.ones_like(prompt)
    prompt[0, :20], mask[0, :20] = 0, 0
    common = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    for method in METHODS:
        model = patched(method)
        without = model.generate(prompt, use_cache=False, **common)
        assert torch.equal(model.generate(prompt, use_cache=True, **common), without)
        beams = model.generate(prompt, num_beams=3, **common)
        assert torch.equal(model.generate(prompt, num_beams=3, use_cache=False, **common), beams)


@pytest.mark.parametrize("method", METHODS)
def test_packed_documents(method, tokens):
    model = patched(method)
    positions = torch.cat((torch.arange(130), torch.arange(70)))[None]
    with torch.no_grad():
        packed = model(tokens, position_ids=positions, use_cache=False).logits
    alone = torch.cat((logits(model, tokens[:, :130]), logits(model, tokens[:, 130:])), 1)
    torch.testing.assert_close(packed, alone, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_gradients_and_checkpointing(method, tokens):
    gradients = []
    for checkpointing in (False, True):
        model = patched(method).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        gradients.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)
    if method == "t5_bias":
        assert model.model.ctxext_bias.table.grad.abs().max() > 1e-4


@pytest.mark.parametrize("method", ["t5_bias", "self_extend", "drope"])
def test_gradients_against_finite_differences(method, tokens):
    model = patched(method).double()
    weights = [model.model.layers[0].self_attn.k_proj.weight]
    if method == "t5_bias":
        weights.append(model.model.ctxext_bias.table)
    ids = tokens[:, :120]
    model(ids, labels=ids, use_cache=False).loss.backward()
    for weight in weights:
        index, step, values = (5, 2), 1e-2, []
        with torch.no_grad():
            for sign in (1, -1):
                weight[index] += sign * step
                values.append(model(ids, labels=ids, use_cache=False).loss.item())
                weight[index] -= sign * step
        assert weight.grad[index].item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=2e-3, abs=1e-7)


def test_under_torch_compile(tokens):
    for method in ("alibi", "nope"):
        model = patched(method)
        want = logits(model, tokens)
        compiled = torch.compile(model, backend="aot_eager")
        torch.testing.assert_close(logits(compiled, tokens), want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_copies_and_pickles_stand_alone(method, tokens):
    model = patched(method)
    want = logits(model, tokens)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        ctxext.unpatch(model)
        assert torch.equal(logits(other, tokens), want)
        torch.testing.assert_close(decode(other, tokens[:, :90]), want[:, :90], atol=TOLERANCE, rtol=0)
        ctxext.unpatch(other)
        assert torch.equal(logits(other, tokens), logits(model, tokens))
        model = patched(method)


def test_undo_leaves_no_trace(tokens):
    model = pico_model()
    names, before, inner = set(model.state_dict()), logits(model, tokens), model.model.layers[0].self_attn
    for method in METHODS:
        patched(method, model)
        ctxext.unpatch(model)
        assert set(model.state_dict()) == names
        assert torch.equal(logits(model, tokens), before)
        assert inner.config is model.config
        assert "forward" not in inner.__dict__
        assert "forward" not in model.model.layers[0].__dict__


# ---------------------------------------------------------------- folders and adapters


@pytest.mark.parametrize("method", [m for m in METHODS if m != "nope"])
def test_folders_refuse_plain_transformers_and_load_with_ctxext(method, llama_folder, tmp_path, tokens):
    from transformers import AutoModelForCausalLM

    live = pico_model()
    options = {"method": method.split()[0], "factor": 4, **METHODS[method]}
    ctxext.patch(live, **options)
    out = ctxext.patch_checkpoint(llama_folder, tmp_path / "out", **options).out
    with pytest.raises(KeyError, match=r"needs ctxext\.load"):
        AutoModelForCausalLM.from_pretrained(out)
    loaded = ctxext.load(out).eval()
    assert torch.equal(logits(loaded, tokens), logits(live, tokens))
    loaded.save_pretrained(tmp_path / "again")
    with pytest.raises(KeyError, match=r"needs ctxext\.load"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(ctxext.load(tmp_path / "again").eval(), tokens), logits(live, tokens))
    assert "Plain transformers can't run this folder" in (out / "README.md").read_text()


def test_a_choice_of_layers_is_written_as_smollm3(llama_folder, tmp_path, tokens):
    from transformers import AutoModelForCausalLM, SmolLM3ForCausalLM

    for options in ({"every": 2}, {"layers": [0, 2]}):
        live = pico_model()
        ctxext.patch(live, "nope", 4, **options)
        out = ctxext.patch_checkpoint(
            llama_folder, tmp_path / str(options), method="nope", factor=4, **options
        ).out
        plain = AutoModelForCausalLM.from_pretrained(out).eval()
        assert type(plain) is SmolLM3ForCausalLM
        assert torch.equal(logits(plain, tokens), logits(live, tokens))
        assert torch.equal(logits(ctxext.load(out).eval(), tokens), logits(live, tokens))
        assert "doesn't rotate; the config says so as SmolLM3's does" in (out / "README.md").read_text()
        # The live Llama can't turn into another architecture: what it saves is for ctxext.load.
        live.save_pretrained(tmp_path / "live")
        with pytest.raises(KeyError, match=r"needs ctxext\.load"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "live")
        assert torch.equal(logits(ctxext.load(tmp_path / "live").eval(), tokens), logits(live, tokens))


def test_a_choice_of_layers_of_other_architectures_is_refused_by_plain_transformers(tmp_path, tokens):
    from transformers import AutoModelForCausalLM

    pico_model("qwen2").save_pretrained(tmp_path / "qwen2")
    live = pico_model("qwen2")
    ctxext.patch(live, "nope", 4, every=2)
    out = ctxext.patch_checkpoint(tmp_path / "qwen2", tmp_path / "out", method="nope", factor=4, every=2).out
    with pytest.raises(KeyError, match=r"needs ctxext\.load"):
        AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(logits(ctxext.load(out).eval(), tokens), logits(live, tokens))


def test_smollm3_keeps_its_own_layers(tmp_path, tokens):
    from transformers import AutoModelForCausalLM

    model = pico_model("smollm3", num_hidden_layers=4)
    model.save_pretrained(tmp_path / "m")
    ctxext.patch(model, "nope", 4, layers=[0])
    out = ctxext.patch_checkpoint(tmp_path / "m", tmp_path / "out", method="nope", factor=4, layers=[0]).out
    plain = AutoModelForCausalLM.from_pretrained(out).eval()
    assert plain.config.no_rope_layers == [0, 1, 1, 0]
    assert torch.equal(logits(plain, tokens), logits(model, tokens))


def test_a_static_fallback_is_the_temperature_of_the_end(llama_folder, tmp_path, tokens):
    """DroPE at 256 tokens with c = 0.3, for a plain runtime: 1 + 0.3 ln 4 at every position."""
    from transformers import AutoModelForCausalLM

    options = {"method": "drope", "factor": 4, "temperature": 0.3}
    out = ctxext.patch_checkpoint(llama_folder, tmp_path / "out", fallback="static", **options).out
    plain = AutoModelForCausalLM.from_pretrained(out).eval()
    sharp = pico_model()
    for layer in sharp.model.layers:
        layer.self_attn.scaling *= 1 + 0.3 * torch.tensor(4.0).log().item()
    ctxext.patch(sharp, "nope", 4)
    torch.testing.assert_close(logits(plain, tokens), logits(sharp, tokens), atol=5 * TOLERANCE, rtol=0)
    live = pico_model()
    ctxext.patch(live, **options)
    assert torch.equal(logits(ctxext.load(out).eval(), tokens), logits(live, tokens))
    with pytest.raises(UsageError, match="no frequency table comes near alibi"):
        ctxext.patch_checkpoint(llama_folder, tmp_path / "no", method="alibi", factor=4, fallback="static")


def test_a_learned_table_is_saved_and_loaded(tmp_path, tokens):
    model = patched("t5_bias")
    want = logits(model, tokens)
    model.save_pretrained(tmp_path / "m", max_shard_size="100KB")
    loaded = ctxext.load(tmp_path / "m").eval()
    assert torch.equal(logits(loaded, tokens), want)
    assert torch.equal(loaded.model.ctxext_bias.table, model.model.ctxext_bias.table)


def test_a_learned_table_in_an_adapter(llama_folder, tmp_path, tokens):
    """By a recipe: the table is trained beside the LoRA weights, carried by the adapter, and merged."""
    from ctxext.training.recipe import load_recipe
    from ctxext.training.run import train

    (tmp_path / "text.txt").write_text("a b c d e f g h " * 200)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"""
output: {tmp_path / "run"}
model: {{path: tiny, dtype: float32}}
method: {{name: t5_bias, factor: 2, start: alibi}}
data: {{sources: [{{path: {tmp_path / "text.txt"}}}], length: 64, cache: {tmp_path / "cache"}}}
train: {{steps: 2, batch_size: 1, learning_rate: 1.0e-2, warmup_steps: 0, loss: stock}}
"""
    )
    done = train(load_recipe(recipe))
    model = ctxext.load(done["trained"], dtype=torch.float32).eval()
    fresh = ctxext.load("tiny", dtype=torch.float32)
    ctxext.patch(fresh, "t5_bias", 2, start="alibi")
    learned = next(p for n, p in model.named_parameters() if "ctxext_bias" in n and "modules_to_save" in n)
    assert (learned - fresh.model.ctxext_bias.table).abs().max() > 1e-3
    ids = tokens[:, :60]
    out = ctxext.merge(done["trained"], tmp_path / "merged", dtype="float32").out
    torch.testing.assert_close(logits(ctxext.load(out).eval(), ids), logits(model, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_a_rotary_embedding_per_layer_type_is_refused(method, tokens):
    """Gemma 3: sliding layers and full ones turn differently."""
    kinds = ["sliding_attention", "full_attention"]
    model = pico_model("gemma3_text", num_hidden_layers=2, layer_types=kinds, sliding_window=32)
    before = logits(model, tokens)
    with pytest.raises(CtxextError, match=r"one rotary embedding for all layers|full attention in every layer"):
        patched(method, model)
    assert torch.equal(logits(model, tokens), before)
