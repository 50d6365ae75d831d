"""An adapter and its base as one folder for plain transformers and servers, checked by reading it back."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.write import write_config
from ..errors import CtxextError
from ..files import WEIGHTS, link_or_copy, model_files, read_config, replacing, write_text
from ..rope import Schedule
from ..runtimes.portability import portability
from .adapter import check_base, read_adapter
from .card import model_card
from .heads import require_causal
from .lengths import longer_config, longer_files
from .load import attach, base_model, find_base
from .patch import check_target, named
from .source import display_name, save
from .weights import INDEX, second_copies, within


@dataclass(frozen=True)
class Merged:
    """What `merge` did. rounding: largest change of a logit by writing the sum in the base's dtype.

    left_out: second copies of the base beside its weights, which the adapter isn't in (`weights.second_copies`).
    """

    out: Path
    schedule: Schedule | None
    rounding: float
    left_out: tuple[str, ...] = ()


def merge(
    adapter: str | os.PathLike,
    out: str | os.PathLike,
    *,
    base: str | os.PathLike | None = None,
    dtype: str = "auto",
    force: bool = False,
) -> Merged:
    """Add an adapter to its base and write the sum, patched, as a model folder.

    A static schedule is written in transformers' own words, so that plain transformers and servers load it; a
    staged one has ctxext's block, and `ctxext.load` runs it. base: where the base is, if it moved. dtype: of the
    weights, "auto" for the base's. The folder is read back and must give the merged model's logits exactly.
    Raises CtxextError for a wrong base, an `out` that is the adapter or its base, or if the folder reads back as
    another model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from .load import load

    folder = Path(adapter)
    if not folder.is_dir():
        raise CtxextError(f"there is no folder {folder}", hint="give the adapter folder that a run wrote")
    entry, schedule = read_adapter(folder)
    base_folder = find_base(entry, base)
    check_target(folder, Path(out), force, "the adapter")
    check_target(base_folder, Path(out), force, "the base model")
    check_base(folder, entry, schedule, base_folder)
    require_causal(read_config(base_folder), base_folder, "merging")
    copies = second_copies(base_folder)
    left_out = named(base_folder, copies)
    model = attach(base_model(base_folder, schedule, dtype=dtype), folder).eval()
    kept = next(p.dtype for n, p in model.named_parameters() if "lora_" not in n and "modules_to_save" not in n)
    before = _logits(model)
    model = model.merge_and_unload(safe_merge=True).to(kept)
    after = _logits(model)
    with replacing(Path(out), force=force) as temporary:
        save(model, temporary)
        saved = read_config(temporary)
        config = {**read_config(base_folder), **{k: saved[k] for k in ("dtype", "sliding_window") if k in saved}}
        if schedule is not None:
            config = longer_config(write_config(config, schedule), schedule.max_length)
        for relative in model_files(base_folder):
            weights = relative.parent == Path() and (relative.suffix in WEIGHTS or relative.name.endswith(INDEX))
            if not (weights or within(relative, copies) or str(relative) in ("config.json", "README.md")):
                link_or_copy(base_folder / relative, temporary / relative, link=False)
        written = {"config.json": config}
        if schedule is not None:
            written |= longer_files(base_folder, schedule.max_length)
        for file, data in written.items():
            write_text(temporary / file, json.dumps(data, indent=2) + "\n")
        if schedule is not None:
            weights = f"The weights are the base model's with the adapter `{display_name(folder)}` added."
            verdicts = portability(config, folder="this-folder")
            name = display_name(entry["base"])
            card = model_card(name, schedule, config, verdicts=verdicts, weights=weights, left_out=left_out)
            write_text(temporary / "README.md", card)
        read_back = load(temporary) if schedule else AutoModelForCausalLM.from_pretrained(temporary)
        if not torch.equal(_logits(read_back.eval()), after):
            raise CtxextError(f"the merged folder reads back as another model, so {out} was not written")
    return Merged(Path(out), schedule, float((before - after).abs().max()), left_out)


def _logits(model: Any) -> Any:
    """float32 logits of a few tokens at spread positions, (16, vocabulary)."""
    import torch

    vocabulary = model.config.get_text_config().vocab_size
    ids = (torch.arange(16) * 7919 % vocabulary)[None].to(model.device)
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits[0].float()
