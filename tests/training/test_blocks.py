"""From files to blocks: every kind of source, packing, mixing, streaming and the cache."""

import itertools
import json
import random
import re

import pytest
import torch
from conftest import pico_model

from ctxext.errors import CtxextError, UsageError
from ctxext.folders.source import TINY
from ctxext.training import data, passkeys
from ctxext.training.positions import draw, flatten
from ctxext.training.recipe import DataSpec, PositionSpec
from ctxext.training.sequences import Blocks, Stream, Windows, collate, make_item

TEXTS = [f"Chapter {i}. " + "And it came to pass in those days. " * (3 + 5 * i) for i in range(6)]


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture
def sources(tmp_path):
    """The same six documents as a folder of files, JSON lines and parquet."""
    from datasets import Dataset

    folder = tmp_path / "folder"
    folder.mkdir()
    for i, text in enumerate(TEXTS):
        (folder / f"{i}.txt").write_text(text)
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"body": text, "id": i}) + "\n" for i, text in enumerate(TEXTS)))
    parquet = tmp_path / "rows.parquet"
    Dataset.from_dict({"body": TEXTS}).to_parquet(str(parquet))
    return {
        "folder": {"path": str(folder)},
        "lines": {"path": str(lines), "column": "body"},
        "parquet": {"path": str(parquet), "column": "body"},
    }


def blocks(tokenizer, tmp_path, *sources, size=32, **more):
    spec = DataSpec(sources=list(sources), length=size, cache=str(tmp_path / "cache"), **more)
    return data.load_blocks(spec, tokenizer, size)


def ids(text, tokenizer):
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["folder", "lines", "parquet"])
def test_a_block_is_a_stretch_of_one_document(tokenizer, sources, tmp_path, kind, streaming):
    made = list(blocks(tokenizer, tmp_path, sources[kind], streaming=streaming, shuffle_buffer=1))
    expected = []
    for text in TEXTS:
        whole = ids(text, tokenizer)
        expected += [whole[i : i + 32] for i in range(0, len(whole) - 31, 32)]
    assert sorted(row["input_ids"] for row in made) == sorted(expected)
    assert all(row["starts"] == [0] and row["filled"] == 32 for row in made)


def test_a_file_is_one_document_and_files_can_be_left_out(tokenizer, sources, tmp_path):
    few = blocks(tokenizer, tmp_path, {**sources["folder"], "leave_out": ["4.txt", "5*"]})
    assert 0 < len(few) < len(blocks(tokenizer, tmp_path, sources["folder"]))
    with pytest.raises(UsageError, match=r"no file of .* matches 'nine\.txt'"):
        blocks(tokenizer, tmp_path, {**sources["folder"], "leave_out": ["nine.txt"]})


def test_what_can_not_be_read_says_so(tokenizer, sources, tmp_path):
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(UsageError, match=r"no \.txt, \.jsonl or \.parquet file"):
        blocks(tokenizer, tmp_path, {"path": str(tmp_path / "notes.md")})
    with pytest.raises(UsageError, match="several kinds"):
        blocks(tokenizer, tmp_path, {"path": str(tmp_path)})
    with pytest.raises(UsageError, match=r"(?s)no column 'text'.*it has: body, id"):
        blocks(tokenizer, tmp_path, {**sources["lines"], "column": "text"})
    with pytest.raises(CtxextError, match="can't read the data source nobody/nothing"):
        blocks(tokenizer, tmp_path, {"path": "nobody/nothing"})
    with pytest.raises(CtxextError, match="no document of 4096 tokens"):
        blocks(tokenizer, tmp_path, sources["folder"], size=4096)


def test_bos_begins_a_document_where_the_tokenizer_adds_one():
    from transformers import BatchEncoding

    class WithBos:
        bos_token_id, eos_token_id = 1, 2

        def __call__(self, text, add_special_tokens, verbose=True):
            ids = ([1] if add_special_tokens else []) + [ord(c) for c in text]
            return BatchEncoding({"input_ids": ids})

    assert data.encoder(WithBos())("ab") == [1, 97, 98, 2]


