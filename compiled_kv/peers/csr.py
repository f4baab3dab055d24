"""Request rows -> the CSR form of a page table: `kv_indptr`, `kv_indices`, `kv_last_page_len`.

    page_size 4, pool = [[ 0,  0,  0,  0,  0,  0],
                         [ 8,  9, 10, 11,  4,  5]]         request 1 owns page 2, then page 1
    req_pool_indices = [1, 0], kv_lens = [6, 3]
    csr_tables(...) -> kv_indptr [0, 2, 3], kv_indices [2, 1, 0], kv_last_page_len [2, 3]

With page size 1 the indices are token slots. `entry_page_size = 4` reads a pool of pages [[0, 0], [2, 1]] instead, and
gives the same. FlashInfer's batch decode reads this form; SGLang publishes the kernel that fills `kv_indices` behind a
given `kv_indptr`, here `fill_kv_indices`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kv.checks import INT32, INTS, Sizes, check_entry_pool, check_int, check_tail, check_tuple
from compiled_kv.launch import launch, runs_kernel, size_of, stride_of
from compiled_kv.layout import INT32_MAX, KVLayout
from compiled_kv.overlap import check_distinct, check_distinct_fake
from compiled_kv.peers.csr_cpu import Given, Settings, entries_of, last_page_lens, lengths_of
from compiled_kv.peers.csr_kernel import csr_kernel
from compiled_kv.registration import operator
from compiled_kv.sharing import BLOCK, SCAN, clearers, programs_a_row

Csr = tuple[Tensor, Tensor, Tensor]
FIELDS = ("kv_indptr", "kv_indices", "kv_last_page_len")
INPUTS = ("pool", "req_pool_indices", "kv_lens", "kv_start", "token_map", "num_reqs")


def _launch(
    kv_indices: Tensor, kv_indptr: Tensor, kv_last_page_len: Tensor | None, given: Given, settings: Settings,
    clear: bool,
) -> None:  # fmt: skip
    """`kv_last_page_len` None: `kv_indptr` is given, not written."""
    pool, batch_size, capacity = given.pool, given.kv_lens.shape[0], kv_indices.shape[0]
    made, token_map, parts = kv_last_page_len is not None, given.token_map, programs_a_row(batch_size, capacity)
    ahead = clearers(capacity, parts, clear)
    launch(
        csr_kernel, (ahead + batch_size, parts),
        pool_ptr=pool, req_pool_indices_ptr=given.req_pool_indices, kv_lens_ptr=given.kv_lens,
        kv_start_ptr=given.kv_start, map_ptr=token_map, num_reqs_ptr=given.num_reqs,
        given_indptr_ptr=None if made else kv_indptr, kv_indptr_ptr=kv_indptr if made else None,
        kv_indices_ptr=kv_indices, kv_last_page_len_ptr=kv_last_page_len,
        pool_rows=pool.shape[0], pool_width=pool.shape[1], pool_row_stride=pool.stride(0), pool_stride=pool.stride(1),
        index_stride=given.req_pool_indices.stride(0), len_stride=given.kv_lens.stride(0),
        start_stride=stride_of(given.kv_start), map_stride=stride_of(token_map),
        map_size=size_of(token_map), indptr_stride=kv_indptr.stride(0),
        clearers=ahead, batch_size=batch_size, capacity=capacity, cap=settings.cap, PAGE_SIZE=settings.page_size,
        ENTRY_SIZE=settings.entry_page_size, CLEAR=clear, BLOCK=BLOCK, SCAN=SCAN,
    )  # fmt: skip


def _cpu_body(
    given: Given, settings: Settings, capacity: int, dtype: torch.dtype = torch.int32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The three outputs, cleared, and which indices a kept tail leaves to us."""
    lengths, pages = lengths_of(given, settings)
    kv_indptr = torch.nn.functional.pad(pages.cumsum(0).clamp(max=capacity), (1, 0))
    indices, written = entries_of(given, settings, kv_indptr, pages, capacity, dtype)
    return kv_indptr.clamp(max=INT32_MAX).int(), indices, last_page_lens(lengths, settings.page_size), written


