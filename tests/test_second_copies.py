"""Folders that hold a model several times: what from_pretrained reads is patched and read, and nothing else."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import logits, pico_model, run
from safetensors.torch import load_file, save_file
from test_checkpoint_gguf import write_gguf

import ctxext
from ctxext.errors import CtxextError
from ctxext.folders.adapter import fingerprint
from ctxext.folders.weights import second_copies, weight_files

SAFETENSORS = ("model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json")


@pytest.fixture
def source(llama_folder, tmp_path):
    shutil.copytree(llama_folder, tmp_path / "source")
    return tmp_path / "source"


def put(folder, *names, data=b"not read"):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def mistral_copy(folder):
    """The files of Mistral's own format: other weights, so that reading them would be seen."""
    state = load_file(folder / "model.safetensors")
    save_file({k.removeprefix("model."): v + 1 for k, v in state.items()}, folder / "consolidated.safetensors")
    (folder / "params.json").write_text(json.dumps({"dim": 128, "n_layers": 3, "rope_theta": 1e6}))
    (folder / "tekken.json").write_text("{}")


COPIES = {
    "Mistral's": (["params.json", "consolidated.safetensors"], {}),
    "Mistral's shards": (["consolidated-00001-of-00002.safetensors", "consolidated.safetensors.index.json"], {}),
    "Meta's": (
        ["original/params.json", "original/consolidated.00.pth", "original/tokenizer.model"],
        {"original/"},
    ),
    "gpt-oss's": (
        ["original/config.json", "original/model--00001-of-00002.safetensors", "metal/model.bin"],
        {"original/", "metal/"},
    ),
    "torch": (["pytorch_model.bin"], {}),
    "torch shards": (["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], {}),
    "stale shards": (["model-00001-of-00002.safetensors", "model.safetensors.index.json"], {}),
    "GGUF": (["pico-Q4_K_M.gguf"], {}),
    "GGUF below": (["gguf/pico-Q4_K_M.gguf", "gguf/README.md"], {"gguf/"}),
    "ONNX": (["onnx/model.onnx", "onnx/model.onnx_data", "onnx/config.json"], {"onnx/"}),
    "ONNX beside": (["model.onnx", "model.onnx.data"], {}),
    "OpenVINO": (["openvino_model.xml", "openvino_model.bin"], {}),
    "OpenVINO below": (["openvino/openvino_model.xml", "openvino/openvino_model.bin"], {"openvino/"}),
    "TensorFlow, Flax, Rust": (["tf_model.h5", "flax_model.msgpack", "rust_model.ot"], {}),
    "Core ML": (
        ["coreml/pico.mlpackage/Manifest.json", "coreml/pico.mlpackage/Data/com.apple.CoreML/model.mlmodel"],
        {"coreml/pico.mlpackage/"},
    ),
    "MLX": (["mlx/config.json", "mlx/model.safetensors"], {"mlx/"}),
    "a checkpoint of a run": (["checkpoint-9/config.json", "checkpoint-9/model.safetensors"], {"checkpoint-9/"}),
}


@pytest.mark.parametrize("kind", COPIES)
def test_a_second_copy_is_left_out_and_said(kind, source, tmp_path, monkeypatch, capsys):
    names, folders = COPIES[kind]
    data = json.dumps({"dim": 128, "n_layers": 3}).encode() if "params.json" in names[0] else b"{}"
    put(source, *names, data=data)
    left_out = sorted(folders or set(names))
    done = ctxext.patch_checkpoint(source, tmp_path / "out", method="yarn", factor=4)
    assert sorted(done.left_out) == left_out
    there = {str(path.relative_to(done.out)) for path in done.out.rglob("*") if path.is_file()}
    assert there == {path.name for path in source.iterdir() if path.is_file()} - set(names) | {"README.base.md"}
    card = (done.out / "README.md").read_text()
    assert all(f"`{name}`" in card for name in left_out)
    code, out, _ = run(monkeypatch, capsys, "patch", source, "-m", "yarn", "-o", tmp_path / "b", "--dry-run")
    assert code == 0
    assert all(name in out for name in left_out)
    code, out, _ = run(monkeypatch, capsys, "patch", source, "-m", "yarn", "-o", tmp_path / "b", "--json")
    assert sorted(json.loads(out)["left_out"]) == left_out
    # Patched by hand, or by an older ctxext: whoever goes on with it reads the same weights.
    assert fingerprint(source) == fingerprint(done.out)


KEPT = {
    "what a run left": ["training_args.bin", "optimizer.pt", "trainable_params.bin"],
    "heads beside": ["colbert_linear.pt", "value_head.safetensors"],
    "variants": ["model.fp16.safetensors", "model.safetensors.index.fp16.json", "pytorch_model.fp16.bin"],
    "an adapter": ["lora/adapter_config.json", "lora/adapter_model.safetensors"],
    "a draft": ["draft/config.json", "draft/model.safetensors"],
    "parameters of something else": ["params.json"],
    "tokenizers": ["tekken.json", "tokenizer.model", "tokenizer.model.v3"],
}


@pytest.mark.parametrize("kind", KEPT)
def test_what_is_no_copy_stays(kind, source, tmp_path):
    weights = (source / "model.safetensors").read_bytes()
    for name in KEPT[kind]:
        data = weights if name.endswith(".safetensors") else b'{"hidden_size": 32, "num_hidden_layers": 1}'
        put(source, name, data=data)
    done = ctxext.patch_checkpoint(source, tmp_path / "out", method="yarn", factor=4)
    assert done.left_out == ()
    assert all((done.out / name).is_file() for name in KEPT[kind])
    assert "Left out" not in (done.out / "README.md").read_text()


def test_modules_of_sentence_transformers_stay(source, tmp_path):
    weights = (source / "model.safetensors").read_bytes()
    put(source, "1_Pooling/config.json", "2_Dense/config.json", data=b"{}")
    put(source, "2_Dense/model.safetensors", data=weights)
    put(source, "onnx/model.onnx")
    paths = ("", "1_Pooling", "2_Dense")
    (source / "modules.json").write_text(json.dumps([{"idx": i, "path": p} for i, p in enumerate(paths)]))
    done = ctxext.patch_checkpoint(source, tmp_path / "out", method="yarn", factor=4)
    assert done.left_out == ("onnx/",)
    assert (done.out / "2_Dense" / "model.safetensors").read_bytes() == weights
    assert (done.out / "1_Pooling" / "config.json").is_file()
    # A module that was cut short is told of as the weights are.
    (source / "2_Dense" / "model.safetensors").write_bytes(weights[:-10])
    with pytest.raises(CtxextError, match=r"2_Dense/model\.safetensors is .* its header promises"):
        ctxext.patch_checkpoint(source, tmp_path / "again", method="yarn", factor=4)


def from_pretrained_reads(folder, monkeypatch):
    """The files that transformers itself settles on."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers import modeling_utils as stock

    seen, resolved = [], stock._get_resolved_checkpoint_files

    def watch(*args, **kwargs):
        found = resolved(*args, **kwargs)
        seen.extend(found[0])
        return found

    monkeypatch.setattr(stock, "_get_resolved_checkpoint_files", watch)
    AutoModelForCausalLM.from_pretrained(folder, config=AutoConfig.from_pretrained(folder))
    return {path.rpartition("/")[2] for path in seen}


@pytest.mark.parametrize("first", ["whole", "shards", "torch", "torch shards", "named in config.json"])
def test_the_choice_is_that_of_from_pretrained(first, tmp_path, monkeypatch):
    """Down transformers' own order: each is taken away in turn from a folder that holds them all."""
    folder, model = tmp_path / "m", pico_model()
    model.save_pretrained(folder, max_shard_size="100KB")
    model.save_pretrained(tmp_path / "whole")
    shutil.copy(tmp_path / "whole" / "model.safetensors", folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    state = model.state_dict()
    torch.save(state, folder / "pytorch_model-00001-of-00001.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(state, "pytorch_model-00001-of-00001.bin")}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    order = ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"]
    names = ["whole", "shards", "torch", "torch shards"]
    for name in order[: names.index(first)] if first in names else ():
        (folder / name).unlink()
    if first not in names:
        shutil.copy(tmp_path / "whole" / "model.safetensors", folder / "other.safetensors")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "other.safetensors"}))
    mine = {path.name for path in weight_files(folder) if not path.name.endswith(".index.json")}
    assert mine == from_pretrained_reads(folder, monkeypatch)
    left = {str(path) for path in second_copies(folder)}
    assert not left & mine
    assert left  # whatever else there is of the whole model
    out = ctxext.patch_checkpoint(folder, tmp_path / "out", method="pi", factor=2).out
    assert from_pretrained_reads(out, monkeypatch) == mine


