"""Our evaluations as tasks of lm-evaluation-harness: data sets made on the spot, and how answers are scored.

The YAML files in `lm_eval/` name these functions. The harness calls a data set function with the task's
metadata, the model's arguments and the user's `--metadata` as keywords: the tokenizer comes from `tokenizer`,
`pretrained` or `model` (anything that ctxext takes as MODEL), lengths from `max_seq_lengths`, as for the
harness's own RULER tasks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import datasets

from ...errors import CtxextError, UsageError
from ...folders.source import resolve
from ...needles.prompts import PromptBuilder, make_key
from ...text import bos_id, load_texts
from ..ruler.samples import SampleBuilder, string_match_all
from ..stats import perplexity
from ..words import embedded_text

TASKS_FOLDER = Path(__file__).parent
"""What `--include_path` takes; the same folder in a clone and in an installed package."""


def tokenizer_of(settings: dict[str, Any]) -> Any:
    """The tokenizer that the settings name; CtxextError if they name none."""
    for key in ("tokenizer", "pretrained", "model"):
        value = settings.get(key)
        if isinstance(value, (str, os.PathLike)) and str(value):
            return _load_tokenizer(str(resolve(value)))
        if value is not None and callable(value):
            return value
    raise CtxextError(
        "these tasks need a tokenizer to make texts of exact lengths",
        hint="""pass --metadata '{"tokenizer": "MODEL", "max_seq_lengths": [4096]}'""",
    )


@cache
def _load_tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def lengths_of(settings: dict[str, Any]) -> list[int]:
    """`max_seq_lengths` as a sorted list of tokens; 4096 if there is none."""
    asked = settings.get("max_seq_lengths", 4096)
    asked = asked.split(",") if isinstance(asked, str) else asked
    return sorted({int(n) for n in ([asked] if isinstance(asked, int) else asked)})


def _test(rows: list[dict]) -> dict[str, datasets.Dataset]:
    return {"test": datasets.Dataset.from_list(rows)}


def passkey_dataset(**settings: Any) -> dict[str, datasets.Dataset]:
    """Passkey prompts for each length, depth and trial. Metadata: depths (a number, 5), trials (4), seed (0)."""
    tokenizer = tokenizer_of(settings)
    builder = PromptBuilder(tokenizer, bos_id(tokenizer))
    count, trials, seed = (int(settings.get(k, v)) for k, v in (("depths", 5), ("trials", 4), ("seed", 0)))
    rows = []
    depths = [i / (count - 1) for i in range(count)] if count > 1 else [0.5]
    # The harness's --limit takes the first rows: each length comes before the next depth, each depth before the
    # next trial.
    for trial, depth, length in product(range(trials), depths, lengths_of(settings)):
        key = make_key(seed, length, depth, trial)
        text = builder.build(length, depth, key).text
        prompt, answer = text[: -len(key) - 1], text[-len(key) - 1 :]
        rows.append({"length": length, "depth": depth, "prompt": prompt, "answer": answer})
    return _test(rows)


def passkey_results(doc: dict, results: Sequence[tuple[float, bool]]) -> dict[str, float]:
    """acc: greedy decoding would say the key. logprob: of the whole key, in nats."""
    logprob, greedy = results[0]
    values = {"acc": float(greedy), "logprob": float(logprob)}
    return values | {f"{name}_{doc['length']}": value for name, value in values.items()}


def ruler_dataset(task: str, **settings: Any) -> dict[str, datasets.Dataset]:
    """Samples of one RULER task. Metadata: samples per length (20), seed (0), example (true), data (a text
    file)."""
    tokenizer = tokenizer_of(settings)
    data = settings.get("data")
    haystack = None if data is None else "\n".join(text.text for text in load_texts(data))
    example = bool(settings.get("example", True))
    builder = SampleBuilder(tokenizer, bos_id(tokenizer), haystack=haystack, example=example)
    made = [
        builder.build(task, length, index, int(settings.get("seed", 0)))
        for index in range(int(settings.get("samples", 20)))
        for length in lengths_of(settings)
    ]
    return _test([{"input": s.text, "outputs": list(s.answers), "length": s.length} for s in made])


def ruler_results(doc: dict, results: Sequence[str]) -> dict[str, float]:
    """score: the share of answers that occur in what was said."""
    score = string_match_all(results[0], doc["outputs"])
    return {"score": score, f"score_{doc['length']}": score}


def ppl_dataset(**settings: Any) -> dict[str, datasets.Dataset]:
    """The beginning of each text, cut into position buckets: one row per document and bucket.

    Metadata: data (files or folders; the embedded text by default), documents (1 by default), bucket (tokens, an
    eighth of the longest length). A bucket's NLL given everything before it equals that part of one prefill, so
    the buckets up to a length add up to the perplexity at that length.

    Buckets are cut where the text before, tokenised alone, gives the same tokens: at most some tokens off.
    Raises CtxextError for a tokenizer without offsets, or too short texts.
    """
    tokenizer = tokenizer_of(settings)
    if not getattr(tokenizer, "is_fast", False):
        raise CtxextError("perplexity by bucket needs a fast tokenizer", hint="use `ctxext eval ppl`")
    lengths = lengths_of(settings)
    bucket = int(settings.get("bucket") or max(1, lengths[-1] // 8))
    data, wanted = settings.get("data"), int(settings.get("documents", 1))
    texts = [embedded_text()] if data is None else [text.text for text in load_texts(data)]
    rows: list[dict] = []
    found = 0
    for text in texts:
        part = _buckets(tokenizer, text, lengths[-1], bucket, found)
        rows += part
        found += bool(part)
        if found == wanted:
            return _test(rows)
    raise CtxextError(
        f"only {found} of {wanted} texts have {lengths[-1]} tokens", hint="give more or longer texts"
    )


def _buckets(tokenizer: Any, text: str, length: int, bucket: int, document: int) -> list[dict]:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, ends = encoded["input_ids"], [end for _, end in encoded["offset_mapping"]]
    front = bos_id(tokenizer) is not None
    if len(ids) + front < length:
        return []

    def boundary(token: int) -> int:
        """The first token index from here on where the text can be cut without changing its tokens."""
        for candidate in range(token, min(token + 64, len(ids))):
            before = text[: ends[candidate - 1]]
            alone = tokenizer(before, add_special_tokens=False, verbose=False)["input_ids"]
            if before == before.rstrip() and alone == ids[:candidate]:
                return candidate
        raise CtxextError("this tokenizer gives no place to cut the text at", hint="use `ctxext eval ppl`")

    # Position 0 is never scored: it is BOS, or else the first token.
    asked = [*range(bucket, length, bucket), length]
    cuts = [0 if front else boundary(1)]
    cuts += [boundary(place - front) for place in asked[:-1]]
    cuts.append(length - front)
    return [
        {
            "document": document,
            "bucket": place,
            "tokens": end - start,
            "context": text[: ends[start - 1]] if start else "",
            "text": text[ends[start - 1] if start else 0 : ends[end - 1]],
        }
        for place, (start, end) in zip(asked, pairwise(cuts), strict=True)
        if end > start
    ]


def ppl_results(doc: dict, results: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    """ppl: over all tokens. nll_<n>: nats per token of the bucket that ends at position n."""
    logprob = float(results[0][0])
    return {"ppl": (logprob, doc["tokens"]), f"nll_{doc['bucket']}": -logprob / doc["tokens"]}


def token_weighted_ppl(items: Sequence[tuple[float, int]]) -> float:
    """exp of the mean NLL per token, over (log-likelihood, tokens) of each row."""
    return perplexity(-sum(logprob for logprob, _ in items) / sum(tokens for _, tokens in items))


def check_limit(tasks: Sequence[str], limit: Any) -> None:
    """Raise UsageError for a limit on a task whose rows are parts of a whole."""
    if limit is not None and {"ctxext_ppl", "ctxext"} & set(tasks):  # the task and its tag
        raise UsageError(
            "ctxext_ppl can't be limited: its rows are the buckets of a text, and the far ones would be left out",
            hint="leave out --limit, or give a smaller max_seq_lengths",
        )


def evaluate(
    lm: Any,
    tasks: Sequence[str],
    *,
    include_path: Sequence[str | Path] = (),
    metadata: dict[str, Any] | None = None,
    limit: int | None = None,
    out: str | Path | None = None,
    bootstrap: int = 0,
) -> dict[str, Any]:
    """Run harness tasks, ours by their names `ctxext_...`, on a `CtxextLM`; the results in the harness's schema.

    The harness's own index (seconds to read) is loaded only if a task isn't found in ours or in `include_path`.
    `out`: also write `results_<time>.json` there, as the harness does. Raises UsageError for an unknown task, and
    for a `limit` (documents per task) on perplexity.
    """
    check_limit(tasks, limit)
    from lm_eval import simple_evaluate as run
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    simple_evaluate: Any = run  # its decorators leave a checker nothing to see
    paths: list[str | Path] = [str(TASKS_FOLDER), *map(str, include_path)]
    for path in paths:
        if not Path(path).is_dir():
            raise UsageError(f"--include-path {path} isn't a folder")
    manager = TaskManager(include_path=paths, include_defaults=False, metadata=metadata)
    if set(tasks) - set(manager.all_tasks):
        manager = TaskManager(include_path=paths, metadata=metadata)
    missing = [name for name in tasks if name not in manager.all_tasks]
    if missing:
        raise UsageError(
            f"there is no task {', '.join(missing)}", hint="`lm_eval ls tasks` lists the harness's own"
        )
    tracker = EvaluationTracker(output_path=str(out)) if out is not None else None
    results = simple_evaluate(
        model=lm,
        model_args=lm.described,
        tasks=list(tasks),
        task_manager=manager,
        limit=limit,
        bootstrap_iters=bootstrap,
        log_samples=False,
        metadata=metadata,
        evaluation_tracker=tracker,
    )
    results["config"]["model"] = "ctxext"
    if tracker is not None:
        tracker.save_results_aggregated(results=results, samples=None)
    return results