@operator("compiled_kv::csr_tables", mutates_args=())
def _csr_tables(
    pool: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, kv_start: Tensor | None, token_map: Tensor | None,
    num_reqs: Tensor | None, page_size: int, entry_page_size: int, cap: int, capacity: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    given = Given(pool, req_pool_indices, kv_lens, kv_start, token_map, num_reqs)
    settings = Settings(page_size, entry_page_size, cap)
    if not runs_kernel(pool):
        return _cpu_body(given, settings, capacity)[:3]
    sizes = (kv_lens.shape[0] + 1, capacity, kv_lens.shape[0])
    kv_indptr, kv_indices, kv_last_page_len = (pool.new_empty((size,), dtype=torch.int32) for size in sizes)
    _launch(kv_indices, kv_indptr, kv_last_page_len, given, settings, clear=True)
    return kv_indptr, kv_indices, kv_last_page_len


@operator("compiled_kv::csr_tables_out", mutates_args=FIELDS)
def _csr_tables_out(
    pool: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, kv_start: Tensor | None, token_map: Tensor | None,
    num_reqs: Tensor | None, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor,
    page_size: int, entry_page_size: int, cap: int, clear: bool,
) -> None:  # fmt: skip
    given = Given(pool, req_pool_indices, kv_lens, kv_start, token_map, num_reqs)
    settings = Settings(page_size, entry_page_size, cap)
    check_distinct_fake(dict(zip(FIELDS, (kv_indptr, kv_indices, kv_last_page_len))), given._asdict())
    if runs_kernel(pool):
        _launch(kv_indices, kv_indptr, kv_last_page_len, given, settings, clear)
        return
    indptr, indices, last, written = _cpu_body(given, settings, kv_indices.shape[0], kv_indices.dtype)
    kv_indptr.copy_(indptr)
    kv_last_page_len.copy_(last)
    kv_indices.copy_(indices if clear else torch.where(written, indices, kv_indices))


@operator("compiled_kv::fill_kv_indices", mutates_args=("kv_indices",))
def _fill_kv_indices(
    pool: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, kv_start: Tensor | None, token_map: Tensor | None,
    kv_indptr: Tensor, kv_indices: Tensor, page_size: int, entry_page_size: int, cap: int,
) -> None:  # fmt: skip
    given = Given(pool, req_pool_indices, kv_lens, kv_start, token_map, None)
    settings = Settings(page_size, entry_page_size, cap)
    check_distinct_fake({"kv_indices": kv_indices}, {**given._asdict(), "kv_indptr": kv_indptr})
    if runs_kernel(pool):
        _launch(kv_indices, kv_indptr, None, given, settings, clear=False)
        return
    _, pages = lengths_of(given, settings)
    indices, written = entries_of(given, settings, kv_indptr.long(), pages, kv_indices.shape[0], kv_indices.dtype)
    kv_indices.copy_(torch.where(written, indices, kv_indices))


def _check_inputs(given: Given, layout: KVLayout, entry_page_size: int) -> Sizes:
    sizes = Sizes()
    check_entry_pool(sizes, given.pool, given.req_pool_indices, entry_page_size, layout)
    sizes.check("kv_lens", given.kv_lens, INTS, "B")
    for name, tensor, dim in (("kv_start", given.kv_start, "B"), ("token_map", given.token_map, "N")):
        if tensor is not None:
            sizes.check(name, tensor, INTS, dim)
    if given.num_reqs is not None:
        sizes.check_scalar("num_reqs", given.num_reqs)
    return sizes


def csr_tables(
    pool: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, kv_start: Tensor | None = None, *, layout: KVLayout,
    entry_page_size: int = 1, token_map: Tensor | None = None, num_reqs: Tensor | None = None,
    capacity: int | None = None, out: Csr | None = None, tail: str = "clear",
) -> Csr:  # fmt: skip
    """Pages of every request, one after the other; with `layout.page_size` 1, token slots.

    Args:
        pool: int [R, C], a token slot for each position of each row, or a page for each `entry_page_size` positions.
        req_pool_indices: int [B], the pool row of each batch entry; one outside the pool has no pages.
        kv_lens: int [B], tokens of each row, from its start on; clamped to [0, layout.max_seqlen_k].
        kv_start: int [B], the position of each row's first token; None for 0. Page p begins at kv_start + p *
            page_size; a position beyond the pool gives -1.
        layout: page size and bounds.
        token_map: int [N], slots to slots, looked up before the page is taken; no counterpart gives -1.
        num_reqs: int tensor, 0-d or [1], on the device: rows at and beyond it have no pages. None: every row counts.
        capacity: entries S of kv_indices; rows that do not fit are cut, and kv_indptr never passes S. Absent: room
            for B rows of layout.max_num_pages.
        out: (int32 [B + 1], int32 or int64 [S], int32 [B]), written in place and returned; in place of capacity.
            A slot or page beyond 2^31 - 1 is -1 in int32 entries, and itself in int64 ones.
        tail: kv_indices past the last row's become 0 ("clear"), or keep their values ("keep", needs out).

    Returns:
        (kv_indptr int32 [B + 1], kv_indices int32 [S], kv_last_page_len int32 [B]). The last page of a row holds
        (length - 1) % page_size + 1 tokens, and 0 where it has none.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device, range, width or overlap is wrong; the text
            names it.
    """
    given = Given(pool, req_pool_indices, kv_lens, kv_start, token_map, num_reqs)
    sizes = _check_inputs(given, layout, entry_page_size)
    check_tail(tail, out)
    settings = (layout.page_size, entry_page_size, layout.max_seqlen_k)
    if out is None:
        room = kv_lens.shape[0] * layout.max_num_pages if capacity is None else capacity
        check_int("capacity", room, 0, INT32_MAX)
        return torch.ops.compiled_kv.csr_tables(*given, *settings, room)
    if capacity is not None:
        raise ValueError(f"capacity goes with a new result: out has its own, got {capacity}")
    check_tuple("out", out, FIELDS)
    for name, tensor, dtypes, dim in zip(FIELDS, out, (INT32, INTS, INT32), ("B+1", "S", "B")):
        sizes.check_output(name, tensor, dtypes, dim)
    check_distinct(dict(zip(FIELDS, out)), given._asdict())
    torch.ops.compiled_kv.csr_tables_out(*given, *out, *settings, tail == "clear")
    return out


def fill_kv_indices(
    pool: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, kv_indptr: Tensor, kv_indices: Tensor,
    kv_start: Tensor | None = None, *, layout: KVLayout, entry_page_size: int = 1, token_map: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`csr_tables` behind a `kv_indptr` that stands already; in place.

    Args:
        pool, req_pool_indices, kv_lens, kv_start, layout, entry_page_size, token_map: as in `csr_tables`.
        kv_indptr: int [B + 1], non-decreasing: row b's pages lie from kv_indptr[b] on. A row writes no more than its
            length's pages, nor past kv_indptr[b + 1], nor outside `kv_indices`.
        kv_indices: int32 or int64 [S]; entries that no row owns keep their values. A slot or page beyond 2^31 - 1 is
            -1 in int32, and itself in int64.

    Returns:
        `kv_indices`.

    Raises:
        TypeError, ValueError: as `csr_tables`.
    """
    given = Given(pool, req_pool_indices, kv_lens, kv_start, token_map, None)
    sizes = _check_inputs(given, layout, entry_page_size)
    sizes.check("kv_indptr", kv_indptr, INTS, "B+1")
    sizes.check_output("kv_indices", kv_indices, INTS, "S")
    check_distinct({"kv_indices": kv_indices}, {**given._asdict(), "kv_indptr": kv_indptr})
    settings = (layout.page_size, entry_page_size, layout.max_seqlen_k)
    torch.ops.compiled_kv.fill_kv_indices(*given[:5], kv_indptr, kv_indices, *settings)
    return kv_indices
