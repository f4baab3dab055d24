"""Request rows of a token pool -> page tables.

    req_to_token = [[ 0,  0,  0,  0,  0,  0],
                    [ 8,  9, 10, 11,  4,  5]]      page_size 4: request 1 owns page 2, then page 1
    req_pool_indices = [1], cache_seqlens = [6]
    page_table(...) -> [[2, 1]]                    ceil(6 / 4) = 2 live columns, each slot // 4

The page-table kernel that reads the lengths on the device, its grid from a static bound, is published in SGLang's
trtllm_mha back end; the FlashMLA block-index kernel parallel over page blocks in its flashmla back end. Here a fixed
number of programs a row stride over the row's live pages, so that cost follows the live lengths and not the context
bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from compiled_kv import rows_cpu as cpu
from compiled_kv.checks import INTS, Sizes, check_least, check_pool, check_table_output, check_tail
from compiled_kv.columns_triton import clear_row, fill_row
from compiled_kv.launch import dependent_launch, kernel, launch, runs_kernel, stride_of, tl
from compiled_kv.layout import KVLayout
from compiled_kv.overlap import check_distinct, check_distinct_fake
from compiled_kv.registration import operator
from compiled_kv.rows_triton import clamped_length, is_within, load_at, pages_of, value_at
from compiled_kv.sharing import split_rows
from compiled_kv.status import DEBUG, Status


@kernel
def _page_table_kernel(
    req_to_token_ptr, req_pool_indices_ptr, kv_lens_ptr, kv_start_ptr, page_table_ptr,
    pool_rows, pool_width, pool_row_stride, pool_stride, index_stride, len_stride, start_stride, page_row_stride,
    width, cap, PAGE_SIZE: tl.constexpr, CLEAR: tl.constexpr, UNIT_STRIDE: tl.constexpr, DEBUG: tl.constexpr,
    PDL: tl.constexpr, SHORT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if PDL:
        dependent_launch()
    row = tl.program_id(0)
    part, parts = tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    pool_row = load_at(req_pool_indices_ptr, row, index_stride, True, 0)
    length = clamped_length(value_at(kv_lens_ptr, row, len_stride, True, 0), 0, cap)
    start = tl.zeros([], tl.int64)
    if kv_start_ptr is not None:
        start = tl.minimum(tl.maximum(load_at(kv_start_ptr, row, start_stride, True, 0), 0), pool_width)
    is_live = is_within(pool_row, pool_rows)
    length = tl.where(is_live, length, 0)
    live = tl.minimum(pages_of(length, PAGE_SIZE), width).to(tl.int32)
    page_row_ptr = page_table_ptr + row.to(tl.int64) * page_row_stride
    fill_row(
        req_to_token_ptr + pool_row * pool_row_stride, pool_stride, pool_width, start, is_live,
        page_row_ptr, None, None, 0, 0, 0, live, part, parts, None, PAGE_SIZE, False, UNIT_STRIDE, DEBUG, SHORT, BLOCK,
    )  # fmt: skip
    if CLEAR:
        clear_row(page_row_ptr, live, width, part, parts, BLOCK)


def _launch(
    out: Tensor, req_to_token: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, kv_start: Tensor | None,
    page_size: int, cap: int, clear: bool,
) -> None:  # fmt: skip
    batch_size, width = req_pool_indices.shape[0], out.shape[1]
    has_unit_stride = req_to_token.stride(1) == 1
    split = split_rows(batch_size, width, page_size, is_mapped=False, has_unit_stride=has_unit_stride)
    launch(
        _page_table_kernel, (batch_size, split.parts),
        req_to_token_ptr=req_to_token, req_pool_indices_ptr=req_pool_indices, kv_lens_ptr=kv_lens,
        kv_start_ptr=kv_start,
        page_table_ptr=out, pool_rows=req_to_token.shape[0], pool_width=req_to_token.shape[1],
        pool_row_stride=req_to_token.stride(0), pool_stride=req_to_token.stride(1),
        index_stride=req_pool_indices.stride(0),
        len_stride=kv_lens.stride(0), start_stride=stride_of(kv_start),
        page_row_stride=out.stride(0), width=width, cap=cap,
        PAGE_SIZE=page_size, CLEAR=clear, UNIT_STRIDE=has_unit_stride, DEBUG=DEBUG,
        SHORT=split.short, BLOCK=split.block, num_warps=split.warps,
    )  # fmt: skip


def _cpu_body(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    kv_lens: Tensor,
    kv_start: Tensor | None,
    page_size: int,
    cap: int,
    width: int,
) -> tuple[Tensor, Tensor]:
    """The cleared table, and which of its columns a kept tail leaves to us."""
    rows = req_pool_indices.long()
    live = (rows >= 0) & (rows < req_to_token.shape[0])
    lengths = cpu.clamped_length(kv_lens, 0, cap).where(live, 0)
    start = None if kv_start is None else kv_start.long().clamp(0, req_to_token.shape[1])
    _, pages, written, owned = cpu.pages_of_rows(req_to_token, rows, lengths, live, width, page_size, start)
    cpu.report(None, cpu.flag(owned & (pages < 0), Status.BAD_SLOT))
    return pages.int(), written


def _new(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    kv_lens: Tensor,
    kv_start: Tensor | None,
    page_size: int,
    cap: int,
    width: int,
) -> Tensor:
    if not runs_kernel(req_to_token):
        return _cpu_body(req_to_token, req_pool_indices, kv_lens, kv_start, page_size, cap, width)[0]
    out = req_to_token.new_empty((req_pool_indices.shape[0], width), dtype=torch.int32)
    _launch(out, req_to_token, req_pool_indices, kv_lens, kv_start, page_size, cap, clear=True)
    return out


def _fill(
    out: Tensor, req_to_token: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, kv_start: Tensor | None,
    page_size: int, cap: int, clear: bool,
) -> None:  # fmt: skip
    inputs = {
        "req_to_token": req_to_token,
        "req_pool_indices": req_pool_indices,
        "kv_lens": kv_lens,
        "kv_start": kv_start,
    }
    check_distinct_fake({"out": out}, inputs)
    if runs_kernel(out):
        _launch(out, req_to_token, req_pool_indices, kv_lens, kv_start, page_size, cap, clear)
        return
    table, written = _cpu_body(req_to_token, req_pool_indices, kv_lens, kv_start, page_size, cap, out.shape[1])
    out.copy_(table if clear else table.where(written, out))


@operator("compiled_kv::page_table", mutates_args=())
def _page_table(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    cache_seqlens: Tensor,
    page_size: int,
    cap: int,
    width: int,
) -> Tensor:
    return _new(req_to_token, req_pool_indices, cache_seqlens, None, page_size, cap, width)


@operator("compiled_kv::page_table_out", mutates_args=("out",))
def _page_table_out(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    cache_seqlens: Tensor,
    out: Tensor,
    page_size: int,
    cap: int,
    clear: bool,
) -> None:
    _fill(out, req_to_token, req_pool_indices, cache_seqlens, None, page_size, cap, clear)


@operator("compiled_kv::flashmla_kv_indices", mutates_args=())
def _flashmla_kv_indices(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    kv_lens: Tensor,
    kv_start: Tensor | None,
    page_size: int,
    cap: int,
    width: int,
) -> Tensor:
    return _new(req_to_token, req_pool_indices, kv_lens, kv_start, page_size, cap, width)


@operator("compiled_kv::flashmla_kv_indices_out", mutates_args=("out",))
def _flashmla_kv_indices_out(
    req_to_token: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, kv_start: Tensor | None, out: Tensor,
    page_size: int, cap: int, clear: bool,
) -> None:  # fmt: skip
    # A kernel takes a larger batch's table as it is: a graph would clone a slice.
    table = out if runs_kernel(out) else out[: kv_lens.shape[0]]
    _fill(table, req_to_token, req_pool_indices, kv_lens, kv_start, page_size, cap, clear)


def page_table(
    req_to_token: Tensor, req_pool_indices: Tensor, cache_seqlens: Tensor,
    *, layout: KVLayout, out: Tensor | None = None, tail: str = "clear",
) -> Tensor:  # fmt: skip
    """Page ids of every request of a batch, for paged attention; at page size 64 FlashMLA's block index.

    Args:
        req_to_token: int [R, C], token slot of each position of each pool row; C >= layout.max_seqlen_k.
        req_pool_indices: int [B], the pool row of each batch entry; one outside the pool gives a row of null pages.
        cache_seqlens: int [B], tokens attention reads of each row; clamped to [0, layout.max_seqlen_k].
        layout: page size and bounds, host ints.
        out: int32 [B, P], P >= layout.max_num_pages, written in place and returned; rows may be strided.
        tail: what becomes of columns past the live ones: "clear" to the null page, or "keep" (needs out).

    Returns:
        int32 [B, layout.max_num_pages], or `out`.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a shape, device, width, stride or `tail` is wrong, or `out` overlaps an input.
    """
    sizes = Sizes()
    check_pool(sizes, req_to_token, req_pool_indices, layout)
    sizes.check("cache_seqlens", cache_seqlens, INTS, "B")
    given = {"req_to_token": req_to_token, "req_pool_indices": req_pool_indices, "cache_seqlens": cache_seqlens}
    operators = torch.ops.compiled_kv.page_table, torch.ops.compiled_kv.page_table_out
    if out is not None:
        check_table_output(sizes, "out", out, layout)
    return _call(*operators, given, layout, out, tail)


def flashmla_kv_indices(
    req_to_token: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, kv_start: Tensor | None = None,
    *, layout: KVLayout, out: Tensor | None = None, tail: str = "clear",
) -> Tensor:  # fmt: skip
    """FlashMLA's block index: page ids of `kv_lens` tokens of each row, counted from `kv_start`.

    Args:
        req_to_token, req_pool_indices, layout, tail: as in `page_table`.
        kv_lens: int [B], tokens each row reads, from its start on; clamped to [0, layout.max_seqlen_k].
        kv_start: int [B], position the first column reads; None for 0. Column p reads position
            kv_start + p * page_size, and -1 where that lies beyond the pool's width.
        out: int32 [N, P], N >= B, P >= layout.max_num_pages, written in place and returned; rows may be strided. Those
            from B on keep their values.

    Returns:
        int32 [B, layout.max_num_pages], or `out`.

    Raises:
        TypeError, ValueError: as `page_table`.
    """
    sizes = Sizes()
    check_pool(sizes, req_to_token, req_pool_indices, layout)
    sizes.check("kv_lens", kv_lens, INTS, "B")
    if kv_start is not None:
        sizes.check("kv_start", kv_start, INTS, "B")
    given = {
        "req_to_token": req_to_token,
        "req_pool_indices": req_pool_indices,
        "kv_lens": kv_lens,
        "kv_start": kv_start,
    }
    operators = torch.ops.compiled_kv.flashmla_kv_indices, torch.ops.compiled_kv.flashmla_kv_indices_out
    if out is not None:
        check_table_output(sizes, "out", out, layout, rows="N")
        check_least("out", out.shape[0], kv_lens.shape[0], "rows", of="the batch")
    return _call(*operators, given, layout, out, tail)


def _call(
    functional: Callable[..., Tensor], in_place: Callable[..., None], given: Mapping[str, Tensor | None],
    layout: KVLayout, out: Tensor | None, tail: str,
) -> Tensor:  # fmt: skip
    check_tail(tail, out)
    bounds = layout.page_size, layout.max_seqlen_k
    if out is None:
        return functional(*given.values(), *bounds, layout.max_num_pages)
    check_distinct({"out": out}, given)
    in_place(*given.values(), out, *bounds, tail == "clear")
    return out
