"""Per-token scores without the logits of a whole sequence.

At 131,072 tokens and Llama 3's vocabulary the stock loss needs 156 GiB for logits alone. Here the body runs once,
and the head sees a few hundred rows at a time.

How the head is applied matters more than it seems: architectures cap logits (Gemma 2), divide them (Granite),
multiply them (Cohere, HyperCLOVA X by the very key that Granite divides by) or scale the hidden states before
(MiniCPM). So no list of config keys is kept. The model's *own* forward is run over each chunk, with the decoder
answering the hidden states already computed. What comes out is the stock head by construction, tied, biased,
quantised or inside a PEFT wrapper.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import CtxextError, UsageError
from . import Foreign

CHUNK = None
"""Rows per application of the head: None for as many as `_rows` says."""

_PROVEN: weakref.WeakSet = weakref.WeakSet()
"""Models whose head was compared with the stock logits of a whole short sequence."""


@dataclass(frozen=True)
class TokenScores:
    """How the model scored given targets; each tensor is [batch, targets], on the CPU."""

    logprob: torch.Tensor
    """float32, nats."""
    rank: torch.Tensor
    """int64: 1 + the number of tokens with a strictly larger logit."""
    is_argmax: torch.Tensor
    """bool: greedy decoding would choose it (with ties, the lowest id wins, as in `generate`)."""


@contextmanager
def inference(model) -> Iterator[None]:
    """No gradients and evaluation mode; the training flags of all modules come back afterwards.

    `no_grad` rather than `inference_mode`: a model may keep buffers that it computed here (stock dynamic RoPE
    does), and inference tensors would break training later.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def cache_argument(model) -> str | None:
    """What this model's forward calls its KV cache ("cache" or "past_key_values"), or None if it takes none."""
    taken = inspect.signature(causal_lm(model).forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in taken), None)


def _body(model, decoder, input_ids: torch.Tensor, cache=None):
    """One pass over [B, T]. Returns (decoder output, hidden [B, T, H], stock logits of the last row [B, V]).

    The whole model is called, not the decoder alone, so that whatever is hooked above the decoder takes part.
    `logits_to_keep=1` keeps its head at one row. No mask and no positions are passed: stock models then use
    0..T-1 (or go on where `cache` ends), and SDPA its causal path without a T x T mask.
    """
    seen = []
    handle = decoder.register_forward_hook(lambda module, args, output: seen.append(output))
    kept = {"use_cache": False} if cache is None else {"use_cache": True, cache_argument(model): cache}
    try:
        last = model(input_ids=input_ids, logits_to_keep=1, **kept).logits
    except TypeError as error:
        if "logits_to_keep" not in str(error):
            raise
        raise CtxextError(
            f"{type(model).__name__}.forward takes no `logits_to_keep`, so it can't be scored in flat memory",
            hint="use a model class of transformers >= 5.24, or add that argument to your own",
        ) from error
    finally:
        handle.remove()
    if not seen:
        raise CtxextError(f"{type(model).__name__} never called its decoder {type(decoder).__name__}")
    output = seen[-1]
    hidden = output[0] if isinstance(output, tuple) else output.last_hidden_state
    # Prompt-learning adapters put virtual tokens in front: keep the rows of the real ones.
    return output, hidden[:, -input_ids.shape[1] :], last[:, -1]


