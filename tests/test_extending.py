"""A method added from outside the package: one file for frequencies, two for attention, and everything follows."""

import json
import sys
import textwrap

import pytest
import torch
from attention_by_hand import DISTANCE, agree
from conftest import logits, pico_model, run

import ctxext
from ctxext import methods
from ctxext.rope import Rope
from ctxext.rope.encodings import Encoding

FREQUENCIES = """
    from ctxext.methods import method
    from ctxext.rope import Rope, Schedule, static


    @method(title="Half", paper="nowhere")
    def halved(rope: Rope, factor: float, *, share: float = 0.5) -> Schedule:
        \"\"\"Divide the slower share of the frequencies by the factor.\"\"\"
        kept = round(rope.size * (1 - share))
        return static(rope, factor, [1.0] * kept + [1 / factor] * (rope.size - kept))
    """

PLAIN = """
    from dataclasses import dataclass, replace

    from ctxext.methods import method
    from ctxext.rope import Rope, Schedule, static
    from ctxext.rope.encodings import Encoding


    @dataclass(frozen=True)
    class Fade(Encoding, kind="fade"):
        rate: float

        def describe(self, trained_length: int) -> str:
            return f"Logits fall by {self.rate:g} a token."


    @method(title="Fading attention", paper="nowhere")
    def fade(rope: Rope, factor: float, *, rate: float = 0.1) -> Schedule:
        \"\"\"Subtract the distance times a rate from every logit; nothing rotates.\"\"\"
        return replace(static(rope, factor, [0.0] * rope.size), encoding=Fade(rate))
    """

LIVE = """
    from ctxext.live.encoding import runs
    from ctxext.live.t5_bias import MaskedBias
    from outside_fade import Fade


    @runs(Fade)
    class LiveFade(MaskedBias):
        def added(self, distance, heads):
            return -self.spec.rate * distance.clamp(min=0)[:, None].expand(-1, heads, -1, -1)
    """


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """Puts files on the import path, imports them, and afterwards forgets what they registered."""
    from ctxext.live import encoding

    known = dict(methods.registry._REGISTRY), dict(Encoding._kinds), dict(encoding._RUNS)
    monkeypatch.syspath_prepend(tmp_path)

    def add(**files):
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        for name in files:
            __import__(name)
        methods.all_methods.cache_clear()

    yield add
    for registry, before in zip((methods.registry._REGISTRY, Encoding._kinds, encoding._RUNS), known, strict=True):
        registry.clear()
        registry.update(before)
    methods.all_methods.cache_clear()
    for name in [n for n in sys.modules if n.startswith("outside_")]:
        del sys.modules[name]


def test_a_frequency_method_costs_one_file(outside, tmp_path, monkeypatch, capsys, llama_folder, tokens):
    outside(outside_halved=FREQUENCIES)
    schedule = methods.schedule(Rope(1e4, 8, 64), "halved", 4)
    assert schedule.stages[0].inv_freq == pytest.approx([1, 0.1, 0.01 / 4, 0.001 / 4])
    # The command line knows it and its option, checks it, writes it; plain transformers runs the folder.
    code, out, _ = run(monkeypatch, capsys, "methods", "--json")
    assert {"name": "share", "type": "float", "default": 0.5} in next(
        m["options"] for m in json.loads(out) if m["name"] == "halved"
    )
    code, _, err = run(monkeypatch, capsys, "patch", llama_folder, "-m", "halved", "--set", "shar=1")
    assert (code, "share" in err) == (2, True)
    folder = tmp_path / "folder"
    code, _, err = run(
        monkeypatch, capsys, "patch", llama_folder, "-m", "halved", "-f", 4, "--set", "share=0.25", "-o", folder
    )
    assert code == 0, err
    from transformers import AutoModelForCausalLM

    live = pico_model()
    ctxext.patch(live, "halved", 4, share=0.25)
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert torch.equal(logits(loaded, tokens), logits(live, tokens))
    assert "Half" in (folder / "README.md").read_text()


def test_an_attention_method_costs_two(outside, tmp_path, llama_folder, tokens):
    outside(outside_fade=PLAIN)
    model = pico_model()
    before = logits(model, tokens)
    with pytest.raises(ctxext.CtxextError, match="no class runs the encoding of fade"):
        ctxext.patch(model, "fade", 4)
    assert torch.equal(logits(model, tokens), before)
    outside(outside_live_fade=LIVE)
    ctxext.patch(model, "fade", 4, rate=0.3)
    agree(model, lambda q, k: q @ k.mT / q.shape[-1] ** 0.5 - 0.3 * DISTANCE)
    folder = ctxext.patch_checkpoint(llama_folder, tmp_path / "folder", method="fade", factor=4, rate=0.3).out
    assert "Logits fall by 0.3 a token." in (folder / "README.md").read_text()
    assert torch.equal(logits(ctxext.load(folder), tokens), logits(model, tokens))
    ctxext.unpatch(model)
    assert torch.equal(logits(model, tokens), before)
