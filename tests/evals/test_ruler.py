"""RULER-type tasks: exact lengths for real and odd tokenizers, and an evaluator that scores known models as it
must."""

from __future__ import annotations

import re
import types

import pytest
import torch
from stand_ins import TOKENIZERS, ByteTokenizer, random_llama
from torch import nn
from transformers import AutoTokenizer

from ctxext.errors import CtxextError, UsageError
from ctxext.evals.ruler.run import DEFAULT_TASKS, grid_that_fits, ruler
from ctxext.evals.ruler.samples import SampleBuilder, string_match_all
from ctxext.evals.ruler.tasks import TASKS
from ctxext.evals.words import words
from ctxext.folders.source import TINY
from ctxext.text import bos_id


class Bytes(ByteTokenizer):
    """Decodes too."""

    def decode(self, ids, skip_special_tokens=True):
        return bytes(i for i in ids if i).decode()


def solve(text: str) -> str:
    """The right answer to a prompt, from what is visible of it."""
    context, _, question = text.rpartition("\nWhat are all the special" if "What are all" in text else "\nWhat is")
    if "special magic" in question:
        asked = re.findall(r"special magic \w+ for (.+?) mentioned in the provided text\? The", text)[-1]
        names = re.split(r", and |, ", asked)
        return " ".join(
            value for name in names for value in re.findall(rf"for {re.escape(name)} is: (\S+)\.", context)
        )
    if "Find all variables" in text:
        value = re.search(r"assigned the value (\d+) in", text[text.rindex("Find all variables") :])[1]
        shown = text[: text.rindex("Find all variables")].rpartition("hidden in the following text.")[2]
        known: list[str] = []
        for name, source in re.findall(r"VAR ([A-Z]+) = (?:VAR )?([A-Z]+|\d+)", shown):
            if source == value or source in known:
                known.append(name)
        return " ".join(known)
    if "most common words" in text:
        shown = text[: text.rindex("Question:")].rpartition("appear most often.\n")[2]
        listed, most = re.findall(r"\d+\. ([a-z]+)", shown), 10
    else:
        shown = text[: text.rindex("\nQuestion:")].rpartition("coded words. ")[2]
        listed, most = re.findall(r"[a-z]{6}", shown), 3
    return " ".join(sorted(set(listed), key=lambda w: -listed.count(w))[:most])


class Solver(nn.Module):
    """A "model" over bytes that generates the right answer to the last `window` bytes of its prompt."""

    device = torch.device("cpu")

    def __init__(self, window: int | None = None):
        super().__init__()
        self.window, self.config, self.seen = window, types.SimpleNamespace(), []

    def generate(self, input_ids, max_new_tokens, **options):
        rows = []
        for ids in input_ids.tolist():
            kept = ids if self.window is None else ids[-(self.window - max_new_tokens) :]
            self.seen.append(len(kept) + max_new_tokens)
            rows.append([*ids, *solve(bytes(kept).decode()).encode()])
        width = max(map(len, rows))
        return torch.tensor([row + [0] * (width - len(row)) for row in rows])


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name != "merges-across-spaces"])
def test_lengths_are_exact(name, tmp_path):
    tokenizer = TOKENIZERS[name](tmp_path)
    builder = SampleBuilder(tokenizer, bos_id(tokenizer), example=False)
    for task, (generate, _) in TASKS.items():
        for length in (4001, 5000):
            sample = builder.build(task, length, 0)
            # Tokenised here, in one piece and with the tokenizer's own special tokens.
            assert sample.ids == list(tokenizer(sample.text).input_ids), task
            assert len(sample.ids) + generate == length
            for (start, end), answer in zip(sample.places, sample.answers, strict=False):
                assert answer in sample.text[start:end]


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_depends_on_its_own_cell_only(task):
    fresh, used = SampleBuilder(ByteTokenizer()), SampleBuilder(ByteTokenizer())
    length = 3500
    used.build(task, length + 500, 3)
    used.build("niah_single_1", 2000, 0)
    assert fresh.build(task, length, 1) == used.build(task, length, 1)
    assert fresh.build(task, length, 1).answers != fresh.build(task, length, 2).answers
    assert fresh.build(task, length, 1).answers != fresh.build(task, length, 1, seed=5).answers


def test_tasks_have_upstreams_shape():
    builder = SampleBuilder(ByteTokenizer())
    answers = {task: builder.build(task, 9000, 0).answers for task in TASKS}
    assert {task: len(found) for task, found in answers.items()} == {
        **dict.fromkeys(
            ("niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"), 1
        ),
        **{"niah_multivalue": 4, "niah_multiquery": 4, "vt": 5, "cwe": 10, "fwe": 3},
    }
    assert builder.build("niah_multikey_1", 5000, 0).text.count("One of the special magic numbers") == 4
    assert builder.build("niah_multikey_2", 5000, 0).text.count("One of the special magic numbers") > 40
    text = builder.build("cwe", 9000, 0).text
    listed = re.findall(r"\d+\. ([a-z]+)", text[text.rindex("appear most often.\n") :])
    counts = sorted((listed.count(w) for w in set(listed)), reverse=True)
    assert counts[:11] == [30] * 10 + [3]
    text = builder.build("fwe", 6000, 0).text
    coded = re.findall(r"[a-z]{6}|\.\.\.(?= )", text.rpartition("coded words. ")[2].partition("\nQuestion")[0])
    tops = sorted((coded.count(w) for w in set(coded)), reverse=True)
    assert tops[0] > tops[1] > tops[2] > tops[3] >= tops[4], "no ties among the answers"
    assert len(words()) > 3000


