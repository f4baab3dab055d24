"""Block tables and slot mappings of several KV groups, which share one tensor: a launch serves them all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from compiled_kv.checks import INT32, INT64, INTS, Sizes, check_int
from compiled_kv.integrations.layouts import worded
from compiled_kv.layout import INT32_MAX, ceil_div
from compiled_kv.peers.block_tables import gather_block_tables
from compiled_kv.peers.group_slots import group_slot_mappings

PAD_SLOT_ID = PADDING_SLOT_ID = -1
NULL_BLOCK_ID = 0


def get_block_table_width(max_num_blocks: int, block_size: int, token_alignment: int = 128) -> int:
    """`max_num_blocks` rounded up so that a row of the table covers a multiple of `token_alignment` tokens."""
    check_int("max_num_blocks", max_num_blocks, 0)
    check_int("block_size", block_size, 1)
    check_int("token_alignment", token_alignment, 1)
    step = token_alignment // math.gcd(token_alignment, block_size)
    return ceil_div(max_num_blocks, step) * step


def map_to_kernel_blocks(block_ids: Sequence[int], blocks_per_kv_block: int) -> list[int]:
    """Ids of the smaller blocks that a kernel reads, `blocks_per_kv_block` for each block of the manager."""
    return [block * blocks_per_kv_block + i for block in block_ids for i in range(blocks_per_kv_block)]


def kernel_ids(name: str, block_ids: Sequence[Any], blocks_per_kv_block: int) -> list[int]:
    """`map_to_kernel_blocks` of ids that a table of int32 holds as they are; NumPy's ints will do."""
    most = INT32_MAX // blocks_per_kv_block
    for i, block in enumerate(block_ids):
        if type(block) is not int or abs(block) > most:
            check_int(f"{name}[{i}]", index(block) if isinstance(block, SupportsIndex) else block, -most, most)
    return map_to_kernel_blocks(block_ids, blocks_per_kv_block)


def _check_groups(groups: int, **given: Sequence[object] | None) -> None:
    """Refuse settings that are not one for each group."""
    for name, values in given.items():
        if values is not None and len(values) != groups:
            raise ValueError(f"{name} must hold {groups} entries, one a group, got {len(values)}")


def kernel_blocks(block_size: int, kernel_block_size: int, name: str = "kernel_block_sizes") -> int:
    """Blocks of `kernel_block_size` tokens in one of `block_size`."""
    if kernel_block_size < 1 or block_size % kernel_block_size != 0:
        sizes = name.removeprefix("kernel_")
        raise ValueError(f"{name} must divide {sizes}, got {kernel_block_size} for {block_size}")
    return block_size // kernel_block_size


def check_interleave(name: str, interleave: int, cp_size: int, sharded_sizes: Sequence[int]) -> None:
    """Refuse tokens dealt to a rank at a time that do not fill its blocks: two tokens would share a slot."""
    check_int(name, interleave, 1)
    if cp_size > 1:
        for size in sharded_sizes:
            if size % interleave != 0:
                raise ValueError(
                    f"{name} must divide the kernels' block size {size} over several ranks, got {interleave}"
                )


