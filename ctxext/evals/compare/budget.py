"""Fitting a comparison into a time budget: what it would cost, and what to drop first."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...errors import CtxextError, UsageError
from ...live.head import inference, token_nll
from ..ruler.tasks import TASKS
from .suite import Suite

SHARED = 0.65
"""What a row of passkey prompts costs with shared prefixes, against a prefill each (benchmarks/passkey.py)."""

SLACK = 1.25
"""For what isn't the model: making prompts, writing cells, a busy machine."""


def parse_budget(text: str) -> float:
    """`90s`, `10m`, `1.5h` or plain seconds, in seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip().lower())
    if not found or float(found[1]) <= 0:
        raise UsageError(f"--budget {text!r} is no duration", hint="for example 90s, 10m or 1.5h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


@dataclass(frozen=True)
class Speed:
    """Seconds to score n tokens in one pass, `linear * n + quadratic * n^2`, and to generate one."""

    linear: float
    quadratic: float
    step: float

    def prefill(self, tokens: int) -> float:
        """Seconds to score `tokens` in one pass."""
        return self.linear * tokens + self.quadratic * tokens * tokens


def measure_speed(model, trained_length: int, *, seconds: Callable[[], float] = time.perf_counter) -> Speed:
    """Time two passes and some steps of the model, after a warm-up; a few seconds for a small model."""
    short, long = max(16, trained_length // 8), max(32, min(trained_length, 2048))

    def timed(run: Callable[[], object]) -> float:
        start = seconds()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return seconds() - start

    def prefill(tokens: int):
        ids = torch.full((tokens,), 5)
        return lambda: token_nll(model, ids)

    def steps(count: int):
        ids = torch.full((1, short), 5, device=model.device)
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        return lambda: model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)

    with inference(model):
        prefill(short)()
        one, two = (min(timed(prefill(n)) for _ in range(2)) for n in (short, long))
        step = max(1e-6, (timed(steps(9)) - timed(steps(1))) / 8)
    # Two equations, two unknowns; noise must not make either negative.
    quadratic = max(0.0, (two / long - one / short) / (long - short))
    return Speed(max(1e-9, two / long - quadratic * long), quadratic, step)


@dataclass(frozen=True)
class Plan:
    """What will be measured. `dropped`: sentences on what the budget took away. `estimate`: seconds."""

    suite: Suite
    lengths: tuple[int, ...]
    dropped: tuple[str, ...] = ()
    estimate: float | None = None

    def to_dict(self) -> dict:
        """JSON-ready."""
        return {
            "suite": self.suite.model_dump(),
            "lengths": list(self.lengths),
            "dropped": list(self.dropped),
            "estimate_seconds": self.estimate,
        }

    @classmethod
    def from_dict(cls, data: dict) -> Plan:
        return cls(
            Suite.model_validate(data["suite"]),
            tuple(data["lengths"]),
            tuple(data["dropped"]),
            data["estimate_seconds"],
        )


def cost(suite: Suite, lengths: Sequence[int], variants: int, trained: int, stride: int, speed: Speed) -> float:
    """Seconds that all cells of a comparison take, the crop control among them."""
    longest, past = max(lengths), [n for n in lengths if n > trained]
    total = suite.documents * variants * speed.prefill(longest)
    if past:
        total += suite.documents * speed.prefill(trained) * (1 + (longest - trained) / stride)
    if suite.passkey:
        prompts = suite.passkey.depths * suite.passkey.trials * (1 + suite.passkey.distractors / 8)
        total += prompts * sum(variants * SHARED * speed.prefill(n) for n in suite.passkey.among(lengths))
        total += prompts * len(suite.passkey.among(past)) * speed.prefill(trained)
    if suite.ruler:
        for task in suite.ruler.tasks:
            writing = TASKS[task][0] * speed.step
            runs = variants * sum(speed.prefill(n) + writing for n in suite.ruler.among(lengths))
            runs += len(suite.ruler.among(past)) * (speed.prefill(trained) + writing)
            total += suite.ruler.samples * runs
    return SLACK * total


def fit(plan: Plan, budget: float, variants: int, trained: int, stride: int, speed: Speed) -> Plan:
    """The largest plan that fits in `budget` seconds, dropping first what hurts least.

    Order: trials and samples are halved, down to 4; then depths to 5, then documents; then the tasks of RULER,
    then the longest lengths go, but never the first one past the trained length. Raises CtxextError if even that
    is too much.
    """
    suite, lengths = plan.suite.model_copy(deep=True), list(plan.lengths)
    first = plan.suite

    def price() -> float:
        return cost(suite, lengths, variants, trained, stride, speed)

    def shrink() -> bool:
        wide = [part for part in (suite.passkey, suite.ruler) if part]
        counts = {id(part): ("trials" if part is suite.passkey else "samples") for part in wide}
        large = [part for part in wide if getattr(part, counts[id(part)]) > 4]
        if large:
            part = max(large, key=lambda p: getattr(p, counts[id(p)]))
            setattr(part, counts[id(part)], max(4, getattr(part, counts[id(part)]) // 2))
        elif suite.passkey and suite.passkey.depths > 5:
            suite.passkey.depths = 5
        elif suite.documents > 1:
            suite.documents //= 2
        elif suite.ruler:
            suite.ruler = None
        elif len(lengths) > 1 and sum(n > trained for n in lengths) != 1:
            lengths.pop()
        elif suite.passkey:
            suite.passkey = None
        else:
            return False
        return True

    while price() > budget:
        if not shrink():
            raise CtxextError(
                f"even the smallest comparison takes about {price():.0f} s, the budget is {budget:.0f} s",
                hint="give more time, fewer methods or shorter lengths",
            )
    dropped = []
    if suite.documents < first.documents:
        dropped.append(f"documents {first.documents} -> {suite.documents}")
    for name in ("passkey", "ruler"):
        before, after = getattr(first, name), getattr(suite, name)
        if before and not after:
            dropped.append(f"all of {name}")
        elif before:
            changed = [k for k in ("depths", "trials", "samples") if getattr(before, k, 0) != getattr(after, k, 0)]
            dropped += [f"{name} {k} {getattr(before, k)} -> {getattr(after, k)}" for k in changed]
    gone = [n for n in plan.lengths if n not in lengths]
    if gone:
        dropped.append("lengths " + ", ".join(f"{n:,}" for n in gone))
    return Plan(suite, tuple(lengths), tuple(dropped), price())
