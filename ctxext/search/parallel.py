"""Several processes under `accelerate launch` or torchrun: each measures a share, all get the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from .. import terminal

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among `size`. The strategy runs in each of them alike; only measuring is divided."""

    rank: int = 0
    size: int = 1

    def map(self, function: Callable[[list[Any]], list[T]], items: list[Any]) -> list[T]:
        """function(items), computed in contiguous shares and put together in order, in every process.

        An error in one process is raised in all of them, so that none waits for ever.
        """
        if self.size == 1:
            return function(items) if items else []
        from torch import distributed

        first, last = (len(items) * r // self.size for r in (self.rank, self.rank + 1))
        try:
            share: Any = function(items[first:last]) if first < last else []
        except Exception as error:
            share = error
        shares: list[Any] = [None] * self.size
        distributed.all_gather_object(shares, share)
        for part in shares:
            if isinstance(part, Exception):
                raise part
        return [value for part in shares for value in part]

    def from_first(self, function: Callable[[], T]) -> T:
        """function() of the first process, given to all; its error too."""
        if self.size == 1:
            return function()
        from torch import distributed

        box: list[Any] = [None]
        if self.rank == 0:
            try:
                box = [function()]
            except Exception as error:
                box = [error]
        distributed.broadcast_object_list(box, src=0)
        if isinstance(box[0], Exception):
            raise box[0]
        return box[0]


@contextmanager
def world() -> Iterator[World]:
    """The processes that a launcher started, by its environment variables; one without a launcher.

    What they exchange are a few numbers, so the group is a gloo one, whatever the model runs on.
    """
    if terminal.processes() == 1:
        yield World()
        return
    from torch import distributed

    mine = not distributed.is_initialized()
    if mine:
        distributed.init_process_group("gloo")
    try:
        yield World(distributed.get_rank(), distributed.get_world_size())
    finally:
        if mine:
            distributed.destroy_process_group()
