"""The functions that the YAML files beside this one name; the harness imports this file by its path."""

from functools import partial

from ctxext.evals.lm_eval.tasks import (
    passkey_dataset,
    passkey_results,
    ppl_dataset,
    ppl_results,
    ruler_dataset,
    ruler_results,
    token_weighted_ppl,
)
from ctxext.evals.ruler.tasks import TASKS

__all__ = [
    "passkey_dataset",
    "passkey_results",
    "ppl_dataset",
    "ppl_results",
    "ruler_results",
    "token_weighted_ppl",
]
for name in TASKS:
    globals()[name] = partial(ruler_dataset, name)
