"""vLLM's names over this package's operators: block tables of several KV groups, slot mappings, the draft step.

    tables = BlockTables([16, 32], 8, 64, max_num_blocks_per_group=[4, 2], device="cpu")
    tables.append_block_ids(3, ([7, 8], [5]), overwrite=True)
    tables.apply_staged_writes()
    tables.gather_block_tables(torch.tensor([3, -1]), num_reqs_padded=2)   -> [[[7, 8, 0, 0], [0, 0, 0, 0]], ..]

Arguments, their order, and what is written and what is left alone are those of vLLM 0.33.0. The groups share one
tensor, so that a launch serves them all and a graph holds no addresses. See docs/integrations/vllm.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_kv.block_tables import gather_block_tables
from compiled_kv.draft_steps import advance_draft_
from compiled_kv.group_slots import group_slot_mappings
from compiled_kv.layout import ceil_div

PAD_SLOT_ID = PADDING_SLOT_ID = -1
NULL_BLOCK_ID = 0


def get_block_table_width(max_num_blocks: int, block_size: int, token_alignment: int = 128) -> int:
    """`max_num_blocks` rounded up so that a row of the table covers a multiple of `token_alignment` tokens."""
    step = token_alignment // math.gcd(token_alignment, block_size)
    return ceil_div(max_num_blocks, step) * step


def map_to_kernel_blocks(block_ids: Sequence[int], blocks_per_kv_block: int) -> list[int]:
    """Ids of the smaller blocks that a kernel reads, `blocks_per_kv_block` for each block of the manager."""
    return [block * blocks_per_kv_block + i for block in block_ids for i in range(blocks_per_kv_block)]


class BlockTables:
    """Block tables of every KV group, persistent: addresses do not change, so captured graphs may read them.

    Args:
        block_sizes: tokens a block of each group, as the manager counts them.
        max_num_reqs: rows R, one a request.
        max_num_batched_tokens: columns of the slot mappings.
        max_num_blocks_per_group: widths of the tables, in blocks of the manager.
        device: where the tables lie.
        cp_size, cp_rank, cp_interleave: context-parallel ranks, this one, and tokens dealt to a rank at a time.
        slot_mapping_enabled: for each group, whether its tokens have slots; all have by default.
        dcp_sharded: for each group, whether its tokens are dealt out over the ranks; all are by default.
        sliding_window_reach: for each group, tokens before the first new one that it still reads; 0 for all.
        kernel_block_sizes: tokens a block as the kernels count them, where they count smaller ones.
    """

    def __init__(
        self, block_sizes: Sequence[int], max_num_reqs: int, max_num_batched_tokens: int,
        max_num_blocks_per_group: Sequence[int], device: torch.device | str, cp_size: int = 1, cp_rank: int = 0,
        cp_interleave: int = 1, slot_mapping_enabled: Sequence[bool] | None = None,
        dcp_sharded: Sequence[bool] | None = None, sliding_window_reach: Sequence[int] | None = None,
        kernel_block_sizes: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        groups = len(block_sizes)
        sizes = list(kernel_block_sizes or block_sizes)
        self.blocks_per_kv_block = [_ratio(size, kernel) for size, kernel in zip(block_sizes, sizes, strict=True)]
        pairs = zip(max_num_blocks_per_group, self.blocks_per_kv_block, strict=True)
        self.widths = [width * ratio for width, ratio in pairs]
        self.cp_size, self.cp_rank, self.cp_interleave = cp_size, cp_rank, cp_interleave

        def ints(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.block_sizes = ints(sizes)
        enabled = [True] * groups if slot_mapping_enabled is None else list(slot_mapping_enabled)
        self.slot_block_sizes = ints([size if on else 0 for size, on in zip(sizes, enabled, strict=True)])
        self.sharded = ints([True] * groups if dcp_sharded is None else [int(on) for on in dcp_sharded])
        self.reach = None if sliding_window_reach is None else ints(sliding_window_reach)
        shape = (groups, max_num_reqs, max(self.widths, default=0))
        self.pool = torch.zeros(shape, dtype=torch.int32, device=device)
        for table, width in zip(self.pool, self.widths):
            table[:, width:] = -1  # beyond its own width a group has no blocks, and no slots
        self.inputs = torch.zeros(shape, dtype=torch.int32, device=device)
        self.num_blocks = torch.zeros(shape[:2], dtype=torch.int32, device=device)
        self.slot_mappings = torch.full((groups, max_num_batched_tokens), PAD_SLOT_ID, dtype=torch.int64, device=device)
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
        """
        staged = []
        for group, ids in enumerate(new_block_ids):
            start = 0 if overwrite else self._counts[group][req_index]
            ids = map_to_kernel_blocks(ids, self.blocks_per_kv_block[group])
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
        below = {}
        if self.reach is not None and num_computed_tokens is not None and self.cp_size == 1:
            below = {"block_sizes": self.block_sizes, "reach": self.reach, "num_computed_tokens": num_computed_tokens}
        into = self.inputs if out is None else out[:, :num_reqs_padded]
        gather_block_tables(self.pool, self.num_blocks, idx_mapping, out=into, tail="keep", **below)
        return [table[:num_reqs_padded, :width] for table, width in zip(into, self.widths)]

    def get_dummy_block_tables(self, num_reqs: int) -> list[Tensor]:
        """The shared storage with null blocks all over, [num_reqs, width] for each group."""
        self.inputs.zero_()
        return [table[:num_reqs] for table in self.input_block_tables]

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
        into = self.slot_mappings if out is None else out
        group_slot_mappings(
            self.pool, self.slot_block_sizes, idx_mapping, query_start_loc, positions, sharded=self.sharded,
            cp_size=self.cp_size, cp_rank=self.cp_rank, cp_interleave=self.cp_interleave, out=into,
        )  # fmt: skip
        return into[:, :num_tokens_padded]

    def get_dummy_slot_mappings(self, num_tokens: int) -> Tensor:
        """The shared storage with padding all over, [G, num_tokens]."""
        return self.slot_mappings.fill_(PAD_SLOT_ID)[:, :num_tokens]


def _ratio(block_size: int, kernel_block_size: int) -> int:
    if block_size % kernel_block_size != 0:
        raise ValueError(f"kernel_block_sizes must divide block_sizes, got {kernel_block_size} for {block_size}")
    return block_size // kernel_block_size


def eagle_step_update_slot_mapping_and_metadata(
    positions_1d: Tensor, block_table_tensor: Tensor, seq_lens: Tensor, block_size: int, max_model_len: int,
    out_clamped_positions: Tensor, out_slot_mapping: Tensor, input_batch_size: int | None = None,
) -> None:  # fmt: skip
    """Move every request one draft token on: position + 1, its slot, length + 1.

    A request whose next position would reach `max_model_len` gets position 0, slot -1 and length 1.

    Args:
        positions_1d: int64 [B]. block_table_tensor: int [B, W].
        seq_lens: int32 [B], updated.
        out_clamped_positions: int64 [B], `positions_1d` itself or another.
        out_slot_mapping: int64; the first `input_batch_size` entries are written, from B on with -1.
    """
    if out_clamped_positions is not positions_1d:
        out_clamped_positions.copy_(positions_1d)
    slots = out_slot_mapping[: positions_1d.shape[0] if input_batch_size is None else input_batch_size]
    advance_draft_(
        out_clamped_positions, block_table_tensor, seq_lens, slots, page_size=block_size, max_context_len=max_model_len
    )