def test_packing_keeps_documents_whole_and_wastes_little(tokenizer, sources, tmp_path):
    made = list(blocks(tokenizer, tmp_path, sources["folder"], size=256, layout="packed"))
    pieces = []
    for row in made:
        edges = [*row["starts"], row["filled"]]
        pieces += [row["input_ids"][a:b] for a, b in itertools.pairwise(edges)]
        assert len(row["input_ids"]) == 256
    documents = [ids(text, tokenizer) for text in TEXTS]
    expected = [d[i : i + 256] for d in documents for i in range(0, len(d), 256)]
    assert sorted(pieces) == sorted(expected)
    assert len(made) == -(-sum(map(len, documents)) // 256)  # no block more than there must be


def test_best_fit_is_decreasing():
    rows = data.pack([[1] * n for n in (3, 7, 5, 2, 6, 1)], 8, 0)
    assert sorted(rows["filled"]) == [8, 8, 8]
    assert [len(s) for s in rows["starts"]] == [2, 2, 2]


def test_packed_documents_do_not_see_each_other():
    """The packed loss is the sum over documents read alone: no leak in attention, positions or labels."""
    model = pico_model()
    documents = [list(range(3, 20)), list(range(40, 49)), list(range(60, 64))]
    rows = data.pack(documents, 32, 0)
    row = {key: column[0] for key, column in rows.items()}
    item = make_item(row, PositionSpec(), random.Random(0), length=32, target=32)
    with torch.no_grad():
        packed = model(**collate([item]), use_cache=False).loss
        alone = [model(torch.tensor([d]), labels=torch.tensor([d])).loss * (len(d) - 1) for d in documents]
    assert torch.allclose(packed, sum(alone) / sum(len(d) - 1 for d in documents), atol=1e-6)


def test_sources_are_mixed_by_weight(tokenizer, tmp_path):
    for name, word in (("a", "alpha "), ("b", "beta ")):
        (tmp_path / f"{name}.txt").write_text(word * 3000)
    made = blocks(
        tokenizer, tmp_path, {"path": str(tmp_path / "a.txt"), "weight": 3}, {"path": str(tmp_path / "b.txt")}
    )
    alphas = sum("alpha" in tokenizer.decode(row["input_ids"]) for row in made)
    assert 0.65 < alphas / len(made) < 0.85


def test_a_second_run_reads_the_cache(tokenizer, sources, tmp_path, monkeypatch):
    first = list(blocks(tokenizer, tmp_path, sources["folder"]))
    monkeypatch.setattr(data, "_rows", lambda *args: pytest.fail("tokenised again"))
    assert list(blocks(tokenizer, tmp_path, sources["folder"])) == first
    with pytest.raises(BaseException, match="tokenised again"):  # another size is another cache
        blocks(tokenizer, tmp_path, sources["folder"], size=16)


def test_a_stream_goes_round_in_another_order(tokenizer, sources, tmp_path):
    streamed = blocks(tokenizer, tmp_path, sources["folder"], streaming=True, shuffle_buffer=50)
    count = len(list(streamed))
    read = iter(Stream(streamed, Windows(PositionSpec(kind="pose"), 32, 256, 0)))
    rounds = [[next(read) for _ in range(count)] for _ in range(2)]
    texts = [[tuple(item["input_ids"]) for item in part] for part in rounds]
    assert sorted(texts[0]) == sorted(texts[1])
    assert texts[0] != texts[1]
    again = iter(Stream(streamed, Windows(PositionSpec(kind="pose"), 32, 256, 0)))
    assert [next(again) for _ in range(2 * count)] == rounds[0] + rounds[1]


@pytest.mark.parametrize(("kind", "step"), [("folder", 1), ("lines", 3)])
def test_a_stream_read_by_workers(tokenizer, sources, tmp_path, kind, step):
    """Each item has a number of its own, and so positions; of three workers, one file leaves two nothing to do."""
    spec = PositionSpec(kind="pose")
    streamed = blocks(tokenizer, tmp_path, sources[kind], streaming=True, shuffle_buffer=1)
    count = len(list(streamed))

    def read():
        stream = Stream(streamed, Windows(spec, 32, 4096, 0))
        loader = torch.utils.data.DataLoader(stream, batch_size=1, collate_fn=collate, num_workers=3)
        return [{k: v[0].tolist() for k, v in batch.items()} for batch in itertools.islice(loader, 3 * count)]

    got = read()
    assert {tuple(item["input_ids"]) for item in got} == {tuple(row["input_ids"]) for row in streamed}
    numbers = range(0, 3 * count * step, step)
    want = [flatten(draw(spec, random.Random(f"0/{k}"), 32, 4096)) for k in numbers]
    assert [item["position_ids"] for item in got] == want
    assert read() == got


def test_an_empty_stream_ends_with_an_error(tokenizer, sources, tmp_path):
    streamed = blocks(tokenizer, tmp_path, sources["folder"], size=4096, streaming=True)
    with pytest.raises(CtxextError, match="no document as long as a block"):
        next(iter(Stream(streamed, Windows(PositionSpec(), 4096, 4096, 0))))


def test_length_of_a_dataset_is_that_of_the_run():
    rows = [{"input_ids": [i] * 4, "starts": [0], "filled": 4} for i in range(3)]
    assert len(Blocks(rows, Windows(PositionSpec(), 4, 4, 0), 50)) == 50


def test_passkey_documents_as_a_source(tokenizer, tmp_path, monkeypatch):
    """Each holds its key twice, in the needle and as the answer; they mix with text."""
    monkeypatch.setattr(passkeys, "COUNT", 300)
    made = blocks(tokenizer, tmp_path, {"path": "passkey"}, size=128)
    for row in list(made)[:50]:
        text = tokenizer.decode(row["input_ids"])
        keys = set(re.findall(r"\d{5}", text))
        assert len(keys) == 1
        assert text.count(keys.pop()) >= 2
    (tmp_path / "a.txt").write_text("alpha " * 3000)
    mixed = blocks(tokenizer, tmp_path, {"path": "passkey"}, {"path": str(tmp_path / "a.txt")}, size=128)
    assert 0.4 < sum("alpha" in tokenizer.decode(row["input_ids"]) for row in mixed) / len(mixed) < 0.6
    streamed = blocks(tokenizer, tmp_path, {"path": "passkey"}, size=128, streaming=True, shuffle_buffer=1)
    assert next(iter(streamed))["input_ids"] == made[0]["input_ids"]
