"""TensorRT-LLM's names: tables from ragged blocks and back, what each writes, and that nobody reads the host."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import compiled_kv as ckv
from compiled_kv.integrations import tensorrt_llm
from tests.cases import DEVICES
from tests.conftest import INTERPRETED
from tests.harness import POISON, assert_untouched, is_clean_around, poisoned
from tests.peer_calls import Draw

KEPT = POISON[torch.int32]

devices = pytest.mark.parametrize("device", DEVICES)
seeds = pytest.mark.parametrize("seed", range(15))


def block(value: int, dtype: torch.dtype = torch.int32) -> int:
    return value if 0 <= value <= torch.iinfo(dtype).max else -1


@devices
@seeds
def test_a_row_holds_its_sequences_blocks_and_then_null_blocks(seed: int, device: str) -> None:
    """Sequences without blocks, wider than the table, and past the end of the ragged blocks; rows behind the batch."""
    draw = Draw(seed, device)
    counts = [draw.randrange(5) for _ in range(draw.choice((0, 1, 3, 7)))]
    bounds = [sum(counts[:i]) for i in range(len(counts) + 1)]
    ragged = draw.ints(0, 90, max(sum(counts) + draw.choice((-2, 0, 3)), 0))
    table = poisoned((len(counts) + draw.randrange(3), draw.randrange(6)), torch.int32, device)
    wanted, blocks, width = table.tolist(), ragged.tolist(), table.shape[1]
    tensorrt_llm.ragged_to_block_table(ragged, draw.plain(bounds + [99] * draw.randrange(2)), table, len(counts))
    for b, (begin, end) in enumerate(pairwise(bounds)):
        row = [block(blocks[at]) if at < len(blocks) else -1 for at in range(begin, end)]
        wanted[b] = (row + [0] * width)[:width]
    assert table.tolist() == wanted and is_clean_around(table)


@devices
@seeds
def test_the_blocks_of_all_rows_one_after_the_other(seed: int, device: str) -> None:
    """Counts below 0 and above the width, and buffers that are longer, or too short."""
    draw = Draw(seed, device)
    rows, width = draw.choice((0, 1, 3, 7)), draw.randrange(5)
    table = draw.ints(0, 90, rows + draw.randrange(2), width)
    num_blocks = draw.ints(-1, width + 2, rows + draw.randrange(2))
    counts = [min(max(count, 0), width) for count in num_blocks.tolist()[:rows]]
    room = max(sum(counts) + draw.choice((-2, 0, 3)), 0)
    cache_loc = poisoned((room,), draw.choice((torch.int32, torch.int64)), device)
    sums = poisoned((rows + 1 + draw.randrange(2),), torch.int32, device)
    kept, bounds = cache_loc.tolist(), sums.tolist()
    total = tensorrt_llm.block_table_to_ragged(table, num_blocks, cache_loc, sums, rows)
    held = [value for line, count in zip(table.tolist(), counts, strict=False) for value in line[:count]]
    ragged = [block(value, cache_loc.dtype) for value in held]
    if rows:
        bounds[: rows + 1] = [min(sum(counts[:i]), room) for i in range(rows + 1)]
    assert cache_loc.tolist() == (ragged + kept[len(ragged) :])[:room]
    assert sums.tolist() == bounds
    assert isinstance(total, Tensor) and total.dtype == torch.int32 and total.device == table.device
    assert total.tolist() == (bounds[rows] if rows else 0)
    assert is_clean_around(cache_loc) and is_clean_around(sums)


@devices
def test_rows_of_one_kind_in_block_offsets_are_a_table(device: str) -> None:
    offsets = torch.full((1, 3, 2, 4), KEPT, dtype=torch.int32, device=device)
    bounds = torch.tensor([0, 2, 5], device=device)
    tensorrt_llm.ragged_to_block_table_triton(torch.arange(1, 6, device=device), bounds, offsets[0, :, 0], 2)
    assert offsets[0, :2, 0].tolist() == [[1, 2, 0, 0], [3, 4, 5, 0]]
    assert {*offsets[0, :, 1].flatten().tolist(), *offsets[0, 2].flatten().tolist()} == {KEPT}


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def out(*shape: int) -> Tensor:
    return poisoned(shape, torch.int32, "cpu")


THERE, BACK = "ragged_to_block_table", "block_table_to_ragged"
REFUSED: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    (THERE, (ints(4), ints(3), out(2, 4), 3), ValueError, "num_sequences must be at most 2, got 3"),
    (THERE, (ints(4), ints(3), out(4, 4), 3), ValueError, "the length of cu_num_blocks must be at least 4, got 3"),
    (THERE, (ints(4).float(), ints(3), out(2, 4), 2), TypeError, "cache_loc must be int32 or int64, got float32"),
    (THERE, (ints(4), ints(3), out(2, 4).long(), 2), TypeError, "block_table must be int32, got int64"),
    (THERE, (ints(4), ints(3), out(2, 4).t(), 2), ValueError, "block_table must have unit column stride"),
    (BACK, (ints(2, 4), ints(2), out(6), out(3), 3), ValueError, "num_sequences must be at most 2, got 3"),
    (BACK, (ints(3, 4), ints(2), out(6), out(4), 3), ValueError, "the length of num_blocks must be at least 3, got 2"),
    (BACK, (ints(3, 4), ints(3), out(6), out(3), 3), ValueError, "the length of cu_num_blocks must be at least 4"),
    (BACK, (ints(2, 4), ints(2), out(6), ints(3), 2), TypeError, "cu_num_blocks must be int32, got int64"),
]


@pytest.mark.parametrize(("name", "given", "error", "sentence"), REFUSED, ids=[case[3] for case in REFUSED])
def test_bad_arguments_are_named_before_anything_is_written(
    name: str, given: tuple[Any, ...], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        getattr(tensorrt_llm, name)(*given)
    assert_untouched(given)


def test_outputs_that_overlap_are_refused() -> None:
    shared = torch.zeros(9, dtype=torch.int32)
    with pytest.raises(ValueError, match="cache_loc must not overlap cu_num_blocks"):
        tensorrt_llm.block_table_to_ragged(ints(2, 4), ints(2), shared[:6], shared[4:], 2)
    with pytest.raises(ValueError, match="block_table must not overlap cache_loc"):
        tensorrt_llm.ragged_to_block_table(shared, ints(3), shared[:8].view(2, 4), 2)


@pytest.mark.skipif(INTERPRETED, reason="traced as for a real device")
def test_the_auditor_finds_nothing_in_a_step_with_buffers_for_a_larger_batch() -> None:
    pytest.importorskip("triton")

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, shape in {"table": (4, 4), "cache_loc": (8,), "sums": (5,)}.items():
                self.register_buffer(name, torch.full(shape, KEPT, dtype=torch.int32), persistent=False)

        def forward(self, ragged: Tensor, bounds: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
            rows = counts.shape[0]
            tensorrt_llm.ragged_to_block_table(ragged, bounds, self.table, rows)
            total = tensorrt_llm.block_table_to_ragged(self.table, counts, self.cache_loc, self.sums, rows)
            return self.table + 0, self.cache_loc + 0, self.sums + 0, total

    given = torch.arange(1, 7), torch.tensor([0, 2, 2, 6], dtype=torch.int32), torch.tensor([1, 0, 4])
    step = Step()
    report = ckv.audit(step, *given, target="cuda:sm_90")
    assert report.ok and report.findings == (), str(report)
    assert report.launches == {"csr_kernel": 1}
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(*given)
    table, cache_loc, sums, total = (part.tolist() for part in found)
    assert table == [[1, 2, 0, 0], [0] * 4, [3, 4, 5, 6], [KEPT] * 4]
    assert (cache_loc, sums, total) == ([1, 3, 4, 5, 6, KEPT, KEPT, KEPT], [0, 1, 1, 5, KEPT], 5)
