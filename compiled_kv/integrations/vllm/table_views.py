"""Block tables in other forms: the state blocks of Mamba layers, and an index for each token."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from compiled_kv.checks import INTS, Sizes, check_int
from compiled_kv.integrations.layouts import layout_of, worded
from compiled_kv.integrations.vllm.block_tables import NULL_BLOCK_ID
from compiled_kv.layout import INT32_MAX
from compiled_kv.peers.csr import fill_kv_indices
from compiled_kv.rows_cpu import floor_div, gather_rows, iota


class MambaSpec(Protocol):
    """What is asked of a KV cache group's own specification."""

    block_size: int
    num_speculative_blocks: int


def mamba_get_block_table_tensor(
    block_table: Tensor, seq_lens: Tensor, kv_cache_spec: MambaSpec, mamba_cache_mode: str
) -> Tensor:
    """The blocks that hold a request's running state: that of its last token, and those of its drafts behind.

    Plain torch, one kernel where the step around it is compiled.

    Args:
        block_table: int [B, W]; seq_lens: int [B], tokens of each request.
        kv_cache_spec: `block_size`, tokens a block, and `num_speculative_blocks`.
        mamba_cache_mode: "align"; in "none" and "all" the result is `block_table` itself.

    Returns:
        [B, 1 + num_speculative_blocks] in the dtype of `block_table`: from column `(seq_lens - 1) // block_size` on, 0
        for a request without tokens; null blocks beyond the row.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device or range is wrong; the text names it.
    """
    if mamba_cache_mode not in ("align", "none", "all"):
        raise ValueError(f"mamba_cache_mode must be 'align', 'none' or 'all', got {mamba_cache_mode!r}")
    if mamba_cache_mode != "align":
        return block_table
    sizes = Sizes()
    sizes.check("block_table", block_table, INTS, "B", "W")
    sizes.check("seq_lens", seq_lens, INTS, "B")
    check_int("kv_cache_spec.block_size", kv_cache_spec.block_size, 1, INT32_MAX)
    check_int("kv_cache_spec.num_speculative_blocks", kv_cache_spec.num_speculative_blocks, 0, INT32_MAX)
    first = floor_div((seq_lens.long() - 1).clamp(min=0), kv_cache_spec.block_size)
    column = first[:, None] + iota(1 + kv_cache_spec.num_speculative_blocks, seq_lens)
    inside = column < block_table.shape[1]
    row = iota(seq_lens.shape[0], seq_lens)[:, None].expand_as(column)
    blocks = gather_rows(block_table, row, column, inside)
    return torch.where(inside, blocks, NULL_BLOCK_ID).to(block_table.dtype)


@worded(pool="block_table", kv_indptr="cu_num_tokens", kv_indices="out")
def expand_page_indices(block_table: Tensor, cu_num_tokens: Tensor, out: Tensor, page_size: int) -> Tensor:
    """Write the index of every token of every row: `out[cu_num_tokens[b] + t]`; all other entries keep their values.

    What vLLM's ROCm back end for MLA launches a kernel of its own for, before attention that reads pages of one token.

    Args:
        block_table: int [B, W], any strides, pages of `page_size` tokens; a negative one gives -1.
        cu_num_tokens: int [B + 1], non-decreasing: row b's tokens lie from cu_num_tokens[b] to the next, as many of
            them as the table's row holds.
        out: int32 or int64 [S].
        page_size: tokens a page.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device, range or overlap is wrong; the text names it.
    """
    sizes = Sizes()
    sizes.check("block_table", block_table, INTS, "B", "W")
    sizes.check("cu_num_tokens", cu_num_tokens, INTS, "B+1")
    check_int("page_size", page_size, 1, INT32_MAX)
    return fill_kv_indices(
        block_table, iota(block_table.shape[0], block_table), cu_num_tokens.diff(), cu_num_tokens, out,
        layout=layout_of(1, block_table.shape[1] * page_size), entry_page_size=page_size,
    )  # fmt: skip
