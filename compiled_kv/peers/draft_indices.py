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

from compiled_kv import rows_cpu as cpu
from compiled_kv.checks import INT32, INTS, Sizes, check_entry_pool, check_int, check_tail, check_tuple
from compiled_kv.launch import launch, runs_kernel, size_of, stride_of
from compiled_kv.layout import INT32_MAX, KVLayout
from compiled_kv.overlap import check_distinct, check_distinct_fake
from compiled_kv.peers.draft_indices_cpu import Given, Settings, cpu_body
from compiled_kv.peers.draft_indices_kernel import draft_kv_indices_kernel
from compiled_kv.registration import operator
from compiled_kv.sharing import BLOCK, SCAN, clearers, programs_a_row

Pair = tuple[Tensor, Tensor]
FIELDS = ("kv_indptr", "kv_indices")


def _launch(out: Pair, given: Given, settings: Settings, clear: bool) -> None:
    (kv_indptr, kv_indices), pool, page_map = out, given.pool, given.page_map
    num_steps, topk = settings.num_steps, settings.topk
    capacity, branches = kv_indices.shape[1], given.seq_lens.shape[0] * topk
    parts = programs_a_row(branches * num_steps, capacity)
    ahead = clearers(capacity, parts * num_steps, clear)
    launch(
        draft_kv_indices_kernel, (ahead + branches, parts, num_steps),
        pool_ptr=pool, req_pool_indices_ptr=given.req_pool_indices, seq_lens_ptr=given.seq_lens,
        branch_lens_ptr=given.positions, map_ptr=page_map, kv_indptr_ptr=kv_indptr, kv_indices_ptr=kv_indices,
        pool_rows=pool.shape[0], pool_width=pool.shape[1], pool_row_stride=pool.stride(0), pool_stride=pool.stride(1),
        index_stride=given.req_pool_indices.stride(0), seq_stride=given.seq_lens.stride(0),
        branch_stride=0 if given.positions is None else given.positions.stride(0),
        map_stride=stride_of(page_map), map_size=size_of(page_map),
        indptr_row_stride=kv_indptr.stride(0), indices_row_stride=kv_indices.stride(0),
        clearers=ahead, batch_size=given.seq_lens.shape[0], topk=topk, num_steps=num_steps, capacity=capacity,
        cap=settings.cap, window=settings.window, sinks=settings.sinks, PAGE_SIZE=settings.page_size,
        ENTRY_SIZE=settings.entry_page_size, CLEAR=clear, BLOCK=BLOCK, SCAN=SCAN,
    )  # fmt: skip


