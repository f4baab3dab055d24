"""The CSR form of every step of a multi-step draft at once: committed tokens, then the draft's own.

    one request, topk 2 branches, 2 steps, page size 1; req_to_token = [[10, 11, 12, 20, 21, 30, 31]], seq_lens = [3]
    branch 0 writes to positions 3 and 4, branch 1 to 5 and 6

    step 0    kv_indptr [0, 4,  8]    kv_indices [10, 11, 12, 20,      10, 11, 12, 30]
    step 1    kv_indptr [0, 5, 10]    kv_indices [10, 11, 12, 20, 21,  10, 11, 12, 30, 31]

With larger pages each branch begins on a page of its own, behind as many slots as the last committed page holds:
branch k of row i begins at position (length // p + k * ceil((length % p + steps) / p)) * p + length % p. SGLang
publishes this kernel for its draft workers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import triton_op

from compiled_kv import rows_cpu as cpu
from compiled_kv.checks import (
    INT32,
    INTS,
    Sizes,
    check_distinct,
    check_distinct_fake,
    check_int,
    check_tail,
    check_tuple,
    check_width,
)
from compiled_kv.csr_kernel import slots_at
from compiled_kv.launch import BLOCK, SCAN, kernel, launch, programs_a_row, runs_kernel, tl
from compiled_kv.layout import KVLayout
from compiled_kv.lengths import UNBOUNDED
from compiled_kv.rows_triton import INT32_MAX, clamped_length, load_at, page_of

Pair = tuple[Tensor, Tensor]
FIELDS = ("kv_indptr", "kv_indices")
INPUTS = ("pool", "req_pool_indices", "seq_lens", "positions")


@kernel
def _draft_kv_indices_kernel(
    pool_ptr, req_pool_indices_ptr, seq_lens_ptr, branch_lens_ptr, kv_indptr_ptr, kv_indices_ptr,
    pool_rows, pool_width, pool_row_stride, pool_stride, index_stride, seq_stride, branch_stride, indptr_row_stride,
    indices_row_stride, batch_size, topk, num_steps, capacity, cap,
    PAGE_SIZE: tl.constexpr, ENTRY_SIZE: tl.constexpr, CLEAR: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    branch = tl.program_id(0).to(tl.int64) - 1
    part, parts = tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    drafts = tl.program_id(2).to(tl.int64) + 1
    room = tl.zeros([], tl.int64) + capacity
    kv_indptr_ptr += tl.program_id(2).to(tl.int64) * indptr_row_stride
    kv_indices_ptr += tl.program_id(2).to(tl.int64) * indices_row_stride
    # Loaded here and not in a device function, as in csr_kernel.
    request = tl.where(branch < 0, batch_size, branch // topk)
    first = tl.zeros([], tl.int64)
    for chunk in range(0, request, SCAN):
        other = (chunk + tl.arange(0, SCAN)).to(tl.int64)
        pool_row = tl.load(req_pool_indices_ptr + other * index_stride, mask=other < request, other=-1).to(tl.int64)
        live = (pool_row >= 0) & (pool_row < pool_rows)
        raw = tl.load(seq_lens_ptr + other * seq_stride, mask=live, other=0).to(tl.int64)
        first += tl.sum(tl.where(other < request, (clamped_length(raw, 0, cap) + drafts) * topk, 0), 0)
    if branch < 0:
        if part == 0:
            total = tl.zeros([], tl.int64)
            branches = (tl.zeros([], tl.int64) + batch_size) * topk
            for from_branch in range(0, branches, SCAN):
                one = from_branch + tl.arange(0, SCAN)
                in_range = one < branches
                if branch_lens_ptr is not None:
                    raw = load_at(branch_lens_ptr, one, branch_stride, in_range, 0)
                else:
                    pool_row = load_at(req_pool_indices_ptr, one // topk, index_stride, in_range, -1)
                    live = (pool_row >= 0) & (pool_row < pool_rows)
                    raw = load_at(seq_lens_ptr, one // topk, seq_stride, live, 0)
                count = tl.where(in_range, clamped_length(raw, 0, cap) + drafts, 0)
                ends = tl.minimum(tl.minimum(total + tl.cumsum(count, 0), room), INT32_MAX)
                tl.store(kv_indptr_ptr + one + 1, ends.to(tl.int32), mask=in_range)
                total += tl.sum(count, 0)
            tl.store(kv_indptr_ptr, 0)
        if CLEAR:
            for begin in range(tl.minimum(first, room) + part * BLOCK, room, parts * BLOCK):
                entry = begin + tl.arange(0, BLOCK)
                tl.store(kv_indices_ptr + entry, tl.zeros([BLOCK], tl.int32), mask=entry < room)
    else:
        pool_row = tl.load(req_pool_indices_ptr + request * index_stride).to(tl.int64)
        is_live = (pool_row >= 0) & (pool_row < pool_rows)
        length = clamped_length(
            tl.load(seq_lens_ptr + request * seq_stride, mask=is_live, other=0).to(tl.int64), 0, cap
        )
        own = branch - request * topk
        pages = (length % PAGE_SIZE + num_steps + PAGE_SIZE - 1) // PAGE_SIZE
        first += own * (length + drafts)
        count = tl.minimum(length + drafts, room - first)
        pool_row_ptr = pool_ptr + pool_row * pool_row_stride
        for begin in range(part * BLOCK, count, parts * BLOCK):
            column = begin + tl.arange(0, BLOCK)
            position = column + tl.where(column < length, 0, own * pages * PAGE_SIZE)
            owned = column < count
            slot = slots_at(pool_row_ptr, pool_stride, pool_width, position, owned & is_live, ENTRY_SIZE)
            tl.store(kv_indices_ptr + first + column, page_of(slot, 1), mask=owned)


def _launch(
    out: Pair, pool: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, positions: Tensor | None,
    topk: int, page_size: int, entry_page_size: int, cap: int, clear: bool,
) -> None:  # fmt: skip
    kv_indptr, kv_indices = out
    (num_steps, capacity), branches = kv_indices.shape, seq_lens.shape[0] * topk
    launch(
        _draft_kv_indices_kernel, (branches + 1, programs_a_row(branches * num_steps, capacity), num_steps),
        pool_ptr=pool, req_pool_indices_ptr=req_pool_indices, seq_lens_ptr=seq_lens, branch_lens_ptr=positions,
        kv_indptr_ptr=kv_indptr, kv_indices_ptr=kv_indices, pool_rows=pool.shape[0], pool_width=pool.shape[1],
        pool_row_stride=pool.stride(0), pool_stride=pool.stride(1), index_stride=req_pool_indices.stride(0),
        seq_stride=seq_lens.stride(0), branch_stride=0 if positions is None else positions.stride(0),
        indptr_row_stride=kv_indptr.stride(0), indices_row_stride=kv_indices.stride(0), batch_size=seq_lens.shape[0],
        topk=topk, num_steps=num_steps, capacity=capacity, cap=cap, PAGE_SIZE=page_size, ENTRY_SIZE=entry_page_size,
        CLEAR=clear, BLOCK=BLOCK, SCAN=SCAN,
    )  # fmt: skip


def _cpu_body(
    pool: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, positions: Tensor | None,
    num_steps: int, topk: int, page_size: int, entry_page_size: int, cap: int, capacity: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Both outputs, cleared, and which indices a kept tail leaves to us."""
    rows = req_pool_indices.long()
    live = (rows >= 0) & (rows < pool.shape[0])
    lengths = cpu.clamped_length(seq_lens, 0, cap).where(live, 0)[:, None].expand(-1, topk).reshape(-1)
    drafts = cpu.iota(num_steps, rows)[:, None] + 1
    ends = (lengths + drafts).cumsum(1)
    shown = lengths if positions is None else cpu.clamped_length(positions, 0, cap)
    kv_indptr = torch.nn.functional.pad((shown + drafts).cumsum(1).clamp(max=min(capacity, cpu.INT32_MAX)), (1, 0))
    entry = cpu.iota(capacity, rows).expand(num_steps, capacity)
    branch = torch.searchsorted(ends.contiguous(), entry.contiguous(), right=True)
    written = branch < lengths.shape[0]
    length = cpu.gather(lengths, branch, written)
    before = cpu.gather(lengths.cumsum(0) - lengths, branch, written)
    column = entry - before - branch * drafts
    request = cpu.floor_div(branch, topk)
    pages = cpu.floor_div(length % page_size + num_steps + page_size - 1, page_size)
    position = column + torch.where(column < length, 0, (branch - request * topk) * pages * page_size)
    pool_row = cpu.gather(rows, request, written)
    slot = cpu.gather_rows(pool, pool_row, cpu.floor_div(position, entry_page_size), written)
    if entry_page_size > 1:
        page = cpu.page_of(slot, 1)
        slot = torch.where(page < 0, -1, page * entry_page_size + position % entry_page_size)
    return kv_indptr.int(), torch.where(written, cpu.page_of(slot, 1), 0).int(), written


