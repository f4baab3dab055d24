"""Times of replay on one CUDA device: of the host for a step, and of the device for the incremental update.

What is compared takes turns, so that ratios and differences are of times that lie side by side.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from compiled_kv.batches import DecodeBatch
from compiled_kv.buffers import DecodeBuffers
from compiled_kv.layout import KVLayout
from compiled_kv.metadata import decode_metadata
from compiled_kv.replay.check import metadata_step
from compiled_kv.replay.graphs import DecodeGraphs

Call = Callable[[], Any]
HOST_TARGET_US, DEVICE_TARGET = 2.0, 1.5


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def host_us(call: Call, calls: int = 160) -> list[float]:
    """Host microseconds of each call; the device is waited for now and then, which is not timed."""
    times = []
    for index in range(calls):
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e3)
        if index % 16 == 15:
            torch.cuda.synchronize()
    return times


def in_turn(ways: dict[str, Call], rounds: int = 25) -> dict[str, list[float]]:
    """The median of each round, by way."""
    for call in ways.values():
        host_us(call)
    medians: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in ways.items():
            medians[name].append(statistics.median(host_us(call)))
    return medians


def make(
    batch_size: int, length: int, page_size: int, context: int, window: int | None
) -> tuple[DecodeBuffers, DecodeBatch]:
    layout = KVLayout(page_size, context, window=window)
    width, rows = layout.max_num_pages * page_size, batch_size
    pool = torch.arange(rows * width, device="cuda").view(rows, width)
    swa = torch.arange(rows * width, device="cuda") if window else None
    buffers = DecodeBuffers(layout, pool, max_batch_size=batch_size, full_to_swa=swa)
    return buffers, DecodeBatch(list(range(rows)), [length] * rows, [0] * rows)


def host_ways(batch_size: int) -> bool:
    """Whether DecodeGraphs takes no more than the target above a bare graph launch and its copy."""
    buffers, batch = make(batch_size, 1000, 64, 8192, None)
    graphs = DecodeGraphs(metadata_step, buffers, [batch_size])
    graphs(batch)
    graph, size = graphs._graphs[batch_size], 1 + 3 * batch_size
    with_tokens = batch._replace(token_ids=list(range(batch_size)))
    inputs, line = buffers.inputs[:size], torch.zeros(size, dtype=torch.int64, pin_memory=True)
    times = in_turn({
        "bare graph launch": graph.replay,
        "bare copy": lambda: inputs.copy_(line, non_blocking=True),
        "bare graph launch and copy": lambda: (inputs.copy_(line, non_blocking=True), graph.replay()),
        "DecodeGraphs.replay": lambda: graphs.replay(batch_size),
        "DecodeBuffers.load": lambda: buffers.load(batch),
        "DecodeGraphs": lambda: graphs(batch),
        "DecodeGraphs, token ids too": lambda: graphs(with_tokens),
        "eager operators": lambda: (buffers.load(batch), metadata_step(buffers, batch_size)),
    })  # fmt: skip
    for name, mode in (("compiled", None), ("reduce-overhead", "reduce-overhead")):
        torch._dynamo.reset()
        step = torch.compile(metadata_step, fullgraph=True, mode=mode)
        times |= in_turn({name: lambda step=step: (buffers.load(batch), step(buffers, batch_size))}, rounds=10)
    for name, found in times.items():
        spread = sorted(found)
        say(what="host", batch=batch_size, way=name, median_us=round(statistics.median(found), 2),
            least_us=round(spread[0], 2), most_us=round(spread[-1], 2))  # fmt: skip
    pairs = zip(times["DecodeGraphs"], times["bare graph launch and copy"], strict=True)
    above = statistics.median(ours - bare for ours, bare in pairs)
    met = above <= HOST_TARGET_US
    say(what="host above bare", batch=batch_size, microseconds=round(above, 2), target=HOST_TARGET_US, met=met)
    return met


def host() -> bool:
    """Every batch size, whatever came of the one before; always True, as a missed target is a result."""
    met = [host_ways(batch_size) for batch_size in (1, 8, 64)]
    say(what="host summary", within_target=met)
    return True


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


def graph_us(calls: dict[str, Call], rounds: int = 31, inner: int = 50) -> dict[str, list[float]]:
    """Device microseconds of each call, one number a round; each runs `inner` times in a graph of its own."""
    graphs = {}
    torch.cuda.synchronize()
    for name, call in calls.items():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(inner):
                call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / inner)
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
    buffers, batch = make(batch_size, length, page_size, context, window)
    buffers.load(batch._replace(seq_lens=[length - page_size] * batch_size))
    buffers.metadata(batch_size)
    a_page_ago = buffers.held.clone()
    buffers.load(batch)
    buffers.metadata(batch_size)
    scratch = torch.zeros(batch_size, dtype=torch.int64, device="cuda")
    full = type(buffers.out())(*(None if t is None else torch.zeros_like(t) for t in buffers.out()))

    def floor() -> None:
        _floor_kernel[(batch_size,)](
            buffers.req_pool_indices, buffers.seq_lens, buffers.req_to_token, buffers.full_to_swa, scratch,
            buffers.req_to_token.stride(0), PAGE_SIZE=page_size, MAPPED=window is not None,
        )  # fmt: skip

    def steady() -> None:
        buffers.metadata(batch_size)

    def put_back() -> None:
        buffers.held.copy_(a_page_ago)

    def new_page() -> None:
        put_back()
        buffers.metadata(batch_size)

    def rebuild() -> None:
        decode_metadata(
            buffers.req_to_token, buffers.req_pool_indices, buffers.seq_lens, layout=buffers.layout,
            full_to_swa=buffers.full_to_swa, num_reqs=buffers.num_reqs, out=full, tail="keep",
        )  # fmt: skip

    calls = {"floor": floor, "steady": steady, "put back": put_back, "page": new_page, "rebuild": rebuild}
    times = graph_us(calls)
    times["page"] = [both - back for both, back in zip(times["page"], times["put back"], strict=True)]
    agrees = all(a is b is None or torch.equal(a, b) for a, b in zip(buffers.out(), full, strict=True))
    median = {name: round(statistics.median(found), 2) for name, found in times.items()}
    over = {
        name: round(statistics.median(a / b for a, b in zip(times[name], times["floor"], strict=True)), 2)
        for name in ("steady", "page", "rebuild")
    }
    return {
        "batch": batch_size, "length": length, "context": context, "page_size": page_size, "window": window,
        "floor_us": median["floor"], "steady_us": median["steady"], "new_page_us": median["page"],
        "rebuild_us": median["rebuild"], "steady_over_floor": over["steady"], "new_page_over_floor": over["page"],
        "rebuild_over_floor": over["rebuild"], "equals_rebuild": agrees,
    }  # fmt: skip


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
    worst = {
        name: max((row[name] for row in timed), default=None) for name in ("steady_over_floor", "new_page_over_floor")
    }
    missed = sum(max(row["steady_over_floor"], row["new_page_over_floor"]) > DEVICE_TARGET for row in timed)
    say(what="device summary", **worst, target=DEVICE_TARGET, cells=len(timed), cells_above_target=missed)
    return all(row["equals_rebuild"] for row in rows)
