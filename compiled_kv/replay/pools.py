"""The allocator's tensors of a scenario, what the scheduler writes to them, and buffers as nested lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compiled_kv.buffers import DecodeBuffers
from compiled_kv.replay.holdings import Write
from compiled_kv.replay.serving import NOWHERE, Serving


def make_pools(given: Serving, device: torch.device) -> dict[str, Tensor]:
    """The allocator's tensors: every slot and mapping none, the null page its own."""
    page_size = given.layout.page_size
    shapes: dict[str, tuple[int, ...]] = {"req_to_token": (given.max_reqs, given.layout.max_num_pages * page_size)}
    if given.num_swa_pages:
        shapes |= (
            {"page_map": (given.num_pages,)} if given.page_map else {"full_to_swa": (given.num_pages * page_size,)}
        )
    pools = {name: torch.full(shape, NOWHERE, dtype=torch.int64, device=device) for name, shape in shapes.items()}
    for name, null in (("full_to_swa", page_size), ("page_map", 1)):
        if name in pools:
            pools[name][:null] = torch.arange(null)
    return pools


def apply(writes: list[Write], pools: Mapping[str, Tensor]) -> None:
    """What the scheduler wrote since, in order."""
    for name, row, start, values in writes:
        line = pools[name][row] if pools[name].ndim == 2 else pools[name]
        line[start : start + len(values)] = torch.tensor(values)


def contents(buffers: DecodeBuffers) -> dict[str, Any]:
    """Every buffer as nested lists."""
    tensors = {name: t for name, t in buffers.out()._asdict().items() if t is not None}
    inputs = buffers.inputs.tolist()
    found: dict[str, Any] = {"inputs": {name: inputs[a:b] for name, (a, b) in buffers._places.items()}}
    found |= {name: tensor.tolist() for name, tensor in tensors.items()}
    return found | {"held": buffers.held.tolist(), "status": buffers.status.tolist()}
