"""The "ctxext" block in config.json: how to make the schedule again, and a hash to check it by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from .. import __version__, methods
from ..errors import CtxextError
from ..rope import Rope, Schedule


def block(schedule: Schedule) -> dict[str, Any]:
    """What config.json remembers under "ctxext": how to make the schedule again, and a hash to check it by."""
    return {
        "version": __version__,
        "method": schedule.method,
        "factor": schedule.factor,
        "params": dict(schedule.params),
        "rope": schedule.to_dict()["rope"],
        "digest": digest(schedule),
    }


def digest(schedule: Schedule) -> str:
    """A short hash over everything that the schedule computes."""
    data = schedule.to_dict()
    computed = {k: data[k] for k in ("stages", "start_tokens", "max_length")}
    if schedule.encoding is not None:
        computed["encoding"] = data["encoding"]
    return hashlib.sha256(json.dumps(computed, sort_keys=True).encode()).hexdigest()[:16]


def read_block(data: Mapping[str, Any]) -> Schedule:
    """The Schedule that a "ctxext" block describes; CtxextError if this version computes another one."""
    try:
        rope = Rope(**data["rope"])
        known = {option.name for option in methods.get(data["method"]).options}
        # An option that an older version had and that was off is no loss; the digest sees to it.
        given = {name: value for name, value in data["params"].items() if value or name in known}
        schedule = methods.schedule(rope, data["method"], data["factor"], **given)
    except (KeyError, TypeError) as error:
        raise CtxextError(f"the ctxext block in config.json is damaged: {error}") from error
    if digest(schedule) != data.get("digest"):
        raise CtxextError(
            f"this ctxext ({__version__}) computes another schedule than the one that wrote the folder "
            f"({data.get('version')})",
            hint="patch the original checkpoint again, or use the version that wrote it",
        )
    return schedule
