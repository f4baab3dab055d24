"""The CSR form behind a `kv_indptr`, as SGLang's flashinfer, triton and aiter back ends fill it."""

from __future__ import annotations

from torch import Tensor

from compiled_kv.checks import check_int
from compiled_kv.integrations.layouts import Subscripted, check_stride, first, first_rows, layout_of, worded
from compiled_kv.layout import INT32_MAX, ceil_div
from compiled_kv.peers.csr import fill_kv_indices

TOKENS_A_BLOCK, MOST_PROGRAMS = 8192, 512


def kv_indices_num_token_blocks(max_width: int, base_programs: int) -> int:
    """Programs a row in the grid of `create_flashinfer_kv_indices_triton`, in its token-parallel form."""
    return max(1, min(ceil_div(max_width, TOKENS_A_BLOCK), MOST_PROGRAMS // max(1, base_programs)))


@worded(
    pool="req_to_token_ptr", req_pool_indices="req_pool_indices_ptr", kv_lens="page_kernel_lens_ptr",
    kv_start="kv_start_idx", kv_indices="kv_indices_ptr", token_map="token_mapping",
)  # fmt: skip
def _create_flashinfer_kv_indices(
    grid: tuple[int, ...], req_to_token_ptr: Tensor, req_pool_indices_ptr: Tensor, page_kernel_lens_ptr: Tensor,
    kv_indptr: Tensor, kv_start_idx: Tensor | None, kv_indices_ptr: Tensor, req_to_token_ptr_stride: int,
    ENTRY_PAGE_SIZE: int = 1, TOKEN_BLOCK_PARALLEL: bool = False, token_mapping: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the slot of every token of every row; nothing outside [kv_indptr[b], kv_indptr[b] + lens[b]).

    Args:
        grid: (bs,), or (bs, programs a row).
        req_to_token_ptr: int [R, C], token slots; with ENTRY_PAGE_SIZE e > 1 page ids, an entry for each e positions.
        req_pool_indices_ptr, page_kernel_lens_ptr: int, bs entries or more; the lengths count from the start on.
        kv_indptr: int, bs + 1 entries or more.
        kv_start_idx: int, bs entries or more, the first position read, or None for 0.
        kv_indices_ptr: int32 or int64 [S].
        req_to_token_ptr_stride: row stride of the pool, for the kernel's sake.
        TOKEN_BLOCK_PARALLEL: of the grid; not used.
        token_mapping: int [N], slots to slots, looked up last; a negative slot stays -1.
    """
    check_stride("req_to_token_ptr_stride", req_to_token_ptr_stride, req_to_token_ptr, "req_to_token_ptr")
    check_int("ENTRY_PAGE_SIZE", ENTRY_PAGE_SIZE, 1, INT32_MAX)
    bs = grid[0]
    fill_kv_indices(
        req_to_token_ptr, first_rows("grid[0]", bs, "req_pool_indices_ptr", req_pool_indices_ptr),
        first("page_kernel_lens_ptr", page_kernel_lens_ptr, bs), first("kv_indptr", kv_indptr, bs + 1), kv_indices_ptr,
        None if kv_start_idx is None else first("kv_start_idx", kv_start_idx, bs),
        layout=layout_of(1, req_to_token_ptr.shape[1] * ENTRY_PAGE_SIZE), entry_page_size=ENTRY_PAGE_SIZE,
        token_map=token_mapping,
    )  # fmt: skip


create_flashinfer_kv_indices_triton = Subscripted(_create_flashinfer_kv_indices)