def _replay(model, decoder, output, rows: torch.Tensor) -> torch.Tensor:
    """Stock logits [N, V] (fp32) of hidden states [N, H]: the model's forward, its decoder answering them."""
    answer = (rows[None],) if isinstance(output, tuple) else type(output)(last_hidden_state=rows[None])
    with answering(decoder, answer):
        ids = torch.zeros(1, rows.shape[0], dtype=torch.long, device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits
    return logits[0, -rows.shape[0] :].float()


def row_logits(model, input_ids: torch.Tensor, rows: torch.Tensor, chunk: int | None = CHUNK, cache=None):
    """Run the body once over [B, T], check the head, then yield fp32 logits [n <= chunk, V] of `rows`.

    `rows` are positions in `input_ids`, the same for each batch row; logits come row-major over the batch. With a
    `cache` the ids go on where it ends, and it is extended. Call it under `inference(model)`.
    """
    if chunk is not None and chunk < 1:
        raise UsageError(f"chunk must be at least 1, not {chunk}")
    decoder = decoder_of(model)
    ids = input_ids.to(model.device)
    if model not in _PROVEN:
        _prove(model, decoder, ids[:1, :16])
    output, hidden, stock = _body(model, decoder, ids, cache)
    _check(model, _replay(model, decoder, output, hidden[:, -1]), stock)
    wanted = hidden[:, rows.to(hidden.device)].flatten(0, 1)
    chunk = chunk or _rows(stock)
    for start in range(0, wanted.shape[0], chunk):
        yield _replay(model, decoder, output, wanted[start : start + chunk])


def _rows(logits: torch.Tensor) -> int:
    """How many rows make just over 32 MiB of logits in the model's dtype.

    Blocks of that size the C library takes from the system and gives back at once. Smaller ones it keeps in a heap
    that the tensors in between split, so that memory grows by the logits of the whole sequence after all.
    """
    return max(1, (33 << 20) // (logits.shape[-1] * logits.element_size()) + 1)


def _prove(model, decoder, sample: torch.Tensor) -> None:
    """Once per model: all stock logits of a short sequence [1, <= 16] against the head applied in two pieces."""
    stock = model(input_ids=sample, use_cache=False).logits[0, -sample.shape[1] :]
    output, hidden, _ = _body(model, decoder, sample)
    pieces = hidden[0].split((sample.shape[1] + 1) // 2)
    _check(model, torch.cat([_replay(model, decoder, output, piece) for piece in pieces]), stock)
    _PROVEN.add(model)


def _check(model, own: torch.Tensor, stock: torch.Tensor) -> None:
    """Compare logits with stock ones, so that an exotic head is never silently mis-scored.

    Beside `_prove` this runs on *every* call for the last row, whose stock logits the body pass gives away free:
    it would notice a model that was changed meanwhile, or one that behaves differently on long input.
    """
    stock = stock.float().to(own.device)
    if not torch.isfinite(stock).all():
        raise CtxextError(
            f"{type(model).__name__} answered logits that aren't finite",
            hint="load it in float32 or bfloat16 instead of float16, and check its schedule with `ctxext inspect`",
        )
    low_precision = model.dtype in (torch.float16, torch.bfloat16)
    tolerance = (3e-2 if low_precision else 1e-3) * max(1.0, float(stock.abs().max()))
    gap = float((own - stock).abs().max())
    if not gap <= tolerance:
        raise CtxextError(
            f"the head of {type(model).__name__} can't be applied in pieces: its logits differ by {gap:.3g}",
            hint="report the architecture; until it is supported its scores would be wrong",
        )


def _two_dims(input_ids) -> torch.Tensor:
    ids = torch.as_tensor(input_ids, dtype=torch.long)
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or ids.shape[1] < 2:
        raise UsageError(f"scoring needs [T] or [B, T] token ids with T >= 2, not {list(ids.shape)}")
    return ids


def token_nll(model, input_ids, *, last: int | None = None, chunk: int | None = CHUNK) -> torch.Tensor:
    """Negative log-likelihood in nats of each token given all before it: float32 [T-1] (or [B, T-1]), on the CPU.

    `input_ids`: [T] or [B, T] ids, rows of one length and without padding. Entry i scores token i+1, as in
    `model(ids, labels=ids)`, whose loss is the mean of this. `last=n` scores the last n tokens only.
    Logits are in the model's dtype as in the stock loss, the cross entropy in fp32.
    Raises CtxextError if the head can't be applied in pieces or a score isn't finite.
    """
    ids = _two_dims(input_ids)
    count = ids.shape[1] - 1 if last is None else last
    if not 1 <= count < ids.shape[1]:
        raise UsageError(f"can't score the last {count} of {ids.shape[1]} tokens: the first has nothing before it")
    targets = ids[:, -count:].flatten()
    rows = torch.arange(ids.shape[1] - 1 - count, ids.shape[1] - 1)
    # Written into one tensor made beforehand: a small tensor kept per chunk comes to lie in the space that the
    # chunk's logits have just left, so that the next logits don't fit there and the heap grows by all of them.
    nll, done = torch.empty(len(targets)), 0
    with inference(model):
        for logits in row_logits(model, ids, rows, chunk):
            end = done + logits.shape[0]
            expected = targets[done:end].to(logits.device)
            nll[done:end] = F.cross_entropy(logits, expected, reduction="none").cpu()
            done = end
    nll = nll.view(ids.shape[0], count)
    if not torch.isfinite(nll).all():
        raise CtxextError(
            f"{int((~torch.isfinite(nll)).sum())} of {nll.numel()} scores aren't finite",
            hint="load the model in float32 or bfloat16 instead of float16",
        )
    return nll[0] if torch.as_tensor(input_ids).dim() == 1 else nll


def token_scores(model, input_ids, positions, *, chunk: int | None = CHUNK) -> TokenScores:
    """Log-probability, rank and "greedy would say it" of the tokens at `positions`; no other row meets the head.

    `input_ids`: [T] or [B, T]; `positions`: n positions in 1..T-1, the same for each row. Gives [B, n] tensors.
    """
    ids = _two_dims(input_ids)
    where = torch.as_tensor(positions, dtype=torch.long)
    if where.dim() != 1 or not len(where) or int(where.min()) < 1 or int(where.max()) >= ids.shape[1]:
        raise UsageError(f"positions must lie in 1..{ids.shape[1] - 1}")
    targets = ids[:, where].flatten()
    with inference(model):
        scores = collect(row_logits(model, ids, where - 1, chunk), targets)
    shape = (ids.shape[0], len(where))
    return TokenScores(*(column.view(shape) for column in scores))


def collect(logits_of_rows: Iterator[torch.Tensor], targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(logprob, rank, is_argmax) of `targets` [N] under the logits that `row_logits` yields: three [N] tensors."""
    size, done = len(targets), 0
    logprob, rank, is_argmax = (
        torch.empty(size),
        torch.empty(size, dtype=torch.long),
        torch.empty(size, dtype=torch.bool),
    )
    for logits in logits_of_rows:
        part = slice(done, done + logits.shape[0])
        expected = targets[part].to(logits.device)
        chosen = logits.gather(1, expected[:, None])
        logprob[part] = -F.cross_entropy(logits, expected, reduction="none").cpu()
        rank[part] = 1 + (logits > chosen).sum(1).cpu()
        is_argmax[part] = (logits.argmax(1) == expected).cpu()
        done += logits.shape[0]
    return logprob[:done], rank[:done], is_argmax[:done]


def causal_lm(model: Foreign) -> Foreign:
    """The model with a language-model head inside `model`; PEFT wrappers are looked through."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder_of(model: Foreign) -> Foreign:
    """The module whose output is the hidden states that the head reads.

    Raises CtxextError if there is none beneath a head.
    """
    base = causal_lm(model)
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else None
    if decoder is base:
        decoder = getattr(base, "model", None)  # Llama 4's text model answers itself
    if decoder is None or base.get_output_embeddings() is None:
        raise CtxextError(
            f"{type(base).__name__} has no decoder beneath a language-model head",
            hint="load the model with AutoModelForCausalLM",
        )
    return decoder


@contextmanager
def answering(decoder: Foreign, answer: Any) -> Iterator[None]:
    """While this holds, `decoder` computes nothing and returns `answer`. Only the instance changes."""
    own = decoder.__dict__.get("forward")  # accelerate and others hang a wrapper on the instance
    decoder.forward = lambda *args, **kwargs: answer
    try:
        yield
    finally:
        if own is None:
            del decoder.forward
        else:
            decoder.forward = own
