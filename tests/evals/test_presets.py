"""Preset prompts against the published code, written out here; haystacks, distractors, margins, resuming."""

from __future__ import annotations

import hashlib
import re

import pytest
import torch
from stand_ins import ByteTokenizer, Oracle, byte_bpe, random_llama

from ctxext.errors import UsageError
from ctxext.evals.models import load
from ctxext.evals.passkey import passkey
from ctxext.evals.passkey_presets import PRESETS, PresetBuilder
from ctxext.needles.prompts import PromptBuilder, make_distractors, make_key, sentences_of

T = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
G = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
Q = "What is the pass key? The pass key is"


def landmark(n_garbage: int, n_prefix: int, key: int) -> str:
    """run_test.py of landmark-attention, which YaRN and LongLoRA copied."""
    infinite = " ".join([G] * 5000)
    assert len(infinite) >= n_garbage
    information = f"The pass key is {key}. Remember it. {key} is the pass key."
    lines = [T, infinite[:n_prefix], information, infinite[: n_garbage - n_prefix], Q]
    return "\n".join(lines)


def own(name: str, length: int, depth: float):
    tokenizer = ByteTokenizer()
    builder = PresetBuilder(name, tokenizer)
    key = builder.key(0, length, depth, 0)
    return builder.build(length, depth, key), key


