"""Encodings beyond frequencies in every shape of model, family, backend and call: the logits are the same.

`test_feeding` has the methods' invariants matrix.
"""

import sys

import pytest
import torch
from conftest import logits, pico_model
from encoded_models import METHODS, patched
from feeding import TOLERANCE, chunks, differences
from test_patching import FAMILIES, family

import ctxext
from ctxext import methods
from ctxext.errors import CtxextError

SHAPES = {
    "mha": ("llama", {"num_key_value_heads": 4}),
    "qwen3-wide-heads": ("qwen3", {"head_dim": 48}),
    "cohere-neighbours": ("cohere", {}),
    "phi-partial": ("phi", {"num_key_value_heads": 4}),
}


def test_every_method_that_changes_attention_is_here():
    """A method that is more than a frequency table or stages needs its rows."""
    from ctxext.rope import Rope

    rope = Rope(1e4, 32, 64)
    made = {m.name: m(rope, 2, **dict.fromkeys(m.needs, [1.0] * 16)) for m in methods.all_methods().values()}
    assert {n for n, s in made.items() if s.encoding} <= {name.split()[0] for name in METHODS}


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
    monkeypatch.setattr("ctxext.live.blocks.BLOCK", 4 * 200 * 30)
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
        # Falcon's attention goes through transformers' functions from 5.25 on.
        own = not hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS")
        refused = (name in ("gemma2", "cohere2") or own) and method in ("alibi", "t5_bias", "dual_chunk")
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


def test_under_torch_compile(tokens):
    for method in ("alibi", "nope", "sinusoidal"):
        model = patched(method)
        want = logits(model, tokens)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=method != "alibi")
        torch.testing.assert_close(logits(compiled, tokens), want, atol=TOLERANCE, rtol=0)
