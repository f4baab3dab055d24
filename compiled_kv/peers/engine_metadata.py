"""The metadata of a captured step in the form of engines that own its static buffers; one launch.

    page_size 4, page_table as it stood [[9, 9, 9, 9]], req_to_token = [[8, .., 11, 4, 5, ..]], seq_lens = [6]
    page_table            -> [[2, 1, 9, 9]]       columns past the live ones keep what they held
    page_map [0, 5, -1]   -> [[0, 5, 9, 9]]       virtual to physical; an unbound page is the null page
    slots [4, -1], full_to_swa [.., 4: 12], room for four -> [12, -1, 0, 0]      zero behind the given ones

`decode_metadata` is the form to prefer: functional, with padding rows and status bits. This one writes in place only,
leaves out what has no buffer, and translates every given slot, those of padded requests too. SGLang publishes this
fusion for its trtllm_mha and trtllm_mla back ends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kv.checks import (
    INT32,
    INT64,
    INTS,
    Sizes,
    check_int,
    check_least,
    check_pool,
    check_strided_table,
    check_tail,
)
from compiled_kv.launch import launch, runs_kernel, size_of, stride_of
from compiled_kv.layout import INT32_MAX, KVLayout
from compiled_kv.lengths import check_queries
from compiled_kv.overlap import check_distinct, check_distinct_fake
from compiled_kv.peers.engine_cpu import run_on_cpu
from compiled_kv.peers.engine_kernel import write_metadata_kernel
from compiled_kv.peers.engine_parts import EngineMetadata, Inputs, Settings
from compiled_kv.registration import operator
from compiled_kv.sharing import BLOCK, SCAN, TOKENS, programs_a_row


def _launch(out: EngineMetadata, given: Inputs, settings: Settings) -> None:
    pool, batch_size, width = given.req_to_token, given.seq_lens.shape[0], settings.width
    swa_map = given.swa_page_map if given.full_to_swa is None else given.full_to_swa
    launch(
        write_metadata_kernel, (batch_size + 1, programs_a_row(batch_size, width)),
        req_to_token_ptr=pool, req_pool_indices_ptr=given.req_pool_indices, seq_lens_ptr=given.seq_lens,
        q_lens_ptr=given.q_len, slots_ptr=given.slots, map_ptr=swa_map, page_map_ptr=given.page_map,
        cache_seqlens_ptr=out.cache_seqlens, cu_q_ptr=out.cu_seqlens_q, cu_k_ptr=out.cu_seqlens_k,
        page_table_ptr=out.page_table, swa_page_table_ptr=out.swa_page_table, swa_slot_mapping_ptr=out.swa_slot_mapping,
        pool_rows=pool.shape[0], pool_width=pool.shape[1], pool_row_stride=pool.stride(0), pool_stride=pool.stride(1),
        index_stride=given.req_pool_indices.stride(0), seq_stride=given.seq_lens.stride(0),
        q_stride=stride_of(given.q_len), slots_stride=stride_of(given.slots), num_slots=size_of(given.slots),
        map_stride=stride_of(swa_map), map_size=size_of(swa_map), page_map_stride=stride_of(given.page_map),
        page_map_size=size_of(given.page_map), page_row_stride=stride_of(out.page_table),
        page_stride=stride_of(out.page_table, 1), swa_row_stride=stride_of(out.swa_page_table),
        swa_stride=stride_of(out.swa_page_table, 1), batch_size=batch_size, width=width,
        num_tokens=size_of(out.swa_slot_mapping), delta=settings.delta, q_len=settings.q_len, cap=settings.cap,
        PAGE_SIZE=settings.page_size, PAGE_MAP=given.full_to_swa is None, CLEAR=settings.clear,
        BLOCK=BLOCK, TOKENS=TOKENS, SCAN=SCAN,
    )  # fmt: skip


@operator("compiled_kv::write_metadata", mutates_args=EngineMetadata._fields)
def _write_metadata(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, q_lens: Tensor | None, slots: Tensor | None,
    full_to_swa: Tensor | None, page_map: Tensor | None, swa_page_map: Tensor | None,
    cache_seqlens: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    page_table: Tensor | None, swa_page_table: Tensor | None, swa_slot_mapping: Tensor | None,
    width: int, page_size: int, cap: int, delta: int, q_len: int, clear: bool,
) -> None:  # fmt: skip
    given = Inputs(req_to_token, req_pool_indices, seq_lens, q_lens, slots, full_to_swa, page_map, swa_page_map)
    out = EngineMetadata(cache_seqlens, cu_seqlens_q, cu_seqlens_k, page_table, swa_page_table, swa_slot_mapping)
    check_distinct_fake(_present(out), given._asdict())
    run = _launch if runs_kernel(req_to_token) else run_on_cpu
    run(out, given, Settings(width, page_size, cap, delta, q_len, clear))


def _present(out: EngineMetadata) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in out._asdict().items() if tensor is not None}


def write_metadata(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, out: EngineMetadata, *, layout: KVLayout,
    seq_len_delta: int = 0, q_len: int | Tensor = 1, slots: Tensor | None = None, full_to_swa: Tensor | None = None,
    page_map: Tensor | None = None, swa_page_map: Tensor | None = None, width: int | None = None, tail: str = "keep",
) -> EngineMetadata:  # fmt: skip
    """Fill an engine's static buffers for one step.

    Args:
        req_to_token: int [R, C], token slot of each position of each pool row; C >= layout.max_seqlen_k.
        req_pool_indices: int [B], the pool row of each batch entry; one outside the pool has length 0.
        seq_lens: int [B], committed tokens; with `seq_len_delta` clamped to [0, layout.max_seqlen_k].
        out: the buffers. `swa_page_table` needs `page_table`.
        layout: page size and bounds; its window plays no part, for every live column is translated.
        seq_len_delta: tokens this step adds to seq_lens.
        q_len: queries a row for `cu_seqlens_q`: an int, or an int tensor [B].
        slots: int [n], the slots that the allocator gave: all of them are translated.
        full_to_swa: int [N], slots to slots: for `swa_page_table` and `swa_slot_mapping`; no counterpart gives -1.
        page_map: int [NP], virtual to physical pages for `page_table`; an unbound page gives the null page.
        swa_page_map: int [NS], the same for `swa_page_table`, in place of full_to_swa.
        width: columns of the tables that may be written, at least layout.max_num_pages; all of them if absent.
        tail: columns past a row's live ones are left alone ("keep") or zeroed up to `width` ("clear").

    Returns:
        `out`.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device, range, width or overlap is wrong; the text
            names it.
    """
    sizes = Sizes()
    check_pool(sizes, req_to_token, req_pool_indices, layout)
    sizes.check("seq_lens", seq_lens, INTS, "B")
    q_lens, fixed_q_len = check_queries(sizes, q_len)
    check_int("seq_len_delta", seq_len_delta, 0, INT32_MAX)
    for name, tensor, dim in (("slots", slots, "n"), ("full_to_swa", full_to_swa, "N"), ("page_map", page_map, "NP"),
                              ("swa_page_map", swa_page_map, "NS")):  # fmt: skip
        if tensor is not None:
            sizes.check(name, tensor, INTS, dim)
    check_tail(tail, out)
    columns = _check_out(sizes, out, layout, width)
    _check_maps(out, full_to_swa, swa_page_map)
    given = Inputs(req_to_token, req_pool_indices, seq_lens, q_lens, slots, full_to_swa, page_map, swa_page_map)
    check_distinct(_present(out), given._asdict())
    torch.ops.compiled_kv.write_metadata(
        *given, *out, columns, layout.page_size, layout.max_seqlen_k, seq_len_delta, fixed_q_len, tail == "clear"
    )
    return out


def _check_out(sizes: Sizes, out: EngineMetadata, layout: KVLayout, width: int | None) -> int:
    """Columns of the tables that may be written."""
    if not isinstance(out, EngineMetadata):
        raise TypeError(f"out must be an EngineMetadata, got {type(out).__name__}")
    batch_size = sizes.named["B"]
    for name, entries in (("cache_seqlens", 0), ("cu_seqlens_q", 1), ("cu_seqlens_k", 1)):
        if (tensor := getattr(out, name)) is not None:
            sizes.check_output(f"out.{name}", tensor, INT32, f"entries of {name}")
            check_least(f"out.{name}", tensor.shape[0], batch_size + entries, "entries")
    if width is not None:
        check_int("width", width, layout.max_num_pages)
    elif isinstance(out.page_table, Tensor) and out.page_table.ndim == 2:
        width = out.page_table.shape[1]
    for name in ("page_table", "swa_page_table"):
        if (tensor := getattr(out, name)) is not None:
            check_strided_table(sizes, f"out.{name}", tensor, f"rows of {name}", f"columns of {name}")
            check_least(f"out.{name}", tensor.shape[0], batch_size, "rows")
            check_least(f"out.{name}", tensor.shape[1], max(layout.max_num_pages, width or 0), "columns")
    if out.swa_slot_mapping is not None:
        sizes.check_output("out.swa_slot_mapping", out.swa_slot_mapping, INT64, "T")
    return width or 0


def _check_maps(out: EngineMetadata, full_to_swa: Tensor | None, swa_page_map: Tensor | None) -> None:
    if out.swa_page_table is not None and out.page_table is None:
        raise ValueError("out.page_table must be given where out.swa_page_table is, got None")
    if out.swa_page_table is not None and (full_to_swa is None) == (swa_page_map is None):
        given = "neither" if full_to_swa is None else "both"
        raise ValueError(f"exactly one of full_to_swa and swa_page_map goes with out.swa_page_table, got {given}")
    if out.swa_slot_mapping is not None and full_to_swa is None:
        raise ValueError("full_to_swa must be given where out.swa_slot_mapping is, got None")
