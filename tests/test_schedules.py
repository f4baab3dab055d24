"""The split-KV schedule: worked by hand, equal to the algorithm over random batches, whole in a graph."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import compiled_kv as ckv
from compiled_kv import reference
from compiled_kv.schedules import FORMS
from compiled_kv.tracing.graphs import capture
from tests.cases import DEVICES, needs_cuda
from tests.conftest import INTERPRETED
from tests.harness import POISON, around, poisoned

compiles = pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be traced")
devices = pytest.mark.parametrize("device", DEVICES)
Call = Callable[..., tuple[Tensor, Tensor]]

# lengths, parts, arguments -> rows, num_splits
BY_HAND: dict[str, tuple[list[int], int, dict[str, Any], list[list[int]], list[int]]] = {
    # 3 + 5, 1 + 5 and 20 + 5 blocks; payload ceil(39 / 2) + 5 = 25 leaves 11 - 5 blocks of request 2 to part 0
    "request-cut-in-two": (
        [192, 64, 1280], 2, {},
        [[0, 2, 0, 6, 0, 0, 1, 0], [2, 2, 6, 20, 1, 1, 1, 0]], [0, 1, 2, 4],
    ),
    # 3 + 5, 1 + 5, 5 + 5 blocks; payload 12 + 5 holds requests 0 and 1 and has 3 left, too few to start request 2
    "boundary-met": ([192, 64, 320], 2, {}, [[0, 1, 0, 1, 0, 0, 0, 0], [2, 2, 0, 5, 0, 0, 0, 0]], [0, 1, 2, 3]),
    # one block each: a part of payload ceil(12 / 3) + 5 = 9 takes one, and the third has none left
    "idle-part": (
        [0, 64], 3, {},
        [[0, 0, 0, 0, 0, 0, 0, 0], [1, 1, 0, 1, 0, 0, 0, 0], [2, 1, 0, 1, 0, 0, 0, 0]], [0, 1, 2],
    ),
    # 10 + 5 blocks over 3 parts: 5 blocks each, and the third part is idle
    "one-request": (
        [640], 3, {},
        [[0, 0, 0, 5, 0, 1, 1, 0], [0, 0, 5, 10, 1, 1, 1, 0], [1, 0, 0, 10, 0, 0, 0, 0]], [0, 2],
    ),
    # quota ceil(14 / 14) = 1 is below the overhead: every block is a part of its own
    "quota-below-overhead": (
        [130, 0], 14, {},
        [[0, 0, 0, 1, 0, 1, 1, 0], [0, 0, 1, 2, 1, 1, 1, 0], [0, 0, 2, 3, 2, 1, 1, 0], [1, 1, 0, 0, 0, 0, 0, 0],
         *[[2, 1, 0, 0, 0, 0, 0, 0]] * 10], [0, 3, 4],
    ),
    "padding-rows": (
        [192, 64, 7, -1], 2, {"num_reqs": 1},
        [[0, 0, 0, 3, 0, 0, 0, 0], [1, 0, 0, 3, 0, 0, 0, 0]], [0, 1, 1, 1, 1],
    ),
    # quota ceil(10 / 4) = 3 leaves the end of request 0 one block behind a mark, and a kernel takes 512 rows at a time
    "padding-rows-of-a-later-chunk": (
        [640, *[7] * 512], 4, {"fixed_overhead_blocks": 0, "num_reqs": 1},
        [[0, 0, 0, 3, 0, 1, 1, 0], [0, 0, 3, 6, 1, 1, 1, 0], [0, 0, 6, 9, 2, 1, 1, 0], [0, 0, 9, 10, 3, 1, 1, 0]],
        [0, *[4] * 513],
    ),
    "every-row-padding": ([192, 64], 2, {"num_reqs": 0}, [[0, -1, 0, 0, 0, 0, 0, 0]] * 2, [0, 0, 0]),
    "empty-batch": ([], 2, {}, [[0, -1, 0, 0, 0, 0, 0, 0]] * 2, [0]),
    "legacy-tokens": (
        [192, 64, 1250], 2, {"form": "legacy_tokens"},
        [[0, 0, 2, 384, 0, 0, 0, 0], [2, 384, 2, 1250, 1, 0, 0, 0]], [0, 1, 2, 4],
    ),
    "legacy-blocks": (
        [192, 64, 1250], 2, {"form": "legacy_blocks"},
        [[0, 0, 2, 6, 0, 0, 0, 0], [2, 6, 2, 20, 1, 0, 0, 0]], [0, 1, 2, 4],
    ),
    "other-block-and-overhead": (
        [30, 10], 2, {"block_size": 10, "fixed_overhead_blocks": 0},
        [[0, 0, 0, 2, 0, 1, 1, 0], [0, 1, 2, 1, 1, 1, 0, 0]], [0, 2, 3],
    ),
}  # fmt: skip


@devices
@pytest.mark.parametrize("case", BY_HAND)
def test_worked_by_hand(case: str, device: str) -> None:
    lengths, parts, options, rows, splits = BY_HAND[case]
    options = {k: torch.tensor(v, device=device) if k == "num_reqs" else v for k, v in options.items()}
    for dtype in (torch.int32, torch.int64):
        found = ckv.flashmla_schedule(torch.tensor(lengths, dtype=dtype, device=device), num_sm_parts=parts, **options)
        assert [each.tolist() for each in found] == [rows, splits]
        assert [each.dtype for each in found] == [torch.int32] * 2


@pytest.mark.parametrize("case", BY_HAND)
def test_oracle_worked_by_hand(case: str) -> None:
    lengths, parts, options, rows, splits = BY_HAND[case]
    found = reference.flashmla_schedule(torch.tensor(lengths, dtype=torch.int64), num_sm_parts=parts, **options)
    assert [each.tolist() for each in found] == [rows, splits]


def draw(pick: random.Random, sizes: list[int]) -> tuple[Tensor, dict[str, Any]]:
    """A batch and the arguments of one call, on the CPU."""
    batch, longest = pick.choice(sizes), pick.choice([1, 64, 300, 2000, 20000, 1 << 20, 1 << 40])
    lengths = [pick.choice([0, -3, *(pick.randint(0, longest) for _ in range(4))]) for _ in range(batch)]
    options: dict[str, Any] = {
        "num_sm_parts": pick.choice([1, 2, 7, 66, 132, 300]),
        "fixed_overhead_blocks": pick.choice([5, 5, 5, 0, 1, 9, 1023]),
        "block_size": pick.choice([64, 64, 64, 1, 48]),
        "form": pick.choice(FORMS),
    }
    if pick.random() < 0.4:
        options["num_reqs"] = torch.tensor(pick.choice([-1, batch + 1, pick.randint(0, batch)]))
    wide = torch.tensor(lengths, dtype=torch.int64)
    narrow = pick.random() < 0.5
    return wide.clamp(max=2**31 - 1).int() if narrow else wide, options


def check(call: Call, lengths: Tensor, options: dict[str, Any], device: str, in_place: bool = False) -> None:
    given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    expected = reference.flashmla_schedule(lengths, **options)
    if in_place:
        metadata = torch.full(expected[0].shape, POISON[torch.int32], dtype=torch.int32, device=device)
        splits = poisoned(expected[1].shape, torch.int32, device)
        given["out"] = (metadata, splits)
    found = call(lengths.to(device), **given)
    if in_place:
        assert found[0] is metadata and found[1] is splits
        assert (around(splits) == POISON[torch.int32]).sum() == 5, "memory around num_splits was written"
    for name, a, b in zip(("tile_scheduler_metadata", "num_splits"), found, expected):
        assert torch.equal(a.cpu(), b), f"{name} differs for {lengths.tolist()}, {options}"


def check_random_calls(count: int, sizes: list[int], device: str = "cpu") -> None:
    pick = random.Random(7)
    for index in range(count):
        check(ckv.flashmla_schedule, *draw(pick, sizes), device, in_place=index % 4 == 3)


def test_random_calls() -> None:
    check_random_calls(3000, [0, 1, 2, 3, 8, 31, 32, 33, 100])


def test_wide_batches() -> None:
    check_random_calls(40, [511, 512, 513, 1500])


@pytest.mark.skipif(INTERPRETED, reason="this process is the interpreted one")
def test_interpreted_kernel() -> None:
    pytest.importorskip("triton")
    by_hand = "for case in BY_HAND: test_worked_by_hand(case, 'cpu')"
    calls = "check_random_calls(50, [0, 1, 2, 31, 33, 100]); check_random_calls(10, [511, 512, 513, 1100])"
    ran = subprocess.run(
        [sys.executable, "-c", f"from tests.test_schedules import *\n{by_hand}\n{calls}\nprint('equal')"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stdout) == (0, "equal\n"), ran.stderr[-3000:]


@pytest.mark.gpu
@needs_cuda
def test_random_calls_on_cuda() -> None:
    check_random_calls(10_000, [0, 1, 2, 31, 32, 33, 64, 128, 511, 512, 513, 1100], "cuda")


def step(lengths: Tensor, num_reqs: Tensor) -> tuple[Tensor, Tensor]:
    return ckv.flashmla_schedule(lengths, num_sm_parts=132, num_reqs=num_reqs)


@compiles
@devices
def test_one_compiled_graph_serves_every_batch(device: str) -> None:
    graphs = 0

    def counting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._inductor.compile(graph, inputs)  # type: ignore[attr-defined]

    call = torch.compile(step, fullgraph=True, dynamic=True, backend=counting)
    pick = random.Random(3)
    for batch in (17, 2, 3, 7, 8, 16, 33, 64, 512, *(pick.randint(2, 200) for _ in range(100))):
        lengths = torch.randint(0, pick.choice([64, 300, 20000, 1 << 20]), (batch,), dtype=torch.int32)
        num_reqs = torch.tensor(pick.randint(0, batch))
        expected = reference.flashmla_schedule(lengths, num_sm_parts=132, num_reqs=num_reqs)
        found = call(lengths.to(device), num_reqs.to(device))
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected)), (batch, num_reqs)
    assert graphs == 1


@compiles
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_one_launch_without_a_copy_when_traced_for_cuda(dynamic: bool) -> None:
    pytest.importorskip("triton")
    graphs = capture(step, torch.zeros(6, dtype=torch.int32), torch.tensor(2), target="cuda:sm_90", dynamic=dynamic)
    assert graphs.is_whole
    assert graphs.launches == {"flashmla_schedule_kernel": 1}
    assert not graphs.host_reads
    assert not graphs.copies


@compiles
@devices
def test_operators_pass_opcheck(device: str) -> None:
    lengths, num_reqs = torch.tensor([5, 900, 0, 64], device=device), torch.tensor(3, device=device)
    out = torch.empty(7, 8, dtype=torch.int32, device=device), torch.empty(5, dtype=torch.int32, device=device)
    torch.library.opcheck(torch.ops.compiled_kv.flashmla_schedule.default, (lengths, num_reqs, 7, 64, 5, 0))
    torch.library.opcheck(torch.ops.compiled_kv.flashmla_schedule_out.default, (lengths, num_reqs, *out, 64, 5, 0))


LENGTHS = torch.tensor([5, 3])
SPLITS = torch.empty(3, dtype=torch.int32)
WIDE = torch.empty(2, 16, dtype=torch.int32)
REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "float-lengths": (
        TypeError, "cache_seqlens must be int32 or int64, got float32", {"cache_seqlens": torch.zeros(2)}
    ),
    "no-parts": (ValueError, "num_sm_parts must be at least 1, got 0", {"num_sm_parts": 0}),
    "no-block": (ValueError, "block_size must be at least 1, got 0", {"block_size": 0}),
    "overhead-too-large": (
        ValueError, "fixed_overhead_blocks must be at most 1023, got 1024", {"fixed_overhead_blocks": 1024}
    ),
    "unknown-form": (
        ValueError, "form must be one of 'current', 'legacy_tokens', 'legacy_blocks', got 'new'", {"form": "new"}
    ),
    "two-num-reqs": (ValueError, "num_reqs must be 0-d or [1], got [2]", {"num_reqs": torch.tensor([1, 2])}),
    "out-not-a-pair": (TypeError, "out must be (tile_scheduler_metadata, num_splits), got Tensor", {"out": SPLITS}),
    "out-of-three": (
        ValueError, "out must be (tile_scheduler_metadata, num_splits), got 3 entries", {"out": (SPLITS,) * 3}
    ),
    "parts-too-few": (
        ValueError, "tile_scheduler_metadata must be [S, 8] with S=2, 8=8, got [3, 8]",
        {"out": (torch.empty(3, 8, dtype=torch.int32), SPLITS)},
    ),
    "rows-apart": (
        ValueError, "tile_scheduler_metadata must be contiguous, got strides [16, 1]", {"out": (WIDE[:, :8], SPLITS)}
    ),
    "outputs-overlap": (
        ValueError, "must not overlap", {"out": (WIDE.view(-1)[:16].view(2, 8), WIDE.view(-1)[15:18])}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_call_names_argument_rule_and_what_came(case: str) -> None:
    kind, text, change = REFUSED[case]
    with pytest.raises(kind) as raised:
        ckv.flashmla_schedule(**{"cache_seqlens": LENGTHS, "num_sm_parts": 2, **change})
    assert text in str(raised.value)
