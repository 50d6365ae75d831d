"""ctxext as a model of lm-evaluation-harness: `--model ctxext --model_args pretrained=...,method=yarn,factor=8`.

What differs from the harness's own `hf` model:

- loads whatever ctxext wrote (staged schedules too) and patches on the fly, and takes `max_length` from the
schedule;
- scores with the chunked head, so log-likelihoods don't need [batch, tokens, vocabulary] logits, always in float32
  (the harness sums a bfloat16 window in bfloat16, 8 bits for a total of tens of thousands of nats);
- never cuts a prompt in silence: one that doesn't fit is an error, unless `truncate=True`;
- rolling perplexity doesn't start a document with two BOS tokens.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from ... import terminal
from ...errors import CtxextError, UsageError
from ...live.head import CHUNK, inference, row_logits
from .. import models

_HFLM: Any = HFLM  # its decorators leave a checker nothing to see
_OPTIONS = (
    "tokenizer",
    "add_bos_token",
    "prefix_token_id",
    "max_batch_size",
    "enable_thinking",
    "chat_template_args",
)
"""Arguments of HFLM that mean the same for a model that is loaded already."""


class CtxextLM(_HFLM):
    """HFLM over `ctxext.evals.models.load`, with the chunked head.

    pretrained: what `ctxext` takes as MODEL, a live model, or a `models.Subject`. method, factor and any option
    of the method: patch it first. max_length: tokens, by default what the schedule is for. truncate: cut what
    doesn't fit from the left, as the harness does, instead of refusing. Other arguments as in `models.load` and
    HFLM.

    Raises UsageError for an unknown argument or more than one process, CtxextError as `ctxext.load` and `patch`
    do.
    """

    def __init__(
        self,
        pretrained: Any,
        method: str | None = None,
        factor: float = 1.0,
        *,
        max_length: int | None = None,
        batch_size: int | str = 1,
        device: str | None = None,
        dtype: str = "auto",
        attn_implementation: str = "auto",
        trained_length: int | None = None,
        existing: str = "refuse",
        truncate: bool = False,
        chunk: int | None = CHUNK,
        **more: Any,
    ):
        if terminal.processes() > 1:
            raise UsageError("the ctxext model runs in one process", hint="start it without accelerate launch")
        if not str(batch_size).isdigit():
            raise UsageError(f"batch_size={batch_size} isn't supported", hint="give a number")
        options = {name: more.pop(name) for name in _OPTIONS if name in more}
        if isinstance(pretrained, (str, os.PathLike)):
            if method is None and more:
                raise UsageError(f"unknown model_args {', '.join(more)}", hint="method options need method=")
            load = {"dtype": dtype, "attention": attn_implementation, "trained_length": trained_length}
            subject = models.load(pretrained, method=method, factor=factor, params=more, existing=existing, **load)
        elif method is not None or more:
            raise UsageError("patch a live model before you hand it over")
        elif isinstance(pretrained, models.Subject):
            subject = pretrained
        else:
            subject = models.of_live(pretrained, options.get("tokenizer"))
        self.subject = subject
        self.chunk, self.truncate, self._bare = (
            (int(chunk) if chunk is not None else None),
            _truth(truncate),
            False,
        )
        # The harness asks for cuda:0 wherever it runs.
        available = torch.cuda.is_available()
        if device is not None and (available or not str(device).startswith("cuda")):
            subject.model.to(device)
        logger = logging.getLogger("lm_eval.models.huggingface")
        level = logger.level
        logger.setLevel(logging.ERROR)  # its warning that a live model was passed says nothing to the user
        try:
            super().__init__(
                pretrained=subject.model,
                max_length=int(max_length or subject.schedule.max_length),
                batch_size=int(batch_size),
                softmax_dtype="float32",
                truncation=False,
                **{"tokenizer": subject.tokenizer, **options},
            )
        finally:
            logger.setLevel(level)

    @property
    def described(self) -> str:
        """The model as the harness writes it into results: name, method and factor."""
        schedule = self.subject.schedule
        patched = "" if schedule.method == "none" else f",method={schedule.method},factor={schedule.factor:g}"
        return f"pretrained={self.subject.name}{patched}"

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """As HFLM's, but a document isn't given a second BOS by its tokenizer."""
        self._bare = True
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        finally:
            self._bare = False

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return super().tok_encode(string, False if self._bare else add_special_tokens, **kwargs)

    def tok_batch_encode(self, strings, padding_side="left", left_truncate_len=None, truncation=False):
        if left_truncate_len and not self.truncate:
            for string in strings:
                self._fits(len(self.tok_encode(string)), left_truncate_len)
        return super().tok_batch_encode(strings, padding_side, left_truncate_len, truncation)

    def _fits(self, tokens: int, room: int) -> None:
        if tokens > room and not self.truncate:
            raise CtxextError(
                f"a prompt of {tokens} tokens doesn't fit in {room} (max_length {self.max_length} less what is "
                "generated): cutting it would drop its beginning",
                hint="raise factor or max_length, choose shorter tasks, or pass truncate=True",
            )

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, greedy would say it) of each continuation.

        Requests with the same input share one pass (the answers of a multiple choice often differ in one token
        alone). Equally long inputs make a batch; nothing is padded.
        """
        inputs: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            whole = [*context, *continuation]
            self._fits(len(whole), self.max_length + 1)
            kept = tuple(whole[-(self.max_length + 1) :][:-1])
            if len(continuation) > len(kept):
                raise UsageError(f"a continuation of {len(continuation)} tokens has no context in max_length")
            inputs.setdefault(kept, []).append(index)
        by_shape: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        for ids, members in inputs.items():
            scored = max(len(requests[index][2]) for index in members)
            by_shape.setdefault((len(ids), scored), []).append(ids)
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        size = override_bs or self.batch_size
        batches = [
            (shape, group[start : start + size])
            for shape, group in sorted(by_shape.items(), reverse=True)
            for start in range(0, len(group), size)
        ]
        for (length, scored), group in tqdm(batches, disable=disable_tqdm, desc="loglikelihood"):
            for index, answer in self._score(group, length, scored, [inputs[ids] for ids in group], requests):
                answers[index] = answer
                if requests[index][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
        return answers

    def _score(self, group, length: int, scored: int, members: list[list[int]], requests):
        """(request index, answer) for a batch [B, length] whose last `scored` rows predict continuations."""
        flat, tokens, owner, order = [], [], [], []
        for row, indices in enumerate(members):
            for index in indices:
                continuation = requests[index][2]
                first = row * scored + scored - len(continuation)
                flat += range(first, first + len(continuation))
                tokens += continuation
                owner += [len(order)] * len(continuation)
                order.append(index)
        flat, tokens, owner = (torch.tensor(column) for column in (flat, tokens, owner))
        total, greedy = torch.zeros(len(order), dtype=torch.float64), [True] * len(order)
        rows, start = torch.arange(length - scored, length), 0
        with inference(self.model):
            for logits in row_logits(self.model, torch.tensor(group), rows, self.chunk):
                mine = (flat >= start) & (flat < start + logits.shape[0])
                place, target = (flat[mine] - start).to(logits.device), tokens[mine].to(logits.device)
                picked = logits.log_softmax(-1)[place, target].double().cpu()
                total.index_add_(0, owner[mine], picked)
                hits = (logits.argmax(-1)[place] == target).tolist()
                for who, hit in zip(owner[mine].tolist(), hits, strict=True):
                    greedy[who] &= hit
                start += logits.shape[0]
        return [(index, (float(total[i]), greedy[i])) for i, index in enumerate(order)]

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside the results: the exact schedule among it."""
        return {
            "model_num_parameters": sum(p.numel() for p in self.model.parameters()),
            "model_dtype": str(self.model.dtype),
            "transformers_version": transformers.__version__,
            "ctxext_schedule": self.subject.description(),
            "ctxext_trained_length": self.subject.trained_length,
            "max_length": self.max_length,
        }


def _truth(value: Any) -> bool:
    return value if isinstance(value, bool) else str(value).lower() in ("1", "true", "yes")


register_model("ctxext")(CtxextLM)
