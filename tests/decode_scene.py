"""Batches for attention kernels that others have written, what they read, and dense attention in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import compiled_kv as ckv
from compiled_kv.integrations import flashinfer
from tests.cases import pool_of_pages

DEVICE, CONTEXT = "cuda", 5120


class Batch(NamedTuple):
    """What a step reads, at addresses that stay."""

    layout: ckv.KVLayout
    pool: Tensor
    rows: Tensor
    lens: Tensor
    num_reqs: Tensor
    full_to_swa: Tensor

    def plan_arguments(self, **options: Any) -> dict[str, Any]:
        return flashinfer.plan_arguments(
            self.pool, self.rows, self.lens, layout=self.layout, num_reqs=self.num_reqs, **options
        )

    def metadata(self, **options: Any) -> ckv.DecodeMetadata:
        return ckv.decode_metadata(
            self.pool, self.rows, self.lens, layout=self.layout, num_reqs=self.num_reqs, **options
        )


def batch(page_size: int, window: int | None = None, dtype: torch.dtype = torch.int64) -> Batch:
    layout = ckv.KVLayout(page_size, CONTEXT, window=window)
    pool, _ = pool_of_pages(5, layout.max_num_pages, page_size)
    num_slots = (int(pool.max()) // page_size + 1) * page_size
    tensors = (torch.zeros(n, dtype=torch.int64) for n in ((6,), (6,), (), (num_slots,)))
    return Batch(layout, pool.to(DEVICE, dtype), *(tensor.to(DEVICE) for tensor in tensors))


def fill(given: Batch, step: int) -> None:
    """One token, whole pages and parts of one, and about 5,000 tokens; behind the live requests it is stale."""
    size = given.layout.page_size
    rows, lens, num_reqs = [
        ([3, 1, 4, 0, 2, 0], [1, size, size + 1, 7 * size + 3, 5000, 9], 5),
        ([2, 4, 1, 3, 9, 0], [5001, 2 * size, 3, 70, 5000, 9], 3),
    ][step]
    for tensor, values in ((given.rows, rows), (given.lens, lens), (given.num_reqs, num_reqs)):
        tensor.copy_(torch.tensor(values))
    pages = torch.arange(len(given.full_to_swa) // size)
    mirrored = torch.where(pages > 0, len(pages) - pages, 0)[:, None] * size + torch.arange(size)
    given.full_to_swa.copy_(mirrored.flatten())
    if given.layout.window is not None:  # whole pages behind the window have no counterpart
        for row, length in zip(rows[:num_reqs], lens):
            passed = max(length - given.layout.window, 0) // size * size
            given.full_to_swa[given.pool[row, :passed].long()] = -1


def states(given: Batch, *shape: int) -> Tensor:
    """A random state for every slot, bfloat16 [slots, *shape]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(len(given.full_to_swa), *shape, generator=generator).to(DEVICE, torch.bfloat16)


def queries(heads: int, dim: int) -> Tensor:
    return torch.randn(6, heads, dim, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)


def paged(given: Batch, kv_layout: str, *pools: Tensor) -> Tensor:
    """The pools of keys and values as one cache, [pages, 2, tokens, heads, dim] or [pages, 2, heads, tokens, dim]."""
    cache = torch.stack([pool.unflatten(0, (-1, given.layout.page_size)) for pool in pools], 1)
    return cache if kv_layout == "NHD" else cache.transpose(2, 3).contiguous()


def check(found: Tensor, given: Batch, query: Tensor, keys: Tensor, values: Tensor, swa: bool = False) -> None:
    """The live rows of `found` are attention over the tokens of their request; averages shrink with their number."""
    for i in range(int(given.num_reqs)):
        length = int(given.lens[i])
        first = max(length - given.layout.window, 0) if swa and given.layout.window else 0
        slots = given.pool[given.rows[i], first:length].long()
        slots = given.full_to_swa[slots] if swa else slots
        each = query.shape[1] // keys.shape[1]
        for head in range(query.shape[1]):
            own = keys[slots, head // each].double(), values[slots, head // each].double()
            weights = (own[0] @ query[i, head].double() / query.shape[2] ** 0.5).softmax(0)
            torch.testing.assert_close(
                found[i, head].double(), weights @ own[1], atol=2e-2 * len(slots) ** -0.5, rtol=1e-2
            )


def captured(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of `step`, and what it leaves its results in."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and warms up
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


def workspace() -> Tensor:
    return torch.zeros(2**27, dtype=torch.uint8, device=DEVICE)


def buffers(*sizes: int) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(size, dtype=torch.int32, device=DEVICE) for size in sizes)
