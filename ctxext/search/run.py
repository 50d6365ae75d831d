"""A whole search: read, search the long factors, search the short ones, check, write the folder."""

from __future__ import annotations

import math
import os
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import methods
from ..errors import CtxextError, UsageError, require, warn
from ..files import read_config, settled, write_json
from ..folders.adapter import fingerprint
from ..folders.load import load, load_tokenizer
from ..folders.patch import check_target, default_out, patched_config, whole, write_patched
from ..folders.source import ModelDtype, display_name
from ..rope import Schedule, target_length, unpatched
from . import documents as texts
from . import strategies
from .documents import Document
from .evaluator import BudgetSpent, Evaluator, Problem
from .fitness import Fitness
from .log import Log
from .options import Existing, Fallback, Objective, Options, Short, Subject, long_space, read_subject
from .parallel import World, world
from .plots import draw
from .report import card_section, compared
from .space import START_TOKENS, Candidate, Space, as_params, factors_of, seeds


def search_factors(
    model: str | os.PathLike,
    *,
    factor: float,
    data: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    strategy: str = "curve",
    constants: Mapping[str, float] | None = None,
    objective: Objective = "perplexity",
    documents: int = 5,
    held_out: int = 5,
    short: Short = "search",
    evaluations: int | None = None,
    start_tokens: Sequence[int] = START_TOKENS,
    upper: float = 1.25,
    step: float = 0.01,
    critical: int | None = None,
    attention_factor: float | None = None,
    seed: int = 0,
    dtype: ModelDtype = "auto",
    attention: str = "auto",
    trained_length: int | None = None,
    existing: Existing = "extend",
    fallback: Fallback = "static",
    resume: bool = False,
    force: bool = False,
    watch: Callable[..., AbstractContextManager] = nullcontext,
) -> dict[str, Any]:
    """Search LongRoPE's factors for a model, write a patched folder, return the report, JSON-ready.

    The folder, `out` or MODEL-longrope-FACTORx, has the log and pictures in its search/.

    model: a folder, a hub id, a .gguf file, or `tiny`.
    factor: times the trained length, whatever the model was extended to already.
    data: files or folders of text, hub data sets, or `tiny`.
    strategy, constants: one of ctxext/search/strategies, and what is changed of its constants.
    documents, held_out: texts of the target length to search on and to check with.
    evaluations: full evaluations (all documents) at most, for each of the two searches.
    start_tokens: what n-hat may be. upper: the largest factor, as a share of `factor`. step: the grid of factors.
    critical: LongRoPE2's constraint from this frequency on; -1: from the first that made no full turn in training.
    attention_factor: on cos and sin; None: sqrt(1 + ln s / ln L).
    resume: go on with a search that was killed, to the same result. force: replace `out`.
    watch: called with an Evaluator, a context manager around its search (the command's progress bar).

    Run by every process of `accelerate launch` alike; only the first one writes.
    Raises CtxextError or UsageError for what can't be searched, a loss that isn't finite, or a log that isn't this
    search's.
    """
    require("a search", "search", "cma", "datasets")
    given = {**locals(), "model": os.fspath(model), "constants": constants or {}}
    given["data"] = (str(data),) if isinstance(data, str | Path) else tuple(map(str, data))
    given |= {"out": None if out is None else Path(out), "start_tokens": tuple(start_tokens)}
    del given["watch"]
    options = Options(**given)
    with world() as team:
        # A .gguf is converted by the first process; the others find what it left.
        team.from_first(lambda: read_subject(options))
        subject = read_subject(options)
        reached = target_length(subject.rope, factor) / subject.rope.trained_length
        folder = options.out or default_out(options.model, "longrope", reached)
        team.from_first(lambda: check_target(whole(options.model, subject.folder), folder, force))
        goal = settled(folder)
        work = goal.with_name(goal.name + ".search")
        return _Search(
            options=options, subject=subject, factor=reached, out=folder, work=work, team=team, watch=watch
        ).run()


