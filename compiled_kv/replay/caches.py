"""Whether a step writes into its caches of keys and values where no live row has a token: padding must not.

    page_size=16, one live row of 6 tokens in page 1, slot 21; a padding row takes its -1 for an index of 2464 slots
    -> write outside the slots: caches[0][2463] was written, a slot of no live row's token: 1 of 2 rows are live

The null page may hold whatever padding leaves there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_kv.replay.names import SLOTS, Difference
from compiled_kv.replay.reference import Expected


def check_caches(caches: Any) -> None:
    """Require a list of tensors, slot after slot."""
    if isinstance(caches, Tensor):
        raise TypeError("caches must be a list of tensors, got a tensor")
    for index, cache in enumerate(caches):
        if not isinstance(cache, Tensor):
            raise TypeError(f"caches[{index}] must be a tensor, got {type(cache).__name__}")
        if cache.ndim == 0:
            raise ValueError(f"caches[{index}] must have a first dimension of slots, got a tensor without any")


def written_outside(caches: Sequence[Tensor], before: Sequence[Tensor], expected: Expected) -> Difference | None:
    """The first slot that changed and is neither of a live row's token in this step nor in the null page."""
    tokens = sum(row.queries for row in expected.rows)
    own = {slot for name in SLOTS for slot in expected.values.get(name, [])[:tokens]}
    own |= set(range(expected.serving.layout.page_size))
    for index, (cache, was) in enumerate(zip(caches, before)):
        changed = (_bytes(cache) != _bytes(was)).any(1).nonzero()[:, 0].tolist()
        for slot in changed:
            if slot not in own:
                live = f"{len(expected.rows)} of {expected.bucket} rows are live"
                where = f"caches[{index}][{slot}] was written, a slot of no live row's token: {live}"
                return Difference("write outside the slots", where)
    return None


def _bytes(cache: Tensor) -> Tensor:
    """uint8 [slots, bytes], in which a NaN is equal to itself."""
    return cache.reshape(len(cache), -1).contiguous().view(torch.uint8)
