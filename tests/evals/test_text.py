"""Documents from files and folders."""

from __future__ import annotations

import json

import pytest

from ctxext.errors import CtxextError, UsageError
from ctxext.text import bos_id, documents, load_texts


class Answer:
    def __init__(self, input_ids):
        self.input_ids = input_ids


class Words:
    """One token per word, the word's number; BOS 0 in front unless told otherwise."""

    bos_token_id = 0

    def __call__(self, text, add_special_tokens=True, **options):
        return Answer([0] * add_special_tokens + [int(word) if word.isdigit() else 9 for word in text.split()])


def numbers(start: int, count: int) -> str:
    return " ".join(str(start + i) for i in range(count))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b.txt").write_text(numbers(1000, 25))
    (tmp_path / "a.md").write_text(numbers(2000, 12))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.py").write_text(numbers(3000, 4))
    (tmp_path / "deep" / "d.bin").write_bytes(b"\xff\xfe")
    lines = [json.dumps({"text": numbers(4000, 11), "id": 1}), "", json.dumps({"text": numbers(5000, 30)})]
    (tmp_path / "e.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_starts_of_all_texts_that_are_long_enough(folder):
    found = documents(folder, Words(), 10)
    assert [ids[0] for ids in found.ids] == [2000, 1000, 4000, 5000]
    assert all(ids == list(range(ids[0], ids[0] + 10)) for ids in found.ids)
    assert found.names[2].endswith("e.jsonl:1[0:10]")
    assert len(found) == 4


def test_more_documents_than_texts_are_later_segments(folder):
    found = documents(folder, Words(), 10, count=7)
    assert [ids[0] for ids in found.ids] == [2000, 1000, 4000, 5000, 1010, 5010, 5020]
    assert [ids[0] for ids in documents(folder, Words(), 10, count=2).ids] == [2000, 1000]
    every = [token for ids in found.ids for token in ids]
    assert len(set(every)) == len(every), "segments must not overlap"
    with pytest.raises(CtxextError, match="only 7 documents of 10 tokens instead of 8") as error:
        documents(folder, Words(), 10, count=8)
    assert "7 documents" in error.value.hint


def test_a_seed_draws_texts_in_another_order_and_again(folder):
    orders = {tuple(ids[0] for ids in documents(folder, Words(), 10, count=3, seed=seed).ids) for seed in range(8)}
    assert len(orders) > 1
    assert documents(folder, Words(), 10, count=3, seed=4) == documents(folder, Words(), 10, count=3, seed=4)


def test_whole_texts(folder):
    found = documents(folder, Words(), 12, whole=True)
    assert [len(ids) for ids in found.ids] == [12, 25, 30]
    assert len(documents(folder, Words(), 12, count=1, whole=True)) == 1
    with pytest.raises(CtxextError, match="only 3 documents"):
        documents(folder, Words(), 12, count=4, whole=True)


def test_the_hash_is_of_the_texts_alone(folder, tmp_path_factory):
    first = documents(folder, Words(), 10).sha256
    other = tmp_path_factory.mktemp("copy")
    (other / "1.txt").write_text((folder / "a.md").read_text())
    (other / "2.txt").write_text((folder / "b.txt").read_text())
    one = documents([folder / "a.md", folder / "b.txt"], Words(), 10)
    assert one.sha256 == documents(other, Words(), 5, count=1, seed=1).sha256 != first
    (other / "2.txt").write_text((folder / "b.txt").read_text() + " 7")
    assert documents(other, Words(), 10).sha256 != one.sha256


def test_bos_is_what_the_tokenizer_does_not_what_it_defines():
    assert bos_id(Words()) == 0

    class Silent(Words):
        def __call__(self, text, **options):
            return Answer([5])

    assert bos_id(Silent()) is None


def test_errors_say_what_and_where(folder):
    with pytest.raises(UsageError, match=r"missing\.txt doesn't exist"):
        load_texts(folder / "missing.txt")
    with pytest.raises(CtxextError, match=r"no text has 31 tokens; the longest, .*e\.jsonl:3, has 30"):
        documents(folder, Words(), 31)
    with pytest.raises(CtxextError, match=r"d\.bin isn't UTF-8"):
        load_texts(folder / "deep" / "d.bin")
    (folder / "bad.jsonl").write_text('{"text": "1"}\n{"body": "2"}\n')
    with pytest.raises(CtxextError, match=r"bad\.jsonl:2"):
        load_texts(folder / "bad.jsonl")
    # JSON may have U+2028 and U+0085 as they are: they end a line of text, but none of JSONL.
    odd = ["one\u2028two", "a\x85b", "plain"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in odd]
    (folder / "odd.jsonl").write_text("\r\n".join(lines), encoding="utf-8", newline="")
    assert [text.text for text in load_texts(folder / "odd.jsonl")] == odd
    (folder / "bad.jsonl").write_text('{"text": 3}\n')
    with pytest.raises(CtxextError, match="not a string"):
        load_texts(folder / "bad.jsonl")
    (folder / "empty").mkdir()
    with pytest.raises(CtxextError, match="holds no"):
        load_texts(folder / "empty")
    (folder / "empty" / "blank.txt").write_text(" \n")
    with pytest.raises(CtxextError, match="no text in"):
        load_texts(folder / "empty")
    with pytest.raises(UsageError, match="at least"):
        documents(folder, Words(), 10, count=0)
