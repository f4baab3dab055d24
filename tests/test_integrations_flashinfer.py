"""FlashInfer's decode arguments: their names, dtypes, strides and alignment, and what they hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import compiled_kv as ckv
from compiled_kv.integrations import flashinfer
from compiled_kv.peers.csr import csr_tables
from tests.cases import DEVICES, pool_of_pages
from tests.conftest import INTERPRETED
from tests.harness import around, poisoned
from tests.peer_calls import Draw

PS, KEPT = 4, 0x7EADBEEF
POOL, BLOCKS = pool_of_pages(5, 7, PS)
ROWS, LENS = [3, 1, 4], [5, 0, 22]
LAYOUT = ckv.KVLayout(PS, 28)
INDICES = [*BLOCKS[3, :2].tolist(), *BLOCKS[4, :6].tolist()]

devices = pytest.mark.parametrize("device", DEVICES)
dtypes = pytest.mark.parametrize(
    "dtypes", [(torch.int32, torch.int64), (torch.int64, torch.int32)], ids=["32-64", "64-32"]
)


def batch(device: str, dtypes: tuple[torch.dtype, torch.dtype]) -> tuple[Tensor, Tensor, Tensor]:
    rows, lens = torch.tensor(ROWS, dtype=dtypes[0]), torch.tensor(LENS, dtype=dtypes[1])
    return POOL.to(device, dtypes[0]), rows.to(device), lens.to(device)


@devices
@dtypes
def test_plan_takes_the_pages_of_each_row_in_turn(dtypes: Any, device: str) -> None:
    given = flashinfer.plan_arguments(*batch(device, dtypes), layout=LAYOUT)
    assert [*given] == ["indptr", "indices", "last_page_len", "page_size"]
    assert {given[name].dtype for name in ("indptr", "indices", "last_page_len")} == {torch.int32}
    assert (given["indptr"].tolist(), given["last_page_len"].tolist()) == ([0, 2, 2, 8], [1, 0, 2])
    assert given["indices"].tolist() == INDICES + [0] * (3 * 7 - 8)
    lengths = flashinfer.get_seq_lens(given["indptr"], given["last_page_len"], given["page_size"])
    assert lengths.tolist() == LENS


@devices
def test_plan_fills_persistent_buffers(device: str) -> None:
    """Padding rows are empty, and what no row owns is cleared for the replay after."""
    out = tuple(poisoned((n,), torch.int32, device) for n in (4, 10, 3))
    pool, rows, lens = batch(device, (torch.int32, torch.int32))
    given = flashinfer.plan_arguments(pool, rows, lens, layout=LAYOUT, num_reqs=torch.tensor(1, device=device), out=out)
    assert all(a is b for a, b in zip(list(given.values())[:3], out, strict=True))
    assert [part.tolist() for part in out] == [[0, 2, 2, 2], INDICES[:2] + [0] * 8, [1, 0, 0]]


@devices
def test_rows_beyond_the_capacity_are_cut(device: str) -> None:
    given = flashinfer.plan_arguments(*batch(device, (torch.int64, torch.int64)), layout=LAYOUT, capacity=5)
    assert given["indptr"].tolist() == [0, 2, 2, 5]
    assert given["indices"].tolist() == INDICES[:5]


def test_the_mla_plan_takes_the_same_tables() -> None:
    made, layout = metadata(ckv.KVLayout(4, 24)), ckv.KVLayout(4, 24)
    tables = csr_tables(torch.arange(5 * 24).view(5, 24), torch.tensor(ROWS), made.cache_seqlens, layout=layout)
    given = flashinfer.mla_plan_arguments(made, tables, layout=layout)
    assert [*given] == ["qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "page_size"]
    assert (given["qo_indptr"].tolist(), given["kv_len_arr"].tolist(), given["page_size"]) == ([0, 1, 2, 3], LENS, 4)
    assert given["kv_indptr"] is tables[0] and given["kv_indices"][:8].tolist() == [18, 19, *range(24, 30)]


def test_indices_that_flashinfer_does_not_read_are_refused_before_anything_is_written() -> None:
    made, out = metadata(LAYOUT), tuple(poisoned((n,), torch.int32, "cpu") for n in (4, 10, 3))
    wide = (out[0], out[1].long(), out[2])
    for call in (
        lambda tables: flashinfer.plan_arguments(*batch("cpu", (torch.int32, torch.int32)), layout=LAYOUT, out=tables),
        lambda tables: flashinfer.mla_plan_arguments(made, tables, layout=LAYOUT),
    ):
        with pytest.raises(TypeError, match="kv_indices must be int32, got int64"):
            call(wide)
        with pytest.raises((TypeError, ValueError), match="kv_indptr, kv_indices, kv_last_page_len"):
            call(out[:2])
    assert {*around(out[0]).tolist(), *around(out[2]).tolist()} == {KEPT}


def test_seq_lens_are_those_of_flashinfers_own_rule() -> None:
    found = flashinfer.get_seq_lens(torch.tensor([0, 3, 3, 4]), torch.tensor([16, 0, 1]), 16)
    assert found.tolist() == [48, 0, 1]


def tokens_on_paper(bounds: list[int], lengths: list[int], nnz: int, stale: list[int]) -> tuple[list[int], list[int]]:
    """The new tokens are the last ones of their request; behind them there is no request."""
    found = [
        (row, length - (end - token))
        for row, (begin, end, length) in enumerate(zip(bounds, bounds[1:], lengths, strict=False))
        for token in range(begin, end)
    ]
    found = [*found, *((-1, stale[token]) for token in range(len(found), nnz))][:nnz]
    return [row for row, _ in found], [place for _, place in found]


@devices
@pytest.mark.parametrize("seed", range(12))
def test_each_new_token_knows_its_request_and_position(seed: int, device: str) -> None:
    """Rows without new tokens, fewer entries than tokens and more; into new tensors, the caller's, and one of each."""
    draw = Draw(seed, device)
    counts = [draw.randrange(4) for _ in range(draw.choice((0, 1, 3, 6)))]
    bounds = [sum(counts[:i]) for i in range(len(counts) + 1)]
    lengths = draw.ints(4, 90, len(counts), bad=0)
    nnz = max(sum(counts) + draw.choice((-1, 0, 3)), 0)
    for kept in ((False, False), (True, True), (False, True), (True, False)):
        out = [poisoned((nnz,), torch.int32, device) if keep else None for keep in kept]
        found = flashinfer.get_batch_indices_positions(draw.plain(bounds), lengths, nnz, *out)
        wanted = tokens_on_paper(bounds, lengths.tolist(), nnz, [KEPT if kept[1] else 0] * nnz)
        assert [part.tolist() for part in found] == [*wanted]
        for mine, part in zip(out, found, strict=True):
            assert part.dtype == torch.int32 and part.shape == (nnz,)
            if mine is not None:
                assert mine is part
                assert (around(mine) != KEPT).sum() == sum(value != KEPT for value in mine.tolist())


