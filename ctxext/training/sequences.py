"""From blocks to what the Trainer reads: item k is a pure function of the seed, k and the blocks.

So a run that was killed and resumed reads the same tokens at the same positions, on any number of processes (a
stream: with as many workers), and positions are redrawn every time that a block comes round again.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ..errors import CtxextError
from .loss import IGNORE
from .positions import Chunk, draw, flatten
from .recipe import PositionSpec


def make_item(
    row: dict[str, Any], spec: PositionSpec, rng: random.Random, *, length: int, target: int
) -> dict[str, list[int]]:
    """One sequence of `length` tokens: input_ids, labels, and where they are needed positions and a mask.

    Skipped windows come with an all-ones mask, which tells transformers that they are one document. Packed ones
    come with positions that start again at 0 and no mask, which tells it that they are several.
    """
    ids = list(row["input_ids"])
    if spec.kind == "plain":
        labels = list(ids)
        if list(row["starts"]) == [0] and row["filled"] == len(ids):
            return {"input_ids": ids, "labels": labels}
        return {"input_ids": ids, "labels": labels, "position_ids": _restarts(row, labels)}
    chunks = draw(spec, rng, length, target)
    if len(ids) > length:  # skipped text: the block is as long as the target
        ids, labels = _skipped(ids, chunks, rng, length)
    else:
        labels = list(ids)
    return {"input_ids": ids, "labels": labels, "position_ids": flatten(chunks), "attention_mask": [1] * length}


def _restarts(row: dict[str, Any], labels: list[int]) -> list[int]:
    """Positions of a packed block; no document predicts the first token of the next, nor padding anything."""
    positions: list[int] = []
    edges = [*row["starts"], row["filled"], len(labels)]
    for start, end in itertools.pairwise(edges):
        positions += range(end - start)
    for start in row["starts"]:
        labels[start] = IGNORE
    labels[row["filled"] :] = [IGNORE] * (len(labels) - row["filled"])
    return positions


def _skipped(ids: list[int], chunks: list[Chunk], rng: random.Random, length: int) -> tuple[list[int], list[int]]:
    if len(chunks) == 1:
        start = rng.randint(0, len(ids) - length)
        return ids[start : start + length], ids[start : start + length]
    kept, labels = [], []
    for before, (position, size) in zip([None, *chunks], chunks, strict=False):
        piece = ids[position : position + size]
        kept += piece
        follows = before is not None and before.position + before.size == position
        # What stands before a skip says nothing about what comes right after it.
        labels += piece if before is None or follows else [IGNORE, *piece[1:]]
    return kept, labels


@dataclass(frozen=True)
class Windows:
    """How a run makes its k-th item from a block: windows of `length` tokens with positions in [0, target)."""

    spec: PositionSpec
    length: int
    target: int
    seed: int

    def item(self, row: dict[str, Any], k: int) -> dict[str, list[int]]:
        rng = random.Random(f"{self.seed}/{k}")
        return make_item(row, self.spec, rng, length=self.length, target=self.target)


class Blocks(Dataset):
    """`items` items from a dataset of blocks, reshuffled each time round."""

    def __init__(self, blocks: Any, windows: Windows, items: int):
        self.blocks, self.windows, self.items = blocks, windows, items
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, k: int) -> dict[str, list[int]]:
        epoch, i = divmod(k, len(self.blocks))
        if self._order[0] != epoch:
            order = list(range(len(self.blocks)))
            random.Random(f"{self.windows.seed}/order/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self.windows.item(self.blocks[self._order[1][i]], k)


class Stream(IterableDataset):
    """Items from a streamed dataset of blocks, begun again, with another shuffle, when it ends.

    Of several workers of a DataLoader each reads its share of the files; one whose share is empty gives no item.
    """

    def __init__(self, blocks: Any, windows: Windows):
        self.blocks, self.windows = blocks, windows

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        worker = get_worker_info()
        # Numbers of one worker are no other's: they choose the positions.
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        k, epoch = first, 0
        while True:
            self.blocks.set_epoch(epoch)
            for row in self.blocks:
                yield self.windows.item(row, k)
                k += step
            if k == first and worker:
                return
            if k == first:
                raise CtxextError(
                    "the stream has no document as long as a block", hint="make data.length shorter, or pack"
                )
            epoch += 1


def collate(items: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Items as one batch, int64 (sequences, tokens). If any has positions, all get them."""
    keys = {key for item in items for key in item}
    if "position_ids" in keys:
        items = [{"position_ids": list(range(len(item["input_ids"]))), **item} for item in items]
    return {key: torch.tensor([item[key] for item in items]) for key in sorted(keys)}
