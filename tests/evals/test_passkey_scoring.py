"""Passkey scores that are known beforehand: an oracle, a random model, a window, both ways of scoring."""

from __future__ import annotations

import pytest
import torch
from stand_ins import ByteTokenizer, Oracle, byte_bpe, random_llama

from ctxext.errors import UsageError
from ctxext.evals.passkey import Prompt, PromptBuilder, _score_cell, make_key, passkey


def test_an_oracle_scores_one():
    result = passkey(Oracle(), ByteTokenizer(), [400, 301], depths=[1, 0, 0.5], trials=3, batch_size=2)
    assert [(row["length"], row["depth"]) for row in result.rows] == [
        (length, depth) for length in (301, 400) for depth in (0, 0.5, 1)
    ]
    for row in result.rows + result.lengths:
        assert row["correct"] == row["trials"]
        assert (row["accuracy"], row["high"], row["rank"]) == (1, 1, 1)
        # Six bytes, each softmax(5, 0 x 255).
        assert row["logprob"] == pytest.approx(6 * float(torch.tensor([5.0] + [0.0] * 255).log_softmax(0)[0]))
        assert "visible" not in row
    assert [row["trials"] for row in result.lengths] == [9, 9]
    assert result.rows[0]["low"] == pytest.approx(0.4385, abs=1e-4)  # Wilson at 3/3


def test_a_random_model_scores_zero():
    result = passkey(random_llama(), ByteTokenizer(), [300], depths=[0, 1], trials=5, batch_size=5)
    assert result.lengths[0]["correct"] == 0
    assert result.lengths[0]["low"] == 0
    assert result.lengths[0]["rank"] > 1
    assert result.lengths[0]["logprob"] < -10


@pytest.mark.parametrize("window", [300, 400])
def test_a_model_that_reads_its_end_only_scores_the_predicted_fraction(window):
    depths = [i / 10 for i in range(11)]
    result = passkey(Oracle(window), ByteTokenizer(), [600], depths=depths, trials=2)
    cropped = passkey(Oracle(), ByteTokenizer(), [600], depths=depths, trials=2, crop=window)
    builder = PromptBuilder(ByteTokenizer())
    predicted = [
        builder.build(600, d, "12345").text.encode().index(b"The pass key") >= 600 - window for d in depths
    ]
    assert 0 < sum(predicted) < 11
    assert [row["accuracy"] for row in result.rows] == predicted
    assert [row["accuracy"] for row in cropped.rows] == predicted
    assert [row["visible"] for row in cropped.rows] == predicted
    assert cropped.lengths[0]["accuracy"] == cropped.lengths[0]["visible"] == pytest.approx(sum(predicted) / 11)


def test_a_crop_keeps_bos_in_front():
    seen = []

    class Spy(Oracle):
        def _read(self, input_ids, **options):
            seen.append(input_ids)
            return super()._read(input_ids)

    passkey(Spy(), ByteTokenizer(), [400], depths=[0.5], trials=1, crop=300, bos=7)
    longest = max(seen, key=lambda ids: ids.shape[1])
    assert longest.shape == (1, 300)
    assert longest[0, 0] == 7
    assert bytes(longest[0, 1:].tolist()).decode().endswith(make_key(0, 400, 0.5, 0))
    # BOS takes one place of the crop, so the needle needs one more to be visible.
    prompt = PromptBuilder(ByteTokenizer(), 7).build(400, 0.5, make_key(0, 400, 0.5, 0))
    for more, visible in ((0, 0), (1, 1)):
        crop = 400 - prompt.depth_tokens + more
        (row,) = passkey(Oracle(), ByteTokenizer(), [400], depths=[0.5], trials=1, crop=crop, bos=7).rows
        assert row["visible"] == row["accuracy"] == visible
    with pytest.raises(UsageError, match="leaves nothing"):
        passkey(Oracle(), ByteTokenizer(), [400], depths=[0.5], trials=1, crop=6)


@pytest.mark.parametrize("crop", [None, 100])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_teacher_forcing_says_what_greedy_generation_says(batch_size, crop):
    model, builder = random_llama(), PromptBuilder(ByteTokenizer())
    prompts, expected = [], []
    for trial in range(4):
        prompt = builder.build(300 + trial // 4, 0.5, make_key(0, 300, 0.5, trial))
        start = prompt.ids[: prompt.answer_start]
        visible = start if crop is None else start[len(prompt.ids) - crop :]
        inputs = torch.tensor([visible])
        said = model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=6)
        said = said[0, len(visible) :].tolist()
        # What it says itself is right; with any one token changed it is wrong.
        for wrong in (None, 0, 3, 5):
            answer = [token if step != wrong else (token + 1) % 256 for step, token in enumerate(said)]
            prompts.append(Prompt("", "", start + answer, len(start), prompt.depth_tokens, prompt.needle_end))
            expected.append(wrong is None)
    for generate in (False, True):
        outcomes = _score_cell(model, prompts, crop, None, batch_size, generate, 256)
        assert [outcome["correct"] for outcome in outcomes] == expected


def test_the_two_ways_of_scoring_give_the_same_rows():
    model, tokenizer = random_llama(700), byte_bpe(700, bos=True)
    grid = {"lengths": [200], "depths": [0.5], "trials": 3}
    forced, generated = (passkey(model, tokenizer, **grid, generate=flag) for flag in (False, True))
    assert forced.settings["bos"] == generated.settings["bos"] == 0
    assert generated.settings["scoring"] == "generate"
    assert {k: forced.rows[0][k] for k in generated.rows[0]} == generated.rows[0]


def test_a_cell_is_the_same_whichever_others_run():
    model = random_llama()
    alone = passkey(model, ByteTokenizer(), [350], depths=[0.5], trials=3)
    among = passkey(model, ByteTokenizer(), [300, 350, 420], depths=[0, 0.5], trials=3, batch_size=3)
    (row,) = [row for row in among.rows if (row["length"], row["depth"]) == (350, 0.5)]
    assert row["logprob"] == pytest.approx(alone.rows[0]["logprob"], abs=1e-4)
    assert row["depth_tokens"] == alone.rows[0]["depth_tokens"]
    assert passkey(model, ByteTokenizer(), [350], depths=[0.5], trials=3, seed=1).rows != alone.rows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [100]}, "at least"),
        ({"lengths": []}, "at least one length"),
        ({"lengths": [400], "trials": 0}, "trial"),
        ({"lengths": [400], "depths": [1.5]}, "depth"),
    ],
)
def test_wrong_usage_is_refused_before_any_forward(options, message):
    with pytest.raises(UsageError, match=message):
        passkey(None, ByteTokenizer(), **options)