def test_a_folder_of_mistral_is_exported_and_loaded_from_its_hf_weights(
    source, tmp_path, tokens, monkeypatch, capsys
):
    """Patched already, with the copy beside it, as an older ctxext wrote it."""
    gguf = pytest.importorskip("gguf")
    done = ctxext.patch_checkpoint(source, tmp_path / "out", method="pi", factor=2)
    want = logits(ctxext.load(done.out), tokens)
    mistral_copy(done.out)
    assert torch.equal(logits(ctxext.load(done.out), tokens), want)
    exported = ctxext.export(done.out, tmp_path / "out.gguf", dtype="f32")
    written = {tensor.name: tensor.data for tensor in gguf.GGUFReader(exported.out).tensors}
    embedding = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(torch.tensor(written["token_embd.weight"]), embedding)
    for command in ("portability", "inspect", "doctor"):
        _, out, err = run(monkeypatch, capsys, command, done.out)
        assert "consolidated.safetensors" in out + err or "--config-format hf --load-format hf" in out, command
    _, out, _ = run(monkeypatch, capsys, "portability", done.out)
    assert "--config-format hf --load-format hf" in out
    _, out, _ = run(monkeypatch, capsys, "portability", tmp_path / "source", "-m", "yarn")
    assert "--load-format hf" not in out
    mistral_copy(tmp_path / "source")
    _, out, _ = run(monkeypatch, capsys, "portability", tmp_path / "source", "-m", "yarn")
    (unpatched,) = [line for line in out.splitlines() if "vLLM, the unpatched model" in line]
    assert "--config-format hf --load-format hf" in unpatched
    assert "--load-format hf" not in out.replace(unpatched, "")