@triton_op("compiled_kv::draft_kv_indices", mutates_args=())
def _draft_kv_indices(
    pool: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, positions: Tensor | None,
    num_steps: int, topk: int, page_size: int, entry_page_size: int, cap: int, capacity: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    inputs = (pool, req_pool_indices, seq_lens, positions)
    if not runs_kernel(pool):
        return _cpu_body(*inputs, num_steps, topk, page_size, entry_page_size, cap, capacity)[:2]
    widths = (seq_lens.shape[0] * topk + 1, capacity)
    kv_indptr, kv_indices = (pool.new_empty((num_steps, width), dtype=torch.int32) for width in widths)
    _launch((kv_indptr, kv_indices), *inputs, topk, page_size, entry_page_size, cap, clear=True)
    return kv_indptr, kv_indices


@triton_op("compiled_kv::draft_kv_indices_out", mutates_args=FIELDS)
def _draft_kv_indices_out(
    pool: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, positions: Tensor | None, kv_indptr: Tensor,
    kv_indices: Tensor, topk: int, page_size: int, entry_page_size: int, cap: int, clear: bool,
) -> None:  # fmt: skip
    inputs, out = (pool, req_pool_indices, seq_lens, positions), (kv_indptr, kv_indices)
    check_distinct_fake(dict(zip(FIELDS, out)), dict(zip(INPUTS, inputs)))
    if runs_kernel(pool):
        _launch(out, *inputs, topk, page_size, entry_page_size, cap, clear)
        return
    num_steps, capacity = kv_indices.shape
    indptr, indices, written = _cpu_body(*inputs, num_steps, topk, page_size, entry_page_size, cap, capacity)
    kv_indptr.copy_(indptr)
    kv_indices.copy_(indices if clear else torch.where(written, indices, kv_indices))


def draft_kv_indices(
    pool: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, *, num_steps: int, topk: int = 1, layout: KVLayout,
    positions: Tensor | None = None, entry_page_size: int = 1, capacity: int | None = None, out: Pair | None = None,
    tail: str = "clear",
) -> Pair:  # fmt: skip
    """Token slots that each branch of each request reads in each of `num_steps` draft steps.

    Args:
        pool: int [R, C], a token slot for each position of each row, or a page for each `entry_page_size` positions.
        req_pool_indices: int [B], the pool row of each batch entry; one outside the pool has no committed tokens, and
            -1 for its draft's.
        seq_lens: int [B], committed tokens; clamped to [0, layout.max_seqlen_k].
        num_steps, topk: steps K and branches a request.
        layout: bounds, and the page size that sets branches apart.
        positions: int [B * topk], the lengths of kv_indptr where a caller has its own; those of seq_lens if absent.
        capacity: entries S a step; rows that do not fit are cut, and kv_indptr never passes S. Absent: room for all.
        out: (int32 [K, B * topk + 1], int32 or int64 [K, S]), written in place and returned; in place of capacity.
        tail: kv_indices past the last branch's become 0 ("clear"), or keep their values ("keep", needs out).

    Returns:
        (kv_indptr int32 [K, B * topk + 1], kv_indices int32 [K, S]).

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device, range, width or overlap is wrong; the text
            names it.
    """
    sizes = Sizes()
    sizes.check("pool", pool, INTS, "R", "C")
    sizes.check("req_pool_indices", req_pool_indices, INTS, "B")
    sizes.check("seq_lens", seq_lens, INTS, "B")
    for name, number in (("num_steps", num_steps), ("topk", topk), ("entry_page_size", entry_page_size)):
        check_int(name, number, 1, UNBOUNDED)
    check_width("pool", pool.shape[1] * entry_page_size, layout.max_seqlen_k, "tokens a row")
    sizes.named |= {"K": num_steps, "B*topk": seq_lens.shape[0] * topk, "B*topk+1": seq_lens.shape[0] * topk + 1}
    if positions is not None:
        sizes.check("positions", positions, INTS, "B*topk")
    check_tail(tail, out)
    inputs = (pool, req_pool_indices, seq_lens, positions)
    settings = (topk, layout.page_size, entry_page_size, layout.max_seqlen_k)
    if out is None:
        room = seq_lens.shape[0] * topk * (layout.max_seqlen_k + num_steps) if capacity is None else capacity
        check_int("capacity", room, 0, UNBOUNDED)
        return torch.ops.compiled_kv.draft_kv_indices(*inputs, num_steps, *settings, room)
    if capacity is not None:
        raise ValueError(f"capacity goes with a new result: out has its own, got {capacity}")
    check_tuple("out", out, FIELDS)
    sizes.check_output("kv_indptr", out[0], INT32, "K", "B*topk+1")
    sizes.check_output("kv_indices", out[1], INTS, "K", "S")
    check_distinct(dict(zip(FIELDS, out)), dict(zip(INPUTS, inputs)))
    torch.ops.compiled_kv.draft_kv_indices_out(*inputs, *out, *settings, tail == "clear")
    return out