def test_tokens_to_append_are_refused_before_anything_is_written() -> None:
    bounds, lengths, out = torch.tensor([0, 2, 3]), torch.tensor([5, 6]), poisoned((4,), torch.int32, "cpu")
    for given, error, sentence in (
        ((bounds[:2], lengths, 4, out), ValueError, r"append_indptr must be \[B\+1\] with B\+1=3, got \[2\]"),
        ((bounds.float(), lengths, 4, out), TypeError, "append_indptr must be int32 or int64, got float32"),
        ((bounds, lengths, -1, out), ValueError, "nnz must be at least 0, got -1"),
        ((bounds, lengths, 3, out), ValueError, r"batch_indices must be \[nnz\] with nnz=3, got \[4\]"),
        ((bounds, lengths, 4, out, out.long()), TypeError, "positions must be int32, got int64"),
        ((bounds, lengths, 4, out, out), ValueError, "must not overlap"),
    ):
        with pytest.raises(error, match=sentence):
            flashinfer.get_batch_indices_positions(*given)
    assert {*around(out).tolist()} == {KEPT}
    with pytest.raises(ValueError, match=r"kv_indptr must be \[B\+1\] with B\+1=3, got \[2\]"):
        flashinfer.get_seq_lens(bounds[:2], lengths, 16)
    with pytest.raises(ValueError, match="page_size must be at least 1, got 0"):
        flashinfer.get_seq_lens(bounds, lengths, 0)


