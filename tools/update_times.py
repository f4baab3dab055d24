"""Device time of the incremental update on one CUDA device, over a floor: a kernel of nothing but dependent loads.

Calls follow each other in a graph, each with lengths of its own: a token more than the last, or a page more. Ways take
turns, so that ratios are of times that lie side by side.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from replay_times import Call, make, say

from compiled_kv.metadata import decode_metadata

Step = Callable[[int], Any]
CALLS = 50
TARGET = 1.5
RATIOS = ("update_token_over_floor", "update_page_over_floor")


@triton.jit
def _floor_kernel(
    rows_ptr, lengths_ptr, pool_ptr, map_ptr, out_ptr, pool_stride, PAGE_SIZE: tl.constexpr, MAPPED: tl.constexpr
):
    """A program a row: row index, then slot, then map, one after the other, and a store."""
    row = tl.program_id(0)
    pool_row = tl.load(rows_ptr + row)
    length = tl.load(lengths_ptr + row)
    slot = tl.load(pool_ptr + pool_row * pool_stride + (length - 1) // PAGE_SIZE * PAGE_SIZE)
    if MAPPED:
        slot = tl.load(map_ptr + slot)
    tl.store(out_ptr + row, slot)


def graph_us(ways: dict[str, Step], rewind: Call, rounds: int = 31) -> dict[str, list[float]]:
    """Device microseconds of a call, one number a round; `rewind` goes back to where the calls of a graph begin."""
    graphs = {}
    for name, step in ways.items():
        for index in range(CALLS):  # the floor is compiled anew for lengths that begin elsewhere
            step(index)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for index in range(CALLS):
                step(index)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, graph in graphs.items():
            rewind()
            torch.cuda._sleep(100_000)  # until the graph is in the queue: its launch is no part of the time
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / CALLS)
    return {name: found[rounds // 10 :] for name, found in times.items()}


CELLS = [  # batch, live length, context bound, page size, window
    (1, 1000, 131072, 64, None),
    (1, 1000, 131072, 1, 4096),
    (1, 1048000, 1048576, 64, 4096),
    (8, 131000, 131072, 128, 4096),
    (64, 8000, 131072, 64, 4096),
    (64, 131000, 131072, 64, None),
    (64, 131000, 131072, 16, 4096),
    (64, 131000, 131072, 1, 4096),
    (64, 1048000, 1048576, 128, 4096),
    (256, 4000, 1048576, 64, None),
    (256, 32000, 131072, 32, 4096),
    (512, 1000, 1048576, 64, 4096),
    (512, 1000, 1048576, 128, None),
    (512, 8000, 131072, 1, 4096),
]


def cell(batch_size: int, length: int, context: int, page_size: int, window: int | None) -> dict[str, Any]:
    """Times of a call that lengthens every row by a token, and of one that lengthens it by a page."""
    length = min(length, context - CALLS * page_size)
    buffers, batch = make(batch_size, length, page_size, context, window)
    buffers.load(batch)
    seq_lens = buffers.seq_lens[:batch_size].clone()
    scratch = torch.zeros(batch_size, dtype=torch.int64, device="cuda")
    full = type(buffers.out())(*(None if t is None else torch.zeros_like(t) for t in buffers.out()))
    grown = torch.arange(1, CALLS + 1, device="cuda")[:, None]

    def rewind() -> None:
        buffers.metadata(batch_size, seq_lens=seq_lens)

    def floor(lengths: torch.Tensor) -> None:
        _floor_kernel[(batch_size,)](
            buffers.req_pool_indices, lengths, buffers.req_to_token, buffers.full_to_swa, scratch,
            buffers.req_to_token.stride(0), PAGE_SIZE=page_size, MAPPED=window is not None,
        )  # fmt: skip

    def update(lengths: torch.Tensor) -> None:
        buffers.metadata(batch_size, seq_lens=lengths)

    def rebuild(lengths: torch.Tensor) -> None:
        decode_metadata(
            buffers.req_to_token, buffers.req_pool_indices, lengths, layout=buffers.layout,
            full_to_swa=buffers.full_to_swa, num_reqs=buffers.num_reqs, out=full, tail="keep",
        )  # fmt: skip

    steps = {"token": seq_lens + grown, "page": seq_lens + grown * page_size}
    ways = {"floor": floor, "update": update, "rebuild": rebuild}
    timed = {
        f"{way} {by}": lambda index, do=do, of=of: do(of[index])
        for by, of in steps.items() for way, do in ways.items()
    }  # fmt: skip
    times = graph_us(timed, rewind)
    rewind()
    for lengths in steps["page"][:3]:
        update(lengths)
    for tensor in full:
        if tensor is not None:
            tensor.zero_()
    rebuild(steps["page"][2])
    agrees = all(a is b is None or torch.equal(a, b) for a, b in zip(buffers.out(), full, strict=True))
    line: dict[str, Any] = {
        "batch": batch_size,
        "length": length,
        "context": context,
        "page_size": page_size,
        "window": window,
    }
    for by in steps:
        line |= {f"{way}_{by}_us": round(statistics.median(times[f"{way} {by}"]), 2) for way in ways}
        ratios = [a / b for a, b in zip(times[f"update {by}"], times[f"floor {by}"], strict=True)]
        line[f"update_{by}_over_floor"] = round(statistics.median(ratios), 2)
    return line | {"equals_rebuild": agrees}


def device() -> bool:
    """Every cell; whether each ran and its tables are those of the full rebuild."""
    rows: list[dict[str, Any]] = []
    for place in CELLS:
        try:
            rows.append(cell(*place))
        except RuntimeError as error:
            rows.append({"cell": place, "error": str(error).splitlines()[0], "equals_rebuild": False})
        say(what="device", **rows[-1])
        torch.cuda.empty_cache()
    timed = [row for row in rows if "error" not in row]
    worst = {name: max((row[name] for row in timed), default=None) for name in RATIOS}
    missed = sum(max(row[name] for name in RATIOS) > TARGET for row in timed)
    say(what="device summary", **worst, target=TARGET, cells=len(timed), cells_above_target=missed)
    return all(row["equals_rebuild"] for row in rows)
