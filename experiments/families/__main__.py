"""Every decoder family of transformers: built tiny with random weights, patched, saved, reloaded, compared.

    python -m experiments.families [--only llama,gemma] [-o FOLDER] [--docs docs/families.md]

A family passes when, for every static method: logits past the trained length differ from the unpatched model's;
plain transformers reloads the saved folder to the same logits; decoding with a cache gives the tokens that one
forward gives; and undoing gives the first logits back. Beside that an oracle that knows nothing of ctxext:
position interpolation by 4 at positions 0, 4, 8, ... must be the unpatched model at 0, 1, 2, ..., in every layer.
Where layers of another type keep their own rope, it is transformers' own linear scaling, written into the config
by hand. Staged methods are tried once.
"""

from __future__ import annotations

import copy
import gc
import json
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import ctxext
from ctxext import methods, terminal
from ctxext.config.families import unsupported_reason
from ctxext.errors import CtxextError
from ctxext.files import read_json, write_json, write_text
from ctxext.live import patch as patching
from ctxext.live.rotary import is_nested, table_of
from experiments.families.tiny_models import TRAINED, tiny_config, tiny_model

FACTOR, TOKENS = 4, 112
# Past the trained length, where a patch must show.
FAR = slice(TRAINED, None)
_CLOSE = 2e-3


def families() -> list[str]:
    """Every model type for which transformers has a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """(tokens, vocabulary) of one text, without a cache."""
    return model(input_ids=ids, use_cache=False, **kwargs).logits[0].float()


def family_row(model_type: str) -> dict[str, Any]:
    """What happens to one family. status: "passes", "refused", "fails" or "not built"."""
    start = time.monotonic()
    row: dict[str, Any] = {"family": model_type}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row |= _judged(model_type)
    return row | {"seconds": round(time.monotonic() - start, 1)}


def _judged(model_type: str) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING

    reason = unsupported_reason({"model_type": model_type})
    try:
        reason = reason or unsupported_reason({**CONFIG_MAPPING[model_type]().to_dict(), "model_type": model_type})
    except Exception as error:  # a class that has no defaults
        return {"status": "not built", "why": _short(error)}
    if reason is not None:
        return {"status": "refused", "why": reason}
    try:
        config = tiny_config(model_type)
        reason = unsupported_reason({**config.to_dict(), "model_type": model_type})
        if reason is not None:
            return {"status": "refused", "why": reason}
        model = tiny_model(model_type)
        ids = torch.randint(3, config.get_text_config().vocab_size, (1, TOKENS), generator=_seeded())
        before = logits(model, ids)
        _generates(model, ids, "the unpatched model")
    except Exception as error:  # the family's own code refuses these sizes: nothing of ours has run yet
        return {"status": "not built", "why": _short(error)}
    if not before.isfinite().all():
        return {"status": "not built", "why": "its random model gives no finite logits"}
    try:
        return _patched(model, ids, before)
    except CtxextError as error:
        return {"status": "refused", "why": error.message}
    except AssertionError as error:
        return {"status": "fails", "why": str(error)}
    except Exception as error:  # a matrix reports every family, whatever one of them does
        return {"status": "fails", "why": _short(error), "trace": traceback.format_exc()[-1500:]}


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _rotary(model: Any) -> Any:
    return patching.find_decoder(model).rotary_emb


def _patched(model: Any, ids: torch.Tensor, before: torch.Tensor) -> dict[str, Any]:
    size = len(table_of(_rotary(model))[0])
    noise = (logits(model, ids) - before).abs().max().item()
    assert noise == 0, f"its forward isn't deterministic: {noise:.1e} between two calls"
    changed, passed = {}, []
    oracle = _stretched(model, ids)
    for name, method in methods.all_methods().items():
        options: dict[str, Any] = {"long_factor": [1 + i / 4 for i in range(size)]} if method.needs else {}
        if not methods.schedule(ctxext.Rope(1e4, 2 * size, TRAINED), name, FACTOR, **options).is_static:
            continue
        ctxext.patch(model, name, FACTOR, **options)
        live = logits(model, ids)
        changed[name] = (live[FAR] - before[FAR]).abs().max().item()
        assert changed[name] > 1e-3, f"{name} changes nothing: {changed[name]:.1e} past the trained length"
        assert _reloaded(model, ids, live) == 0.0, f"{name}: the saved folder reloads to other logits"
        _generates(model, ids, name)
        passed.append(name)
    ctxext.unpatch(model)
    assert torch.equal(logits(model, ids), before), "undoing doesn't give the first logits back"
    return {
        "status": "passes",
        "methods": passed,
        "smallest_change": min(changed.values()),
        "oracle": oracle,
        "staged": _staged(model, ids, before),
    }


def _stretched(model: Any, ids: torch.Tensor) -> float:
    """Largest difference between PI and what knows nothing of ctxext (see above)."""
    if is_nested(_rotary(model)):
        return _by_hand(model, ids)
    short = ids[:, :TRAINED]
    want = logits(model, short)
    ctxext.patch(model, "pi", FACTOR)
    positions = FACTOR * torch.arange(TRAINED)[None]
    got = logits(model, short, position_ids=positions, attention_mask=torch.ones_like(short))
    difference = (got - want).abs().max().item()
    assert difference < _CLOSE, f"PI at stretched positions isn't the unpatched model: {difference:.1e}"
    return difference


def _by_hand(model: Any, ids: torch.Tensor) -> float:
    """Largest difference between PI and transformers' linear scaling in the config of full-attention layers."""
    config = copy.deepcopy(model.config)
    ctxext.patch(model, "pi", FACTOR)
    ropes = copy.deepcopy(config.rope_parameters)
    ropes["full_attention"] |= {"rope_type": "linear", "factor": float(FACTOR)}
    config.rope_parameters = ropes
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    difference = (logits(model, ids) - logits(other, ids)).abs().max().item()
    assert difference < _CLOSE, f"PI isn't transformers' linear scaling: {difference:.1e}"
    return difference


