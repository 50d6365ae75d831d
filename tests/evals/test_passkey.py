"""Passkey prompts: exact lengths over real and odd tokenizers, each dependent on its own cell only."""

from __future__ import annotations

import re

import pytest
from stand_ins import TOKENIZERS, Answer, ByteTokenizer

from ctxext.errors import CtxextError, UsageError
from ctxext.evals.passkey import PromptBuilder, make_key
from ctxext.needles import NEEDLE, QUESTION, TASK, passkey_prompt
from ctxext.text import bos_id


@pytest.mark.parametrize("name", TOKENIZERS)
def test_lengths_are_exact(name, tmp_path):
    tokenizer = TOKENIZERS[name](tmp_path)
    builder = PromptBuilder(tokenizer, bos_id(tokenizer))
    least = builder.minimum()
    lengths = [*range(least + 12, least + 44), 1024, 1025, 4096]
    for length in lengths:
        for depth in (0.0, 0.1, 0.5, 1.0):
            key = make_key(0, length, depth, 0)
            prompt = builder.build(length, depth, key)
            # Tokenised here, in one piece and with the tokenizer's own special tokens.
            assert prompt.ids == list(tokenizer(prompt.text).input_ids)
            assert len(prompt.ids) == length
            assert prompt.text.startswith(TASK)
            assert prompt.text.endswith(f"{QUESTION} {key}")
            assert NEEDLE.format(key=key) in prompt.text
            assert prompt.text.count(key) == 3
            if length >= 1024:
                # A sentence of filler is a few tokens (some twenty bytes), so the needle can't be further off.
                share = (prompt.depth_tokens - least / 3) / (length - least)
                assert share == pytest.approx(depth, abs=0.12)


@pytest.mark.parametrize("name", ["byte-bpe", "byte-bpe-bos", "merges-across-spaces", "metaspace"])
def test_measured_places_agree_with_offsets(name, tmp_path):
    tokenizer = TOKENIZERS[name](tmp_path)
    builder = PromptBuilder(tokenizer, bos_id(tokenizer))
    for length, depth in ((400, 0.0), (401, 0.5), (402, 1.0)):
        key = make_key(1, length, depth, 0)
        prompt = builder.build(length, depth, key)
        spans = tokenizer(prompt.text, return_offsets_mapping=True)["offset_mapping"]
        at = prompt.text.index(NEEDLE.format(key=key))
        assert spans[prompt.depth_tokens][0] <= at < spans[prompt.depth_tokens][1]
        end = at + len(NEEDLE.format(key=key))
        assert spans[prompt.needle_end - 1][0] < end <= spans[prompt.needle_end - 1][1]
        boundary = len(prompt.text) - len(key) - 1
        assert spans[prompt.answer_start][1] > boundary
        assert spans[prompt.answer_start - 1][1] <= boundary
        assert "".join(prompt.text[a:b] for a, b in spans[prompt.answer_start :]).endswith(f" {key}")


def test_a_tokenizer_that_merges_across_the_boundary(tmp_path):
    tokenizer = TOKENIZERS["merges-across-spaces"](tmp_path)
    builder = PromptBuilder(tokenizer)
    prompt = builder.build(300, 0.5, "54321")
    alone = tokenizer(prompt.text[:-6]).input_ids
    assert list(alone) != prompt.ids[: len(alone)], "this tokenizer was made to merge there"
    spans = tokenizer(prompt.text, return_offsets_mapping=True)["offset_mapping"]
    assert spans[prompt.answer_start][0] < len(prompt.text) - 6 < spans[prompt.answer_start][1]


def test_keys_and_prompts_depend_on_their_own_cell_only():
    assert make_key(0, 4096, 0.5, 3) == "29008"  # pinned: published figures must stay reproducible
    keys = [make_key(0, 1024, depth / 10, trial) for depth in range(11) for trial in range(20)]
    assert len(set(keys)) > 210
    assert all(re.fullmatch(r"[1-9]\d{4}", key) for key in keys)
    fresh, used = PromptBuilder(ByteTokenizer()), PromptBuilder(ByteTokenizer())
    for length, depth in ((900, 0.1), (301, 0.5), (650, 1.0)):
        used.build(length, depth, "11111")
    for length, depth in ((650, 1.0), (302, 0.5)):
        assert fresh.build(length, depth, "22222") == used.build(length, depth, "22222")


def test_a_prompt_does_not_depend_on_what_was_built_before(tmp_path):
    # With this tokenizer keys take different numbers of tokens, so plans differ between them.
    tokenizer = TOKENIZERS["byte-bpe-bos"](tmp_path)
    keys = [make_key(0, 300, 0.5, trial) for trial in range(40)]
    assert len({PromptBuilder(tokenizer).minimum(0.5, key) for key in keys}) > 1
    forward, backward = PromptBuilder(tokenizer), PromptBuilder(tokenizer)
    first = [forward.build(300, 0.5, key) for key in keys]
    assert first == [backward.build(300, 0.5, key) for key in keys[::-1]][::-1]
    assert first[7] == PromptBuilder(tokenizer).build(300, 0.5, keys[7])


def test_lengths_too_short_name_the_minimum():
    builder = PromptBuilder(ByteTokenizer())
    least = builder.minimum()
    assert builder.build(least, 0.5, "12345").ids == list(f"{passkey_prompt('', '', '12345')} 12345".encode())
    with pytest.raises(UsageError, match=f"at least {least} tokens") as error:
        builder.build(least - 1, 0.5, "12345")
    assert str(least) in error.value.hint


def test_a_length_that_no_filler_hits_is_an_error_not_an_approximation():
    class Pairs(ByteTokenizer):
        """Two tokens per byte: only even lengths exist."""

        def __call__(self, text, **options):
            return Answer([half for byte in text.encode() for half in (byte >> 4, byte & 15)])

    builder = PromptBuilder(Pairs())
    assert len(builder.build(602, 0.5, "12345").ids) == 602
    with pytest.raises(CtxextError, match="exactly 601 tokens"):
        builder.build(601, 0.5, "12345")