@operator("compiled_kv::draft_kv_indices", mutates_args=())
def _draft_kv_indices(
    pool: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, positions: Tensor | None, page_map: Tensor | None,
    num_steps: int, topk: int, page_size: int, entry_page_size: int, cap: int, window: int, sinks: int, capacity: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    given = Given(pool, req_pool_indices, seq_lens, positions, page_map)
    settings = Settings(num_steps, topk, page_size, entry_page_size, cap, window, sinks)
    if not runs_kernel(pool):
        return cpu_body(given, settings, capacity)[:2]
    widths = (seq_lens.shape[0] * topk + 1, capacity)
    kv_indptr, kv_indices = (pool.new_empty((num_steps, width), dtype=torch.int32) for width in widths)
    _launch((kv_indptr, kv_indices), given, settings, clear=True)
    return kv_indptr, kv_indices


@operator("compiled_kv::draft_kv_indices_out", mutates_args=FIELDS)
def _draft_kv_indices_out(
    pool: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, positions: Tensor | None, page_map: Tensor | None,
    kv_indptr: Tensor, kv_indices: Tensor, num_steps: int, topk: int, page_size: int, entry_page_size: int, cap: int,
    window: int, sinks: int, clear: bool,
) -> None:  # fmt: skip
    given, out = Given(pool, req_pool_indices, seq_lens, positions, page_map), (kv_indptr, kv_indices)
    settings = Settings(num_steps, topk, page_size, entry_page_size, cap, window, sinks)
    check_distinct_fake(dict(zip(FIELDS, out)), given._asdict())
    if runs_kernel(pool):
        _launch(out, given, settings, clear)
        return
    indptr, indices, written = cpu_body(given, settings, kv_indices.shape[1], kv_indices.dtype)
    # A copy into a slice would be guarded on whether it is the whole buffer.
    kv_indptr[:num_steps].index_copy_(1, cpu.iota(indptr.shape[1], indptr), indptr)
    steps = kv_indices[:num_steps]
    steps.copy_(indices if clear else torch.where(written, indices, steps))


def draft_kv_indices(
    pool: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, *, num_steps: int, topk: int = 1, layout: KVLayout,
    positions: Tensor | None = None, page_map: Tensor | None = None, entry_page_size: int = 1, window: int = 0,
    sinks: int = 0, capacity: int | None = None, out: Pair | None = None, tail: str = "clear",
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
        page_map: int [NP], virtual to physical pages of layout.page_size; a slot of none, and an unbound page, give 0.
        window, sinks: where window is not 0, a branch reads the first `sinks` committed tokens and the last ones, at
            most window + sinks together, before its own.
        capacity: entries S a step; rows that do not fit are cut, and kv_indptr never passes S. Absent: room for all.
        out: (int32 [K, B * topk + 1], int32 or int64 [K, S]), written in place and returned; in place of capacity.
            Both may have more rows, and the first more columns, which are left alone. A slot beyond 2^31 - 1 is -1 in
            int32 entries, and itself in int64 ones.
        tail: kv_indices past the last branch's become 0 ("clear"), or keep their values ("keep", needs out).

    Returns:
        (kv_indptr int32 [K, B * topk + 1], kv_indices int32 [K, S]).

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device, range, width or overlap is wrong; the text
            names it.
    """
    sizes = Sizes()
    check_entry_pool(sizes, pool, req_pool_indices, entry_page_size, layout)
    sizes.check("seq_lens", seq_lens, INTS, "B")
    for name, number in (("num_steps", num_steps), ("topk", topk)):
        check_int(name, number, 1, INT32_MAX)
    for name, number in (("window", window), ("sinks", sinks)):
        check_int(name, number, 0, INT32_MAX)
    sizes.named["B*topk"] = branches = seq_lens.shape[0] * topk
    if positions is not None:
        sizes.check("positions", positions, INTS, "B*topk")
    if page_map is not None:
        sizes.check("page_map", page_map, INTS, "NP")
    check_tail(tail, out)
    given = Given(pool, req_pool_indices, seq_lens, positions, page_map)
    settings = (num_steps, topk, layout.page_size, entry_page_size, layout.max_seqlen_k, window, sinks)
    if out is None:
        room = branches * (layout.max_seqlen_k + num_steps) if capacity is None else capacity
        check_int("capacity", room, 0, INT32_MAX)
        return torch.ops.compiled_kv.draft_kv_indices(*given, *settings, room)
    if capacity is not None:
        raise ValueError(f"capacity goes with a new result: out has its own, got {capacity}")
    check_tuple("out", out, FIELDS)
    for name, tensor, dtypes, columns in zip(FIELDS, out, (INT32, INTS), (branches + 1, 0)):
        sizes.check_output(name, tensor, dtypes, f"steps of {name}", f"columns of {name}")
        if tensor.shape[0] < num_steps or tensor.shape[1] < columns:
            raise ValueError(f"{name} must be at least [{num_steps}, {columns}], got {list(tensor.shape)}")
    check_distinct(dict(zip(FIELDS, out)), given._asdict())
    torch.ops.compiled_kv.draft_kv_indices_out(*given, *out, *settings, tail == "clear")
    return out
