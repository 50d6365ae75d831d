"""What an encoding beyond frequencies must survive: training, copies, undoing, folders and adapters."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import logits, pico_model
from encoded_models import METHODS, patched
from feeding import TOLERANCE, decode

import ctxext
from ctxext.errors import CtxextError, UsageError


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

    def loss():
        # The model's own loss is float32.
        logits = model(ids, use_cache=False).logits[0, :-1]
        assert logits.dtype == torch.float64
        return torch.nn.functional.cross_entropy(logits, ids[0, 1:])

    loss().backward()
    for weight in weights:
        # Where the gradient is largest: norms compute in float32, which blurs small differences.
        index = divmod(int(weight.grad.abs().argmax()), weight.shape[1])
        step, values = 1e-2, []
        with torch.no_grad():
            for sign in (1, -1):
                weight[index] += sign * step
                values.append(loss().item())
                weight[index] -= sign * step
        assert weight.grad[index].item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=2e-3)


@pytest.mark.parametrize("method", METHODS)
def test_two_threads_call_one_model(method, tokens):
    """Both are made to stand between their projections and their attention at once, in every layer."""
    model = patched(method)
    packed = torch.cat((torch.arange(60), torch.arange(60)))[None]
    calls = [
        {"input_ids": tokens[:, :120]},
        {"input_ids": tokens[:, :120], "position_ids": packed},
        {"input_ids": tokens[:, 50:150]},
    ]

    meeting = threading.Barrier(2, timeout=60)

    def run(call):
        try:
            with torch.no_grad():
                return model(**call, use_cache=False).logits
        except BaseException:
            meeting.abort()
            raise

    want = [run(call) for call in calls]

    def meet(*_):
        meeting.wait()

    hooks = [layer.self_attn.v_proj.register_forward_hook(meet) for layer in model.model.layers]
    for pair in ((0, 1), (0, 2)):
        with ThreadPoolExecutor(2) as threads:
            got = list(threads.map(run, [calls[i] for i in pair]))
        for i, logits_there in zip(pair, got, strict=True):
            torch.testing.assert_close(logits_there, want[i], atol=TOLERANCE, rtol=0)
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("method", METHODS)
def test_a_call_leaves_nothing_in_the_model(method, tokens):
    model = patched(method)
    before = len(pickle.dumps(model))
    logits(model, tokens)
    assert len(pickle.dumps(model)) == before


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


def test_weights_without_their_method_are_no_silent_loss(tmp_path):
    """A folder with a learned table, patched anew by another method: loading says what would be lost."""
    base, folder, wrong = tmp_path / "base", tmp_path / "folder", tmp_path / "wrong"
    pico_model(num_hidden_layers=2).save_pretrained(base)
    ctxext.patch_checkpoint(base, folder, method="t5_bias", factor=4)
    ctxext.load(folder).save_pretrained(folder)
    ctxext.patch_checkpoint(folder, wrong, method="drope", factor=4, existing="replace", temperature=0.1)
    with pytest.raises(CtxextError, match="the model has None") as error:
        ctxext.load(wrong)
    assert "options that it was trained with" in error.value.hint


def test_learned_tables_outlive_other_methods_and_options(tokens):
    model = pico_model(num_hidden_layers=2)
    tables = {}
    for buckets in (32, 16):
        ctxext.patch(model, "t5_bias", 4, buckets=buckets)
        with torch.no_grad():
            model.model.ctxext_bias.table.normal_(generator=torch.Generator().manual_seed(buckets))
        tables[buckets] = model.model.ctxext_bias.table.detach().clone()
    ctxext.patch(model, "yarn", 4)
    ctxext.patch(model, "alibi", 4)
    for buckets in (32, 16, 32):
        ctxext.patch(model, "t5_bias", 4, buckets=buckets)
        assert torch.equal(model.model.ctxext_bias.table, tables[buckets])
    ctxext.unpatch(model)
    assert "ctxext" not in " ".join(model.state_dict())


def test_a_learned_table_beside_offloaded_weights(tokens, tmp_path):
    from accelerate import disk_offload

    want = pico_model(num_hidden_layers=2)
    ctxext.patch(want, "t5_bias", 4, start="alibi")
    want = logits(want, tokens)
    model = pico_model(num_hidden_layers=2)
    disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    ctxext.patch(model, "t5_bias", 4, start="alibi")
    torch.testing.assert_close(logits(model, tokens), want)