def _reloaded(model: Any, ids: torch.Tensor, live: torch.Tensor) -> float:
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        return (logits(again, ids) - live).abs().max().item()


def _generates(model: Any, ids: torch.Tensor, name: str) -> None:
    """Greedy tokens with a cache, across the trained length, are those that one forward of the result gives."""
    prompt = ids[:, : TRAINED - 2]
    ones = torch.ones_like(prompt)
    out = model.generate(
        prompt, attention_mask=ones, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0
    )
    rows = logits(model, out)[prompt.shape[1] - 1 : -1]
    new = out[0, prompt.shape[1] :]
    # The best token may be one that generation suppresses (min_new_tokens), or a tie within rounding.
    rows[:, 2] = -torch.inf
    worse = (rows.max(dim=-1).values - rows[torch.arange(len(new)), new]).max().item()
    assert worse < _CLOSE, f"{name}: decoding with a cache picks tokens that are {worse:.1e} below the best"


def _staged(model: Any, ids: torch.Tensor, before: torch.Tensor) -> str:
    """Whether staged schedules run: "yes", or why they are refused."""
    try:
        ctxext.patch(model, "dynamic_ntk", FACTOR)
    except CtxextError as error:
        return error.message
    with torch.no_grad():
        short = logits(model, ids[:, :TRAINED])
    ctxext.unpatch(model)
    assert (short - before[:TRAINED]).abs().max() < _CLOSE, "a staged schedule changes short text"
    return "yes"


def matrix(only: list[str] | None = None, done: dict[str, dict] | None = None) -> Iterator[dict[str, Any]]:
    """Rows of all families that aren't in `done`."""
    for model_type in only or families():
        if model_type not in (done or {}):
            yield family_row(model_type)
            gc.collect()


def _grouped(rows: list[dict[str, Any]], key: Callable[[dict[str, Any]], Any]) -> list[tuple[Any, list[str]]]:
    """The families that have the same key, the largest group first."""
    groups: dict[Any, list[str]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row["family"])
    return sorted(groups.items(), key=lambda item: -len(item[1]))


def markdown(rows: list[dict[str, Any]], version: str) -> str:
    """The page docs/families.md."""
    tried = sorted({name for r in rows for name in r.get("methods", ())})
    by = {s: [r for r in rows if r["status"] == s] for s in ("passes", "refused", "fails", "not built")}
    counts = ", ".join(f"{len(found)} {status}" for status, found in by.items())
    lines = [
        "# Model families",
        "",
        f"Generated by `python -m experiments.families` with transformers {version}: every model type with",
        f"a causal language model, built tiny with random weights. {counts}.",
        "",
        f"Methods tried: {', '.join(tried)}.",
        "",
        "A family passes when for every static method the logits past the trained length change, the saved folder",
        "reloads in plain transformers to the same logits, decoding with a cache agrees with one forward, undoing",
        "is exact, and position interpolation is what it should be by an oracle that knows nothing of ctxext.",
        "",
        "## Passes",
        "",
        "| families | static methods | staged schedules |",
        "|---|---|---|",
        *(
            f"| {', '.join(names)} | {methods} of {len(tried)} | {staged} |"
            for (methods, staged), names in _grouped(by["passes"], lambda r: (len(r["methods"]), r["staged"]))
        ),
        "",
        f"Largest difference from the oracle: {max((r['oracle'] for r in by['passes']), default=0.0):.1e}.",
    ]
    for status, title in (("refused", "Refused"), ("fails", "Fails"), ("not built", "Not built")):
        if by[status]:
            lines += ["", f"## {title}", "", "| families | why |", "|---|---|"]
            reasons = _grouped(by[status], lambda r: r["why"].replace(r["family"], "it").replace("|", "/"))
            lines += [f"| {', '.join(names)} | {why} |" for why, names in reasons]
    return "\n".join(lines) + "\n"


def main(
    only: Annotated[str | None, typer.Option(help="Some families, with commas between.")] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Folder for families.json; goes on from one that is there.")
    ] = None,
    docs: Annotated[Path | None, typer.Option(help="Also write the page.")] = None,
) -> None:
    """Try every family, print a row for each."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path = out / "families.json" if out else None
    rows = read_json(path)["results"] if path and path.is_file() else []
    for row in matrix(only.split(",") if only else None, {r["family"]: r for r in rows}):
        rows.append(row)
        print(json.dumps(row), flush=True)
        if path:
            write_json(path, {"transformers": transformers.__version__, "results": rows}, indent=1)
    if docs:
        write_text(docs, markdown(rows, transformers.__version__))


if __name__ == "__main__":
    terminal.run(main)
