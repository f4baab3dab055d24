"""SGLang's names: which columns are written, kept or zeroed, what stands for none, and which batches touch nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_kv.integrations import sglang
from tests.cases import DEVICES, pool_of_pages
from tests.conftest import INTERPRETED
from tests.harness import around, poisoned

PS, WIDTH, KEPT = 4, 7, 0x7EADBEEF
POOL, _ = pool_of_pages(5, WIDTH, PS)
ROWS, LENS = [3, 1, 4], [5, 0, 22]
TOKEN_MAP = (torch.arange(160) * 3 + 8) % 200
TOKEN_MAP[::9] = -1

devices = pytest.mark.parametrize("device", DEVICES)
dtypes = pytest.mark.parametrize(
    "dtypes", [(torch.int32, torch.int64), (torch.int64, torch.int32)], ids=["32-64", "64-32"]
)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def slots_of(row: int, length: int, start: int = 0) -> list[int]:
    """The slot at the head of each page of `length` tokens from `start` on."""
    return [POOL.tolist()[row][start + column * PS] for column in range(ceil_div(length, PS))]


def line(values: Sequence[int], width: int = WIDTH, tail: int = KEPT) -> list[int]:
    return [*values, *[tail] * (width - len(values))]


def pages(length: int, row: int) -> list[int]:
    return [slot // PS for slot in slots_of(row, length)]


def swa_pages(length: int, row: int) -> list[int]:
    return [-1 if mapped(slot) < 0 else mapped(slot) // PS for slot in slots_of(row, length)]


def mapped(slot: int) -> int:
    return -1 if slot < 0 else TOKEN_MAP.tolist()[slot]


def table(device: str, rows: int = 3, width: int = WIDTH) -> Tensor:
    return poisoned((rows, width), torch.int32, device)


def vector(device: str, size: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return poisoned((size,), dtype, device)


def is_clean_around(out: Tensor) -> bool:
    """Whether the buffer that `out` lies in holds poison everywhere else."""
    whole = around(out).clone()
    whole.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(whole[0])
    return bool((whole == whole[0]).all())


def batch(device: str, first: torch.dtype, second: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Pool, rows and lengths."""
    rows, lens = torch.tensor(ROWS, dtype=first), torch.tensor(LENS, dtype=second)
    return POOL.to(device, first), rows.to(device), lens.to(device)


@devices
@dtypes
def test_page_table_writes_the_live_columns_and_keeps_the_others(dtypes: Any, device: str) -> None:
    pool, rows, lens = batch(device, *dtypes)
    full, swa = table(device), table(device)
    sglang.build_trtllm_mha_page_table(pool, rows, lens, full, PS, swa, TOKEN_MAP.to(device, dtypes[1]))
    assert full.tolist() == [line(pages(n, r)) for n, r in zip(LENS, ROWS)]
    assert swa.tolist() == [line(swa_pages(n, r)) for n, r in zip(LENS, ROWS)]
    assert (swa == -1).any() and is_clean_around(full) and is_clean_around(swa)
    alone = table(device)
    sglang.build_trtllm_mha_page_table(pool, rows, lens, alone, PS)
    assert torch.equal(alone, full)