@pytest.mark.skipif(INTERPRETED, reason="traced as for a real device")
def test_the_auditor_finds_nothing_in_a_step_that_appends() -> None:
    pytest.importorskip("triton")

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("batch_indices", "positions"):
                self.register_buffer(name, torch.full((8,), KEPT, dtype=torch.int32), persistent=False)

        def forward(self, append_indptr: Tensor, seq_lens: Tensor, last_page_len: Tensor) -> tuple[Tensor, ...]:
            made = flashinfer.get_batch_indices_positions(append_indptr, seq_lens, 8)
            kept = flashinfer.get_batch_indices_positions(
                append_indptr, seq_lens, 8, self.batch_indices, self.positions
            )
            return *made, *(part + 0 for part in kept), flashinfer.get_seq_lens(append_indptr, last_page_len, 4)

    given = torch.tensor([0, 2, 2, 5], dtype=torch.int32), torch.tensor([7, 4, 3]), torch.tensor([3, 0, 1])
    step = Step()
    report = ckv.audit(step, *given, target="cuda:sm_90")
    assert report.ok and report.findings == (), str(report)
    eager = step(*given)
    assert [part.tolist() for part in torch.compile(step, fullgraph=True, backend="aot_eager")(*given)] == [
        part.tolist() for part in eager
    ]


def metadata(layout: ckv.KVLayout, **options: Any) -> ckv.DecodeMetadata:
    pool = torch.arange(5 * layout.max_seqlen_k).view(5, -1)
    return ckv.decode_metadata(pool, torch.tensor(ROWS), torch.tensor(LENS), layout=layout, **options)


def test_trtllm_decode_takes_bounds_from_the_layout() -> None:
    made = metadata(LAYOUT, full_to_swa=torch.arange(400).flip(0))
    given = flashinfer.trtllm_decode_arguments(made, layout=LAYOUT)
    assert [*given] == ["block_tables", "seq_lens", "max_seq_len"]
    assert given["block_tables"] is made.page_table and given["seq_lens"] is made.cache_seqlens
    assert given["block_tables"].dtype == given["seq_lens"].dtype == torch.int32
    assert given["max_seq_len"] == 28 and type(given["max_seq_len"]) is int
    assert flashinfer.trtllm_decode_arguments(made, layout=LAYOUT, swa=True)["block_tables"] is made.swa_page_table
    with pytest.raises(ValueError, match="swa_page_table must be a tensor where swa is True, got None"):
        flashinfer.trtllm_decode_arguments(metadata(LAYOUT), layout=LAYOUT, swa=True)
    for name, swa in (("page_table", False), ("swa_page_table", True)):
        apart = made._replace(**{name: torch.zeros(3, 9, dtype=torch.int32)[:, :7]})
        with pytest.raises(ValueError, match=rf"metadata.{name} must be contiguous, got strides \[9, 1\]"):
            flashinfer.trtllm_decode_arguments(apart, layout=LAYOUT, swa=swa)


@pytest.mark.parametrize(("page_size", "tokens", "fits"), [(32, 256, True), (32, 160, False), (64, 192, False)])
def test_trtllm_mla_decode_asks_for_rows_of_whole_128_tokens(page_size: int, tokens: int, fits: bool) -> None:
    layout = ckv.KVLayout(page_size, tokens)
    if fits:
        given = flashinfer.trtllm_mla_decode_arguments(metadata(layout), layout=layout)
        assert given["block_tables"].shape[1] * page_size % 128 == 0
    else:
        with pytest.raises(ValueError, match=r"must have a multiple of \d columns"):
            flashinfer.trtllm_mla_decode_arguments(metadata(layout), layout=layout)
