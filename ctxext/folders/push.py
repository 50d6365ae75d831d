"""Send a model folder to the Hugging Face hub, with a card whose metadata the hub understands.

huggingface_hub does the sending. Here is what only ctxext knows: that the folder must be right first (a wrong one
is copied by strangers), which tags belong to it, and that `base_model` must be a hub id.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CtxextError, UsageError, warn
from ..files import model_files, read_config
from .doctor import BACKUP, doctor
from .load import stored_schedule

_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


@dataclass(frozen=True)
class Pushed:
    """What `push` sent, or would send: the files by their names on the hub, the card, and the commit's address."""

    repo: str
    files: tuple[str, ...]
    card: str
    url: str | None


def push(
    folder: str | os.PathLike,
    repo: str,
    *,
    base_model: str | None = None,
    license: str | None = None,
    private: bool = False,
    create_pr: bool = False,
    message: str | None = None,
    token: str | None = None,
    force: bool = False,
    dry_run: bool = False,
) -> Pushed:
    """Create the hub repository if needed and send the folder there in one commit.

    repo: its id, owner/name. base_model: the hub id of the model that was patched, for the card; by default what
    the card says already, left out if that is no id. license: an identifier such as apache-2.0, for the card.
    create_pr: open a pull request instead of committing. force: send it even if `ctxext doctor` finds errors.
    dry_run: check and show, send nothing. The folder itself isn't changed.
    Raises CtxextError if the folder has errors or the hub refuses, UsageError for an id that can't be one.
    """
    for what, value in (("repo", repo), ("base_model", base_model)):
        if value is not None and not _ID.fullmatch(value):
            raise UsageError(f"{what} {value!r} is no hub id", hint="write it as owner/name")
    found = doctor(folder)
    errors = [f for f in found.findings if f.level == "error"]
    if errors and not force:
        raise CtxextError(
            f"{folder} has {len(errors)} error(s), the first in {errors[0].where}: {errors[0].what}",
            hint="ctxext doctor --fix mends what can be mended; --force sends it as it is",
        )
    path = found.folder
    card = card_for_hub(path, base_model, license)
    names = [str(f) for f in model_files(path) if not (f.name.startswith(".") or f.name.endswith(BACKUP))]
    names = sorted({*names, "README.md"})
    if dry_run:
        return Pushed(repo, tuple(names), card, None)
    return Pushed(repo, tuple(names), card, _send(path, repo, names, card, private, create_pr, message, token))


def card_for_hub(folder: Path, base_model: str | None = None, license: str | None = None) -> str:
    """The folder's card with metadata for the hub: base model, tags, library, and the license if given."""
    from huggingface_hub import ModelCard, ModelCardData

    path = folder / "README.md"
    try:
        card = ModelCard(path.read_text(encoding="utf-8-sig") if path.is_file() else f"# {folder.name}\n")
    except ValueError as error:
        raise CtxextError(f"the metadata on top of {path} is damaged: {error}") from error
    data = card.data.to_dict() if card.data else {}
    base = base_model or data.get("base_model")
    if isinstance(base, str) and not _ID.fullmatch(base):
        warn(f"base_model {base!r} is no hub id and is left out of the card; say it with --base-model owner/name")
        base = None
    schedule = stored_schedule(read_config(folder)) if (folder / "config.json").is_file() else None
    tags = {"ctxext", "long-context", *([schedule.method] if schedule else []), *(data.get("tags") or [])}
    data |= {"base_model": base, "library_name": data.get("library_name", "transformers"), "tags": sorted(tags)}
    if license:
        data["license"] = license
    card.data = ModelCardData(**{k: v for k, v in data.items() if v is not None})
    return str(card)


def _send(
    path: Path,
    repo: str,
    names: list[str],
    card: str,
    private: bool,
    create_pr: bool,
    message: str | None,
    token: str | None,
) -> str:
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    def content(name: str) -> Any:
        return card.encode() if name == "README.md" else str((path / name).resolve())

    api = HfApi(token=token, library_name="ctxext")
    try:
        api.create_repo(repo, private=private or None, exist_ok=True)
        done = api.create_commit(
            repo,
            [CommitOperationAdd(name, content(name)) for name in names],
            commit_message=message or f"{path.name}, by ctxext",
            create_pr=create_pr,
        )
    except OfflineModeIsEnabled as error:
        raise CtxextError("HF_HUB_OFFLINE is set, so nothing was sent", hint="unset it to push") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        why = str(error).strip().splitlines()[0][:200]
        raise CtxextError(
            f"the hub refused {repo}: {why}", hint="log in with `hf auth login`, or check the name"
        ) from error
    return str(done.pr_url if create_pr else done.commit_url)