class BlockTables(torch.nn.Module):
    """Block tables of every KV group, persistent: addresses do not change, so captured graphs may read them.

    A module, so that a compiled step may write its buffers: see "In a compiled step" in docs/index.md.

    Args:
        block_sizes: tokens a block of each group, as the manager counts them.
        max_num_reqs: rows R, one a request.
        max_num_batched_tokens: columns of the slot mappings.
        max_num_blocks_per_group: widths of the tables, in blocks of the manager.
        device: where the tables lie.
        cp_size, cp_rank, cp_interleave: context-parallel ranks, this one, and tokens dealt to a rank at a time, a
            divisor of the kernels' block size of every group that is dealt out.
        slot_mapping_enabled: for each group, whether its tokens have slots; all have by default.
        dcp_sharded: for each group, whether its tokens are dealt out over the ranks; all are by default.
        sliding_window_reach: for each group, tokens before the first new one that it still reads; 0 for all.
        kernel_block_sizes: tokens a block as the kernels count them, where they count smaller ones.

    Raises:
        TypeError, ValueError: a setting is no int, out of range, or not one for each group; the text names it.
    """

    block_sizes: Tensor
    slot_block_sizes: Tensor
    sharded: Tensor
    reach: Tensor
    pool: Tensor
    inputs: Tensor
    num_blocks: Tensor
    slot_mappings: Tensor

    def __init__(
        self, block_sizes: Sequence[int], max_num_reqs: int, max_num_batched_tokens: int,
        max_num_blocks_per_group: Sequence[int], device: torch.device | str, cp_size: int = 1, cp_rank: int = 0,
        cp_interleave: int = 1, slot_mapping_enabled: Sequence[bool] | None = None,
        dcp_sharded: Sequence[bool] | None = None, sliding_window_reach: Sequence[int] | None = None,
        kernel_block_sizes: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        groups = len(block_sizes)
        _check_groups(
            groups, max_num_blocks_per_group=max_num_blocks_per_group, slot_mapping_enabled=slot_mapping_enabled,
            dcp_sharded=dcp_sharded, sliding_window_reach=sliding_window_reach, kernel_block_sizes=kernel_block_sizes,
        )  # fmt: skip
        check_int("max_num_reqs", max_num_reqs, 0)
        check_int("max_num_batched_tokens", max_num_batched_tokens, 0)
        for name, values in (("block_sizes", block_sizes), ("max_num_blocks_per_group", max_num_blocks_per_group),
                             ("sliding_window_reach", sliding_window_reach or ())):  # fmt: skip
            for i, value in enumerate(values):
                check_int(f"{name}[{i}]", value, int(name == "block_sizes"), INT32_MAX)
        sizes = list(kernel_block_sizes or block_sizes)
        self.blocks_per_kv_block = [
            kernel_blocks(size, kernel) for size, kernel in zip(block_sizes, sizes, strict=True)
        ]
        pairs = zip(max_num_blocks_per_group, self.blocks_per_kv_block, strict=True)
        self.widths = [width * ratio for width, ratio in pairs]
        self.cp_size, self.cp_rank, self.cp_interleave = cp_size, cp_rank, cp_interleave

        def keep(name: str, tensor: Tensor) -> None:
            self.register_buffer(name, tensor.to(device), persistent=False)

        def ints(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32)

        enabled = [True] * groups if slot_mapping_enabled is None else slot_mapping_enabled
        keep("block_sizes", ints(sizes))
        keep("slot_block_sizes", ints([size if on else 0 for size, on in zip(sizes, enabled, strict=True)]))
        dealt = [True] * groups if dcp_sharded is None else dcp_sharded
        check_int("cp_size", cp_size, 1, INT32_MAX)
        check_int("cp_rank", cp_rank, 0, cp_size - 1)
        dealt_sizes = [size for size, *on in zip(sizes, dealt, enabled, strict=True) if all(on)]
        check_interleave("cp_interleave", cp_interleave, cp_size, dealt_sizes)
        keep("sharded", ints([int(on) for on in dealt]))
        keep("reach", ints([0] * groups if sliding_window_reach is None else sliding_window_reach))
        shape = (groups, max_num_reqs, max(self.widths, default=0))
        pool = torch.zeros(shape, dtype=torch.int32)
        for table, width in zip(pool, self.widths):
            table[:, width:] = -1  # beyond its own width a group has no blocks, and no slots
        keep("pool", pool)
        keep("inputs", torch.zeros(shape, dtype=torch.int32))
        keep("num_blocks", torch.zeros(shape[:2], dtype=torch.int32))
        keep("slot_mappings", torch.full((groups, max_num_batched_tokens), PAD_SLOT_ID))
        self._counts = [[0] * max_num_reqs for _ in range(groups)]
        self._staged: list[tuple[int, int, int, list[int]]] = []

    @property
    def block_tables(self) -> list[Tensor]:
        """Blocks of every request: int32 [R, width] for each group."""
        return [table[:, :width] for table, width in zip(self.pool, self.widths)]

    @property
    def input_block_tables(self) -> list[Tensor]:
        """Blocks of the batch gathered last: int32 [R, width] for each group."""
        return [table[:, :width] for table, width in zip(self.inputs, self.widths)]

    def append_block_ids(self, req_index: int, new_block_ids: tuple[list[int], ...], overwrite: bool) -> None:
        """Stage blocks for a request, a list for each group, behind those it has or in their place.

        Raises:
            RuntimeError: a row would hold more blocks than its table is wide; nothing is staged.
            TypeError, ValueError: there is no such request, not a list for each group, or a block that is no int or
                has no place in int32. Nothing is staged then either.
        """
        check_int("req_index", req_index, 0, self.pool.shape[1] - 1)
        if len(new_block_ids) != len(self.widths):
            raise ValueError(f"new_block_ids must hold {len(self.widths)} lists, one a group, got {len(new_block_ids)}")
        staged = []
        for group, ids in enumerate(new_block_ids):
            start = 0 if overwrite else self._counts[group][req_index]
            ids = kernel_ids(f"new_block_ids[{group}]", ids, self.blocks_per_kv_block[group])
            if start + len(ids) > self.widths[group]:
                raise RuntimeError(
                    f"request {req_index} needs {start + len(ids)} blocks in group {group}, has {self.widths[group]}"
                )
            staged.append((group, req_index, start, ids))
        for group, row, start, ids in staged:
            self._counts[group][row] = start + len(ids)
        self._staged += staged

    def apply_staged_writes(self) -> None:
        """Write what was staged, in order, with one copy to the device."""
        if not self._staged:
            return
        entries = {(g, row, start + i): block for g, row, start, ids in self._staged for i, block in enumerate(ids)}
        counts = {(g, row): self._counts[g][row] for g, row, _, _ in self._staged}
        flat = [*sum(zip(*entries), ()), *entries.values(), *sum(zip(*counts), ()), *counts.values()]
        moved = torch.tensor(flat, dtype=torch.int64).to(self.pool.device, non_blocking=True)
        blocks, rows = moved[: 4 * len(entries)].view(4, -1 if entries else 0), moved[4 * len(entries) :].view(3, -1)
        self.pool.index_put_(tuple(blocks[:3]), blocks[3].int())
        self.num_blocks.index_put_(tuple(rows[:2]), rows[2].int())
        self._staged.clear()

    @worded(req_pool_indices="idx_mapping")
    def gather_block_tables(
        self, idx_mapping: Tensor, num_reqs_padded: int, out: Tensor | None = None,
        num_computed_tokens: Tensor | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Block tables of a batch, int32 [num_reqs_padded, width] for each group.

        Args:
            idx_mapping: int [B], the row of each request; -1 for padding.
            num_reqs_padded: rows of the result; those from B on are null blocks, and so are all further ones of the
                shared storage, whatever a larger batch left there.
            out: int32 [G, N, widest], N >= num_reqs_padded, in place of the shared storage.
            num_computed_tokens: int [R]: blocks wholly below a group's reach become null, where cp_size is 1.
        """
        sizes = Sizes()
        sizes.check("idx_mapping", idx_mapping, INTS, "B")
        if out is not None:
            sizes.check("out", out, INT32, "G", "N", "W")
        check_int(
            "num_reqs_padded", num_reqs_padded, idx_mapping.shape[0], (self.inputs if out is None else out).shape[1]
        )
        below = {}
        if num_computed_tokens is not None and self.cp_size == 1:
            below = {"block_sizes": self.block_sizes, "reach": self.reach, "num_computed_tokens": num_computed_tokens}
        into = self.inputs if out is None else out[:, :num_reqs_padded]
        gather_block_tables(self.pool, self.num_blocks, idx_mapping, out=into, tail="keep", **below)
        return [table[:num_reqs_padded, :width] for table, width in zip(into, self.widths)]

    def get_dummy_block_tables(self, num_reqs: int) -> list[Tensor]:
        """The shared storage with null blocks all over, [num_reqs, width] for each group; num_reqs is at most R."""
        check_int("num_reqs", num_reqs, 0, self.inputs.shape[1])
        self.inputs.zero_()
        return [table[:num_reqs] for table in self.input_block_tables]

    @worded(req_pool_indices="idx_mapping", cu_seqlens_q="query_start_loc")
    def compute_slot_mappings(
        self, idx_mapping: Tensor, query_start_loc: Tensor, positions: Tensor, num_tokens_padded: int,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Slot of each token in each group, int64 [G, num_tokens_padded].

        Args:
            idx_mapping: int [B], the row of each request; the tokens of -1 get `PAD_SLOT_ID`.
            query_start_loc: int [B + 1]; from its last entry, read on the device, to the end of the storage: padding.
            positions: int [T], position of each token.
            out: int64 [G, N], N >= T, in place of the shared storage.
        """
        if out is not None:
            Sizes().check("out", out, INT64, "G", "N")
        into = self.slot_mappings if out is None else out
        check_int("num_tokens_padded", num_tokens_padded, 0, into.shape[-1])
        group_slot_mappings(
            self.pool, self.slot_block_sizes, idx_mapping, query_start_loc, positions, sharded=self.sharded,
            cp_size=self.cp_size, cp_rank=self.cp_rank, cp_interleave=self.cp_interleave, out=into,
        )  # fmt: skip
        return into[:, :num_tokens_padded]

    def get_dummy_slot_mappings(self, num_tokens: int) -> Tensor:
        """The shared storage with padding all over, [G, num_tokens]."""
        check_int("num_tokens", num_tokens, 0, self.slot_mappings.shape[1])
        return self.slot_mappings.fill_(PAD_SLOT_ID)[:, :num_tokens]
