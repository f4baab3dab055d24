"""One cell: inputs, contenders, the check of each, and their times in turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from compiled_kv.bench.cells import Cell
from compiled_kv.bench.contenders import Contender, contenders
from compiled_kv.bench.expected import Known, check
from compiled_kv.bench.inputs import Inputs, make_inputs
from compiled_kv.bench.timing import Timed, captured, interleave, interleave_on_host, paired_ratio, summary

SETS = 16
FEW_SETS = 4
FLOORS = (
    ("ours", "copy"), ("ours", "loads"), ("incremental", "loads"), ("ours-clear", "copy-tables"),
    ("ours-clear", "loads"), ("ours-clear", "fill"), ("ours", "gather-known"), ("ours-clear", "gather-known"),
)  # fmt: skip
MANY_ENTRIES = 1 << 22  # a batch of more table entries takes long enough to be timed over fewer sets


def run_cell(cell: Cell, device: torch.device, rounds: int, trace: Path | None = None) -> dict[str, Any]:
    """Check and time everyone; microseconds a call."""
    given = make_inputs(cell, device, sets_of(cell, device), trace)
    running = contenders(given)
    for index in (0, given.sets - 1):
        known: Known = {}
        for name, contender in running.items():
            check(given, name, contender, index, known)
    timed = {name: to_time(contender, given) for name, contender in running.items()}
    take_turns(timed, device, rounds)
    return {**cell.to_dict(), "live_pages": given.live_pages, **judged(running, timed)}


def sets_of(cell: Cell, device: torch.device) -> int:
    """How many batches of a cell a replay runs over."""
    entries = cell.live_tokens // cell.page_size * (1 if cell.swa == "off" else 2)
    return FEW_SETS if entries > MANY_ENTRIES or device.type == "cpu" else SETS


def take_turns(timed: dict[Any, Timed], device: torch.device, rounds: int) -> None:
    """Fill in everyone's samples, on the clock of what they run on."""
    if device.type == "cuda":
        interleave(timed, rounds)
    else:
        interleave_on_host(timed, rounds)


def to_time(contender: Contender, given: Inputs) -> Timed:
    """All batches of `given`, as one thing to replay: on CUDA a graph."""
    if given.rows.is_cuda:
        return captured(contender.step, given.sets, contender.before)

    def run() -> None:
        for index in range(given.sets):
            contender.step(index)

    return Timed(run, given.sets, contender.before)


def judged(running: dict[str, Contender], timed: dict[str, Timed]) -> dict[str, Any]:
    """Everyone's times, and ours against the best of those that do the same work."""
    times = {name: {"label": running[name].label, **summary(each.samples)} for name, each in timed.items()}
    rivals = [name for name, contender in running.items() if contender.same_work]
    best = min(rivals, key=lambda name: times[name]["median"])
    ratio = {"rebuild": paired_ratio(timed["ours"].samples, timed[best].samples)}
    for form in ("incremental", "incremental-untouched"):
        ratio[form] = paired_ratio(timed[form].samples, timed[best].samples)
    for ours, floor in FLOORS:
        if floor in timed:
            ratio[f"{ours}/{floor}"] = paired_ratio(timed[ours].samples, timed[floor].samples)
    return {"times": times, "best": best, "ratios": ratio}
