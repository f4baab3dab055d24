"""The operators behind the integrations equal their oracle exactly: eagerly, interpreted and compiled."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_kv import KVLayout, capture
from compiled_kv.peers.block_tables import gather_block_tables
from compiled_kv.peers.csr import csr_tables
from compiled_kv.peers.draft_indices import draft_kv_indices
from compiled_kv.peers.draft_steps import advance_draft
from compiled_kv.peers.group_slots import group_slot_mappings
from tests.cases import DEVICES
from tests.conftest import INTERPRETED, take_last_program_first, take_small_sizes
from tests.peer_calls import CALLS, Draw, check_call
from tests.test_opcheck import Recorder

EAGER, KERNEL, COMPILED = 300, 30, 2

compiles = pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be traced")
devices = pytest.mark.parametrize("device", DEVICES)
operators = pytest.mark.parametrize("operator", CALLS)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels take four columns, rows or tokens at a time: every loop goes round."""
    if INTERPRETED:
        names = ("BLOCK", "CHUNK", "SCAN", "TOKENS", "ROW_TOKENS", "PROGRAMS", "CLEARERS")
        take_small_sizes(monkeypatch, dict.fromkeys(names, 4))


@devices
@operators
def test_any_call(operator: str, device: str) -> None:
    for seed in range(EAGER if device == "cpu" and not INTERPRETED else KERNEL):  # a kernel compiles for most calls
        check_call(operator, seed, device)


@pytest.mark.skipif(not INTERPRETED, reason="the order of a device's programs is its own")
@operators
def test_any_call_with_the_last_program_first(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take_last_program_first(monkeypatch)
    for seed in range(KERNEL):
        check_call(operator, seed, "cpu")


@compiles
@devices
@operators
def test_any_call_compiled(operator: str, device: str) -> None:
    """Whole graphs; on the CPU without code generation, which the operators of the package are tested with."""
    backend = "inductor" if device == "cuda" else "aot_eager"
    for seed in range(COMPILED):
        torch._dynamo.reset()  # each call has other optional parts
        check_call(operator, seed, device, torch.compile(CALLS[operator][0], fullgraph=True, backend=backend))


@compiles
@devices
@operators
def test_opcheck(operator: str, device: str) -> None:
    for seed in range(2):
        with Recorder() as recorder:
            check_call(operator, seed, device)
        assert len(recorder.calls) == 1, "a public function calls one operator, once"
        function, args, kwargs = recorder.calls[0]
        assert set(torch.library.opcheck(function, args, kwargs).values()) == {"SUCCESS"}


@compiles
def test_one_graph_serves_every_batch_size() -> None:
    pool, tables = torch.arange(6 * 31).view(6, 31), torch.arange(2 * 6 * 9).view(2, 6, 9)
    counts, sizes, layout = torch.full((2, 6), 5), torch.tensor([4, 8]), KVLayout(4, 28)

    def step(rows: Tensor, lens: Tensor, bounds: Tensor, positions: Tensor) -> list[Tensor]:
        blocks = gather_block_tables(tables, counts, rows)
        slots = group_slot_mappings(tables, sizes, rows, bounds, positions)
        drafts = draft_kv_indices(pool, rows, lens, num_steps=2, topk=3, layout=layout)
        advanced = advance_draft(lens, blocks[0], lens, page_size=4, max_context_len=28)
        return [blocks, slots, *csr_tables(pool, rows, lens, layout=layout), *drafts, *advanced]

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for size in (3, 5, 2):
            rows = torch.arange(size) + 1
            given = rows, rows * 3, torch.arange(size + 1) * 7, torch.arange(size * 7) % 20
            found, wanted = compiled(*given), step(*given)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@compiles
@operators
def test_one_launch_and_no_copy_on_a_device(operator: str) -> None:
    """Traced for CUDA: torch's mutation analysis finds nothing written but the outputs."""
    pytest.importorskip("triton")
    for seed in (1, 3):
        given = CALLS[operator][1](Draw(seed, "cpu"))
        graphs = capture(lambda given: CALLS[operator][0](**given), given, target="cuda:sm_90")
        assert graphs.is_whole and graphs.fallbacks == ()
        assert (sum(graphs.launches.values()), graphs.copied_bytes, graphs.host_reads) == (1, 0, [])


@operators
def test_calls_are_drawn_alike(operator: str) -> None:
    """The operator and the oracle are given equal tensors, none of them shared."""
    first, second = (CALLS[operator][1](Draw(1, "cpu")) for _ in range(2))

    def values(given: dict[str, Any]) -> list[Any]:
        return [value.tolist() if isinstance(value, torch.Tensor) else str(value) for value in given.values()]

    assert values(first) == values(second)
    shared = [k for k, value in first.items() if isinstance(value, torch.Tensor) and value is second[k]]
    assert shared == []


@pytest.mark.skipif(INTERPRETED, reason="this process is the interpreted one")
def test_interpreted_kernels_equal_the_oracle() -> None:
    pytest.importorskip("triton")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "tests/test_peer_operators.py", "-k", "test_any_call"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed is not None and int(passed[1]) == 2 * len(CALLS)  # in both orders of programs
