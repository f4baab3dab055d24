"""Block tables of several KV groups, gathered by request row, in one launch.

    block_tables = [[[7, 8, 9, 0], [4, 5, 0, 0]]]      one group [G, R, W]: its pools hold a request a row
    num_blocks = [[3, 2]], req_pool_indices = [1, 0, -1]
    gather_block_tables(...) -> [[[4, 5, 0, 0],
                                  [7, 8, 9, 0],
                                  [0, 0, 0, 0]]]       -1 is no request: null blocks
    block_sizes [16], reach [20], num_computed_tokens [60, 10]
                             -> [.., [0, 0, 9, 0], ..]  (60 - 20) // 16 blocks lie below what is still read

Groups of unequal widths share one tensor as wide as the widest. vLLM publishes the gather over several groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kv import rows_cpu as cpu
from compiled_kv.checks import INT32, INTS, Sizes, check_blocks_output, check_least, check_tail
from compiled_kv.launch import dependent_launch, kernel, launch, runs_kernel, stride_of, tl
from compiled_kv.overlap import check_distinct, check_distinct_fake
from compiled_kv.registration import operator
from compiled_kv.rows_triton import load_at, page_of
from compiled_kv.sharing import BLOCK, programs_a_row

INPUTS = ("block_tables", "num_blocks", "req_pool_indices", "block_sizes", "reach", "num_computed_tokens")
Given = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


@kernel
def _gather_block_tables_kernel(
    pool_ptr, num_blocks_ptr, req_pool_indices_ptr, block_sizes_ptr, reach_ptr, computed_ptr, page_table_ptr,
    pool_rows, pool_group_stride, pool_row_stride, pool_stride, count_group_stride, count_stride, index_stride,
    block_size_stride, reach_stride, computed_stride, page_group_stride, page_row_stride,
    batch_size, width, CLEAR: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if PDL:
        dependent_launch()
    row, group = tl.program_id(0), tl.program_id(2)
    part, parts = tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    pool_row = load_at(req_pool_indices_ptr, row, index_stride, row < batch_size, -1)
    is_live = (pool_row >= 0) & (pool_row < pool_rows)
    count_ptr = num_blocks_ptr + group.to(tl.int64) * count_group_stride
    live = tl.minimum(tl.maximum(load_at(count_ptr, pool_row, count_stride, is_live, 0), 0), width)
    first = tl.zeros([], tl.int64)
    if reach_ptr is not None:
        reach = load_at(reach_ptr, group, reach_stride, True, 0)
        block_size = load_at(block_sizes_ptr, group, block_size_stride, True, 1)
        computed = tl.maximum(load_at(computed_ptr, pool_row, computed_stride, is_live, 0), 0)
        below = tl.maximum(computed - tl.maximum(reach, 0), 0) // tl.maximum(block_size, 1)
        first = tl.where((reach > 0) & (block_size > 0), below, 0)
    pool_row_ptr = pool_ptr + group.to(tl.int64) * pool_group_stride + pool_row * pool_row_stride
    page_row_ptr = page_table_ptr + group.to(tl.int64) * page_group_stride + row.to(tl.int64) * page_row_stride
    # A row of no request is cleared whole: that is what attention reads there.
    end = tl.where(is_live, live, width)
    if CLEAR:
        end = tl.maximum(live, width)
    for begin in range(part * BLOCK, end, parts * BLOCK):
        column = begin + tl.arange(0, BLOCK)
        block = page_of(load_at(pool_row_ptr, column, pool_stride, (column < live) & (column >= first), 0), 1)
        tl.store(page_row_ptr + column, block, mask=column < end)


def _launch(out: Tensor, given: Given, clear: bool) -> None:
    block_tables, num_blocks, indices, block_sizes, reach, computed = given
    groups, rows, width = out.shape
    optional = {"block_sizes": block_sizes, "reach": reach, "computed": computed}
    launch(
        _gather_block_tables_kernel, (rows, programs_a_row(rows * groups, width), groups),
        pool_ptr=block_tables, num_blocks_ptr=num_blocks, req_pool_indices_ptr=indices, page_table_ptr=out,
        **{f"{name}_ptr": tensor for name, tensor in optional.items()},
        pool_rows=block_tables.shape[1], pool_group_stride=block_tables.stride(0),
        pool_row_stride=block_tables.stride(1), pool_stride=block_tables.stride(2),
        count_group_stride=num_blocks.stride(0), count_stride=num_blocks.stride(1), index_stride=indices.stride(0),
        block_size_stride=stride_of(block_sizes), reach_stride=stride_of(reach), computed_stride=stride_of(computed),
        page_group_stride=out.stride(0), page_row_stride=out.stride(1), batch_size=indices.shape[0], width=width,
        CLEAR=clear, BLOCK=BLOCK,
    )  # fmt: skip


def _cpu_body(given: Given, rows: int) -> tuple[Tensor, Tensor]:
    """The cleared tables, and which of their entries a kept tail leaves to us."""
    block_tables, num_blocks, indices, block_sizes, reach, computed = given
    groups, pool_rows, width = block_tables.shape
    entry = cpu.iota(rows, indices)
    pool_row = cpu.gather(indices, entry, entry < indices.shape[0])
    is_live = (pool_row >= 0) & (pool_row < pool_rows)
    line = cpu.iota(groups, indices)[:, None] * pool_rows + pool_row  # [G, rows], in the groups laid end to end
    live = cpu.gather(num_blocks.reshape(-1), line, is_live.expand(groups, rows)).clamp(0, width)
    column = cpu.iota(width, indices).expand(groups, rows, width)
    held = (column < live[:, :, None]) & is_live[:, None]
    seen = held
    if reach is not None and block_sizes is not None and computed is not None:
        used = reach.long().clamp(min=0)[:, None], block_sizes.long().clamp(min=1)[:, None]
        below = (cpu.gather(computed, pool_row, is_live).clamp(min=0) - used[0]).clamp(min=0) // used[1]
        seen = held & (column >= torch.where((reach > 0) & (block_sizes > 0), below.t(), 0).t()[:, :, None])
    blocks = cpu.gather_rows(block_tables.reshape(groups * pool_rows, width), line[:, :, None], column, seen)
    return torch.where(seen, cpu.page_of(blocks, 1), 0).int(), held | ~is_live[:, None]


@operator("compiled_kv::gather_block_tables", mutates_args=())
def _gather_block_tables(
    block_tables: Tensor, num_blocks: Tensor, req_pool_indices: Tensor, block_sizes: Tensor | None,
    reach: Tensor | None, num_computed_tokens: Tensor | None,
) -> Tensor:  # fmt: skip
    given = (block_tables, num_blocks, req_pool_indices, block_sizes, reach, num_computed_tokens)
    rows = req_pool_indices.shape[0]
    if not runs_kernel(block_tables):
        return _cpu_body(given, rows)[0]
    out = block_tables.new_empty((block_tables.shape[0], rows, block_tables.shape[2]), dtype=torch.int32)
    _launch(out, given, clear=True)
    return out


@operator("compiled_kv::gather_block_tables_out", mutates_args=("out",))
def _gather_block_tables_out(
    block_tables: Tensor, num_blocks: Tensor, req_pool_indices: Tensor, block_sizes: Tensor | None,
    reach: Tensor | None, num_computed_tokens: Tensor | None, out: Tensor, clear: bool,
) -> None:  # fmt: skip
    given = (block_tables, num_blocks, req_pool_indices, block_sizes, reach, num_computed_tokens)
    check_distinct_fake({"out": out}, dict(zip(INPUTS, given)))
    if runs_kernel(block_tables):
        _launch(out, given, clear)
        return
    tables, written = _cpu_body(given, out.shape[1])
    out.copy_(tables if clear else tables.where(written, out))


def gather_block_tables(
    block_tables: Tensor, num_blocks: Tensor, req_pool_indices: Tensor, *, block_sizes: Tensor | None = None,
    reach: Tensor | None = None, num_computed_tokens: Tensor | None = None, out: Tensor | None = None,
    tail: str = "clear",
) -> Tensor:  # fmt: skip
    """Block tables of a batch's requests in every KV group.

    Args:
        block_tables: int [G, R, W], blocks of each request row in each group; a negative one gives -1.
        num_blocks: int [G, R], how many of them a row holds; clamped to [0, W].
        req_pool_indices: int [B], the request row of each batch entry; one outside [0, R) gives a row of null blocks.
        block_sizes: int [G], tokens a block.
        reach: int [G], tokens before a request's first new one that the group still reads; 0 or less: all of them.
            Blocks that lie wholly below become the null block. Goes with `block_sizes` and `num_computed_tokens`.
        num_computed_tokens: int [R], tokens of each request row that are already in the cache.
        out: int32 [G, N, W], N >= B, written in place and returned: rows from B on hold null blocks.
        tail: entries past a row's blocks become null blocks ("clear"), or keep their values ("keep", needs out).

    Returns:
        int32 [G, B, W], or `out`.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device, strides or overlap is wrong; the text names it.
    """
    sizes = Sizes()
    sizes.check("block_tables", block_tables, INTS, "G", "R", "W")
    sizes.check("num_blocks", num_blocks, INTS, "G", "R")
    sizes.check("req_pool_indices", req_pool_indices, INTS, "B")
    below = {"block_sizes": block_sizes, "reach": reach, "num_computed_tokens": num_computed_tokens}
    absent = [name for name, tensor in below.items() if tensor is None]
    if len(absent) not in (0, len(below)):
        raise ValueError(f"{', '.join(below)} go together, got no {' and no '.join(absent)}")
    for name, tensor in below.items():
        if tensor is not None:
            sizes.check(name, tensor, INTS, "R" if name == "num_computed_tokens" else "G")
    check_tail(tail, out)
    given = (block_tables, num_blocks, req_pool_indices, block_sizes, reach, num_computed_tokens)
    if out is None:
        return torch.ops.compiled_kv.gather_block_tables(*given)
    check_blocks_output(sizes, "out", out, INT32, "G", "N", "W")
    check_least("out", out.shape[1], req_pool_indices.shape[0], "rows", of="the batch")
    check_distinct({"out": out}, dict(zip(INPUTS, given)))
    torch.ops.compiled_kv.gather_block_tables_out(*given, out, tail == "clear")
    return out
