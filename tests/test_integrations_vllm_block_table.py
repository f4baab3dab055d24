"""vLLM's V1 block table: rows edited on the host, what a commit copies, and the slots of a step's tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import compiled_kv as ckv
from compiled_kv.integrations.vllm import PAD_SLOT_ID, BlockTable
from tests.cases import DEVICES
from tests.conftest import INTERPRETED

KEPT = 0x7EADBEEF
ROWS, WIDTH, SIZE, TOKENS = 4, 5, 4, 14
BLOCKS = {0: [7, 8, 9], 2: [3], 3: [10, 11, 12, 13]}

devices = pytest.mark.parametrize("device", DEVICES)


def table(device: str, **options: Any) -> BlockTable:
    """Four rows of which the second is empty."""
    made = BlockTable(SIZE, ROWS, WIDTH, TOKENS, False, device, **options)
    for row, blocks in BLOCKS.items():
        made.add_row(blocks, row)
    made.commit_block_table(ROWS)
    return made


class Lists:
    """The host's table on paper: what each edit leaves in every entry."""

    def __init__(self) -> None:
        self.rows, self.counts = [[0] * WIDTH for _ in range(ROWS)], [0] * ROWS

    def append_row(self, ids: list[int], row: int) -> None:
        for block in ids:
            self.rows[row][self.counts[row]] = block
            self.counts[row] += 1

    def add_row(self, ids: list[int], row: int) -> None:
        self.counts[row] = 0
        self.append_row(ids, row)

    def clear_row(self, row: int) -> None:
        self.rows[row], self.counts[row] = [0] * WIDTH, 0

    def move_row(self, src: int, tgt: int) -> None:
        if src != tgt:
            self.add_row(self.rows[src][: self.counts[src]], tgt)
            self.clear_row(src)

    def swap_row(self, src: int, tgt: int) -> None:
        for both in (self.rows, self.counts):
            both[src], both[tgt] = both[tgt], both[src]

    def clear(self) -> None:
        Lists.__init__(self)


def edit_of(draw: random.Random, counts: list[int]) -> tuple[str, tuple[Any, ...]]:
    name = draw.choice(["append_row", "append_row", "add_row", "clear_row", "move_row", "swap_row"])
    row, other = draw.randrange(ROWS), draw.randrange(ROWS)
    if name in ("append_row", "add_row"):
        room = WIDTH - (counts[row] if name == "append_row" else 0)
        return name, ([draw.randrange(1, 99) for _ in range(draw.randrange(room + 1))], row)
    return name, (row,) if name == "clear_row" else (row, other)


def test_any_edits_leave_what_lists_would_hold() -> None:
    draw = random.Random(0)
    for _ in range(20):
        made, paper = BlockTable(SIZE, ROWS, WIDTH, TOKENS, False, "cpu"), Lists()
        for _ in range(15):
            name, given = edit_of(draw, paper.counts)
            for each in (made, paper):
                getattr(each, name)(*given)
            assert made.get_cpu_tensor().tolist() == paper.rows, name
            assert made.num_blocks_per_row == paper.counts
        made.clear()
        assert made.get_numpy_array().tolist() == [[0] * WIDTH] * ROWS and made.num_blocks_per_row == [0] * ROWS


@devices
def test_a_moved_row_leaves_null_blocks_behind(device: str) -> None:
    made = table(device)
    made.move_row(0, 3)
    assert made.get_device_tensor(4)[3].tolist() == [10, 11, 12, 13, 0]  # nothing happens before a commit
    made.commit_block_table(4)
    assert made.get_device_tensor(4).tolist() == [[0] * 5, [0] * 5, [3, 0, 0, 0, 0], [7, 8, 9, 13, 0]]
    made.move_row(2, 2)
    assert made.num_blocks_per_row == [0, 0, 1, 3]


@devices
def test_a_commit_copies_the_batchs_rows_alone(device: str) -> None:
    made = table(device)
    address = made.block_table.data_ptr()
    made.block_table.fill_(KEPT)
    made.commit_block_table(2)
    assert made.block_table.tolist() == [[7, 8, 9, 0, 0], [0] * 5, [KEPT] * 5, [KEPT] * 5]
    assert made.get_device_tensor(2).data_ptr() == address == made.block_table.data_ptr()


def test_rows_are_refused_before_anything_is_written() -> None:
    made = table("cpu")
    before = made.host.clone()
    with pytest.raises(RuntimeError, match="row 3 needs 6 blocks, has 5"):
        made.append_row([1, 2], 3)
    with pytest.raises(RuntimeError, match="row 0 needs 6 blocks, has 5"):
        made.add_row([1] * 6, 0)
    for edit, given, name in (
        (made.append_row, ([1], 4), "row_idx must be at most 3, got 4"),
        (made.move_row, (0, -1), "tgt must be at least 0, got -1"),
        (made.swap_row, (5, 0), "src must be at most 3, got 5"),
        (made.commit_block_table, (5,), "num_reqs must be at most 4, got 5"),
    ):
        with pytest.raises(ValueError, match=name):
            edit(*given)
    assert torch.equal(made.host, before) and made.num_blocks_per_row == [3, 0, 1, 4]
    with pytest.raises(ValueError, match="kernel_block_size must divide block_size, got 3 for 4"):
        table("cpu", kernel_block_size=3)
    with pytest.raises(ValueError, match="cp_rank must be at most 1, got 2"):
        table("cpu", cp_size=2, cp_rank=2)
    for interleave, size in ((3, 4), (4, 2)):
        sentence = f"cp_kv_cache_interleave_size must divide .* block size {size} over several ranks, got {interleave}"
        with pytest.raises(ValueError, match=sentence):
            table("cpu", cp_size=2, kernel_block_size=size, cp_kv_cache_interleave_size=interleave)


