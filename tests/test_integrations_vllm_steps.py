"""vLLM's smaller functions: positions and lengths, slots of pooled and compressed caches, tables in other forms."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import compiled_kv as ckv
from compiled_kv.integrations import vllm
from tests.cases import DEVICES
from tests.conftest import INTERPRETED
from tests.harness import POISON, assert_untouched, is_clean_around, poisoned
from tests.peer_calls import Draw

KEPT, KEPT64 = POISON[torch.int32], POISON[torch.int64]

devices = pytest.mark.parametrize("device", DEVICES)
seeds = pytest.mark.parametrize("seed", range(10))


class Batch:
    """Requests with up to three new tokens each, bounds that may be longer than the batch, and tokens behind it."""

    def __init__(self, draw: Draw) -> None:
        self.counts = [draw.randrange(4) for _ in range(draw.choice((0, 1, 3, 7)))]
        self.size, self.tokens = len(self.counts), sum(self.counts)
        self.bounds = [sum(self.counts[:i]) for i in range(self.size + 1)]
        self.query_start_loc = draw.plain(self.bounds + [99] * draw.choice((0, 2)))
        self.request = [b for b, count in enumerate(self.counts) for _ in range(count)]
        self.room = self.tokens + draw.choice((0, 3))


@devices
@seeds
def test_positions_and_lengths_of_a_step(seed: int, device: str) -> None:
    """A request of -1 or outside the rows is padding; what lies behind the last token is kept, behind the batch 0."""
    draw = Draw(seed, device)
    batch, rows = Batch(draw), draw.randrange(1, 5)
    mapping, computed = draw.ints(-1, rows, batch.size), draw.ints(-2, 50, rows, bad=0)
    pos = poisoned((batch.room,), torch.int64, device)
    seq_lens = poisoned((batch.size + draw.randrange(3),), torch.int32, device)
    vllm.prepare_pos_seq_lens(mapping, batch.query_start_loc, computed, pos, seq_lens)
    lengths, positions = [0] * len(seq_lens), [KEPT64] * batch.room
    for b, row in enumerate(mapping.tolist()):
        if 0 <= row < rows:
            done = max(computed.tolist()[row], 0)
            lengths[b] = done + batch.counts[b]
            positions[batch.bounds[b] : batch.bounds[b + 1]] = [*range(done, done + batch.counts[b])]
    assert seq_lens.tolist() == lengths and pos.tolist() == positions
    assert is_clean_around(pos) and is_clean_around(seq_lens)


@devices
@seeds
@pytest.mark.parametrize("into", ["new", "out", "itself"])
def test_a_requests_tail_goes_round_in_its_own_block(into: str, seed: int, device: str) -> None:
    draw = Draw(seed, device)
    batch, kpool = Batch(draw), draw.choice((1, 3, 4))
    table = draw.ints(0, 6, batch.size + draw.randrange(2), draw.choice((1, 2)))  # a block in six is the null block
    actual = draw.choice((batch.tokens, batch.room))
    positions = draw.ints(0, 40, batch.room, bad=0.05)
    slots = poisoned((batch.room,), torch.int64, device)
    slots.copy_(torch.arange(100, 100 + batch.room))
    given = slots if into == "itself" else draw.plain(slots.tolist())
    out = {"new": None, "out": poisoned((batch.room,), torch.int64, device), "itself": slots}[into]
    found = vllm.compute_kpool_tail_slot_mapping(
        given, table, batch.query_start_loc, positions, actual, batch.size, kpool, out=out
    )
    wanted = list(range(100, 100 + batch.room))
    for token in range(actual):
        # Behind the last bound a token is the last request's.
        request = batch.request[token] if token < batch.tokens else batch.size - 1
        own = table.tolist()[request][0] if request >= 0 else -1
        at = positions.tolist()[token]
        wanted[token] = own * kpool + at % kpool if 0 < own < 2**31 and at >= 0 else vllm.PAD_SLOT_ID
    assert found.tolist() == wanted and found.dtype == torch.int64
    assert out is None or (found is out and is_clean_around(out))


@devices
@seeds
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_compressed_cache_takes_the_last_token_of_each_group(ranks: int, seed: int, device: str) -> None:
    draw = Draw(seed, device)
    batch, size, ratio, interleave = Batch(draw), draw.choice((1, 4)), draw.choice((1, 2, 4)), draw.choice((1, 2))
    lengths = draw.ints(0, 60, batch.size, bad=0)
    table = draw.ints(0, 90, batch.size, draw.randrange(9))
    slots = draw.ints(-1, 3, batch.room + draw.randrange(2))
    found = vllm.get_compressed_slot_mapping(
        batch.room, slots, batch.query_start_loc, lengths, table, size, ratio, ranks, interleave
    )
    wanted = [vllm.PAD_SLOT_ID] * batch.room
    for token, request in enumerate(batch.request):
        at = lengths.tolist()[request] - batch.bounds[request + 1] + token
        if at < 0 or (at + 1) % ratio or slots.tolist()[token] < 0:
            continue
        entry = (at // (interleave * ranks) * interleave + at % interleave) // ratio
        line = table.tolist()[request]
        if entry // size < len(line) and 0 <= line[entry // size] < 2**31:
            wanted[token] = line[entry // size] * size + entry % size
    assert found.tolist() == wanted and found.dtype == torch.int64


@devices
@seeds
def test_state_blocks_begin_at_the_last_tokens(seed: int, device: str) -> None:
    """A request without tokens takes its first blocks; beyond the row there are null blocks."""
    draw = Draw(seed, device)
    batch, width, drafts = draw.choice((0, 1, 4)), draw.randrange(6), draw.randrange(3)
    spec = SimpleNamespace(block_size=draw.choice((1, 4)), num_speculative_blocks=drafts)
    table, lengths = draw.ints(1, 90, batch, width, bad=0), draw.ints(0, 20, batch)
    found = vllm.mamba_get_block_table_tensor(table, lengths, spec, "align")
    wanted = []
    for line, length in zip(table.tolist(), lengths.tolist(), strict=True):
        first = max(max(length, 0) - 1, 0) // spec.block_size
        wanted.append([line[j] if j < width else 0 for j in range(first, first + drafts + 1)])
    assert found.tolist() == wanted and found.dtype == table.dtype
    assert vllm.mamba_get_block_table_tensor(table, lengths, spec, "none") is table


@devices
@seeds
def test_an_index_for_each_token(seed: int, device: str) -> None:
    """Nothing but a row's own entries is written, and nothing past its pages."""
    draw = Draw(seed, device)
    batch, page_size, dtype = Batch(draw), draw.choice((1, 2, 4)), draw.choice((torch.int32, torch.int64))
    table = draw.ints(0, 90, batch.size, draw.randrange(3))
    out = poisoned((max(batch.room - draw.choice((0, 4)), 0),), dtype, device)
    found = vllm.expand_page_indices(table, draw.plain(batch.bounds), out, page_size)
    wanted = [POISON[dtype]] * len(out)
    for token, request in enumerate(batch.request[: len(out)]):
        column, place = divmod(token - batch.bounds[request], page_size)
        line = table.tolist()[request]
        if column < len(line):
            index = line[column] * page_size + place if 0 <= line[column] < 2**31 else -1
            wanted[token] = index if index < 2**31 else -1
    assert found is out and found.tolist() == wanted and is_clean_around(out)


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def out(size: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return poisoned((size,), dtype, "cpu")


SPEC = SimpleNamespace(block_size=0, num_speculative_blocks=1)
REFUSED: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("prepare_pos_seq_lens", (ints(3), ints(3), ints(5), out(4), out(3, torch.int32)), ValueError,
     "the length of query_start_loc must be at least 4, got 3"),
    ("prepare_pos_seq_lens", (ints(3), ints(4), ints(5), out(4), out(2, torch.int32)), ValueError,
     "seq_lens must have at least 3 entries, got 2"),
    ("prepare_pos_seq_lens", (ints(3), ints(4), ints(5), out(4), out(3)), TypeError,
     "seq_lens must be int32, got int64"),
    ("compute_kpool_tail_slot_mapping", (ints(4), ints(2, 1), ints(4), ints(4), 4, 3, 2, out(4)), ValueError,
     "num_reqs must be at most 2, got 3"),
    ("compute_kpool_tail_slot_mapping", (ints(4), ints(2, 1), ints(3), ints(3), 4, 2, 2, out(4)), ValueError,
     "num_actual_tokens must be at most 3, got 4"),
    ("compute_kpool_tail_slot_mapping", (ints(4), ints(2, 1), ints(3), ints(4), 4, 2, 0, out(4)), ValueError,
     "kpool must be at least 1, got 0"),
    ("get_compressed_slot_mapping", (5, ints(4), ints(3), ints(2), ints(2, 1), 4, 2), ValueError,
     "num_tokens must be at most 4, got 5"),
    ("get_compressed_slot_mapping", (4, ints(4), ints(3), ints(2), ints(3, 1), 4, 2), ValueError,
     r"block_table must be \[B, W\] with B=2, got \[3, 1\]"),
    ("get_compressed_slot_mapping", (4, ints(4), ints(3), ints(2), ints(2, 1), 4, 0), ValueError,
     "compress_ratio must be at least 1, got 0"),
    ("mamba_get_block_table_tensor", (ints(2, 1), ints(2), SPEC, "some"), ValueError,
     "mamba_cache_mode must be 'align', 'none' or 'all', got 'some'"),
    ("mamba_get_block_table_tensor", (ints(2, 1), ints(2), SPEC, "align"), ValueError,
     "kv_cache_spec.block_size must be at least 1, got 0"),
    ("expand_page_indices", (ints(2, 1), ints(2), out(4), 2), ValueError,
     r"cu_num_tokens must be \[B\+1\] with B\+1=3"),
    ("expand_page_indices", (ints(2, 1), ints(3), out(4).float(), 2), TypeError, "out must be int32 or int64"),
    ("eagle_step_update_slot_mapping_and_metadata", (ints(1), ints(3, 2), ints(3).int(), 4, 20, out(3), out(3)),
     ValueError, r"out_clamped_positions must be \[B\] with B=1, got \[3\]"),
    ("eagle_step_update_slot_mapping_and_metadata", (ints(3), ints(2, 2), ints(3).int(), 4, 20, out(3), out(3)),
     ValueError, r"block_table_tensor must be \[B, W\] with B=3, got \[2, 2\]"),
    ("eagle_step_update_slot_mapping_and_metadata", (ints(3), ints(3, 2), ints(3).int(), 4, 20, out(3), out(3), 4),
     ValueError, "input_batch_size must be at most 3, got 4"),
    ("eagle_step_update_slot_mapping_and_metadata", (ints(3).int(), ints(3, 2), ints(3).int(), 4, 20, out(3), out(3)),
     TypeError, "positions_1d must be int64, got int32"),
    ("get_dcp_local_seq_lens", (ints(2).float(), 2, 0), TypeError, "seq_lens must be int32 or int64, got float32"),
    ("get_dcp_local_seq_lens", (ints(2), 2, ints(2)), ValueError, r"dcp_rank must be 0-d or \[1\], got \[2\]"),
    ("get_dcp_local_seq_lens", (ints(2), 2, 2), ValueError, "dcp_rank must be at most 1, got 2"),
    ("get_dcp_local_seq_lens", (ints(2), 2, 0, 0), ValueError, "interleave must be at least 1, got 0"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "given", "error", "sentence"), REFUSED, ids=[f"{c[0]}-{i}" for i, c in enumerate(REFUSED)]
)
def test_bad_arguments_are_named_before_anything_is_written(
    name: str, given: tuple[Any, ...], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        getattr(vllm, name)(*given)
    assert_untouched(given)


@pytest.mark.skipif(INTERPRETED, reason="traced as for a real device")
def test_the_auditor_finds_nothing_in_a_step_of_them_all() -> None:
    pytest.importorskip("triton")
    spec = SimpleNamespace(block_size=4, num_speculative_blocks=1)

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("pos", torch.full((8,), KEPT64), persistent=False)
            self.register_buffer("tail", torch.full((8,), KEPT64), persistent=False)
            self.register_buffer("seq_lens", torch.full((4,), KEPT, dtype=torch.int32), persistent=False)
            self.register_buffer("indices", torch.full((8,), KEPT, dtype=torch.int32), persistent=False)

        def forward(self, mapping: Tensor, bounds: Tensor, computed: Tensor, table: Tensor) -> tuple[Tensor, ...]:
            vllm.prepare_pos_seq_lens(mapping, bounds, computed, self.pos, self.seq_lens)
            slots = ckv.slot_mapping(None, mapping, self.pos, block_table=table, page_size=4, cu_seqlens_q=bounds)
            vllm.compute_kpool_tail_slot_mapping(slots, table, bounds, self.pos, 8, mapping.shape[0], 2, out=self.tail)
            lengths = self.seq_lens[: mapping.shape[0]]
            vllm.expand_page_indices(table, bounds, self.indices, 4)
            return (
                self.pos + 0, self.seq_lens + 0, self.tail + 0, self.indices + 0,
                vllm.get_compressed_slot_mapping(8, slots, bounds, lengths, table, 4, 2),
                vllm.mamba_get_block_table_tensor(table, lengths, spec, "align"),
                vllm.get_dcp_local_seq_lens(lengths, 2),
            )  # fmt: skip

    given = (
        torch.tensor([2, 0, 1]), torch.tensor([0, 2, 2, 5], dtype=torch.int32), torch.tensor([7, 3, 0]),
        torch.tensor([[4, 5, 6], [7, 8, 9], [1, 2, 3]], dtype=torch.int32),
    )  # fmt: skip
    step = Step()
    report = ckv.audit(step, *given, target="cuda:sm_90")
    assert report.ok and report.findings == (), str(report)
    eager = [part.clone() for part in step(*given)]
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(*given)
    assert [part.tolist() for part in found] == [part.tolist() for part in eager]
