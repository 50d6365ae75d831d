"""The loss that candidates are compared by, against transformers' own; and what it is measured on."""

import json

import pytest
import torch
import torch.nn.functional as F
from conftest import pico_model
from transformers import BatchEncoding

import ctxext
from ctxext import methods
from ctxext import needles as prompts
from ctxext.errors import CtxextError, UsageError
from ctxext.folders.source import TINY
from ctxext.rope import Rope, unpatched
from ctxext.search import documents
from ctxext.search.documents import Document
from ctxext.search.fitness import Fitness
from ctxext.training.loss import bind

ROPE = Rope(10000.0, 32, 64)
FACTORS = [1 + i / 5 for i in range(16)]


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY)


@pytest.mark.parametrize("start_tokens", [0, 4])
def test_loss_is_transformers_loss(tokens, start_tokens):
    """A second model, patched the usual way, scored by its own forward with all logits."""
    measured, other = pico_model(), pico_model()
    schedule = methods.schedule(ROPE, "longrope", 3, long_factor=FACTORS, start_tokens=start_tokens)
    ctxext.patch(other, "longrope", 3, long_factor=FACTORS, start_tokens=start_tokens)
    with torch.no_grad():
        logits = other(tokens[:, :190]).logits[0]
    nll = F.cross_entropy(logits[:-1], tokens[0, 1:190], reduction="none")
    ids = tuple(tokens[0, :190].tolist())
    fitness = Fitness(measured)
    plain, answer = fitness(schedule, [Document(ids), Document(ids, 180)])
    assert plain == pytest.approx(float(nll.mean()), abs=1e-5)
    assert answer == pytest.approx(float(nll[179:].mean()), abs=1e-5)
    # Back to the original rope, and to another schedule, on the same model.
    with torch.no_grad():
        stock = float(pico_model()(tokens[:, :60], labels=tokens[:, :60]).loss)
    assert fitness(unpatched(ROPE), [Document(ids[:60])]) == [pytest.approx(stock, abs=1e-5)]
    assert fitness(schedule, [Document(ids)]) == [plain]


def test_experts_whose_router_loss_is_on(tokens):
    """A perplexity has no router loss, whatever the config says for training."""
    small = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    model, plain = (pico_model("mixtral", output_router_logits=on, **small) for on in (True, False))
    rope = Rope(model.config.rope_parameters["rope_theta"], 32, 64)
    found = Fitness(model)(unpatched(rope), [Document(tuple(tokens[0, :60].tolist()))])
    with torch.no_grad():
        assert found == [pytest.approx(float(plain(tokens[:, :60], labels=tokens[:, :60]).loss), abs=1e-5)]


def test_several_chunks_are_one_loss(tokens, monkeypatch):
    monkeypatch.setattr("ctxext.search.fitness.bind", lambda model, chunk: bind(model, 7))
    ids = tuple(tokens[0].tolist())
    in_pieces = Fitness(pico_model())(unpatched(ROPE), [Document(ids)])
    monkeypatch.undo()
    assert in_pieces == [pytest.approx(Fitness(pico_model())(unpatched(ROPE), [Document(ids)])[0], abs=1e-5)]


def test_a_text_that_comes_twice_is_used_once(tokenizer):
    """Else the document that is held out might be the one that was searched on."""
    one, other = (" ".join(f"{word} {n}" for n in range(400)) for word in ("verse", "psalm"))
    found = documents.cut([one, one, other], tokenizer, 200, 2)
    assert tokenizer.decode(found[0]).split()[0] == "verse"
    assert tokenizer.decode(found[1]).split()[0] == "psalm"


class WithBos:
    """A tokenizer that begins every text with a token of its own."""

    bos_token_id = 999

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, text, add_special_tokens=True, **more):
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return BatchEncoding({"input_ids": [999, *ids] if add_special_tokens else ids})


def test_tails_are_what_follows(tokenizer):
    stretch = list(range(1, 101))
    assert documents.tails([stretch], tokenizer, 50) == [stretch[50:]]
    assert documents.tails([stretch], tokenizer, 40) == [stretch[40:80]]
    assert documents.tails([stretch], tokenizer, 66) == [stretch[66:]]
    assert documents.tails([stretch], tokenizer, 67) == []
    assert documents.tails([[999, *stretch]], WithBos(tokenizer), 40) == [[999, *stretch[39:78]]]


