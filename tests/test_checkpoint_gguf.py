"""A GGUF file as the model to patch: turned into a folder once; an estimate reads its header alone."""

import time

import pytest
import torch
from conftest import logits, pico_model

import ctxext
from ctxext.errors import CtxextError, UsageError
from ctxext.folders import patch as checkpoint


def test_a_gguf_is_dequantised_once(tmp_path, monkeypatch, tokens):
    pytest.importorskip("gguf")
    source = write_gguf(tmp_path / "pico.gguf", model := pico_model())
    monkeypatch.setenv("CTXEXT_CACHE", str(tmp_path / "cache"))
    out = ctxext.patch_checkpoint(source, tmp_path / "out", method="yarn", factor=4, dtype="float32").out
    ctxext.patch(model, "yarn", 4)
    torch.testing.assert_close(logits(ctxext.load(out).eval(), tokens), logits(model, tokens), atol=1e-4, rtol=0)
    (made,) = (tmp_path / "cache" / "gguf").iterdir()
    assert (out / "model.safetensors").samefile(made / "model.safetensors")
    stamp = made.stat().st_mtime_ns
    time.sleep(0.01)
    ctxext.patch_checkpoint(source, tmp_path / "out2", method="pi", factor=2, dtype="float32")
    assert made.stat().st_mtime_ns == stamp
    with pytest.raises(UsageError, match="dtype='int8'"):
        checkpoint.plan(source, checkpoint.Request("pi", 2), dtype="int8")
    (tmp_path / "bad.gguf").write_bytes(b"not a gguf")
    with pytest.raises(CtxextError, match="can't read"):
        checkpoint.plan(tmp_path / "bad.gguf", checkpoint.Request("pi", 2))


def test_an_estimate_needs_only_the_header_of_a_gguf(tmp_path):
    pytest.importorskip("gguf")
    from ctxext.training import estimate

    model = pico_model()
    config = estimate.find_config(str(write_gguf(tmp_path / "pico.gguf", model)))
    assert estimate.Shape(config).parameters == sum(p.numel() for p in model.parameters())
    (tmp_path / "bad.gguf").write_bytes(b"not a gguf")
    with pytest.raises(CtxextError, match=r"bad\.gguf can't be read"):
        estimate.find_config(str(tmp_path / "bad.gguf"))
    assert estimate.find_config(str(tmp_path / "none.gguf")) is None


def write_gguf(path, model):
    """A float32 GGUF of a pico Llama, with a byte-level tokenizer of its 128 tokens."""
    import gguf

    config, state = model.config, {k: v.float().numpy() for k, v in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    pieces = [chr(33 + i) if i < 94 else f"t{i}" for i in range(config.vocab_size - 2)]
    writer.add_token_list([*pieces, '!"', '"#'])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(['! "', '" #'])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def permuted(weight, heads):
        """llama.cpp rotates neighbouring pairs, transformers halves: rows are interleaved on the way out."""
        return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)

    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    names["lm_head.weight"] = "output.weight"
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for i in range(config.num_hidden_layers):
        names |= {f"model.layers.{i}.{k}.weight": f"blk.{i}.{v}.weight" for k, v in parts.items()}
    for name, tensor in state.items():
        if "q_proj" in name:
            tensor = permuted(tensor, config.num_attention_heads)
        if "k_proj" in name:
            tensor = permuted(tensor, config.num_key_value_heads)
        writer.add_tensor(names[name], tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
