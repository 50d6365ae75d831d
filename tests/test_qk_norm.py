"""Norms of queries and keys that DroPE may add: against transformers' OLMo 2, learned, saved, kept."""

import copy

import pytest
import torch
from conftest import logits, pico_model

import ctxext
from ctxext.errors import CtxextError
from ctxext.folders.source import TINY
from ctxext.live.qk_norm import NORMS

IDS = torch.randint(0, 64, (1, 100), generator=torch.Generator().manual_seed(9))


def normed(model=None, **params):
    """A pico model under DroPE with norms of random weights."""
    model = pico_model(num_hidden_layers=2) if model is None else model
    ctxext.patch(model, "drope", 4, qk_norm=True, **params)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if NORMS in name:
                parameter.normal_(1, 0.5, generator=generator)
    return model


def test_one_layer_is_olmo_2s():
    """transformers' Olmo2Attention, given the same weights and no rotation, gives the same output."""
    from transformers import Olmo2Config
    from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention

    model = normed()
    config = model.config
    keys = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
    other = Olmo2Config(**{k: getattr(config, k) for k in keys}, rms_norm_eps=1e-6, attn_implementation="eager")
    ours, theirs = model.model.layers[1].self_attn, Olmo2Attention(other, 1)
    norms = getattr(model.model, NORMS)
    state = {
        k: v for k, v in ours.state_dict().items() if k.split(".")[0] in ("q_proj", "k_proj", "v_proj", "o_proj")
    }
    state |= {"q_norm.weight": norms.query[1].data, "k_norm.weight": norms.key[1].data}
    theirs.load_state_dict(state)

    hidden = torch.randn(2, 20, config.hidden_size, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(20)[None].expand(2, -1)
    mask = torch.full((20, 20), torch.finfo(torch.float32).min).triu(1)[None, None]
    still = torch.ones(1, 20, config.head_dim), torch.zeros(1, 20, config.head_dim)
    with torch.no_grad():
        mine = ours(hidden, position_embeddings=still, attention_mask=mask, position_ids=positions)[0]
        wanted = theirs(hidden, position_embeddings=still, attention_mask=mask)[0]
    assert (mine - wanted).abs().max() < 1e-5
    assert (mine - hidden).abs().max() > 0.1


def test_both_norms_have_an_effect_and_unpatching_leaves_nothing():
    plain = pico_model(num_hidden_layers=2)
    before, names = logits(plain, IDS), set(plain.state_dict())
    model = normed(copy.deepcopy(plain))
    whole = logits(model, IDS)
    for name in ("query", "key"):
        other = copy.deepcopy(model)
        with torch.no_grad():
            getattr(getattr(other.model, NORMS), name).fill_(1)
        assert (logits(other, IDS) - whole).abs().max() > 1e-3
    ctxext.unpatch(model)
    assert torch.equal(logits(model, IDS), before)
    assert set(model.state_dict()) == names


def test_what_was_learned_outlives_another_temperature_and_an_unpatch():
    """`ctxext fit-temperature` tries many temperatures on the live model."""
    model = normed(temperature=0.2)
    wanted = logits(model, IDS)
    ctxext.patch(model, "drope", 4, qk_norm=True, temperature=0.0)
    assert (logits(model, IDS) - wanted).abs().max() > 1e-4
    ctxext.unpatch(model)
    ctxext.patch(model, "drope", 4, qk_norm=True, temperature=0.2)
    assert torch.equal(logits(model, IDS), wanted)


def test_fitting_a_temperature_keeps_the_norms():
    from transformers import AutoTokenizer

    from ctxext.evals import temperature
    from ctxext.evals.models import Subject

    model = normed()
    subject = Subject("pico", model, AutoTokenizer.from_pretrained(TINY), ctxext.schedule_of(model))
    before = logits(model, IDS)
    documents = [torch.randint(0, 64, (256,), generator=torch.Generator().manual_seed(s)).tolist() for s in (0, 1)]
    found = temperature.fit(subject, documents, "drope", 4, grid=(0.0, 0.1, 0.4))
    assert torch.equal(logits(model, IDS), before)
    sharp = copy.deepcopy(model)
    ctxext.patch(sharp, "drope", 4, qk_norm=True, temperature=0.4)
    with torch.no_grad():
        sums = []
        for ids in documents:
            row = torch.tensor([ids])
            losses = torch.nn.functional.cross_entropy(sharp(row).logits[0, :-1], row[0, 1:], reduction="none")
            sums.append(losses[63:].mean().item())
    assert found["curve"][-1]["nll"] == pytest.approx(sum(sums) / 2, rel=1e-4)


@pytest.mark.parametrize("adapter", [False, True])
def test_learned_saved_and_loaded(adapter, tmp_path):
    """Gradients reach both; a folder or an adapter brings them back; plain transformers refuses."""
    from transformers import AutoModelForCausalLM

    from ctxext.training.model import add_lora
    from ctxext.training.recipe import AdapterSpec

    base = tmp_path / "base"
    pico_model(num_hidden_layers=2).save_pretrained(base)
    folder = tmp_path / "folder"
    ctxext.patch_checkpoint(base, folder, method="drope", factor=4, qk_norm=True)
    with pytest.raises(Exception, match=r"ctxext\.load"):
        AutoModelForCausalLM.from_pretrained(folder)
    model = ctxext.load(folder)
    if adapter:
        model = add_lora(model, AdapterSpec(r=2, alpha=4, norms=True))
    ids = torch.randint(0, 64, (2, 40), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(2):
        loss = model(ids, labels=ids).loss
        assert loss.isfinite()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    mine = {n: p for n, p in model.named_parameters() if NORMS in n and p.requires_grad}
    assert len(mine) == 2
    assert all((p != 1).any() for p in mine.values())
    model.eval()
    wanted = logits(model, ids)
    if adapter:
        from peft import PeftModel

        model.save_pretrained(tmp_path / "adapter")
        again = PeftModel.from_pretrained(ctxext.load(folder), tmp_path / "adapter").eval()
    else:
        model.save_pretrained(folder)
        again = ctxext.load(folder).eval()
    assert (logits(again, ids) - wanted).abs().max() < 1e-5


def test_weights_without_their_option_are_no_silent_loss(tmp_path):
    base, folder, wrong = tmp_path / "base", tmp_path / "folder", tmp_path / "wrong"
    pico_model(num_hidden_layers=2).save_pretrained(base)
    ctxext.patch_checkpoint(base, folder, method="drope", factor=4, qk_norm=True)
    normed(ctxext.load(folder)).save_pretrained(folder)
    ctxext.patch_checkpoint(folder, wrong, method="drope", factor=4, existing="replace", temperature=0.1)
    with pytest.raises(CtxextError, match="the model has None") as error:
        ctxext.load(wrong)
    assert "options that it was trained with" in error.value.hint
