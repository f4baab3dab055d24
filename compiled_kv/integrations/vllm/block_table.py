"""The V1 runner's block table of one KV group: edited on the host, committed to the device, a row a batch entry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_kv.checks import check_int
from compiled_kv.integrations.layouts import first, worded
from compiled_kv.integrations.vllm.block_tables import (
    PAD_SLOT_ID,
    check_interleave,
    kernel_blocks,
    kernel_ids,
)
from compiled_kv.layout import INT32_MAX
from compiled_kv.peers.group_slots import group_slot_mappings


class BlockTable(torch.nn.Module):
    """Blocks of every request of the batch, row by row, and the slot of each of a step's tokens.

    `block_table` int32 [R, W] and `slot_mapping` int64 [T] lie on the device and keep their addresses; a compiled step
    may write them, see "In a compiled step" in docs/index.md. Rows are edited on the host and reach the device with
    `commit_block_table`. A row index outside [0, R) is a `ValueError`.

    Args:
        block_size: tokens a block, as the manager counts them.
        max_num_reqs: rows R.
        max_num_blocks_per_req: width of the table, in blocks of the manager.
        max_num_batched_tokens: entries T of the slot mapping.
        pin_memory: keep the host's table in pinned memory. A commit then does not wait for its copy, so rows are
            edited again only after the device has passed it.
        device: where the two tensors lie.
        kernel_block_size: tokens a block as the kernels count them, where they count smaller ones.
        cp_kv_cache_interleave_size: tokens dealt to a context-parallel rank at a time, a divisor of the block size that
            the kernels count.
        cp_size, cp_rank: context-parallel ranks, and this one.
        slot_mapping_enabled: whether the group's tokens have slots; else `compute_slot_mapping` writes nothing.
    """

    block_table: Tensor
    slot_mappings: Tensor
    kernel_block_sizes: Tensor
    sharded: Tensor
    rows: Tensor

    def __init__(
        self, block_size: int, max_num_reqs: int, max_num_blocks_per_req: int, max_num_batched_tokens: int,
        pin_memory: bool, device: torch.device | str, kernel_block_size: int | None = None,
        cp_kv_cache_interleave_size: int = 1, *, cp_size: int = 1, cp_rank: int = 0, slot_mapping_enabled: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        check_int("block_size", block_size, 1, INT32_MAX)
        for name, count in (("max_num_reqs", max_num_reqs), ("max_num_blocks_per_req", max_num_blocks_per_req),
                            ("max_num_batched_tokens", max_num_batched_tokens)):  # fmt: skip
            check_int(name, count, 0)
        size = block_size if kernel_block_size is None else kernel_block_size
        self.blocks_per_kv_block = kernel_blocks(block_size, size, "kernel_block_size")
        check_int("cp_size", cp_size, 1, INT32_MAX)
        check_int("cp_rank", cp_rank, 0, cp_size - 1)
        check_interleave("cp_kv_cache_interleave_size", cp_kv_cache_interleave_size, cp_size, [size])
        self.cp_size, self.cp_rank, self.cp_interleave = cp_size, cp_rank, cp_kv_cache_interleave_size
        self.slot_mapping_enabled = slot_mapping_enabled
        shape = (max_num_reqs, max_num_blocks_per_req * self.blocks_per_kv_block)
        self.host = torch.zeros(shape, dtype=torch.int32, pin_memory=pin_memory)
        self.num_blocks_per_row = [0] * max_num_reqs

        def keep(name: str, tensor: Tensor) -> None:
            self.register_buffer(name, tensor.to(device), persistent=False)

        keep("block_table", torch.zeros(shape, dtype=torch.int32))
        # Of one group [1, T], as the operator takes it: a buffer written through a view would be cloned in a graph.
        keep("slot_mappings", torch.full((1, max_num_batched_tokens), PAD_SLOT_ID))
        keep("kernel_block_sizes", torch.tensor([size], dtype=torch.int32))
        keep("sharded", torch.ones(1, dtype=torch.int32))
        keep("rows", torch.arange(max_num_reqs, dtype=torch.int32))

    @property
    def slot_mapping(self) -> Tensor:
        """Slots of the step's tokens: int64 [T]."""
        return self.slot_mappings[0]

    def append_row(self, block_ids: Sequence[int], row_idx: int) -> None:
        """Put blocks of the manager behind those that a row holds.

        Raises:
            RuntimeError: the row would hold more blocks than the table is wide; nothing is written.
            TypeError, ValueError: there is no such row, or a block is no int or has no place in int32; nor is it then.
        """
        self._check_row("row_idx", row_idx)
        self._put(block_ids, row_idx, self.num_blocks_per_row[row_idx])

    def add_row(self, block_ids: Sequence[int], row_idx: int) -> None:
        """`append_row` to a row that starts over; entries past its new blocks keep their values."""
        self._check_row("row_idx", row_idx)
        self._put(block_ids, row_idx, 0)

    def clear_row(self, row_idx: int) -> None:
        """Give a row no blocks: null blocks over its whole width."""
        self._check_row("row_idx", row_idx)
        self.host[row_idx] = 0
        self.num_blocks_per_row[row_idx] = 0

    def move_row(self, src: int, tgt: int) -> None:
        """Move a row's blocks to another, and clear the row they leave.

        Entries of the other row past the moved blocks keep their values. A row moved onto itself stays as it is.
        """
        self._check_row("src", src)
        self._check_row("tgt", tgt)
        if src != tgt:
            count = self.num_blocks_per_row[src]
            self.host[tgt, :count] = self.host[src, :count]
            self.num_blocks_per_row[tgt] = count
            self.clear_row(src)

    def swap_row(self, src: int, tgt: int) -> None:
        """Exchange two rows, their whole width."""
        self._check_row("src", src)
        self._check_row("tgt", tgt)
        self.host[[src, tgt]] = self.host[[tgt, src]]
        counts = self.num_blocks_per_row
        counts[src], counts[tgt] = counts[tgt], counts[src]

    def clear(self) -> None:
        """Null blocks in every row, on the host and on the device."""
        self.host.zero_()
        self.block_table.zero_()
        self.num_blocks_per_row[:] = [0] * len(self.num_blocks_per_row)

    def commit_block_table(self, num_reqs: int) -> None:
        """Copy the first rows to the device: one copy, outside a captured graph. Further rows keep their values."""
        self._check_batch(num_reqs)
        self.block_table[:num_reqs].copy_(self.host[:num_reqs], non_blocking=self.host.is_pinned())

    @worded(cu_seqlens_q="query_start_loc", out="slot_mapping")
    def compute_slot_mapping(self, num_reqs: int, query_start_loc: Tensor, positions: Tensor) -> None:
        """Write the slot of each token; `PAD_SLOT_ID` behind them to the end of `slot_mapping`, and on other ranks.

        Args:
            num_reqs: rows of the batch; row b of the committed table is request b.
            query_start_loc: int [num_reqs + 1] or longer, non-decreasing from 0: tokens of each request.
            positions: int [n], n <= T, position of each token in its request; one below 0, or beyond the row, gives
                `PAD_SLOT_ID`.

        Raises:
            TypeError, ValueError: an argument's type, dtype, shape, device or range is wrong; the text names it.
        """
        self._check_batch(num_reqs)
        if self.slot_mapping_enabled:
            group_slot_mappings(
                self.block_table[None], self.kernel_block_sizes, self.rows[:num_reqs],
                first("query_start_loc", query_start_loc, num_reqs + 1), positions, sharded=self.sharded,
                cp_size=self.cp_size, cp_rank=self.cp_rank, cp_interleave=self.cp_interleave, out=self.slot_mappings,
            )  # fmt: skip

    def get_device_tensor(self, num_reqs: int) -> Tensor:
        """The committed table's first rows, int32 [num_reqs, W]."""
        self._check_batch(num_reqs)
        return self.block_table[:num_reqs]

    def get_cpu_tensor(self) -> Tensor:
        """The host's table, int32 [R, W]."""
        return self.host

    def get_numpy_array(self) -> Any:
        """The host's table as an array over the same memory."""
        return self.host.numpy()

    def _put(self, block_ids: Sequence[int], row: int, start: int) -> None:
        ids = kernel_ids("block_ids", block_ids, self.blocks_per_kv_block)
        end = start + len(ids)
        if end > self.host.shape[1]:
            raise RuntimeError(f"row {row} needs {end} blocks, has {self.host.shape[1]}")
        self.host[row, start:end] = torch.tensor(ids, dtype=torch.int32)
        self.num_blocks_per_row[row] = end

    def _check_row(self, name: str, row: int) -> None:
        check_int(name, row, 0, self.host.shape[0] - 1)

    def _check_batch(self, num_reqs: int) -> None:
        # The device's own: the host's table would be an input of a compiled step.
        check_int("num_reqs", num_reqs, 0, self.block_table.shape[0])
