"""Times that can be compared: contenders in turn within each round, ratios taken within a round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

ROUNDS = 25
SLOW_ROUNDS = 7
SLOW_MS = 4.0  # a replay longer than this, and than three of ours, gets fewer rounds
SLEEP_CYCLES = 2_000_000  # about a millisecond, in which the host queues a round


@dataclass
class Timed:
    """Something to replay: `run` makes `calls` calls; `before` is not timed."""

    run: Callable[[], None]
    calls: int
    before: Callable[[], None] | None = None
    rounds: int = ROUNDS
    samples: list[float] = field(default_factory=list)  # microseconds a call
    kept: Any = None
    """What must live as long: a graph does not keep the tensors that its kernels read and write."""


def captured(step: Callable[[int], Any], calls: int, before: Callable[[], None] | None = None) -> Timed:
    """A CUDA graph of `step(0) .. step(calls - 1)`; the step has been called before, so nothing compiles here."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for index in range(calls):
            step(index)
    torch.cuda.synchronize()
    return Timed(graph.replay, calls, before, kept=step)


def interleave(timed: dict[str, Timed], rounds: int = ROUNDS) -> None:
    """Fill in `samples`: one replay of each in every round, on the device's clock; the first one is ours."""
    took = {name: _milliseconds(each) for name, each in timed.items()}
    slow = max(SLOW_MS, 3 * next(iter(took.values())))
    for name, each in timed.items():
        each.rounds = min(rounds, SLOW_ROUNDS) if took[name] > slow else rounds
    for number in range(rounds):
        running = [each for each in timed.values() if number < each.rounds]
        torch.cuda._sleep(SLEEP_CYCLES)
        events = []
        for each in running:
            _replay(each)  # not counted: what the one ahead has left in the cache must not be in a time
            events.append(_replay(each))
        torch.cuda.synchronize()
        for each, (begin, end) in zip(running, events):
            each.samples.append(begin.elapsed_time(end) * 1e3 / each.calls)


def _replay(each: Timed) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if each.before:
        each.before()
    begin.record()
    each.run()
    end.record()
    return begin, end


def _milliseconds(each: Timed) -> float:
    begin, end = _replay(each)
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def interleave_on_host(timed: dict[str, Timed], rounds: int, settle: Callable[[], None] = lambda: None) -> None:
    """The same on the host's clock; `settle` waits for what a round has queued, outside of the time."""
    for _ in range(rounds):
        for each in timed.values():
            if each.before:
                each.before()
            settle()
            begin = time.perf_counter()
            each.run()
            each.samples.append((time.perf_counter() - begin) * 1e6 / each.calls)
    settle()


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles in microseconds."""
    ordered = sorted(samples)
    quartiles = [ordered[round(at * (len(ordered) - 1))] for at in (0.25, 0.75)]
    return {"median": statistics.median(ordered), "quartiles": quartiles, "samples": [round(s, 4) for s in samples]}


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Median of the ratios within rounds, and its exact 95 % interval from order statistics."""
    ratios = sorted(a / b for a, b in zip(ours, theirs))
    rank = interval_rank(len(ratios))
    return {"median": statistics.median(ratios), "low": ratios[rank], "high": ratios[-1 - rank]}


def interval_of_median(samples: Sequence[float]) -> tuple[float, float]:
    """The exact 95 % interval of the median, from order statistics."""
    ordered = sorted(samples)
    rank = interval_rank(len(ordered))
    return ordered[rank], ordered[-1 - rank]


def interval_rank(n: int) -> int:
    """How many of n sorted values lie outside on each side of a 95 % interval of the median; 0 where n is too small."""
    outside, rank, term = 0.0, 0, 0.5**n
    for k in range(n):
        outside += term
        if outside > 0.025:
            break
        rank = k + 1
        term *= (n - k) / (k + 1)
    return max(rank - 1, 0)