@devices
@dtypes
@pytest.mark.parametrize("start", [None, [0, 3, 4]], ids=["no-start", "start"])
def test_flashmla_indices_begin_at_the_start_offset(start: list[int] | None, dtypes: Any, device: str) -> None:
    pool, rows, lens = batch(device, *dtypes)
    out = table(device)
    starts = None if start is None else torch.tensor(start, dtype=dtypes[1], device=device)
    grid = (3, sglang.get_num_kv_index_blocks_flashmla(WIDTH, PS))
    kernel = sglang.create_flashmla_kv_indices_triton[grid]
    kernel(pool, rows, lens, starts, out, pool.stride(0), out.stride(0), PAGED_SIZE=PS)
    heads = [slots_of(r, n, s) for r, n, s in zip(ROWS, LENS, start or [0, 0, 0])]
    assert out.tolist() == [line([slot // PS for slot in head]) for head in heads]
    assert is_clean_around(out)


@devices
@pytest.mark.parametrize("start", [None, [3, 0, 4]], ids=["no-start", "start"])
def test_the_grid_says_how_many_rows_of_larger_buffers_are_read_and_written(
    start: list[int] | None, device: str
) -> None:
    """As a captured step's buffers are: made for three requests or more, two of them in use."""
    pool, rows, lens = batch(device, torch.int32, torch.int64)
    starts = None if start is None else torch.tensor(start, device=device)
    out, bounds = table(device, 4), torch.tensor([0, 5, 5, 27], dtype=torch.int32, device=device)
    kernel = sglang.create_flashmla_kv_indices_triton[(2, 1)]
    kernel(pool, rows, lens, starts, out, pool.stride(0), out.stride(0), PAGED_SIZE=PS)
    heads = [slots_of(r, n, s) for r, n, s in zip(ROWS[:2], LENS[:2], start or [0, 0])]
    assert out.tolist() == [line([slot // PS for slot in head]) for head in heads] + [line([])] * 2
    assert is_clean_around(out)
    indices = vector(device, 27)
    sglang.create_flashinfer_kv_indices_triton[(2,)](pool, rows, lens, bounds, starts, indices, pool.stride(0))
    first = (start or [0])[0]
    assert indices.tolist() == line(POOL.tolist()[ROWS[0]][first : first + LENS[0]], 27)


def test_a_batch_larger_than_its_rows_is_refused() -> None:
    pool, rows, lens = batch("cpu", torch.int32, torch.int64)
    full, sums, lengths, bounds = table("cpu", 4), vector("cpu", 5), vector("cpu", 4), torch.arange(5)
    wide = table("cpu", 1, 40), table("cpu", 1, 5)
    strides = pool.stride(0), *(out.stride(0) for out in wide)
    with pytest.raises(ValueError, match=r"grid\[0\] must be at most 3, got 4"):
        sglang.create_flashmla_kv_indices_triton[(4, 1)](pool, rows, lens, None, full, 28, 12, 4)
    with pytest.raises(ValueError, match=r"grid\[0\] must be at most 3, got 4"):
        sglang.create_flashinfer_kv_indices_triton[(4,)](pool, rows, lens, bounds, None, sums, pool.stride(0))
    with pytest.raises(ValueError, match=r"grid\[1\] must be at most 3, got 4"):
        sglang.generate_draft_decode_kv_indices[(1, 4, 1)](rows, pool, lens, *wide, lens, *strides, 4, 1, 4, 1)
    with pytest.raises(ValueError, match="bs must be at most 3, got 4"):
        sglang.update_trtllm_mla_graph_metadata(
            req_pool_indices=rows, seq_lens=lens, req_to_token=pool, block_kv_indices=full, bs=4, seqlen_offset=0,
            page_size=PS, seq_lens_k=lengths,
        )  # fmt: skip
    assert all((out == KEPT).all() for out in (full, sums, lengths, *wide))


def test_number_of_index_blocks_covers_the_table() -> None:
    assert [sglang.get_num_kv_index_blocks_flashmla(w, 64) for w in (1, 64, 65, 2049)] == [1, 1, 2, 33]
    assert sglang.get_num_kv_index_blocks_flashmla(65, 32) == 1


@devices
@dtypes
@pytest.mark.parametrize("q_mode", [0, 1, 2], ids=["none", "cumsum", "strided"])
@pytest.mark.parametrize("offset", [0, 3])
def test_mha_graph_metadata(q_mode: int, offset: int, dtypes: Any, device: str) -> None:
    """Buffers for five rows, of which three are in the batch; columns end at max_seq_pages, below the table's width."""
    pool, rows, lens = batch(device, *dtypes)
    out = {"cache_seqlens": vector(device, 5), "cu_seqlens_k": vector(device, 6), "cu_seqlens_q": vector(device, 6)}
    full, swa, swa_loc = table(device, 5, WIDTH + 2), table(device, 5, WIDTH + 2), vector(device, 5, torch.int64)
    loc = torch.tensor([44, -1, 45], dtype=dtypes[0], device=device)
    sglang.update_trtllm_mha_graph_metadata(
        req_pool_indices=rows, seq_lens=lens, req_to_token=pool, bs=3, seqlen_offset=offset, max_seq_pages=WIDTH,
        page_size=PS, page_table=full, swa_page_table=swa, swa_mapping=TOKEN_MAP.to(device), out_cache_loc=loc,
        swa_out_cache_loc=swa_loc, qlens=torch.tensor([1, 0, 4], device=device), q_stride=2, q_mode=q_mode, **out,
    )  # fmt: skip
    lengths = [n + offset for n in LENS]
    assert out["cache_seqlens"].tolist() == [*lengths, KEPT, KEPT]
    assert out["cu_seqlens_k"].tolist() == [0, *[sum(lengths[: i + 1]) for i in range(3)], KEPT, KEPT]
    queries = {0: [KEPT] * 4, 1: [0, 1, 1, 5], 2: [0, 2, 4, 6]}[q_mode]
    assert out["cu_seqlens_q"].tolist() == [*queries, KEPT, KEPT]
    untouched = [line([], WIDTH + 2)] * 2
    assert full.tolist() == [line(pages(n, r), WIDTH + 2) for n, r in zip(lengths, ROWS)] + untouched
    assert swa.tolist() == [line(swa_pages(n, r), WIDTH + 2) for n, r in zip(lengths, ROWS)] + untouched
    assert swa_loc.tolist() == [mapped(44), -1, mapped(45), 0, 0]
    assert all(map(is_clean_around, [*out.values(), full, swa, swa_loc]))


@devices
def test_mha_graph_metadata_without_tables_translates_slots_all_the_same(device: str) -> None:
    pool, rows, lens = batch(device, torch.int32, torch.int64)
    lengths, sums, full, swa_loc = vector(device, 3), vector(device, 4), table(device), vector(device, 4, torch.int64)
    update = partial(
        sglang.update_trtllm_mha_graph_metadata, req_pool_indices=rows, seq_lens=lens, req_to_token=pool, bs=3,
        seqlen_offset=1, max_seq_pages=WIDTH, page_size=PS, cache_seqlens=lengths, cu_seqlens_k=sums, page_table=full,
        swa_mapping=TOKEN_MAP.to(device), swa_out_cache_loc=swa_loc, skip_page_table=True,
    )  # fmt: skip
    update()
    assert (lengths.tolist(), sums.tolist()) == ([6, 1, 23], [0, 6, 7, 30])
    assert swa_loc.tolist() == [0, 0, 0, 0]  # no out_cache_loc: all padding
    assert full.tolist() == [line([])] * 3
    out = torch.tensor([44, 45, 46, 47, 48, 49], device=device)
    update(out_cache_loc=out)
    assert swa_loc.tolist() == [mapped(44 + i) for i in range(4)]  # what does not fit is left out
    for max_seq_pages in (0, 1):  # of tables that nobody asked for: they bound no length
        lengths.fill_(KEPT)
        update(max_seq_pages=max_seq_pages)
        assert (lengths.tolist(), sums.tolist()) == ([6, 1, 23], [0, 6, 7, 30])
        lengths.fill_(KEPT)
        sglang.normal_decode_set_metadata(
            lengths, sums, full, pool, rows, max_seq_pages, lens, 1, PS, skip_page_table=True
        )
        assert lengths.tolist() == [6, 1, 23] and full.tolist() == [line([])] * 3


@devices
@pytest.mark.parametrize("given", [True, False], ids=["lengths", "no-lengths"])
def test_mla_graph_metadata(given: bool, device: str) -> None:
    pool, rows, lens = batch(device, torch.int32, torch.int64)
    lengths, blocks = vector(device, 3), table(device)
    sglang.update_trtllm_mla_graph_metadata(
        req_pool_indices=rows, seq_lens=lens, req_to_token=pool, block_kv_indices=blocks, bs=3, seqlen_offset=2,
        page_size=PS, seq_lens_k=lengths if given else None,
    )  # fmt: skip
    assert lengths.tolist() == ([7, 2, 24] if given else [KEPT] * 3)
    assert blocks.tolist() == [line(pages(n + 2, r)) for n, r in zip(LENS, ROWS)]


@devices
@dtypes
@pytest.mark.parametrize("zero_tail", [False, True], ids=["kept", "zeroed"])
def test_normal_decode_with_columns_apart(zero_tail: bool, dtypes: Any, device: str) -> None:
    pool, rows, lens = batch(device, *dtypes)
    apart = pool.new_zeros(5, 2 * pool.shape[1])[:, ::2].copy_(pool)
    full, swa = table(device, 3, 2 * WIDTH + 1)[:, ::2], table(device, WIDTH + 1, 3).t()
    lengths, sums = vector(device, 3), vector(device, 4)
    sglang.normal_decode_set_metadata(
        lengths, sums, full, apart, rows, WIDTH, lens, 1, PS, swa, TOKEN_MAP.to(device), zero_tail=zero_tail
    )
    counts = [n + 1 for n in LENS]
    for found, expected in ((full, pages), (swa, swa_pages)):
        lines = [line(line(expected(n, r), WIDTH, 0 if zero_tail else KEPT), WIDTH + 1) for n, r in zip(counts, ROWS)]
        assert found.tolist() == lines
        assert is_clean_around(found)
    assert (lengths.tolist(), sums.tolist()) == ([6, 1, 23], [0, 6, 7, 30])


@devices
def test_virtual_pages_become_physical_and_unbound_ones_the_sink(device: str) -> None:
    pool, rows, lens = batch(device, torch.int32, torch.int32)
    full_v2p, swa_v2p = (torch.arange(40) * 7 + 1) % 41, (torch.arange(40) * 5 + 2) % 43
    full_v2p[::3] = swa_v2p[1::4] = -1
    full, swa, lengths, sums = table(device), table(device), vector(device, 3), vector(device, 4)
    sglang.normal_decode_set_metadata(
        lengths, sums, full, pool, rows, WIDTH, lens, 0, PS, swa, full_v2p=full_v2p.to(device),
        swa_v2p=swa_v2p.to(device),
    )  # fmt: skip
    for found, map_ in ((full, full_v2p.tolist()), (swa, swa_v2p.tolist())):
        assert found.tolist() == [line([max(map_[page], 0) for page in pages(n, r)]) for n, r in zip(LENS, ROWS)]
        assert (found == 0).any()


@devices
@dtypes
def test_draft_extend_translates_padded_rows_too(dtypes: Any, device: str) -> None:
    pool, rows, lens = batch(device, *dtypes)
    lengths, sums_k, sums_q = vector(device, 3), vector(device, 4), vector(device, 4)
    full, swa, swa_loc = table(device), table(device), vector(device, 6, torch.int64)
    loc = torch.arange(50, 56, device=device)
    sglang.draft_extend_set_metadata(
        lengths, sums_k, sums_q, full, pool, rows, lens, torch.tensor([2, 0, 3], dtype=dtypes[1], device=device), PS,
        TOKEN_MAP.to(device), swa, loc, swa_loc,
    )  # fmt: skip
    assert (lengths.tolist(), sums_k.tolist(), sums_q.tolist()) == (LENS, [0, 5, 5, 27], [0, 2, 2, 5])
    assert full.tolist() == [line(pages(n, r)) for n, r in zip(LENS, ROWS)]
    assert swa.tolist() == [line(swa_pages(n, r)) for n, r in zip(LENS, ROWS)]
    assert swa_loc.tolist() == [mapped(slot) for slot in range(50, 56)]


@devices
def test_an_empty_batch_touches_nothing(device: str) -> None:
    pool, rows, lens = batch(device, torch.int32, torch.int32)
    small, sums, full, swa_loc = vector(device, 3), vector(device, 4), table(device), vector(device, 2, torch.int64)
    sglang.update_trtllm_mha_graph_metadata(
        req_pool_indices=rows, seq_lens=lens, req_to_token=pool, bs=0, seqlen_offset=0, max_seq_pages=WIDTH,
        page_size=PS, cache_seqlens=small, cu_seqlens_k=sums, page_table=full, swa_mapping=TOKEN_MAP.to(device),
        swa_out_cache_loc=swa_loc,
    )  # fmt: skip
    sglang.update_trtllm_mla_graph_metadata(
        req_pool_indices=rows, seq_lens=lens, req_to_token=pool, block_kv_indices=full, bs=0, seqlen_offset=0,
        page_size=PS, seq_lens_k=small,
    )  # fmt: skip
    none = rows[:0]
    sglang.normal_decode_set_metadata(none, sums, full[:0], pool, none, WIDTH, none, 0, PS)
    sglang.draft_extend_set_metadata(none, sums, sums, full[:0], pool, none, none, none, PS)
    sglang.build_trtllm_mha_page_table(pool, none, none, full[:0], PS)
    assert all((out == KEPT).all() for out in (small, sums, full))
    assert len(set(swa_loc.tolist())) == 1 and is_clean_around(swa_loc)


@devices
@dtypes
@pytest.mark.parametrize("out_dtype", [torch.int32, torch.int64], ids=["out-32", "out-64"])
@pytest.mark.parametrize("start", [None, [1, 0, 4]], ids=["no-start", "start"])
def test_token_indices_stay_between_their_bounds(
    start: list[int] | None, out_dtype: torch.dtype, dtypes: Any, device: str
) -> None:
    """The length counts from the start on; the bounds leave a gap of two at the front, and room behind."""
    pool, rows, lens = batch(device, *dtypes)
    out = vector(device, 33, out_dtype)
    starts = None if start is None else torch.tensor(start, dtype=dtypes[1], device=device)
    bounds = torch.tensor([2, 7, 7, 29, KEPT], dtype=torch.int32, device=device)
    grid = (3, sglang.kv_indices_num_token_blocks(28, 3))
    kernel = sglang.create_flashinfer_kv_indices_triton[grid]
    kernel(pool, rows, lens, bounds, starts, out, pool.stride(0), TOKEN_BLOCK_PARALLEL=True)
    kept = out[:1].tolist() * 33
    slots = [POOL.tolist()[r][s : s + n] for r, n, s in zip(ROWS, LENS, start or [0, 0, 0])]
    assert out.tolist() == kept[:2] + slots[0] + slots[2] + kept[:4]
    assert is_clean_around(out)


@devices
@pytest.mark.parametrize("translated", [False, True])
def test_token_indices_from_a_pool_of_pages(translated: bool, device: str) -> None:
    pages = torch.tensor([[3, -1, 5], [7, 8, 9]], dtype=torch.int32, device=device)
    rows, lens = torch.tensor([1, 0], device=device), torch.tensor([4, 9], device=device)
    bounds, starts = torch.tensor([0, 4, 13], device=device), torch.tensor([3, 2], device=device)
    out = vector(device, 13)
    map_ = TOKEN_MAP.to(device) if translated else None
    kernel = sglang.create_flashinfer_kv_indices_triton[(2,)]
    kernel(pages, rows, lens, bounds, starts, out, 3, ENTRY_PAGE_SIZE=4, token_mapping=map_)
    slots = [31, 32, 33, 34, 14, 15, -1, -1, -1, -1, 20, 21, 22]
    assert out.tolist() == [mapped(slot) if translated else slot for slot in slots]


@devices
@pytest.mark.parametrize("out_dtype", [torch.int32, torch.int64], ids=["out-32", "out-64"])
def test_token_indices_beyond_int32_need_an_int64_buffer(out_dtype: torch.dtype, device: str) -> None:
    """SGLang's Triton back end has one; page 2^29 of four tokens begins at slot 2^31."""
    pages = torch.tensor([[2**29 - 1, 2**29, 2**31 - 1]], dtype=torch.int32, device=device)
    rows, lens = torch.tensor([0], device=device), torch.tensor([8], device=device)
    slots = [*range(2**31 - 2, 2**31 + 4), 2**33 - 4, 2**33 - 3]
    wanted = slots if out_dtype == torch.int64 else [*slots[:2], -1, -1, -1, -1, -1, -1]
    bounds, out = torch.tensor([0, 8], device=device), vector(device, 8, out_dtype)
    starts = torch.tensor([2], device=device)
    sglang.create_flashinfer_kv_indices_triton[(1,)](pages, rows, lens, bounds, starts, out, 3, ENTRY_PAGE_SIZE=4)
    assert out.tolist() == wanted
    indptr, drafts = table(device, 1, 2), vector(device, 9, out_dtype)[None]
    kernel = sglang.generate_draft_decode_kv_indices[(1, 1, 1)]
    strides = pages.stride(0), drafts.stride(0), indptr.stride(0)
    kernel(rows, pages, lens, drafts, indptr, lens, *strides, 1, 1, 1, 4, ENTRY_PAGE_SIZE=4)
    slots = [*range(2**31 - 4, 2**31 + 4), 2**33 - 4]
    assert drafts[0].tolist() == (slots if out_dtype == torch.int64 else [*slots[:4], -1, -1, -1, -1, -1])
    assert is_clean_around(out) and is_clean_around(drafts[0])


def test_number_of_token_blocks_is_bounded_by_the_programs() -> None:
    blocks = [sglang.kv_indices_num_token_blocks(w, b) for w, b in ((1, 1), (8193, 4), (10**6, 64), (10**6, 0))]
    assert blocks == [1, 2, 8, 123]


def draft_on_paper(lengths: list[int], topk: int, steps: int, page_size: int) -> list[list[list[int]]]:
    """Slots of each branch in each step."""
    found: list[list[list[int]]] = [[] for _ in range(steps)]
    for it in range(steps):
        for row, length in zip(ROWS, lengths):
            for k in range(topk):
                begin = length + k * steps
                if page_size > 1 and topk > 1:
                    last = length % page_size
                    begin = length // page_size * page_size + k * ceil_div(last + steps, page_size) * page_size + last
                slots = POOL.tolist()[row]
                found[it].append(slots[:length] + slots[begin : begin + it + 1])
    return found


@devices
@dtypes
@pytest.mark.parametrize(("topk", "page_size"), [(1, 4), (2, 1), (2, 4), (3, 2)])
def test_draft_indices_of_every_step(topk: int, page_size: int, dtypes: Any, device: str) -> None:
    """Prefixes are shared by a request's branches, whose own tokens lie apart; what lies behind is kept."""
    steps, lengths = 3, [5, 0, 7]
    pool, rows, _ = batch(device, *dtypes)
    lens = torch.tensor(lengths, dtype=dtypes[1], device=device)
    positions = lens.repeat_interleave(topk)
    indices, indptr = table(device, steps, 120), table(device, steps, 3 * topk + 3)
    kernel = sglang.generate_draft_decode_kv_indices[(steps, 3, topk)]
    strides = pool.stride(0), indices.stride(0), indptr.stride(0)
    kernel(rows, pool, lens, indices, indptr, positions, *strides, 4, 4, 16, page_size)
    for it, branches in enumerate(draft_on_paper(lengths, topk, steps, page_size)):
        assert indptr[it].tolist() == [*[sum(map(len, branches[:z])) for z in range(3 * topk + 1)], KEPT, KEPT]
        assert indices[it].tolist() == line([slot for slots in branches for slot in slots], 120)
    assert is_clean_around(indices) and is_clean_around(indptr)


def test_draft_indices_take_their_steps_from_num_steps() -> None:
    pool, rows, lens = batch("cpu", torch.int32, torch.int64)
    indices, indptr = table("cpu", 3, 60), table("cpu", 3, 4)
    strides = pool.stride(0), indices.stride(0), indptr.stride(0)
    kernel = sglang.generate_draft_decode_kv_indices[(8, 3, 1)]
    kernel(rows, pool, lens, indices, indptr, lens, *strides, 4, 4, 4, 4, NUM_STEPS=2)
    assert indptr.tolist() == [[0, 6, 7, 30], [0, 7, 9, 33], [KEPT] * 4]
    assert (indices[2] == KEPT).all()
    with pytest.raises(ValueError, match="v2p must be given where TRANSLATE is True, got None"):
        kernel(rows, pool, lens, indices, indptr, lens, *strides, 4, 4, 4, 4, TRANSLATE=True)


@devices
def test_draft_indices_through_a_window_and_a_page_map(device: str) -> None:
    """Two sinks and the last three of seven tokens, then one of the draft; pages 0 and 2 of the map are not bound."""
    pool = torch.arange(16, dtype=torch.int32, device=device)[None]
    lens, rows = torch.tensor([7], device=device), torch.tensor([0], device=device)
    v2p = torch.tensor([-1, 5, -1, 9], device=device)
    indices, indptr = table(device, 1, 8), table(device, 1, 2)
    strides = pool.stride(0), indices.stride(0), indptr.stride(0)
    call = partial(
        sglang.generate_draft_decode_kv_indices[(1, 1, 1)], rows, pool, lens, indices, indptr, lens, *strides, 1, 1, 1,
        4, window_size=3, sink_size=2,
    )  # fmt: skip
    call(v2p=v2p)
    assert (indptr.tolist(), indices.tolist()) == ([[0, 6]], [[0, 1, 4, 5, 6, 7, KEPT, KEPT]])
    call(v2p=v2p, TRANSLATE=True)
    assert indices.tolist() == [[0, 0, 20, 21, 22, 23, KEPT, KEPT]]
    pool[0, 5] = -1
    call(v2p=v2p, TRANSLATE=True)
    assert indices.tolist() == [[0, 0, 20, 0, 22, 23, KEPT, KEPT]]


def test_bad_values_reach_nothing_outside_their_row() -> None:
    """Where SGLang's kernels would read past the pool or the map, the column is -1 and the length is clamped."""
    pool = POOL.clone()
    pool[3, 4], pool[1, 0] = -1, 10**6
    full, swa, lengths, sums = table("cpu"), table("cpu"), vector("cpu", 3), vector("cpu", 4)
    rows, lens = torch.tensor([3, 1, 9]), torch.tensor([5, 4, 8])
    sglang.normal_decode_set_metadata(lengths, sums, full, pool, rows, WIDTH, lens, 0, PS, swa, TOKEN_MAP)
    assert full.tolist() == [line([pages(1, 3)[0], -1]), line([250_000]), line([])]
    assert swa.tolist()[0][1] == -1 and swa.tolist()[1][0] == -1
    assert lengths.tolist() == [5, 4, 0]
    sglang.normal_decode_set_metadata(lengths, sums, full, pool, rows, 2, torch.tensor([5, 9, 1]), 0, PS)
    assert lengths.tolist() == [5, 8, 0]  # eight tokens fill two pages


def test_contradictions_are_refused() -> None:
    pool, rows, lens = batch("cpu", torch.int64, torch.int64)
    full, lengths, sums = table("cpu"), vector("cpu", 3), vector("cpu", 4)
    with pytest.raises(ValueError, match="swa_page_table and full_to_swa go together"):
        sglang.build_trtllm_mha_page_table(pool, rows, lens, full, PS, full_to_swa=TOKEN_MAP)
    both = {"full_to_swa_index_mapping": TOKEN_MAP, "swa_v2p": TOKEN_MAP}
    with pytest.raises(ValueError, match=r"exactly one of full_to_swa_index_mapping and swa_v2p .* got both"):
        sglang.normal_decode_set_metadata(lengths, sums, full, pool, rows, 7, lens, 0, PS, table("cpu"), **both)
    with pytest.raises(ValueError, match="kv_indices_ptr_stride must be the row stride of kv_indices_ptr, 12, got 7"):
        sglang.create_flashmla_kv_indices_triton[(1,)](pool, rows, lens, None, full, pool.stride(0), WIDTH, 4)
    assert all((out == KEPT).all() for out in (lengths, sums, full))


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be traced")
def test_a_compiled_step_holds_the_calls_whole() -> None:
    """One graph for batches of every size from two up."""

    def step(pool: Tensor, rows: Tensor, lens: Tensor, full: Tensor, lengths: Tensor, sums: Tensor) -> Tensor:
        bs, width = rows.shape[0], full.shape[1]
        sglang.normal_decode_set_metadata(lengths, sums, full, pool, rows, width, lens, 0, PS)
        other = full.new_zeros(bs, width)
        kernel = sglang.create_flashmla_kv_indices_triton[(bs, 1)]
        kernel(pool, rows, lens, None, other, pool.stride(0), other.stride(0), PAGED_SIZE=PS)
        # Buffers for three requests, which the batch fills or does not.
        indices, indptr = full.new_zeros(1, 40), full.new_zeros(1, 4)
        drafts = sglang.generate_draft_decode_kv_indices[(1, bs, 1)]
        strides = pool.stride(0), indices.stride(0), indptr.stride(0)
        drafts(rows, pool, lens, indices, indptr, lens, *strides, 4, 1, 4, PS)
        return other

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for size in (3, 2):
            full, lengths, sums = table("cpu", size), vector("cpu", size), vector("cpu", size + 1)
            rows, lens = torch.tensor(ROWS[:size]), torch.tensor(LENS[:size])
            other = compiled(POOL.clone(), rows, lens, full, lengths, sums)
            assert full.tolist() == [line(pages(n, r)) for n, r in zip(LENS[:size], ROWS)]
            assert other.tolist() == [line(pages(n, r), tail=0) for n, r in zip(LENS[:size], ROWS)]
