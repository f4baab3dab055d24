"""Full-attention slots and pages -> those of the sliding-window pool.

    page_size 4, window 4, cache_seqlens = [6], page_table = [[2, 1]], full_to_swa = [0, .., 4: 12, .., 8: -1]
    the query at position 5 sees keys 2 .. 5: column 0 holds keys 0 .. 3, column 1 keys 4 .. 5
    swa_page_table -> [[-1, 3]]        slot 8 of column 0 has no counterpart, slot 4 lies in page 12 // 4
    with window 2 it sees keys 4 .. 5: [[0, 3]]    column 0 lies wholly before the window and is not looked up

A token map takes slots to slots, a page map pages to pages: exactly one is given. SGLang publishes the fused lookup.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kv import rows_cpu as cpu
from compiled_kv.checks import (
    INTS,
    Sizes,
    check_map,
    check_one_of,
    check_pool,
    check_table_output,
    check_tail,
    check_tuple,
)
from compiled_kv.columns_triton import clear_row, fill_row
from compiled_kv.launch import dependent_launch, kernel, launch, runs_kernel, stride_of, tl
from compiled_kv.layout import KVLayout
from compiled_kv.lengths import check_queries
from compiled_kv.overlap import check_distinct, check_distinct_fake
from compiled_kv.registration import operator
from compiled_kv.rows_triton import (
    clamped_length,
    clamped_queries,
    first_column,
    is_within,
    load_at,
    pages_of,
    value_at,
)
from compiled_kv.sharing import split_rows
from compiled_kv.status import DEBUG, Status

Pair = tuple[Tensor, Tensor]
INPUTS = ("req_to_token", "req_pool_indices", "cache_seqlens", "q_len", "full_to_swa", "page_map")


@kernel
def _swa_page_table_kernel(
    req_to_token_ptr, req_pool_indices_ptr, cache_seqlens_ptr, q_lens_ptr, map_ptr, page_table_ptr, swa_page_table_ptr,
    pool_rows, pool_width, pool_row_stride, pool_stride, index_stride, len_stride, q_stride, map_stride, map_size,
    page_row_stride, swa_row_stride, width, cap, q_len, window,
    PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr, WINDOWED: tl.constexpr, CLEAR: tl.constexpr, DEBUG: tl.constexpr,
    UNIT_STRIDE: tl.constexpr, PDL: tl.constexpr, SHORT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if PDL:
        dependent_launch()
    row = tl.program_id(0)
    part, parts = tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    pool_row = load_at(req_pool_indices_ptr, row, index_stride, True, 0)
    length = clamped_length(value_at(cache_seqlens_ptr, row, len_stride, True, 0), 0, cap)
    queries = tl.zeros([], tl.int64) + q_len
    if q_lens_ptr is not None:
        queries = clamped_queries(load_at(q_lens_ptr, row, q_stride, True, 0))
    is_live = is_within(pool_row, pool_rows)
    length = tl.where(is_live, length, 0)
    live = tl.minimum(pages_of(length, PAGE_SIZE), width).to(tl.int32)
    page_row_ptr = page_table_ptr + row.to(tl.int64) * page_row_stride
    swa_row_ptr = swa_page_table_ptr + row.to(tl.int64) * swa_row_stride
    fill_row(
        req_to_token_ptr + pool_row * pool_row_stride, pool_stride, pool_width, 0, is_live,
        page_row_ptr, swa_row_ptr, map_ptr, map_stride, map_size, first_column(length, queries, window, PAGE_SIZE,
        WINDOWED),
        live, part, parts, None, PAGE_SIZE, PAGE_MAP, UNIT_STRIDE, DEBUG, SHORT, BLOCK,
    )  # fmt: skip
    if CLEAR:
        clear_row(page_row_ptr, live, width, part, parts, BLOCK)
        clear_row(swa_row_ptr, live, width, part, parts, BLOCK)


def _launch(
    out: Pair, req_to_token: Tensor, req_pool_indices: Tensor, cache_seqlens: Tensor, q_lens: Tensor | None,
    full_to_swa: Tensor | None, page_map: Tensor | None, page_size: int, cap: int, q_len: int, window: int | None,
    clear: bool,
) -> None:  # fmt: skip
    table, swa_table = out
    batch_size, width = table.shape
    has_unit_stride = req_to_token.stride(1) == 1
    split = split_rows(batch_size, width, page_size, is_mapped=True, has_unit_stride=has_unit_stride)
    map_ = page_map if full_to_swa is None else full_to_swa
    assert map_ is not None
    launch(
        _swa_page_table_kernel, (batch_size, split.parts),
        req_to_token_ptr=req_to_token, req_pool_indices_ptr=req_pool_indices, cache_seqlens_ptr=cache_seqlens,
        q_lens_ptr=q_lens,
        map_ptr=map_, page_table_ptr=table, swa_page_table_ptr=swa_table,
        pool_rows=req_to_token.shape[0], pool_width=req_to_token.shape[1],
        pool_row_stride=req_to_token.stride(0), pool_stride=req_to_token.stride(1),
        index_stride=req_pool_indices.stride(0),
        len_stride=cache_seqlens.stride(0), q_stride=stride_of(q_lens),
        map_stride=map_.stride(0),
        map_size=map_.shape[0], page_row_stride=table.stride(0), swa_row_stride=swa_table.stride(0), width=width,
        cap=cap,
        q_len=q_len, window=window or 0, PAGE_SIZE=page_size, PAGE_MAP=full_to_swa is None, WINDOWED=window is not None,
        CLEAR=clear, UNIT_STRIDE=has_unit_stride, DEBUG=DEBUG,
        SHORT=split.short, BLOCK=split.block, num_warps=split.warps,
    )  # fmt: skip


def _cpu_body(
    req_to_token: Tensor, req_pool_indices: Tensor, cache_seqlens: Tensor, q_lens: Tensor | None,
    full_to_swa: Tensor | None, page_map: Tensor | None, page_size: int, cap: int, width: int, q_len: int, window: int
    | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Both cleared tables, and which columns a kept tail leaves to us."""
    rows = req_pool_indices.long()
    live = (rows >= 0) & (rows < req_to_token.shape[0])
    lengths = cpu.clamped_length(cache_seqlens, 0, cap).where(live, 0)
    slots, pages, written, owned = cpu.pages_of_rows(req_to_token, rows, lengths, live, width, page_size)
    seen = owned & cpu.in_window(lengths, cpu.queries_of_rows(q_lens, q_len, live), window, width, page_size)
    swa_pages = torch.where(seen, cpu.swa_page_of(slots, pages, full_to_swa, page_map, seen, page_size), 0)
    cpu.report(
        None,
        cpu.flag(owned & (pages < 0), Status.BAD_SLOT),
        cpu.flag(seen & (pages >= 0) & (swa_pages < 0), Status.UNMAPPED),
    )
    return pages.int(), swa_pages.int(), written


