"""vLLM's names: what is gathered, kept and zeroed, which tokens have no slot, and one draft step further."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_kv.integrations import vllm
from compiled_kv.integrations.vllm import BlockTables
from tests.cases import DEVICES
from tests.conftest import INTERPRETED
from tests.harness import around, poisoned

KEPT = 0x7EADBEEF
BLOCKS = {0: ([7, 8, 9], [5, 6]), 2: ([3], [4]), 3: ([10, 11, 12, 13], [14, 15])}
SIZES, WIDTHS = [4, 8], [5, 3]

devices = pytest.mark.parametrize("device", DEVICES)


def tables(device: str, **options: Any) -> BlockTables:
    """Four request rows of which the second is empty, in two groups."""
    made = BlockTables(SIZES, 4, 12, WIDTHS, device, **options)
    for row, blocks in BLOCKS.items():
        made.append_block_ids(row, blocks, overwrite=True)
    made.apply_staged_writes()
    return made


def tensor(device: str, *values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


@devices
def test_staged_blocks_are_appended_or_written_over(device: str) -> None:
    made = tables(device)
    made.append_block_ids(2, ([20, 21], []), overwrite=False)
    made.append_block_ids(0, ([30], [31]), overwrite=True)
    assert made.num_blocks.tolist() == [[3, 0, 1, 4], [2, 0, 1, 2]]  # nothing happens before the writes are applied
    made.apply_staged_writes()
    made.apply_staged_writes()
    assert made.num_blocks.tolist() == [[1, 0, 3, 4], [1, 0, 1, 2]]
    assert made.block_tables[0][2].tolist() == [3, 20, 21, 0, 0]
    assert [table[0, 0].item() for table in made.block_tables] == [30, 31]
    with pytest.raises(RuntimeError, match="request 3 needs 6 blocks in group 0, has 5"):
        made.append_block_ids(3, ([1, 2], [1]), overwrite=False)
    made.append_block_ids(3, ([], []), overwrite=True)
    made.apply_staged_writes()
    assert made.num_blocks[:, 3].tolist() == [0, 0]


@devices
def test_gather_keeps_what_lies_past_a_requests_blocks(device: str) -> None:
    made = tables(device)
    made.inputs.fill_(KEPT)
    first, second = made.gather_block_tables(tensor(device, 3, 0, 2), num_reqs_padded=4)
    assert first.tolist() == [[10, 11, 12, 13, KEPT], [7, 8, 9, KEPT, KEPT], [3, *[KEPT] * 4], [0] * 5]
    assert second.tolist() == [[14, 15, KEPT], [5, 6, KEPT], [4, KEPT, KEPT], [0] * 3]
    assert first.data_ptr() == made.input_block_tables[0].data_ptr()


@devices
def test_a_smaller_batch_clears_the_rows_of_the_larger_one_before(device: str) -> None:
    made = tables(device)
    made.gather_block_tables(tensor(device, 3, 0, 2, 3), num_reqs_padded=4)
    made.gather_block_tables(tensor(device, 0), num_reqs_padded=1)
    assert made.input_block_tables[0].tolist() == [[7, 8, 9, 13, 0], [0] * 5, [0] * 5, [0] * 5]
    assert [table.tolist() for table in made.get_dummy_block_tables(2)] == [[[0] * 5] * 2, [[0] * 3] * 2]


@devices
def test_padding_in_the_mapping_is_a_row_of_null_blocks(device: str) -> None:
    out = poisoned((2, 4, 5), torch.int32, device)
    first, second = tables(device).gather_block_tables(tensor(device, -1, 2), num_reqs_padded=3, out=out)
    assert first.tolist() == [[0] * 5, [3, *[KEPT] * 4], [0] * 5]
    assert second.tolist() == [[0] * 3, [4, KEPT, KEPT], [0] * 3]
    assert {*out[:, 3].flatten().tolist()} == {KEPT}  # rows past the padding are the caller's
    assert (around(out) == KEPT).sum() == around(out).numel() - 22


@devices
def test_blocks_below_the_window_are_null(device: str) -> None:
    made = tables(device, sliding_window_reach=[5, 0])
    computed = tensor(device, 9, 0, 4, 16)
    first, second = made.gather_block_tables(tensor(device, 3, 0, 2), 3, num_computed_tokens=computed)
    assert first.tolist() == [[0, 0, 12, 13, 0], [0, 8, 9, 0, 0], [3, 0, 0, 0, 0]]  # (16 - 5) // 4, (9 - 5) // 4, none
    assert second.tolist() == [[14, 15, 0], [5, 6, 0], [4, 0, 0]]  # this group reads everything
    whole = made.gather_block_tables(tensor(device, 3), 1)[0]
    assert whole.tolist() == [[10, 11, 12, 13, 0]]
    sharded = tables(device, sliding_window_reach=[5, 0], cp_size=2)
    kept = sharded.gather_block_tables(tensor(device, 3), 1, num_computed_tokens=computed)[0]
    assert kept.tolist() == [[10, 11, 12, 13, 0]]


def slots_on_paper(group: int, row: int, position: int, cp: int = 1, rank: int = 0, interleave: int = 1) -> int:
    block_size, blocks = SIZES[group], BLOCKS[row][group]
    virtual = block_size * cp
    block, offset = divmod(position, virtual)
    if offset // interleave % cp != rank:
        return -1
    return blocks[block] * block_size + offset // (interleave * cp) * interleave + offset % interleave


POSITIONS = {3: [13, 14, 15], 0: [11], 2: [2, 3]}


@devices
@pytest.mark.parametrize("wide", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_slot_mappings_pad_to_the_buffers_end(wide: torch.dtype, device: str) -> None:
    """Tokens of requests 3, padding, 0 and 2; ten positions are given, of which seven are in the batch."""
    made = tables(device)
    made.slot_mappings.fill_(KEPT)
    positions = tensor(device, *POSITIONS[3], 99, *POSITIONS[0], *POSITIONS[2], 1, 1, 1, dtype=torch.int64)
    bounds = tensor(device, 0, 3, 4, 5, 7, dtype=wide)
    mappings = made.compute_slot_mappings(tensor(device, 3, -1, 0, 2, dtype=wide), bounds, positions, 8)
    for group in range(2):
        of = {row: [slots_on_paper(group, row, at) for at in POSITIONS[row]] for row in POSITIONS}
        assert mappings[group].tolist() == [*of[3], vllm.PAD_SLOT_ID, *of[0], *of[2], vllm.PAD_SLOT_ID]
    assert made.slot_mappings[:, 7:].tolist() == [[-1] * 5] * 2
    assert mappings.data_ptr() == made.slot_mappings.data_ptr()
    assert made.get_dummy_slot_mappings(3).tolist() == [[-1] * 3] * 2
    assert made.slot_mappings.tolist() == [[-1] * 12] * 2


@devices
def test_a_group_without_slots_is_never_looked_up(device: str) -> None:
    made = tables(device, slot_mapping_enabled=[True, False])
    made.pool[1] = KEPT
    positions = tensor(device, 1, 10**9, dtype=torch.int64)
    mappings = made.compute_slot_mappings(tensor(device, 0), tensor(device, 0, 2), positions, 2)
    assert mappings.tolist() == [[29, -1], [-1, -1]]


@devices
def test_a_position_past_a_narrow_groups_own_row_has_no_slot(device: str) -> None:
    mappings = tables(device).compute_slot_mappings(
        tensor(device, 3), tensor(device, 0, 2), tensor(device, 15, 24, dtype=torch.int64), 2
    )
    assert mappings[1].tolist() == [15 * 8 + 7, -1]


@devices
@pytest.mark.parametrize("interleave", [1, 2, 4])
@pytest.mark.parametrize("cp", [2, 3])
def test_each_token_lies_on_one_rank(cp: int, interleave: int, device: str) -> None:
    """Over all ranks every position has one slot, and no two share one."""
    positions = list(range(12))
    found = []
    for rank in range(cp):
        made = tables(device, cp_size=cp, cp_rank=rank, cp_interleave=interleave, dcp_sharded=[True, False])
        mappings = made.compute_slot_mappings(
            tensor(device, 3), tensor(device, 0, 12), tensor(device, *positions, dtype=torch.int64), 12
        )
        expected = [slots_on_paper(0, 3, at, cp, rank, interleave) for at in positions]
        assert mappings[0].tolist() == expected
        assert mappings[1].tolist() == [slots_on_paper(1, 3, at) for at in positions]
        found += [(rank, slot) for slot in expected if slot >= 0]
    assert len(found) == len(set(found)) == 12


@pytest.mark.parametrize(
    ("sizes", "kernel_sizes", "interleave"), [([6, 4], None, 3), ([16], [4], 8)], ids=["of-a-group", "of-the-kernels"]
)
def test_tokens_dealt_out_fill_the_blocks_of_a_rank(
    sizes: list[int], kernel_sizes: list[int] | None, interleave: int
) -> None:
    """Else two tokens would share a slot: of blocks of 4 over 2 ranks, 3 at a time, both 7 and 8 are the fifth's."""
    widths = [4] * len(sizes)
    size = (kernel_sizes or sizes)[-1]
    with pytest.raises(ValueError, match=f"cp_interleave must divide .* {size} over several ranks, got {interleave}"):
        vllm.BlockTables(
            sizes, 2, 8, widths, "cpu", cp_size=2, cp_interleave=interleave, kernel_block_sizes=kernel_sizes
        )
    for fine in ({"dcp_sharded": [True, False]}, {"slot_mapping_enabled": [True, False]}):
        vllm.BlockTables([6, 4], 2, 8, [4, 4], "cpu", cp_size=2, cp_interleave=3, **fine)
    vllm.BlockTables(sizes, 2, 8, widths, "cpu", cp_interleave=interleave, kernel_block_sizes=kernel_sizes)