def test_a_tokenizer_that_makes_nothing_of_text(tokenizer):
    def empty(text, **kwargs):
        return BatchEncoding({"input_ids": []})

    empty.bos_token_id = None
    with pytest.raises(CtxextError, match="no tokens"):
        documents.cut(["some text"], empty, 10, 1)


def test_documents_are_starts_then_later_stretches(tokenizer):
    texts = ["one two three " * 30, "too short", "four five six " * 60]
    ids = [tokenizer(t, add_special_tokens=False)["input_ids"] for t in texts]
    length = len(ids[0]) - 3
    found = documents.cut(texts, tokenizer, length, 3)
    assert found == [ids[0][:length], ids[2][:length], ids[2][length : 2 * length]]
    with pytest.raises(CtxextError, match=r"holds 5 documents .* 9 are needed"):
        documents.cut(texts, tokenizer, length, 9)
    with pytest.raises(CtxextError, match="longest text has"):
        documents.cut(texts, tokenizer, 5000, 1)


def test_bos_is_in_front_of_each_stretch(tokenizer):
    text = "one two three " * 40
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert documents.cut([text], WithBos(tokenizer), 20, 2) == [[999, *ids[:19]], [999, *ids[19:38]]]
    (needle,) = documents.needles([[999, *ids, *ids]], WithBos(tokenizer), 0)
    assert needle.ids[0] == 999
    assert needle.ids.count(999) == 1


def test_needles_ask_for_what_they_hide(tokenizer):
    text = tokenizer("In the beginning was the word. " * 80, add_special_tokens=False)["input_ids"]
    stretches = [text[:400], text[100:500], text[200:600]]
    found = documents.needles(stretches, tokenizer, 7)
    depths = []
    for document in found:
        assert len(document.ids) == 400
        whole = tokenizer.decode(document.ids)
        key = tokenizer.decode(document.ids[document.scored_from :]).strip()
        assert len(key) == 5
        assert key.isdigit()
        assert prompts.NEEDLE.format(key=key) in whole
        assert whole.startswith(prompts.TASK)
        assert whole.endswith(f"{prompts.QUESTION} {key}")
        depths.append(whole.index(f"The pass key is {key}. Remember") / len(whole))
    assert depths == sorted(depths)
    assert depths[0] < 0.4
    assert depths[2] > 0.6
    assert found == documents.needles(stretches, tokenizer, 7)
    assert found != documents.needles(stretches, tokenizer, 8)
    with pytest.raises(UsageError, match="needs"):
        documents.needles([text[:40]], tokenizer, 0)


def test_tiny_finds_needles_at_home_only(tokenizer):
    """The objective is worth having: near zero where the model can look, large where it can't."""
    texts = documents.read_texts(["tiny"])
    stretches = documents.cut(texts, tokenizer, 512, 2)
    fitness = Fitness(ctxext.load("tiny", dtype=torch.float32))
    rope = Rope(10000.0, 32, 256)
    near = documents.needles([s[:250] for s in stretches], tokenizer, 0)
    far = documents.needles(stretches, tokenizer, 0)
    assert max(fitness(unpatched(rope), near)) < 0.2
    broken = fitness(unpatched(rope), far)
    mended = fitness(methods.schedule(rope, "yarn", 2), far)
    assert sum(mended) < 0.3 * sum(broken)


def test_data_can_be_files_and_folders(tmp_path):
    (tmp_path / "a.txt").write_text("first\ntext")
    (tmp_path / "b.txt").write_text("second")
    assert list(documents.read_texts([str(tmp_path)])) == ["first\ntext", "second"]
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": "third"}) + "\n")
    assert list(documents.read_texts([str(tmp_path / "c.jsonl"), str(tmp_path / "a.txt")])) == [
        "third",
        "first\ntext",
    ]
    with pytest.raises(CtxextError):
        list(documents.read_texts([str(tmp_path / "none.txt")]))


def test_digest_knows_the_scored_part():
    ids = (1, 2, 3)
    found = {documents.digest(d) for d in ([Document(ids)], [Document(ids, 2)], [Document((1, 2))], [])}
    assert len(found) == 4
