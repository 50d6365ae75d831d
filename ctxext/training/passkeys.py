"""Passkey documents as a data source, `path: passkey`: text whose next token needs what stood far before.

Plain text teaches new positions but rarely rewards looking far back, and a small model that is trained on text
alone forgets how to. In windows with skipped positions these documents ask for the key over the whole target. A
model that was trained on them has practised the task of `ctxext eval passkey`, on other keys: say so too.
"""

from __future__ import annotations

import random
from typing import Any

from ..needles import FILLER
from ..needles.token_ids import PasskeyRows

COUNT = 4000


def passkey_blocks(tokenizer: Any, size: int, seed: int) -> Any:
    """A dataset of COUNT blocks of `size` tokens, a passkey document each, with filler after a short one.

    Raises UsageError if a document doesn't fit.
    """
    from datasets import Dataset

    rows = PasskeyRows(tokenizer, {"filler": " ".join([FILLER] * 8)})
    rng = random.Random(f"{seed}/passkeys")
    ids = [rows.passkey_row(rng, size) for _ in range(COUNT)]
    return Dataset.from_dict({"input_ids": ids, "starts": [[0]] * COUNT, "filled": [size] * COUNT})