def test_what_the_host_can_see_to_be_wrong_is_refused_before_anything_is_written() -> None:
    made = tables("cpu")
    before = [buffer.clone() for buffer in made.buffers()]
    with pytest.raises(ValueError, match="cp_rank must be at most 1, got 2"):
        tables("cpu", cp_size=2, cp_rank=2)
    with pytest.raises(ValueError, match="cp_size must be at least 1, got 0"):
        tables("cpu", cp_size=0)
    for row, sentence in ((-1, "req_index must be at least 0, got -1"), (99, r"req_index must be at most \d+, got 99")):
        with pytest.raises(ValueError, match=sentence):
            made.append_block_ids(row, ([1], [2]), True)
    with pytest.raises(ValueError, match="new_block_ids must hold 2 lists, one a group, got 1"):
        made.append_block_ids(0, ([1],), True)
    with pytest.raises(ValueError, match="num_reqs_padded must be at least 2, got 1"):
        made.gather_block_tables(tensor("cpu", 0, 1), 1)
    with pytest.raises(ValueError, match=r"num_tokens_padded must be at most \d+, got 99"):
        made.compute_slot_mappings(tensor("cpu", 0), tensor("cpu", 0, 1), tensor("cpu", 3, dtype=torch.int64), 99)
    made.apply_staged_writes()
    assert all(torch.equal(now, then) for now, then in zip(made.buffers(), before, strict=True))