def slots_on_paper(row: int, position: int, cp: int = 1, rank: int = 0, interleave: int = 1) -> int:
    column, offset = divmod(position, SIZE * cp)
    if column >= len(BLOCKS.get(row, [])) or offset // interleave % cp != rank:
        return PAD_SLOT_ID
    return BLOCKS[row][column] * SIZE + offset // (interleave * cp) * interleave + offset % interleave


COUNTS, POSITIONS = [3, 0, 1, 4], [9, 10, 11, 2, 0, 5, 14, 15]
TOKEN_ROWS = [0, 0, 0, 2, 3, 3, 3, 3]
kinds = pytest.mark.parametrize("wide", [torch.int32, torch.int64], ids=["int32", "int64"])


@devices
@kinds
@pytest.mark.parametrize("interleave", [1, 2])
@pytest.mark.parametrize("cp", [1, 2])
def test_slots_pad_to_the_buffers_end(cp: int, interleave: int, wide: torch.dtype, device: str) -> None:
    for rank in range(cp):
        made = table(device, cp_kv_cache_interleave_size=interleave, cp_size=cp, cp_rank=rank)
        made.slot_mapping.fill_(KEPT)
        bounds = torch.tensor([0, 3, 3, 4, 8, 99], dtype=wide, device=device)  # longer than the batch: a larger buffer
        made.compute_slot_mapping(4, bounds, torch.tensor(POSITIONS, dtype=wide, device=device))
        expected = [
            slots_on_paper(row, at, cp, rank, interleave) for row, at in zip(TOKEN_ROWS, POSITIONS, strict=True)
        ]
        assert made.slot_mapping.tolist() == expected + [PAD_SLOT_ID] * (TOKENS - len(POSITIONS))


@devices
def test_a_batch_takes_the_first_rows_and_bounds(device: str) -> None:
    """Positions behind the last bound have no slot; a row that is not in the batch is not looked at."""
    made = table(device)
    made.compute_slot_mapping(1, torch.tensor([0, 2], device=device), torch.tensor([4, 5, 6], device=device))
    assert made.slot_mapping.tolist() == [8 * 4, 8 * 4 + 1] + [PAD_SLOT_ID] * 12
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    made.compute_slot_mapping(0, torch.tensor([0], device=device), nothing)
    assert made.slot_mapping.tolist() == [PAD_SLOT_ID] * TOKENS


@devices
def test_a_group_without_slots_writes_nothing(device: str) -> None:
    made = table(device, slot_mapping_enabled=False)
    made.slot_mapping.fill_(KEPT)
    made.compute_slot_mapping(1, torch.tensor([0, 2], device=device), torch.tensor([4, 5], device=device))
    assert made.slot_mapping.tolist() == [KEPT] * TOKENS


@devices
def test_smaller_kernel_blocks_hold_the_same_slots(device: str) -> None:
    made = table(device, kernel_block_size=2)
    assert made.get_device_tensor(1).tolist() == [[14, 15, 16, 17, 18, 19, 0, 0, 0, 0]]
    given = 1, torch.tensor([0, 12], device=device), torch.arange(12, device=device)
    made.compute_slot_mapping(*given)
    assert made.slot_mapping[:12].tolist() == [slots_on_paper(0, at) for at in range(12)]


def test_a_step_that_is_too_long_is_refused() -> None:
    made = table("cpu")
    for given, sentence in (
        ((5, torch.zeros(6, dtype=torch.int64), torch.arange(3)), "num_reqs must be at most 4, got 5"),
        ((1, torch.tensor([0, 15]), torch.arange(15)), "at least the 15 columns of positions, got 14"),
        ((2, torch.tensor([0, 1]), torch.arange(3)), "B\\+1=3, got \\[2\\]"),
    ):
        with pytest.raises(ValueError, match=sentence):
            made.compute_slot_mapping(*given)


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be traced")
def test_the_auditor_finds_nothing_in_a_step() -> None:
    pytest.importorskip("triton")

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table("cpu", cp_size=2)

        def forward(self, query_start_loc: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
            self.table.compute_slot_mapping(4, query_start_loc, positions)
            return self.table.slot_mapping + 0, self.table.get_device_tensor(4) + 0

    given = torch.tensor([0, 3, 3, 4, 8]), torch.tensor(POSITIONS)
    step = Step()
    report = ckv.audit(step, *given, target="cuda:sm_90")
    assert report.ok and report.findings == (), str(report)
    assert report.launches == {"_group_slot_mappings_kernel": 1}
    eager = [part.clone() for part in step(*given)]
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(*given)
    assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be traced")
def test_the_hosts_table_is_no_input_of_a_compiled_step() -> None:
    shapes: list[tuple[int, ...]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        shapes.extend(tuple(given.shape) for given in inputs if isinstance(given, Tensor))
        return graph

    made = table("cpu")
    torch.compile(made.compute_slot_mapping, fullgraph=True, backend=backend)(
        2, torch.tensor([0, 3, 3]), torch.tensor([9, 10, 11])
    )
    assert shapes.count(tuple(made.host.shape)) == 1  # the device's
    assert made.slot_mapping[:3].tolist() == [slots_on_paper(0, at) for at in (9, 10, 11)]
