"""Host time of a replayed step on one CUDA device.

Ways take turns, so that differences are of times that lie side by side.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from compiled_kv.batches import DecodeBatch
from compiled_kv.buffers import DecodeBuffers
from compiled_kv.layout import KVLayout
from compiled_kv.replay.check import metadata_step
from compiled_kv.replay.graphs import DecodeGraphs

Call = Callable[[], Any]
TARGET_US = 2.0


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
    met = above <= TARGET_US
    say(what="host above bare", batch=batch_size, microseconds=round(above, 2), target=TARGET_US, met=met)
    return met


def host() -> bool:
    """Every batch size, whatever came of the one before; always True, as a missed target is a result."""
    met = [host_ways(batch_size) for batch_size in (1, 8, 64)]
    say(what="host summary", within_target=met)
    return True