@operator("compiled_kv::swa_page_table", mutates_args=())
def _swa_page_table(
    req_to_token: Tensor, req_pool_indices: Tensor, cache_seqlens: Tensor, q_lens: Tensor | None,
    full_to_swa: Tensor | None, page_map: Tensor | None, page_size: int, cap: int, width: int, q_len: int, window: int
    | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    inputs = (req_to_token, req_pool_indices, cache_seqlens, q_lens, full_to_swa, page_map)
    if not runs_kernel(req_to_token):
        return _cpu_body(*inputs, page_size, cap, width, q_len, window)[:2]
    shape = (req_pool_indices.shape[0], width)
    out = (req_to_token.new_empty(shape, dtype=torch.int32), req_to_token.new_empty(shape, dtype=torch.int32))
    _launch(out, *inputs, page_size, cap, q_len, window, clear=True)
    return out


@operator("compiled_kv::swa_page_table_out", mutates_args=("page_table", "swa_page_table"))
def _swa_page_table_out(
    req_to_token: Tensor, req_pool_indices: Tensor, cache_seqlens: Tensor, q_lens: Tensor | None,
    full_to_swa: Tensor | None, page_map: Tensor | None, page_table: Tensor, swa_page_table: Tensor,
    page_size: int, cap: int, q_len: int, window: int | None, clear: bool,
) -> None:  # fmt: skip
    inputs = (req_to_token, req_pool_indices, cache_seqlens, q_lens, full_to_swa, page_map)
    check_distinct_fake({"page_table": page_table, "swa_page_table": swa_page_table}, dict(zip(INPUTS, inputs)))
    if runs_kernel(req_to_token):
        _launch((page_table, swa_page_table), *inputs, page_size, cap, q_len, window, clear)
        return
    table, swa_table, written = _cpu_body(*inputs, page_size, cap, page_table.shape[1], q_len, window)
    page_table.copy_(table if clear else table.where(written, page_table))
    swa_page_table.copy_(swa_table if clear else swa_table.where(written, swa_page_table))


def swa_page_table(
    req_to_token: Tensor, req_pool_indices: Tensor, cache_seqlens: Tensor, full_to_swa: Tensor | None = None,
    *, page_map: Tensor | None = None, layout: KVLayout, q_len: int | Tensor = 1, out: Pair | None = None, tail: str =
    "clear",
) -> Pair:  # fmt: skip
    """Page tables of the full-attention layers and of the sliding-window layers, in one pass.

    Args:
        req_to_token, req_pool_indices, cache_seqlens, tail: as in `page_table`.
        full_to_swa: int [N], sliding-window slot of each full-attention slot, negative for none.
        page_map: int [NP], sliding-window page of each full-attention page, negative for none. Exactly one of the two
        is given.
        layout: page size, bounds and window. With a window, columns wholly before that of the row's first query hold
        the null page
            and are not looked up; without one the whole row is translated.
        q_len: queries a row, an int or an int tensor [B]; the first sits at cache_seqlens - q_len.
        out: (page_table, swa_page_table), each int32 [B, P] with P >= layout.max_num_pages.

    Returns:
        (page_table, swa_page_table), int32 [B, layout.max_num_pages] each, or `out`. A live column without a
        counterpart holds -1.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device, width or overlap is wrong; the text names it.
    """
    sizes = Sizes()
    check_pool(sizes, req_to_token, req_pool_indices, layout)
    sizes.check("cache_seqlens", cache_seqlens, INTS, "B")
    check_one_of(full_to_swa=full_to_swa, page_map=page_map)
    check_map(sizes, full_to_swa, page_map)
    q_lens, fixed_q_len = check_queries(sizes, q_len)
    check_tail(tail, out)
    inputs = (req_to_token, req_pool_indices, cache_seqlens, q_lens, full_to_swa, page_map)
    if out is None:
        return torch.ops.compiled_kv.swa_page_table(
            *inputs, layout.page_size, layout.max_seqlen_k, layout.max_num_pages, fixed_q_len, layout.window
        )
    check_tuple("out", out, ("page_table", "swa_page_table"))
    named = dict(zip(("page_table", "swa_page_table"), out))
    for name, table in named.items():
        check_table_output(sizes, name, table, layout)
    check_distinct(named, dict(zip(INPUTS, inputs)))
    torch.ops.compiled_kv.swa_page_table_out(
        *inputs, *out, layout.page_size, layout.max_seqlen_k, fixed_q_len, layout.window, tail == "clear"
    )
    return out
