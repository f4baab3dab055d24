"""What is not a cell: the schedule, time on the host, compile and import time, and the CPU path."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import compiled_kv as ckv
from compiled_kv import metadata_op, reference
from compiled_kv.bench import baselines_torch
from compiled_kv.bench.cells import Cell, K
from compiled_kv.bench.contenders import new_outputs
from compiled_kv.bench.inputs import Inputs, make_inputs
from compiled_kv.bench.timing import Timed, captured, interleave, interleave_on_host, summary

CALLS = 50
HOST_CELL = Cell(64, 8 * K, 128 * K, 64)
CPU_CELLS = [Cell(8, K, 8 * K, 16), Cell(64, 8 * K, 128 * K, 64), Cell(64, 8 * K, 8 * K, 1)]
PARTS = 132
LONGEST = (0, 64, 1000, 30_000, 1 << 20)
SCHEDULES = [(batch, length) for batch in (1, 64, 512) for length in (128, 8 * K, 128 * K)]


def schedule(device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """`flashmla_schedule`, its kernel with other numbers of warps, and the published walk in one thread; in a graph."""
    from compiled_kv.bench import baseline_schedule

    results = []
    for batch, length in SCHEDULES:
        generator = torch.Generator(device=device).manual_seed(batch + length)
        lengths = torch.randint(
            length // 2, length + 1, (16, batch), dtype=torch.int32, device=device, generator=generator
        )
        i32 = partial(torch.zeros, dtype=torch.int32, device=device)
        out = (i32((PARTS, 8)), i32((batch + 1,)))
        steps: dict[str, Callable[[int], Any]] = {
            "ours": lambda i: ckv.flashmla_schedule(lengths[i], num_sm_parts=PARTS, out=out),  # noqa: B023
            "one thread": lambda i: baseline_schedule.run(lengths[i], out),  # noqa: B023
            **{f"{warps} warps": partial(_with_warps, lengths, out, warps) for warps in (1, 2, 4, 16)},
        }
        for name, step in steps.items():
            for index in (0, 15):
                step(index)
                wanted = reference.flashmla_schedule(lengths[index].cpu(), num_sm_parts=PARTS)
                if not all(torch.equal(a.cpu(), b) for a, b in zip(out, wanted)):
                    raise AssertionError(f"schedule, {name}: differs at batch {batch}, length {length}")
        timed = {name: captured(step, 16) for name, step in steps.items()}
        interleave(timed, rounds)
        times = {name: summary(each.samples) for name, each in timed.items()}
        results.append({"batch": batch, "length": length, "parts": PARTS, "times": times})
    return results


def agreement(device: torch.device, batches: int = 10_000) -> dict[str, int]:
    """How many random batches get another schedule than the oracle's, of all sizes and lengths."""
    pick, different = random.Random(0), 0
    for _ in range(batches):
        batch, parts, most = pick.choice((1, 2, 31, 64, 200, 512)), pick.choice((1, 78, 132, 264)), pick.choice(LONGEST)
        lengths = torch.tensor([pick.randrange(most + 1) for _ in range(batch)], dtype=torch.int32)
        found = ckv.flashmla_schedule(lengths.to(device), num_sm_parts=parts)
        wanted = reference.flashmla_schedule(lengths, num_sm_parts=parts)
        different += not all(torch.equal(a.cpu(), b) for a, b in zip(found, wanted))
    return {"batches": batches, "different": different}


def _with_warps(lengths: Tensor, out: tuple[Tensor, Tensor], warps: int, index: int) -> None:
    from compiled_kv.bench import baseline_schedule

    baseline_schedule.ours_with(lengths[index], out, warps)


class Buffered(nn.Module):
    """A step over registered buffers, the form that reduce-overhead captures."""

    req_to_token: Tensor

    def __init__(self, given: Inputs, out: ckv.DecodeMetadata) -> None:
        super().__init__()
        self.layout = given.layout
        self.register_buffer("req_to_token", given.req_to_token)
        for name, tensor in out._asdict().items():
            self.register_buffer(name, tensor)

    def forward(self, rows: Tensor, seq_lens: Tensor) -> Tensor:
        out = ckv.DecodeMetadata(*(getattr(self, name) for name in ckv.DecodeMetadata._fields))
        meta = ckv.decode_metadata(self.req_to_token, rows, seq_lens, layout=self.layout, out=out, tail="keep")
        return meta.cu_seqlens_k[-1].clone()


