"""Arguments of FlashInfer's decode calls, as it names them, built by the operators.

    wrapper.plan(**plan_arguments(req_to_token, rows, seq_lens, layout=layout), num_qo_heads=32, ...)
    trtllm_batch_decode_with_kv_cache(query, cache, workspace, **trtllm_decode_arguments(metadata, layout=layout))

FlashInfer need not be installed. `plan` reads `indptr` back to the host, so it belongs outside a captured graph; what
it takes here has fixed addresses where `out` is given. See docs/integrations/flashinfer_flashmla.md.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from compiled_kv.checks import INT32, INTS, Sizes, check_int, check_tuple, check_width
from compiled_kv.integrations.layouts import worded
from compiled_kv.layout import INT32_MAX, KVLayout
from compiled_kv.metadata_parts import DecodeMetadata
from compiled_kv.peers.csr import FIELDS, Csr, csr_tables
from compiled_kv.peers.token_positions import place_tokens_

MLA_TOKEN_ALIGNMENT = 128


@worded(pool="req_to_token", kv_lens="seq_lens")
def plan_arguments(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, *, layout: KVLayout,
    num_reqs: Tensor | None = None, capacity: int | None = None, out: Csr | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What `BatchDecodeWithPagedKVCacheWrapper.plan` takes of the cache: the CSR form of the page table.

    Args:
        req_to_token: int [R, C]; req_pool_indices, seq_lens: int [B].
        layout: page size and bounds.
        num_reqs: int tensor, 0-d or [1], on the device: rows at and beyond it are empty.
        capacity: entries of `indices`; room for B rows of layout.max_num_pages if absent.
        out: (indptr int32 [B + 1], indices int32 [S], last_page_len int32 [B]), persistent buffers.

    Returns:
        int32 indptr, indices and last_page_len, as FlashInfer's kernels read no other, and page_size.

    Raises:
        TypeError, ValueError: as `csr_tables`; and for an `out` whose indices are int64.
    """
    if out is not None:
        _check_tables("out", out)
    indptr, indices, last_page_len = csr_tables(
        req_to_token, req_pool_indices, seq_lens, layout=layout, num_reqs=num_reqs, capacity=capacity, out=out
    )
    return {"indptr": indptr, "indices": indices, "last_page_len": last_page_len, "page_size": layout.page_size}


def mla_plan_arguments(metadata: DecodeMetadata, tables: Csr, *, layout: KVLayout) -> dict[str, Any]:
    """What `BatchMLAPagedAttentionWrapper.plan` takes of the cache.

    Args:
        metadata: of this step; tables: its `csr_tables`, (kv_indptr, kv_indices, kv_last_page_len), all int32.
        layout: the one that both were made with.

    Returns:
        qo_indptr int32 [B + 1], kv_indptr, kv_indices, kv_len_arr int32 [B] and page_size.

    Raises:
        TypeError, ValueError: `tables` is not three tensors, its kv_indices are int64, or it has other rows.
    """
    _check_tables("tables", tables)
    sizes = Sizes()
    sizes.named["B"] = metadata.cache_seqlens.shape[0]
    sizes.check("kv_indptr", tables[0], INT32, "B+1")
    return {
        "qo_indptr": metadata.cu_seqlens_q,
        "kv_indptr": tables[0],
        "kv_indices": tables[1],
        "kv_len_arr": metadata.cache_seqlens,
        "page_size": layout.page_size,
    }


def _check_tables(name: str, tables: Csr) -> None:
    """Refuse int64 entries, which `csr_tables` fills and FlashInfer refuses, before they are written."""
    check_tuple(name, tables, FIELDS)
    Sizes().check("kv_indices", tables[1], INT32, "S")


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """Tokens of each row, from the CSR form of its pages. Plain torch: one kernel where it is compiled.

    Args:
        kv_indptr: int [B + 1]; kv_last_page_len: int [B].
        page_size: tokens a page.

    Returns:
        int [B]; a row without pages has what its kv_last_page_len says.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device or range is wrong; the text names it.
    """
    _check_rows("kv_indptr", kv_indptr, "kv_last_page_len", kv_last_page_len)
    check_int("page_size", page_size, 1, INT32_MAX)
    return torch.clamp(kv_indptr.diff() - 1, min=0) * page_size + kv_last_page_len


