"""TensorRT-LLM's names over this package's operators: block tables from ragged rows of blocks, and back.

    cache_loc = [7, 8, 9, 4], cu_num_blocks = [0, 3, 4]        request 0 holds three blocks, request 1 one
    ragged_to_block_table(cache_loc, cu_num_blocks, block_table, 2)   -> [[7, 8, 9, 0], [4, 0, 0, 0]]
    block_table_to_ragged(block_table, [3, 1], cache_loc, cu_num_blocks, 2)   -> 4, on the device

Arguments, their order, and what is written and what is left alone are those of AutoDeploy's functions, which add
`_triton` to the names. Nothing here reads the host, so both may stand in a captured graph: where AutoDeploy returns how
many blocks there are as an int, this returns it as a tensor. TensorRT-LLM need not be installed. See
docs/integrations/tensorrt_llm.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kv.checks import INT32, INTS, Sizes, check_int
from compiled_kv.integrations.layouts import layout_of
from compiled_kv.overlap import check_distinct
from compiled_kv.peers.csr import fill_kv_indices
from compiled_kv.rows_cpu import gather, iota, page_of, prefix_sums


def ragged_to_block_table(cache_loc: Tensor, cu_num_blocks: Tensor, block_table: Tensor, num_sequences: int) -> None:
    """Write each sequence's blocks into its row of the table, and null blocks behind them.

    Plain torch, one kernel where the step around it is compiled.

    Args:
        cache_loc: int [S], the blocks of all sequences, one after the other; a negative one gives -1.
        cu_num_blocks: int, `num_sequences + 1` entries or more, non-decreasing: sequence b holds the blocks from
            cu_num_blocks[b] to the next. One that would lie outside `cache_loc` gives -1; those past the table's width
            are left out.
        block_table: int32 [N, M], N >= num_sequences, unit column stride, any row stride. The first `num_sequences`
            rows are written, over their whole width; other rows keep their values.
        num_sequences: sequences of the batch; 0 touches nothing.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device, strides or overlap is wrong; the text names it.
    """
    sizes = Sizes()
    sizes.check("cache_loc", cache_loc, INTS, "S")
    sizes.check("cu_num_blocks", cu_num_blocks, INTS, "bounds")
    sizes.check_output("block_table", block_table, INT32, "N", "M")
    _check_batch(num_sequences, block_table, cu_num_blocks)
    check_distinct({"block_table": block_table}, {"cache_loc": cache_loc, "cu_num_blocks": cu_num_blocks})
    if num_sequences == 0:
        return
    begin, end = cu_num_blocks[:num_sequences, None].long(), cu_num_blocks[1 : num_sequences + 1, None].long()
    entry = begin + iota(block_table.shape[1], cache_loc)
    held = entry < end
    block_table[:num_sequences].copy_(torch.where(held, page_of(gather(cache_loc, entry, held), 1), 0))


def block_table_to_ragged(
    block_table: Tensor, num_blocks: Tensor, cache_loc: Tensor, cu_num_blocks: Tensor, num_sequences: int
) -> Tensor:
    """Write the blocks of all sequences one after the other, and where each one's begin.

    Args:
        block_table: int [N, M], N >= num_sequences, any strides, blocks of each sequence; a negative one gives -1.
        num_blocks: int, `num_sequences` entries or more: how many of them it holds; clamped to [0, M].
        cache_loc: int32 or int64 [S]. Entries behind the last block keep their values; blocks that do not fit are cut,
            and `cu_num_blocks` never passes S.
        cu_num_blocks: int32, `num_sequences + 1` entries or more, of which the first ones are written.
        num_sequences: sequences of the batch; 0 touches nothing.

    Returns:
        How many blocks there are, int32, 0-d, on the device. Read it back outside a graph, where a host needs it.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device, strides or overlap is wrong; the text names it.
    """
    sizes = Sizes()
    sizes.check("block_table", block_table, INTS, "N", "M")
    sizes.check("num_blocks", num_blocks, INTS, "counts")
    sizes.check_output("cache_loc", cache_loc, INTS, "S")
    sizes.check_output("cu_num_blocks", cu_num_blocks, INT32, "bounds")
    _check_batch(num_sequences, block_table, cu_num_blocks)
    check_int("the length of num_blocks", num_blocks.shape[0], num_sequences)
    inputs = {"block_table": block_table, "num_blocks": num_blocks}
    check_distinct({"cache_loc": cache_loc, "cu_num_blocks": cu_num_blocks}, inputs)
    if num_sequences == 0:
        return cu_num_blocks.new_zeros(())
    rows, counts = iota(num_sequences, block_table), num_blocks[:num_sequences]
    # Sums of its own: a slice of `cu_num_blocks` written by an operator would be cloned in a graph.
    ends = counts.long().clamp(0, block_table.shape[1]).cumsum(0).clamp(max=cache_loc.shape[0])
    bounds = prefix_sums(ends)
    cu_num_blocks[: num_sequences + 1].copy_(bounds)
    fill_kv_indices(block_table, rows, counts, bounds, cache_loc, layout=layout_of(1, block_table.shape[1]))
    return bounds[num_sequences]


ragged_to_block_table_triton, block_table_to_ragged_triton = ragged_to_block_table, block_table_to_ragged


def _check_batch(num_sequences: int, block_table: Tensor, cu_num_blocks: Tensor) -> None:
    check_int("num_sequences", num_sequences, 0, block_table.shape[0])
    check_int("the length of cu_num_blocks", cu_num_blocks.shape[0], num_sequences + 1)