def host(device: torch.device, rounds: int) -> dict[str, Any]:
    """Microseconds of host time a call, as the host queues calls; the gather to the longest also waits for its read."""
    given = make_inputs(HOST_CELL, device, 1)
    out, rows, seq_lens = new_outputs(given), given.rows[0], given.seq_lens[0]
    ours = partial(ckv.decode_metadata, layout=given.layout, out=out, tail="keep")
    width, page_size = given.layout.max_num_pages, given.layout.page_size

    def eager() -> Any:
        return ours(given.req_to_token, rows, seq_lens)

    recorded: list[Callable[[], Any]] = []

    def record(fn: Any, grid: Any, **arguments: Any) -> None:
        recorded.append(lambda: fn[grid](**arguments))

    with mock.patch.object(metadata_op, "launch", record):
        eager()
    (launch,) = recorded
    compiled = torch.compile(ours, fullgraph=True)
    buffered = torch.compile(Buffered(given, new_outputs(given)), mode="reduce-overhead", fullgraph=True)
    torch_only = (given.req_to_token, rows, seq_lens, None, out, page_size)

    def reduced() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        buffered(rows, seq_lens)

    calls: dict[str, Callable[[], Any]] = {
        "the kernel's launch alone": launch,
        "operator, eager": eager,
        "operator, compiled": lambda: compiled(given.req_to_token, rows, seq_lens),
        'mode="reduce-overhead"': reduced,
        "replay of a captured graph": captured(lambda _: eager(), 1).run,
        "gather, eager": lambda: baselines_torch.gather(*torch_only, width),
        "gather to the longest, with its host read": lambda: baselines_torch.gather_to_longest(*torch_only),
        "the host read alone": lambda: seq_lens.max().item(),
    }
    for call in calls.values():
        for _ in range(3):
            call()
    timed = {name: Timed(partial(_repeat, call), CALLS) for name, call in calls.items()}
    interleave_on_host(timed, rounds, torch.cuda.synchronize)
    return {name: summary(each.samples) for name, each in timed.items()}


def _repeat(call: Callable[[], Any]) -> None:
    for _ in range(CALLS):
        call()


def cpu(rounds: int) -> list[dict[str, Any]]:
    """Our operator on CPU tensors, eager and compiled, beside the eager gather."""
    results = []
    for cell in CPU_CELLS:
        given = make_inputs(cell, torch.device("cpu"), 1)
        out, rows, seq_lens = new_outputs(given), given.rows[0], given.seq_lens[0]
        fixed = (cell.page_size, given.layout.max_num_pages)
        ours = partial(ckv.decode_metadata, layout=given.layout)
        compiled = torch.compile(ours, fullgraph=True)
        calls: dict[str, Callable[[], Any]] = {
            "ours": lambda: ours(given.req_to_token, rows, seq_lens),  # noqa: B023
            "ours, compiled": lambda: compiled(given.req_to_token, rows, seq_lens),  # noqa: B023
            "gather": lambda: baselines_torch.gather(given.req_to_token, rows, seq_lens, None, out, *fixed),  # noqa: B023
        }
        for call in calls.values():
            call()
        timed = {name: Timed(call, 1) for name, call in calls.items()}
        interleave_on_host(timed, rounds)
        times = {name: summary(each.samples) for name, each in timed.items()}
        results.append({**cell.to_dict(), "threads": torch.get_num_threads(), "times": times})
    return results


FIRST_CALL = """
import time; begin = time.perf_counter()
import torch; torch_in = time.perf_counter()
import compiled_kv as ckv; ours_in = time.perf_counter()
device = "cuda" if torch.cuda.is_available() else "cpu"
pool = torch.zeros(4, 8192, dtype=torch.int32, device=device)
rows, lengths = torch.arange(4, device=device), torch.full((4,), 100, device=device)
layout, ready = ckv.KVLayout(64, 8192), time.perf_counter()
call = torch.compile(ckv.decode_metadata, fullgraph=True) if COMPILED else ckv.decode_metadata
call(pool, rows, lengths, layout=layout).page_table.cpu()
print(torch_in - begin, ours_in - torch_in, time.perf_counter() - ready)
"""


def starts() -> dict[str, float]:
    """Seconds: imports, and the first call in a new process, with caches empty and with them filled."""
    found: dict[str, float] = {}
    for form in ("eager", "compiled"):
        with tempfile.TemporaryDirectory() as folder:
            for state in ("cold", "warm"):
                torch_in, ours_in, first = _first_call(folder, form == "compiled")
                found |= {
                    "import torch": torch_in,
                    "import compiled_kv": ours_in,
                    f"first call, {form}, {state}": first,
                }
    return found


def _first_call(folder: str, is_compiled: bool) -> list[float]:
    places = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    command = [sys.executable, "-c", FIRST_CALL.replace("COMPILED", str(is_compiled))]
    ran = subprocess.run(command, env={**os.environ, **places}, check=True, capture_output=True, text=True)
    return [float(word) for word in ran.stdout.split()]


def stopwatch() -> Callable[[], float]:
    begin = time.perf_counter()
    return lambda: round(time.perf_counter() - begin, 1)
