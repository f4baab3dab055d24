"""Page tables in place, as SGLang's trtllm_mha, flashmla, cutlass_mla, trtllm_mla and aiter back ends fill theirs."""

from __future__ import annotations

from torch import Tensor

from compiled_kv.checks import INT32, check_int
from compiled_kv.integrations.layouts import (
    Subscripted,
    check_stride,
    first,
    first_rows,
    layout_of,
    width_of,
    worded,
)
from compiled_kv.layout import ceil_div
from compiled_kv.page_tables import flashmla_kv_indices
from compiled_kv.peers.engine_metadata import write_metadata
from compiled_kv.peers.engine_parts import EngineMetadata

TOKENS_A_PROGRAM = 4096


@worded(seq_lens="cache_seqlens")
def build_trtllm_mha_page_table(
    req_to_token: Tensor, req_pool_indices: Tensor, cache_seqlens: Tensor, page_table: Tensor, page_size: int,
    swa_page_table: Tensor | None = None, full_to_swa: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the live columns of `page_table`, and of `swa_page_table` where one is given; others keep their values.

    Args:
        req_to_token: int [R, C]; req_pool_indices, cache_seqlens: int [bs].
        page_table, swa_page_table: int32 [bs, P]; live columns are `ceil(cache_seqlens / page_size)`, at most P.
        full_to_swa: int [N], goes with `swa_page_table`.

    Raises:
        TypeError, ValueError: as `compiled_kv.peers.engine_metadata.write_metadata`; or one of the last two stands
            alone.
    """
    if (swa_page_table is None) != (full_to_swa is None):
        raise ValueError("swa_page_table and full_to_swa go together, got one of them")
    out = EngineMetadata(page_table=page_table, swa_page_table=swa_page_table)
    width = width_of("page_table", page_table, INT32)
    layout = layout_of(page_size, width_of("req_to_token", req_to_token), width)
    write_metadata(req_to_token, req_pool_indices, cache_seqlens, out, layout=layout, full_to_swa=full_to_swa)


def get_num_kv_index_blocks_flashmla(max_blocks: int, page_size: int) -> int:
    """Programs a row in the grid of `create_flashmla_kv_indices_triton`, for tables `max_blocks` wide."""
    check_int("page_size", page_size, 1, TOKENS_A_PROGRAM)
    return ceil_div(max_blocks, TOKENS_A_PROGRAM // page_size)


@worded(
    req_to_token="req_to_token_ptr", req_pool_indices="req_pool_indices_ptr", kv_lens="page_kernel_lens_ptr",
    kv_start="kv_start_idx", out="kv_indices_ptr", page_size="PAGED_SIZE",
)  # fmt: skip
def _create_flashmla_kv_indices(
    grid: tuple[int, ...], req_to_token_ptr: Tensor, req_pool_indices_ptr: Tensor, page_kernel_lens_ptr: Tensor,
    kv_start_idx: Tensor | None, kv_indices_ptr: Tensor, req_to_token_ptr_stride: int, kv_indices_ptr_stride: int,
    PAGED_SIZE: int = 64,
) -> None:  # fmt: skip
    """Write the page of every `PAGED_SIZE`-th position of each row, from its start on; other columns keep their values.

    Args:
        grid: (bs,), or (bs, programs a row).
        req_to_token_ptr: int [R, C]; req_pool_indices_ptr, page_kernel_lens_ptr: int, bs entries or more.
        kv_start_idx: int, bs entries or more, the position that column 0 reads, or None for 0.
        kv_indices_ptr: int32 [N, P], N >= bs; further rows keep their values.
        req_to_token_ptr_stride, kv_indices_ptr_stride: row strides of the two, for the kernel's sake.
    """
    check_stride("req_to_token_ptr_stride", req_to_token_ptr_stride, req_to_token_ptr, "req_to_token_ptr")
    check_stride("kv_indices_ptr_stride", kv_indices_ptr_stride, kv_indices_ptr, "kv_indices_ptr", INT32)
    bs = grid[0]
    flashmla_kv_indices(
        req_to_token_ptr, first_rows("grid[0]", bs, "req_pool_indices_ptr", req_pool_indices_ptr),
        first("page_kernel_lens_ptr", page_kernel_lens_ptr, bs),
        None if kv_start_idx is None else first("kv_start_idx", kv_start_idx, bs), out=kv_indices_ptr, tail="keep",
        layout=layout_of(PAGED_SIZE, req_to_token_ptr.shape[1], kv_indices_ptr.shape[1]),
    )  # fmt: skip


create_flashmla_kv_indices_triton = Subscripted(_create_flashmla_kv_indices)