@dataclass(kw_only=True)
class _Search:
    """One search under way. out: the folder to be written; work: where its log is until then."""

    options: Options
    subject: Subject
    factor: float
    out: Path
    work: Path
    team: World
    watch: Callable[..., AbstractContextManager]

    def __post_init__(self):
        options, subject = self.options, self.subject
        self.space = long_space(options, subject.rope)
        self.seeds = seeds(subject.rope, self.factor, self.space, subject.previous)
        least = len(set(self.seeds.values()))
        if options.evaluations is not None and options.evaluations < least:
            raise UsageError(f"evaluations must be at least {least}: the search starts from so many candidates")
        self._read_data()
        self.fitness = Fitness(self._load())
        self._check_runs()
        settings = self._settings()
        log = self.team.from_first(lambda: Log.begin(self.work / "log.jsonl", settings, resume=options.resume))
        self.log = Log(log.path, log.records, log.header)

    def _read_data(self) -> None:
        options, rope = self.options, self.subject.rope
        tokenizer = load_tokenizer(self.subject.folder)
        length, total = target_length(rope, self.factor), options.documents + options.held_out
        stretches = texts.cut(texts.read_texts(options.data), tokenizer, length, total)
        mine, others = stretches[: options.documents], stretches[options.documents :]
        if options.objective == "needle":
            self.long = texts.needles(mine, tokenizer, options.seed)
            self.held_out = texts.needles(others, tokenizer, options.seed + 1)
        else:
            self.long, self.held_out = texts.plain(mine), texts.plain(others)
        # Short text is always plain: what it loses is told in perplexity.
        self.short = texts.plain(ids[: rope.trained_length] for ids in mine)
        self.unread_short = texts.plain(texts.tails(mine, tokenizer, rope.trained_length))
        self.held_out_short = texts.plain(ids[: rope.trained_length] for ids in others)

    def _settings(self) -> dict[str, Any]:
        """What must be the same for a log to be gone on with."""
        options = self.options
        kept = (
            "objective",
            "short",
            "evaluations",
            "upper",
            "step",
            "critical",
            "attention_factor",
            "seed",
            "dtype",
        )
        return {
            "model": fingerprint(self.subject.folder),
            "runs": (self.subject.previous or unpatched(self.subject.rope)).to_dict()["stages"],
            "factor": self.factor,
            "data": texts.digest([*self.long, *self.short]),
            "strategy": options.strategy,
            "constants": strategies.constants(options.strategy, options.constants),
            "start_tokens": list(options.start_tokens),
            "attention": self._attention(),
            **{name: getattr(options, name) for name in kept},
        }

    def _attention(self) -> str:
        asked = self.options.attention
        return self.fitness.model.config._attn_implementation if asked == "auto" else asked

    def _load(self) -> Any:
        import torch
        from torch.distributed.distributed_c10d import get_node_local_rank

        options = self.options
        model = load(self.subject.folder, dtype=options.dtype, attn_implementation=options.attention)
        if torch.cuda.is_available():
            model.to(f"cuda:{get_node_local_rank(fallback_rank=0) % torch.cuda.device_count()}")
        return model

    def _check_runs(self) -> None:
        """Raise CtxextError if the model can't run what will be searched for: before the search, not after it."""
        probe = self.space.candidate([1.0] * self.space.size, self.space.start_tokens[-1])
        ones = [1.0] * self.space.size
        schedule = self._long_schedule(probe) if self.options.short == "none" else self._both(probe, ones)
        try:
            self.fitness(schedule, [])
        except CtxextError as error:
            if schedule.is_static:
                raise
            raise CtxextError(
                error.message, hint="--start-tokens 0 --short none searches for a plain table of factors"
            ) from error

    def run(self) -> dict[str, Any]:
        options = self.options
        long = self._phase("long", self.space, self.seeds, self._long_schedule, self.long)
        short = None
        if options.short == "search":
            small = self._short_space(long.best)
            short = self._phase(
                "short", small, self._short_seeds(small), lambda c: self._both(long.best, c.factors), self.short
            )
        final = self._final(long.best, short)
        report = self._report(final, long, short)
        self.team.from_first(lambda: self._write(final, report, long))
        return report

    def _phase(
        self,
        name: str,
        space: Space,
        started_from: dict[str, Candidate],
        schedule: Callable[[Candidate], Schedule],
        documents: Sequence[Document],
    ) -> Evaluator:
        """Run the strategy on one kind of documents."""
        sizes = [len(d.ids) for d in documents]
        limit = self.options.evaluations
        evaluator = Evaluator(
            space,
            lambda c, which: self.fitness(schedule(c), [documents[d] for d in which]),
            sizes,
            budget=math.inf if limit is None else limit * sum(sizes),
            log=self.log,
            world=self.team,
            phase=name,
        )
        seed = self.options.seed
        problem = Problem(space, started_from, evaluator, random.Random(f"{seed}/{name}"), seed)
        constants = strategies.constants(self.options.strategy, self.options.constants)
        with self.watch(evaluator), suppress(BudgetSpent):
            strategies.get(self.options.strategy)(problem, **constants)
        return evaluator

    def _long_schedule(self, candidate: Candidate) -> Schedule:
        more = {"attention_factor": self.options.attention_factor}
        return methods.schedule(self.subject.rope, "longrope", self.factor, **as_params(candidate, **more))

    def _both(self, long: Candidate, short: Sequence[float]) -> Schedule:
        more = {"attention_factor": self.options.attention_factor, "short_factor": list(short)}
        if self.subject.previous is not None:
            # Short text keeps the scale that the model reads it with, and may be tuned to.
            more["short_attention_factor"] = self.subject.previous.stages[0].attention_scale
        return methods.schedule(self.subject.rope, "longrope", self.factor, **as_params(long, **more))

    def _short_space(self, long: Candidate) -> Space:
        """Up to the trained length less interpolation is needed: the scale that the model was extended to."""
        scale = self.subject.previous.factor if self.subject.previous else 1.0
        options = self.options
        return Space(self.subject.rope.size, scale, options.upper, options.step, (long.start_tokens,))

    def _short_seeds(self, space: Space) -> dict[str, Candidate]:
        found = {"original": [1.0] * space.size}
        previous = self.subject.previous
        if previous is not None:
            found["previous"] = factors_of(previous)
            first = zip(previous.rope.inv_freq(), previous.stages[0].inv_freq, strict=True)
            found["previous, short"] = [f / g if g else math.inf for f, g in first]
        return {name: space.candidate(factors, space.start_tokens[0]) for name, factors in found.items()}

    def _final(self, long: Candidate, short: Evaluator | None) -> Schedule:
        if self.options.short == "none":
            return self._long_schedule(long)
        return self._both(long, self._kept(long, short) if short else [1.0] * self.subject.rope.size)

    def _kept(self, long: Candidate, short: Evaluator) -> Sequence[float]:
        """The short factors that were found, unless some that the search began with read other text better.

        Short documents hold few tokens, so a search can fit itself to them. Other text: what follows them in the
        same documents, so that what is held out stays so.
        """
        tried = [short.best, *self._short_seeds(self._short_space(long)).values()]
        if not self.unread_short:
            return short.best.factors
        losses = [self._perplexity(self._both(long, c.factors), self.unread_short) for c in tried]
        return tried[losses.index(min(losses))].factors

    def _report(self, final: Schedule, long: Evaluator, short: Evaluator | None) -> dict[str, Any]:
        """What was found, beside PI, NTK, YaRN and the model as it was, on documents that the search never saw."""
        checked = (self.held_out, self.held_out_short) if self.held_out else (self.long, self.short)
        rows = []
        for name, schedule in compared(self.subject, final, self.factor).items():
            far, near = (self._perplexity(schedule, documents) for documents in checked)
            rows.append({"schedule": name, "long": far, "short": near})
        by_name = {row["schedule"]: row for row in rows}
        first = long.means(list(self.seeds.values()))
        return {
            "out": str(self.out),
            "schedule": final.to_dict(),
            "settings": self._settings(),
            "fallback": self.options.fallback,
            "tokens": long.tokens + (short.tokens if short else 0),
            "tokens_short": short.tokens if short else 0,
            "full_evaluations": long.tokens / long.full_cost(),
            "best": math.exp(long.best_loss),
            "seeds": {name: math.exp(loss) for name, loss in zip(self.seeds, first, strict=True)},
            "checked_on": "held-out documents" if self.held_out else "the documents of the search",
            "lengths": {"long": len(self.long[0].ids), "short": self.subject.rope.trained_length},
            "rows": rows,
            "short_change": by_name["searched"]["short"] / rows[0]["short"] - 1,
            "history": [[tokens, math.exp(loss)] for tokens, loss in long.history],
        }

    def _perplexity(self, schedule: Schedule, documents: Sequence[Document]) -> float:
        losses = self.team.map(lambda some: self.fitness(schedule, some), list(documents))
        mean = sum(losses) / len(losses)
        if not math.isfinite(mean):
            raise CtxextError(f"the loss under {schedule.method} isn't finite", hint="load the model in float32")
        return math.exp(min(mean, 700))

    def _write(self, final: Schedule, report: dict[str, Any], long: Evaluator) -> None:
        options, folder = self.options, self.subject.folder
        config = patched_config(read_config(folder), final, fallback=options.fallback)
        write_patched(folder, self.out, final, config, name=display_name(options.model), force=options.force)
        # The folder stands; its papers follow. After a kill in between they are still in OUT.search.
        write_json(self.work / "report.json", report, indent=1)
        try:
            draw(self.work, report, self.subject.rope, self.factor)
        except CtxextError:
            warn("no pictures were drawn: pip install 'ctxext[plot]'")
        with (self.out / "README.md").open("a", encoding="utf-8") as card:
            card.write(card_section(report))
        # A folder that was searched before has papers of its own, which came along.
        shutil.rmtree(self.out / "search", ignore_errors=True)
        shutil.move(self.work, self.out / "search")
