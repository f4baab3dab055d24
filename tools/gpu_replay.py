"""Replay on one GPU: long scenarios compared byte for byte, host time a step four ways, device time of the update.

    python tools/gpu_replay.py scenarios --steps 20000 --trace FILE      every mode, with and without a window
    python tools/gpu_replay.py host                                      microseconds of host time a step
    python tools/gpu_replay.py device                                    update against full rebuild and the floor

Each prints one JSON object a line.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parent.parent))

from compiled_kv.batches import DecodeBatch
from compiled_kv.buffers import DecodeBuffers
from compiled_kv.layout import KVLayout
from compiled_kv.metadata import decode_metadata
from compiled_kv.replay.check import check_replay, metadata_step
from compiled_kv.replay.graphs import DecodeGraphs
from compiled_kv.replay.scenarios import serving, story, trace, walk


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def read_lengths(path: Path | None) -> list[tuple[int, int]]:
    if path is None or not path.exists():
        return [(374, 44), (396, 109), (879, 55), (91, 16), (2000, 300), (7, 1), (1020, 129), (4083, 451)]
    with path.open() as file:
        return [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]


def scenarios(steps: int, path: Path | None, modes: list[str]) -> None:
    lengths = read_lengths(path)
    for mode in modes:
        for window in (None, 200):
            given = serving(mode, page_size=16, max_context_len=2048, max_batch_size=16, window=window)
            for scenario in (story(given), trace(given, lengths, steps), walk(given, steps, seed=1)):
                begin = time.time()
                report = check_replay(metadata_step, scenario, device="cuda", outputs_every=1 if steps < 1000 else 25)
                say(
                    what="scenario", mode=mode, window=window, report=str(report), seconds=round(time.time() - begin, 1)
                )


def host_us(call: Callable[[], Any], calls: int = 2000) -> dict[str, float]:
    """Host time of one call, the device kept from falling behind by a wait now and then, which is not timed."""
    for _ in range(50):
        call()
    torch.cuda.synchronize()
    times = []
    for index in range(calls):
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e3)
        if index % 16 == 0:
            torch.cuda.synchronize()
    times.sort()
    return {
        "median_us": round(statistics.median(times), 2),
        "p10_us": round(times[calls // 10], 2),
        "p90_us": round(times[calls * 9 // 10], 2),
    }


def make(
    batch_size: int, length: int, page_size: int, context: int, window: int | None
) -> tuple[DecodeBuffers, DecodeBatch]:
    layout = KVLayout(page_size, context, window=window)
    width, rows = layout.max_num_pages * page_size, batch_size
    pool = torch.arange(rows * width, device="cuda").view(rows, width)
    swa = torch.arange(rows * width, device="cuda") if window else None
    buffers = DecodeBuffers(layout, pool, max_batch_size=batch_size, full_to_swa=swa)
    return buffers, DecodeBatch(list(range(rows)), [length] * rows, [0] * rows)


def host_ways(batch_size: int) -> None:
    buffers, batch = make(batch_size, 1000, 64, 8192, None)
    graphs = DecodeGraphs(metadata_step, buffers, [batch_size])
    ring, graph, head = buffers._ring, graphs._graphs[batch_size], buffers._heads[0]
    assert ring is not None
    compiled = torch.compile(metadata_step, fullgraph=True)
    overhead = torch.compile(metadata_step, fullgraph=True, mode="reduce-overhead")
    ways: dict[str, Callable[[], Any]] = {
        "bare graph launch": graph.replay,
        "bare copy": lambda: ring.send(head),
        "bare graph launch and copy": lambda: (ring.send(head), graph.replay()),
        "DecodeGraphs.replay": lambda: graphs.replay(batch_size),
        "DecodeBuffers.load": lambda: buffers.load(batch),
        "DecodeGraphs": lambda: graphs(batch),
        "eager operators": lambda: (buffers.load(batch), metadata_step(buffers, batch_size)),
        "compiled": lambda: (buffers.load(batch), compiled(buffers, batch_size)),
        "reduce-overhead": lambda: (buffers.load(batch), overhead(buffers, batch_size)),
    }
    for name, call in ways.items():
        if name in ("compiled", "reduce-overhead"):
            torch._dynamo.reset()
        say(what="host", batch=batch_size, way=name, **host_us(call))


def host() -> None:
    for batch_size in (1, 8, 64):
        host_ways(batch_size)


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


def graph_us(calls: list[Callable[[], Any]], rounds: int = 15) -> list[float]:
    """Device time of each call inside a graph of its own, contenders taking turns; medians."""
    inner, graphs = 50, []
    for call in calls:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(inner):
                call()
        graphs.append(graph)
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for graph, found in zip(graphs, times):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) * 1e3 / inner)
    return [statistics.median(found[3:]) for found in times]


CELLS = [  # batch, live length, context bound, page size, window
    (1, 1000, 131072, 64, None),
    (1, 1048000, 1048576, 64, None),
    (8, 131000, 131072, 128, 4096),
    (64, 8000, 131072, 64, 4096),
    (64, 131000, 131072, 64, None),
    (64, 131000, 131072, 16, 4096),
    (64, 131000, 131072, 1, 4096),
    (256, 4000, 1048576, 64, None),
    (256, 32000, 131072, 32, 4096),
    (512, 1000, 1048576, 64, None),
    (512, 1000, 1048576, 128, 4096),
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
    full = type(buffers.out())(*(None if t is None else torch.empty_like(t) for t in buffers.out()))

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

    floor_us, steady_us, back_us, page_us, rebuild_us = graph_us([floor, steady, put_back, new_page, rebuild])
    return {
        "batch": batch_size, "length": length, "context": context, "page_size": page_size, "window": window,
        "floor_us": round(floor_us, 2), "steady_us": round(steady_us, 2), "new_page_us": round(page_us - back_us, 2),
        "rebuild_us": round(rebuild_us, 2), "steady_over_floor": round(steady_us / floor_us, 2),
        "new_page_over_floor": round((page_us - back_us) / floor_us, 2),
    }  # fmt: skip


def device() -> None:
    for place in CELLS:
        say(what="device", **cell(*place))
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["scenarios", "host", "device"])
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--modes", nargs="+", default=["decode", "verify"])
    given = parser.parse_args()
    say(what="device name", name=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__)
    {"scenarios": lambda: scenarios(given.steps, given.trace, given.modes), "host": host, "device": device}[
        given.what
    ]()


if __name__ == "__main__":
    main()
