"""Token indices of every step of a multi-step draft, as SGLang's draft workers fill them before the first one."""

from __future__ import annotations

from torch import Tensor

from compiled_kv.checks import INT32, check_int, check_tuple
from compiled_kv.integrations.layouts import Subscripted, check_stride, first, first_rows, layout_of, worded
from compiled_kv.layout import INT32_MAX
from compiled_kv.peers.draft_indices import draft_kv_indices


@worded(pool="req_to_token", seq_lens="paged_kernel_lens", page_map="v2p", window="window_size", sinks="sink_size")
def _generate(
    grid: tuple[int, ...], req_pool_indices: Tensor, req_to_token: Tensor, paged_kernel_lens: Tensor,
    kv_indices: Tensor, kv_indptr: Tensor, positions: Tensor, row_stride: int, kv_indices_stride: int,
    kv_indptr_stride: int, bs_upper: int, iter_upper: int, num_tokens_upper: int, page_size: int,
    window_size: int = 0, sink_size: int = 0, NUM_STEPS: int = 0, ENTRY_PAGE_SIZE: int = 1,
    v2p: Tensor | None = None, TRANSLATE: bool = False,
) -> None:  # fmt: skip
    """Write `kv_indptr` and `kv_indices` of each step: a request's tokens, then those of the branch so far.

    Args:
        grid: (steps, bs, topk), or (programs, bs, topk) where NUM_STEPS says the steps.
        req_pool_indices, paged_kernel_lens: int, bs entries or more.
        req_to_token: int [R, C], or pages where ENTRY_PAGE_SIZE > 1.
        kv_indices: int32 or int64 [steps, S], entries past the last branch's keep their values.
        kv_indptr: int32 [steps, bs * topk + 1] or wider, from 0 on.
        positions: int, bs * topk entries or more, the lengths that kv_indptr adds up.
        row_stride, kv_indices_stride, kv_indptr_stride: row strides, for the kernel's sake.
        bs_upper, iter_upper, num_tokens_upper: of the kernel's blocks; not used.
        page_size: branches of a request lie on pages of their own.
        window_size, sink_size: where the first is not 0, a branch reads the first `sink_size` committed tokens and the
            last ones, at most their sum together.
        v2p: int [NP], virtual to physical pages, with TRANSLATE; a negative slot and an unbound page give slot 0.
    """
    if TRANSLATE and v2p is None:
        raise ValueError("v2p must be given where TRANSLATE is True, got None")
    check_stride("row_stride", row_stride, req_to_token, "req_to_token")
    check_stride("kv_indices_stride", kv_indices_stride, kv_indices, "kv_indices")
    check_stride("kv_indptr_stride", kv_indptr_stride, kv_indptr, "kv_indptr", INT32)
    check_tuple("grid", grid, ("steps", "bs", "topk"))
    check_int("NUM_STEPS", NUM_STEPS, 0)
    check_int("ENTRY_PAGE_SIZE", ENTRY_PAGE_SIZE, 1, INT32_MAX)
    steps, bs, topk = NUM_STEPS or grid[0], grid[1], grid[2]
    rows = first_rows("grid[1]", bs, "req_pool_indices", req_pool_indices)
    check_int("grid[0]", steps, 1, INT32_MAX)
    check_int("grid[2]", topk, 1, INT32_MAX)
    draft_kv_indices(
        req_to_token, rows, first("paged_kernel_lens", paged_kernel_lens, bs), num_steps=steps, topk=topk,
        layout=layout_of(page_size, req_to_token.shape[1] * ENTRY_PAGE_SIZE),
        positions=first("positions", positions, bs * topk),
        page_map=v2p if TRANSLATE else None, entry_page_size=ENTRY_PAGE_SIZE, window=window_size, sinks=sink_size,
        out=(kv_indptr, kv_indices), tail="keep",
    )  # fmt: skip


generate_draft_decode_kv_indices = Subscripted(_generate)