@pytest.mark.parametrize("below", ["", "gguf"])
def test_a_folder_of_gguf_files_alone_names_in_gguf(below, source, tmp_path, monkeypatch, capsys):
    pytest.importorskip("gguf")
    (source / "model.safetensors").unlink()
    (source / below).mkdir(exist_ok=True)
    file = write_gguf(source / below / "pico.gguf", pico_model())
    commands = [
        *(["patch", "-m", "yarn", "-o", str(tmp_path / "out")], ["inspect"], ["portability"], ["export"]),
        ["eval", "passkey", "--lengths", "64"],
    ]
    for command, *rest in commands:
        kind = [rest.pop(0)] if command == "eval" else []
        code, _, err = run(monkeypatch, capsys, command, *kind, source, *rest)
        assert code == 1, command
        assert f"ctxext patch {file} --in-gguf" in " ".join(err.split()), command
    assert not (tmp_path / "out").exists()
    with pytest.raises(CtxextError, match="--in-gguf"):
        ctxext.load(source)
    # The advice is right.
    code, _, err = run(
        monkeypatch, capsys, "patch", file, "--in-gguf", "-m", "pi", "-f", 2, "-o", tmp_path / "o.gguf"
    )
    assert code == 0, err


@pytest.mark.parametrize("name", ["consolidated.safetensors", "model.onnx", "tf_model.h5"])
def test_a_folder_of_another_format_alone(name, source, tmp_path):
    (source / "model.safetensors").rename(source / name)
    for work in (
        ctxext.load,
        lambda folder: ctxext.patch_checkpoint(folder, tmp_path / "out", method="pi", factor=2),
    ):
        with pytest.raises(CtxextError, match=rf"no weights that from_pretrained finds.*{name}"):
            work(source)