def get_batch_indices_positions(
    append_indptr: Tensor, seq_lens: Tensor, nnz: int, batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Request and position of each token to append, for `append_paged_kv_cache`.

    Args:
        append_indptr: int [B + 1], non-decreasing from 0: new tokens of each request.
        seq_lens: int [B], tokens of each request, the new ones counted: these are its last.
        nnz: entries of the results.
        batch_indices, positions: int32 [nnz], written in place and returned.

    Returns:
        (batch_indices int32 [nnz], positions int32 [nnz]). From append_indptr[B] on, read on the device, the request
        is -1, and the position 0 in a new tensor and what it was in one that is given.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device, range or overlap is wrong; the text names it.
    """
    sizes = _check_rows("append_indptr", append_indptr, "seq_lens", seq_lens)
    check_int("nnz", nnz, 0, INT32_MAX)
    sizes.named["nnz"] = nnz
    for name, given in {"batch_indices": batch_indices, "positions": positions}.items():
        if given is not None:
            sizes.check_output(name, given, INT32, "nnz")
    made = seq_lens.new_empty((nnz,), dtype=torch.int32) if batch_indices is None else batch_indices
    places = seq_lens.new_zeros((nnz,), dtype=torch.int32) if positions is None else positions
    place_tokens_(places, seq_lens, append_indptr, counted=True, batch_indices=made)
    return made, places


def _check_rows(name: str, indptr: Tensor, lengths_name: str, lengths: Tensor) -> Sizes:
    """Sizes of a batch, of which `indptr` is [B + 1] and `lengths` [B]."""
    sizes = Sizes()
    sizes.check(lengths_name, lengths, INTS, "B")
    sizes.check(name, indptr, INTS, "B+1")
    return sizes


def trtllm_decode_arguments(metadata: DecodeMetadata, *, layout: KVLayout, swa: bool = False) -> dict[str, Any]:
    """What `trtllm_batch_decode_with_kv_cache` takes of the cache; the bound is the host's, no length is read back.

    Args:
        metadata: of this step; `swa` picks the sliding-window layers' page table.
        layout: the one that it was made with.

    Returns:
        block_tables int32 [B, P], contiguous, seq_lens int32 [B] and max_seq_len.

    Raises:
        ValueError: there is no such table, it is narrower than the layout's, or its rows lie further apart than they
            are wide: the kernels do not ask.
    """
    table = metadata.swa_page_table if swa else metadata.page_table
    if table is None:
        raise ValueError("metadata.swa_page_table must be a tensor where swa is True, got None")
    name = f"metadata.{'swa_' * swa}page_table"
    check_width(name, table.shape[1], layout.max_num_pages, "columns")
    if not table.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {list(table.stride())}")
    return {"block_tables": table, "seq_lens": metadata.cache_seqlens, "max_seq_len": layout.max_seqlen_k}


def trtllm_mla_decode_arguments(metadata: DecodeMetadata, *, layout: KVLayout) -> dict[str, Any]:
    """What `trtllm_batch_decode_with_kv_cache_mla` takes of the cache.

    Raises:
        ValueError: a row of the page table does not cover a multiple of 128 tokens, which the kernel asks for; choose
            max_context_len + max_draft_tokens accordingly, or give `decode_metadata` a wider page table in `out`.
    """
    step = MLA_TOKEN_ALIGNMENT // math.gcd(MLA_TOKEN_ALIGNMENT, layout.page_size)
    width = metadata.page_table.shape[1]
    if width % step != 0:
        raise ValueError(f"metadata.page_table must have a multiple of {step} columns, got {width}")
    return trtllm_decode_arguments(metadata, layout=layout)