@pytest.mark.parametrize("depth", [0.0, 0.37, 1.0])
@pytest.mark.parametrize("name", ["landmark", "yarn", "longlora"])
def test_character_presets(name, depth):
    prompt, key = own(name, 3000, depth)
    fixed = len(landmark(0, 0, 25000))
    garbage = {
        "landmark": 3000 - 1 - fixed,  # the most that stays below the target
        "yarn": (3000 - 1 - fixed) // 128 * 128,
        "longlora": int(3.75 * 3000 // 1024 * 1024),
    }[name]
    assert prompt.text == landmark(garbage, int(depth * garbage), int(key)) + f" {key}"
    assert 1 <= int(key) <= 50000


def test_pose():
    prompt, key = own("pose", 2048, 0.5)
    count = (2048 - 32 - 26 - 11) // 25
    information = f"The pass key is {key}. Remember it. {key} is the pass key."
    lines = [T, G * (count // 2), information, G * (count - count // 2), Q]
    assert prompt.text == "\n".join(lines) + f" {key}"


def test_ruler():
    prompt, key = own("ruler", 4096, 0.5)
    (name,) = set(re.findall(r"for (\S+) mentioned", prompt.text))
    lines = [G] * prompt.text.count(G)
    assert len(lines) % 25 == 0
    lines.insert(len(lines) // 2, f"One of the special magic numbers for {name} is: {key}.")
    expected = (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards.\n"
        + "\n".join(lines)
        + f"\nWhat is the special magic number for {name} mentioned in the provided text? "
        f"The special magic number for {name} mentioned in the provided text is {key}"
    )
    assert prompt.text == expected
    assert re.fullmatch(r"\d{7}", key)
    assert len(prompt.ids) - len(f" {key}") + 128 <= 4096


@pytest.mark.parametrize("name", ["landmark", "yarn", "longlora", "pose"])
def test_an_oracle_passes_every_preset_and_rows_say_the_tokens(name):
    class Anyone(Oracle):
        """Keys of these presets have one to five digits."""

        def _read(self, input_ids, **options):
            hidden = torch.zeros(*input_ids.shape, 256)
            for row, ids in enumerate(input_ids.tolist()):
                data = bytes(ids)
                needle = re.search(rb"The pass key is (\d+)\. Remember it", data)
                place = data.rfind(Q.encode()) + len(Q) - 1
                for step, byte in enumerate(b" " + needle[1] if needle else b""):
                    if place + step < len(data):
                        hidden[row, place + step, byte] = 1
            from transformers.modeling_outputs import BaseModelOutput

            return BaseModelOutput(last_hidden_state=hidden)

    result = passkey(Anyone(), ByteTokenizer(), [3100], depths=[0, 1], trials=2, preset=name)
    assert result.lengths[0]["accuracy"] == 1
    assert result.lengths[0]["tokens"] > 300
    assert result.settings["preset"] == name


def test_unknown_presets_are_named():
    with pytest.raises(UsageError, match="no passkey preset") as error:
        PresetBuilder("yran", ByteTokenizer())
    assert "yarn" in error.value.hint
    assert set(PRESETS) == {"landmark", "yarn", "pose", "longlora", "ruler"}
    with pytest.raises(UsageError, match="brings its own"):
        passkey(None, ByteTokenizer(), [900], preset="yarn", distractors=1)


# --- haystacks and distractors ----------------------------------------------------------------------------------

ESSAY = "It was a bright cold day. The clocks were striking! Who would have thought so? Not she; not he. " * 3


@pytest.mark.parametrize("bos", [None, 0])
def test_haystacks_and_distractors_keep_lengths_exact(bos):
    tokenizer = byte_bpe(600, bos=bos is not None)
    builder = PromptBuilder(tokenizer, bos, sentences_of(ESSAY))
    for length in (420, 421, 1000):
        for depth in (0.0, 0.5, 1.0):
            key, extra = make_key(0, length, depth, 0), make_distractors(3, 0, length, depth, 0)
            prompt = builder.build(length, depth, key, *extra)
            assert prompt.ids == list(tokenizer(prompt.text).input_ids)
            assert len(prompt.ids) == length
            assert len(prompt.rivals) == 3
            ordinal, others = extra
            assert f"The {ordinal} pass key is {key}." in prompt.text
            assert prompt.text.endswith(f"The {ordinal} pass key is {key}")
            for other in others:
                assert f"The {other.ordinal} pass key is {other.key}." in prompt.text
            for rival, other in zip(prompt.rivals, others, strict=True):
                instead = prompt.text[: -len(key)] + other.key
                assert prompt.ids[: prompt.answer_start] + list(rival) == list(tokenizer(instead).input_ids)
    assert "striking" in prompt.text
    assert "The grass is green" not in prompt.text


@pytest.mark.parametrize("depth", [0.0, 0.4, 1.0])
def test_a_haystack_is_read_on_after_the_needle(depth):
    """What stands before and after the needle is one running text, no sentence of which comes twice."""
    essay = [f"In the year {year} there was a harvest." for year in range(1200, 1300)]
    builder = PromptBuilder(ByteTokenizer(), None, essay)
    lines = builder.build(1500, depth, "12345").text.split("\n")
    before, needle, after = lines[1:4]
    assert "The pass key is 12345" in needle
    running = f"{before} {after}".strip()
    found = sentences_of(running)
    whole = [sentence for sentence in found if sentence.endswith("harvest.")]
    assert len(found) - len(whole) <= 1, "at most one sentence is cut, to hit the length"
    assert whole == essay[: len(whole)]
    assert len(whole) > 15
    assert len(set(found)) == len(found)


def test_a_haystack_of_the_same_length_is_another(tmp_path):
    model, path = random_llama(), tmp_path / "cells.jsonl"
    grid = {"depths": [0.5], "trials": 1, "resume": path, "identity": "a"}
    other = ESSAY.replace("clocks", "clacks")
    found = [passkey(model, ByteTokenizer(), [900], **grid, haystack=text) for text in (ESSAY, other)]
    assert found[0].rows[0]["logprob"] != found[1].rows[0]["logprob"]
    assert found[0].settings["haystack_sha256"] == hashlib.sha256(ESSAY.encode()).hexdigest()


def test_the_margin_is_that_of_the_key_over_the_likeliest_other():
    model, tokenizer = random_llama(), ByteTokenizer()
    grid = {"depths": [0.5], "trials": 2, "distractors": 2}
    shared = passkey(model, tokenizer, [900], **grid)
    alone = passkey(model, tokenizer, [900], **grid, reuse=False)
    assert shared.rows[0]["margin"] == pytest.approx(alone.rows[0]["margin"], abs=1e-4)
    gaps = []
    for trial in range(2):
        cell = (0, 900, 0.5, trial)
        prompt = PromptBuilder(tokenizer).build(900, 0.5, make_key(*cell), *make_distractors(2, *cell))
        start = prompt.ids[: prompt.answer_start]
        totals = []
        for answer in (tuple(prompt.ids[prompt.answer_start :]), *prompt.rivals):
            with torch.no_grad():
                logits = model(torch.tensor([[*start, *answer]])).logits[0].log_softmax(-1)
            totals.append(sum(float(logits[len(start) - 1 + i, t]) for i, t in enumerate(answer)))
        gaps.append(totals[0] - max(totals[1:]))
    assert shared.rows[0]["margin"] == pytest.approx(sum(gaps) / 2, abs=1e-3)


def test_a_stopped_run_goes_on(tmp_path):
    model, path = random_llama(), tmp_path / "cells.jsonl"
    grid = {"depths": [0, 1], "trials": 2, "resume": path, "identity": "a"}
    whole = passkey(model, ByteTokenizer(), [400, 500], **grid)
    lines = path.read_text().splitlines()
    assert len(lines) == 4
    path.write_text("\n".join(lines[:3]) + "\n" + lines[3][:20])  # killed while it wrote the last cell
    calls = []
    model.register_forward_pre_hook(lambda *args: calls.append(1))
    again = passkey(model, ByteTokenizer(), [400, 500], **grid)
    for row, other in zip(again.rows, whole.rows, strict=True):
        assert row == pytest.approx(other, abs=1e-4)
    done = len(calls)
    assert 0 < done < 12
    passkey(model, ByteTokenizer(), [400, 500], **{**grid, "identity": "b"})
    assert len(calls) > 2 * done, "cells of another model aren't taken"


def test_teacher_forced_equals_generated_on_200_prompts_of_tiny():
    """Prompts around and past its length, patched, so that both outcomes occur often."""
    subject = load("tiny", method="dynamic_yarn", factor=4, dtype="float32")
    grid = {"depths": [0, 0.25, 0.5, 0.75, 1], "trials": 14}
    forced = passkey(subject.model, subject.tokenizer, [256, 512, 700], **grid)
    said = passkey(subject.model, subject.tokenizer, [256, 512, 700], **grid, generate=True, batch_size=14)
    assert sum(row["trials"] for row in said.rows) == 210
    assert [row["correct"] for row in forced.rows] == [row["correct"] for row in said.rows]
    assert 40 < sum(row["correct"] for row in said.rows) < 200