@pytest.mark.parametrize("example", [True, False])
def test_an_oracle_scores_one_on_every_task(example):
    result = ruler(Solver(), Bytes(), [3800, 9000], tasks=TASKS, samples=3, batch_size=2, example=example)
    assert [row["score"] for row in result.rows] == [1.0] * 2 * len(TASKS)
    assert {row["high"] for row in result.rows} == {1.0}
    assert [row["passes"] for row in result.lengths] == [True, True]
    assert result.effective == 9000
    assert "visible" not in result.rows[0]


def test_random_weights_score_zero_on_every_task():
    class Text(Bytes):
        def decode(self, ids, skip_special_tokens=True):
            return bytes(ids).decode("latin-1")

    result = ruler(random_llama(), Text(), [3800], tasks=TASKS, samples=1)
    assert [row["score"] for row in result.rows] == [0.0] * len(TASKS)
    assert result.effective is None


def test_a_model_that_reads_its_end_only_scores_the_predicted_fraction():
    grid = {"tasks": TASKS, "samples": 12, "example": False}
    cropped = ruler(Solver(), Bytes(), [4000], crop=2000, **grid)
    windowed = Solver(2000)
    blind = ruler(windowed, Bytes(), [4000], **grid)
    assert max(windowed.seen) == 2000
    assert [row["score"] for row in cropped.rows] == [row["score"] for row in blind.rows]
    builder = SampleBuilder(Bytes(), example=False)
    for row in cropped.rows:
        samples = [builder.build(row["task"], 4000, index) for index in range(12)]
        firsts = [4000 - 2000 for _ in samples]  # bytes are characters: what is cut off in front
        starts = [[start for start, _ in sample.places] for sample in samples]
        if row["task"].startswith("niah"):
            predicted = [
                sum(s >= first for s in them) / len(them) for them, first in zip(starts, firsts, strict=True)
            ]
            assert row["visible"] == pytest.approx(sum(predicted) / 12)
        elif row["task"] == "vt":  # without its first statement a chain can't be followed
            predicted = [float(min(them) >= first) for them, first in zip(starts, firsts, strict=True)]
        else:
            continue
        assert row["score"] == pytest.approx(sum(predicted) / 12), row["task"]
    by_task = {row["task"]: row["score"] for row in cropped.rows}
    assert 0 < by_task["niah_multiquery"] < 1
    assert by_task["fwe"] > 0.5, "counts survive a crop better than needles"


def test_scoring_is_upstreams():
    assert string_match_all("they are: ABCDE, fghij", ["abcde", "FGHIJ", "KLMNO", "X1"]) == 0.5
    assert string_match_all("a\x00b", ["a\nb"]) == 1
    assert string_match_all("", ["1"]) == 0


def test_a_stopped_run_goes_on(tmp_path):
    grid = {"tasks": ["niah_single_1", "fwe"], "samples": 2, "resume": tmp_path / "r.jsonl"}
    whole = ruler(Solver(), Bytes(), [2000], **grid)

    class Broken(Solver):
        def generate(self, *args, **options):
            raise AssertionError("everything was measured already")

    assert ruler(Broken(), Bytes(), [2000], **grid).rows == whole.rows
    with pytest.raises(AssertionError, match="already"):
        ruler(Broken(), Bytes(), [2000], **grid, identity="other")


def test_a_haystack_of_the_same_length_is_another(tmp_path):
    grid = {"tasks": ["niah_single_2"], "samples": 1, "resume": tmp_path / "r.jsonl"}
    for text in ("One day. " * 900, "Two days." * 900, "One day. " * 900):
        ruler(Solver(), Bytes(), [3800], **grid, haystack=text)
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 2


def test_every_sample_is_built_before_the_first_forward():
    """With tiny's tokenizer words take one to three tokens, so a length may suit the first sample alone."""

    class Unread(Solver):
        def generate(self, *args, **options):
            raise AssertionError("a forward ran")

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    builder = SampleBuilder(tokenizer)

    def fits(length, index):
        try:
            return bool(builder.build("niah_single_1", length, index))
        except CtxextError:
            return False

    length = next(n for n in range(260, 300) if fits(n, 0) and not all(fits(n, i) for i in range(1, 4)))
    with pytest.raises(CtxextError, match=r"needs at least|no filler"):
        ruler(Unread(), tokenizer, [length], tasks=["niah_single_1"], samples=4)


def test_a_default_grid_leaves_out_what_can_not_be():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    lengths, tasks = grid_that_fits(tokenizer, [128, 256, 512])
    assert (lengths, tasks) == ([512], [task for task in DEFAULT_TASKS if task not in ("vt", "cwe")])
    assert grid_that_fits(tokenizer, [128, 256, 512], ["fwe"]) == ([256, 512], ["fwe"])
    assert grid_that_fits(tokenizer, [256, 1024], ["fwe", "vt"]) == ([1024], ["fwe", "vt"])
    with pytest.raises(UsageError, match="vt needs at least"):
        grid_that_fits(tokenizer, [128, 256], ["fwe", "vt"])
    with pytest.raises(UsageError, match="needs at least"):
        grid_that_fits(tokenizer, [32, 64])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["niah_singel_1"]}, "no task"),
        ({"lengths": [300]}, "needs at least"),
        ({"samples": 0}, "sample"),
        ({"crop": 100}, "leaves nothing"),
    ],
)
def test_wrong_usage(options, message):
    with pytest.raises(UsageError, match=message):
        ruler(Solver(), Bytes(), **{"lengths": [2000], "tasks": ["niah_single_1"], "samples": 1, **options})