def test_an_unfinished_copy_is_no_matter(source, tmp_path):
    """Its index names shards that were never downloaded."""
    index = json.dumps({"weight_map": {"a": "pytorch_model-00001-of-00002.bin"}})
    put(source, "pytorch_model.bin.index.json", "consolidated.safetensors.index.json", data=index.encode())
    ctxext.patch_checkpoint(source, tmp_path / "out", method="pi", factor=2)


def test_merging_leaves_copies_of_the_base_out(source, tmp_path, tokens):
    pytest.importorskip("peft")
    from peft import LoraConfig, get_peft_model

    from ctxext.folders.adapter import Base, seal

    mistral_copy(source)
    put(source, "2_Dense/model.safetensors", data=(source / "model.safetensors").read_bytes())
    put(source, "2_Dense/config.json", data=b"{}")
    (source / "modules.json").write_text('[{"path": ""}, {"path": "2_Dense"}]')
    model = get_peft_model(pico_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "adapter")
    seal(
        tmp_path / "adapter", Base.of(str(source), source), json.loads((source / "config.json").read_text()), None
    )
    done = ctxext.merge(tmp_path / "adapter", tmp_path / "merged")
    assert done.left_out == ("consolidated.safetensors", "params.json")
    there = {str(path.relative_to(done.out)) for path in done.out.rglob("*") if path.is_file()}
    assert there >= {"2_Dense/model.safetensors", "tekken.json"}
    assert not there & {"consolidated.safetensors", "params.json"}
    torch.testing.assert_close(
        logits(ctxext.load(done.out), tokens), logits(model.eval(), tokens), atol=1e-4, rtol=0
    )


def test_an_adapter_of_0_1_0_knows_its_base(source, tmp_path):
    """Its fingerprint was of every file of weights, copies too."""
    import hashlib

    from ctxext.folders.adapter import check_base
    from ctxext.folders.weights import safetensors_header

    mistral_copy(source)
    lines = []
    for path in sorted(source.glob("*.safetensors")):
        header, start = safetensors_header(path)
        for name, tensor in header.items():
            begin, end = tensor["data_offsets"]
            data = path.read_bytes()[start + begin : start + min(end, begin + 512)]
            lines.append(f"{name} {tensor['dtype']} {tensor['shape']} {hashlib.sha256(data).hexdigest()}")
    old = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:32]
    assert old != fingerprint(source)
    config = json.loads((source / "config.json").read_text())
    from ctxext.config.keys import rope_parameters

    entry = {"fingerprint": old, "base_rope": rope_parameters(config), "base": "it"}
    check_base(tmp_path, entry, None, source)
    with pytest.raises(CtxextError, match="other weights"):
        check_base(tmp_path, entry | {"fingerprint": "0" * 32}, None, source)


def test_plain_transformers_loads_what_is_left(source, tmp_path):
    """In a process of its own, with the copies there before."""
    mistral_copy(source)
    put(source, "pytorch_model.bin", "onnx/model.onnx")
    out = ctxext.patch_checkpoint(source, tmp_path / "out", method="yarn", factor=4).out
    script = f"import transformers; transformers.AutoModelForCausalLM.from_pretrained({str(out)!r})"
    subprocess.run([sys.executable, "-c", script], check=True)
