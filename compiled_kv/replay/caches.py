"""Whether a step writes into its caches of keys and values where no live row has a token: padding must not.

    page_size=16, one live row of 6 tokens in page 1, slot 21; a padding row takes its -1 for an index of 2464 slots
    -> write outside the slots: caches[0][2463] was written, a slot of no live row's token: 1 of 2 rows are live

The null page may hold whatever padding leaves there. With no live row a step finds its caches full of MARK, so that a
write shows even where it writes what was there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from compiled_kv.replay.names import SLOTS, Difference
from compiled_kv.replay.reference import Expected
from compiled_kv.replay.serving import Serving

MARK = 90  # which every dtype holds


def check_caches(caches: Any, given: Serving) -> None:
    """Require a list of tensors, slot after slot, with room for a pool."""
    if not isinstance(caches, list | tuple):
        raise TypeError(f"caches must be a list of tensors, got {type(caches).__name__}")
    pages = min(given.num_pages, given.num_swa_pages or given.num_pages)
    slots = pages * given.layout.page_size
    for index, cache in enumerate(caches):
        if not isinstance(cache, Tensor):
            raise TypeError(f"caches[{index}] must be a tensor, got {type(cache).__name__}")
        if cache.ndim == 0:
            raise ValueError(f"caches[{index}] must have a first dimension of slots, got a tensor without any")
        if len(cache) < slots:
            said = f"the {slots} slots of {pages} pages, got {len(cache)}: flatten one in pages"
            raise ValueError(f"caches[{index}] must have in its first dimension {said}")


@contextmanager
def marked(caches: Sequence[Tensor], held: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The caches full of MARK, and tensors that are so; behind it they hold `held`."""
    full = [torch.full_like(cache, MARK) for cache in caches]
    restore(caches, full)
    try:
        yield full
    finally:
        restore(caches, held)


def copies(caches: Sequence[Tensor]) -> list[Tensor]:
    return [cache.detach().clone() for cache in caches]


@torch.no_grad()
def restore(caches: Sequence[Tensor], held: Sequence[Tensor]) -> None:
    """Give the caches what they held."""
    for cache, was in zip(caches, held):
        cache.copy_(was)


def changed(caches: Sequence[Tensor], before: Sequence[Tensor]) -> list[list[int]]:
    """Of each cache the slots that hold something else than before."""
    return [(_bytes(cache) != _bytes(was)).any(1).nonzero()[:, 0].tolist() for cache, was in zip(caches, before)]


def written_outside(slots_changed: Sequence[Sequence[int]], expected: Expected) -> Difference | None:
    """The first slot that changed and is neither of a live row's token in this step nor in the null page."""
    tokens = sum(row.queries for row in expected.rows)
    own = {slot for name in SLOTS for slot in expected.values.get(name, [])[:tokens]}
    own |= set(range(expected.serving.layout.page_size))
    for index, slots in enumerate(slots_changed):
        for slot in slots:
            if slot not in own:
                live = f"{len(expected.rows)} of {expected.bucket} rows are live"
                where = f"caches[{index}][{slot}] was written, a slot of no live row's token: {live}"
                return Difference("write outside the slots", where)
    return None


def _bytes(cache: Tensor) -> Tensor:
    """uint8 [slots, bytes], in which a NaN is equal to itself."""
    return cache.detach().reshape(len(cache), -1).contiguous().view(torch.uint8)