def test_local_lengths_of_many_ranks_do_not_wrap_round() -> None:
    lengths = torch.tensor([5, 2**31 - 1], dtype=torch.int32)
    assert vllm.get_dcp_local_seq_lens(lengths, 4096, 0, 2**20).tolist() == [5, 2**20]
    assert vllm.get_dcp_local_seq_lens(lengths, 8, torch.tensor([1]), 2**30).tolist() == [0, 2**30 - 1]
    assert vllm.get_dcp_local_seq_lens(lengths[0], 2, torch.tensor([1])).tolist() == 2


@devices
@pytest.mark.parametrize("interleave", [1, 2, 4])
@pytest.mark.parametrize("cp", [1, 2, 3])
def test_local_lengths_count_the_tokens_of_a_rank(cp: int, interleave: int, device: str) -> None:
    lengths = tensor(device, *range(15))
    found = vllm.get_dcp_local_seq_lens(lengths, cp, None, interleave)
    ranks = [[at // interleave % cp for at in range(length)] for length in range(15)]
    assert found.tolist() == [[each.count(rank) for rank in range(cp)] for each in ranks]
    assert found.dtype == torch.int32
    for rank in (0, tensor(device, cp - 1)):
        assert torch.equal(vllm.get_dcp_local_seq_lens(lengths, cp, rank, interleave), found[:, int(rank)])


@devices
def test_smaller_kernel_blocks_hold_the_same_slots(device: str) -> None:
    made = tables(device, kernel_block_sizes=[2, 4])
    assert made.gather_block_tables(tensor(device, 0), 1)[0].tolist() == [[14, 15, 16, 17, 18, 19, 0, 0, 0, 0]]
    positions = tensor(device, *range(12), dtype=torch.int64)
    args = tensor(device, 0), tensor(device, 0, 12), positions, 12
    assert torch.equal(made.compute_slot_mappings(*args), tables(device).compute_slot_mappings(*args))
    with pytest.raises(ValueError, match="kernel_block_sizes must divide block_sizes, got 3 for 4"):
        tables(device, kernel_block_sizes=[3, 8])


def test_widths_are_rounded_to_the_token_alignment() -> None:
    widths = [vllm.get_block_table_width(n, size) for n, size in ((1, 16), (9, 16), (5, 64), (3, 128), (3, 48))]
    assert widths == [8, 16, 6, 3, 8]
    assert vllm.map_to_kernel_blocks([3, 5], 2) == [6, 7, 10, 11]


@devices
@pytest.mark.parametrize("in_place", [True, False], ids=["same-positions", "other-positions"])
def test_draft_step(in_place: bool, device: str) -> None:
    """A step within a block, one into the next, one past the table's width, one at the model's end, and padding."""
    positions = tensor(device, 4, 3, 12, 14, dtype=torch.int64)
    table = torch.tensor([[7, 8, 9], [5, 6, 0], [1, 2, 3], [4, 4, 4]], dtype=torch.int32, device=device)
    lengths, slots = tensor(device, 5, 4, 13, 15), poisoned((7,), torch.int64, device)
    out = positions if in_place else poisoned((4,), torch.int64, device)
    vllm.eagle_step_update_slot_mapping_and_metadata(positions, table, lengths, 4, 15, out, slots, input_batch_size=6)
    assert out.tolist() == [5, 4, 13, 0]
    assert slots.tolist()[:6] == [8 * 4 + 1, 6 * 4, 3 * 4 + 1, -1, -1, -1]
    assert slots[6] == around(slots)[0]  # past input_batch_size nothing is written
    assert lengths.tolist() == [6, 5, 14, 1]
    if not in_place:
        assert positions.tolist() == [4, 3, 12, 14]


@devices
def test_draft_steps_follow_the_slots_of_a_whole_prefill(device: str) -> None:
    made = tables(device)
    table = made.gather_block_tables(tensor(device, 3), 1)[0]
    positions, lengths = tensor(device, 0, dtype=torch.int64), tensor(device, 1)
    slots, seen = torch.full((1,), -1, device=device), []
    for _ in range(15):
        vllm.eagle_step_update_slot_mapping_and_metadata(positions, table, lengths, 4, 100, positions, slots)
        seen.append(int(slots))
    whole = made.compute_slot_mappings(tensor(device, 3), tensor(device, 0, 12), torch.arange(12, device=device), 12)
    assert seen[:11] == whole[0, 1:].tolist()
    assert seen[11:] == [13 * 4 + i for i in range(4)] and int(lengths) == 16


@devices
def test_an_empty_batch_touches_nothing_but_padding(device: str) -> None:
    made, none = tables(device), torch.empty(0, dtype=torch.int64, device=device)
    assert made.compute_slot_mappings(none, tensor(device, 0), none, 3).tolist() == [[-1] * 3] * 2
    assert made.gather_block_tables(none, 1)[0].tolist() == [[0] * 5]
    vllm.eagle_step_update_slot_mapping_and_metadata(none, made.pool[0, :0], none.int(), 4, 9, none, none)


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be traced")
def test_a_compiled_step_holds_the_calls_whole() -> None:
    made = tables("cpu", cp_size=2, cp_interleave=2)

    def step(rows: Tensor, bounds: Tensor, positions: Tensor, lengths: Tensor, slots: Tensor) -> list[Tensor]:
        blocks = made.gather_block_tables(rows, rows.shape[0])
        mappings = made.compute_slot_mappings(rows, bounds, positions, positions.shape[0])
        last = positions[: rows.shape[0]].clone()
        vllm.eagle_step_update_slot_mapping_and_metadata(last, blocks[0], lengths, 4, 99, last, slots)
        return [*blocks, mappings, last]

    given = tensor("cpu", 3, 0, 2), tensor("cpu", 0, 2, 3, 5), tensor("cpu", 1, 2, 3, 0, 1, dtype=torch.int64)
    states = [(tensor("cpu", 4, 5, 6), torch.full((3,), KEPT)) for _ in range(2)]
    eager = [out.clone() for out in step(*given, *states[0])]
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(*given, *states[1])
    assert all(torch.equal(a, b) for a, b in zip([*eager, *states[0]], [*found, *states[1]], strict=True))
