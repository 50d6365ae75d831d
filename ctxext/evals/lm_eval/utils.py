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

__all__ = [
    "passkey_dataset",
    "passkey_results",
    "ppl_dataset",
    "ppl_results",
    "ruler_results",
    "token_weighted_ppl",
]
niah_single_1 = partial(ruler_dataset, "niah_single_1")
niah_single_2 = partial(ruler_dataset, "niah_single_2")
niah_multikey_1 = partial(ruler_dataset, "niah_multikey_1")
niah_multikey_2 = partial(ruler_dataset, "niah_multikey_2")
niah_multikey_3 = partial(ruler_dataset, "niah_multikey_3")
niah_multivalue = partial(ruler_dataset, "niah_multivalue")
niah_multiquery = partial(ruler_dataset, "niah_multiquery")
vt = partial(ruler_dataset, "vt")
cwe = partial(ruler_dataset, "cwe")
fwe = partial(ruler_dataset, "fwe")
