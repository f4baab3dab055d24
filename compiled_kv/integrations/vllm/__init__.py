"""vLLM's names over this package's operators: block tables of several KV groups, slot mappings, the draft step.

    tables = BlockTables([16, 32], 8, 64, max_num_blocks_per_group=[4, 2], device="cpu")
    tables.append_block_ids(3, ([7, 8], [5]), overwrite=True)
    tables.apply_staged_writes()
    tables.gather_block_tables(torch.tensor([3, -1]), num_reqs_padded=2)   -> [[[7, 8, 0, 0], [0, 0, 0, 0]], ..]

Arguments, their order, and what is written and what is left alone are those of vLLM 0.33.0, save that the groups share
one tensor, so that a graph holds no addresses. See docs/integrations/vllm.md.
"""

from compiled_kv.integrations.vllm.block_table import BlockTable
from compiled_kv.integrations.vllm.block_tables import (
    NULL_BLOCK_ID,
    PAD_SLOT_ID,
    PADDING_SLOT_ID,
    BlockTables,
    get_block_table_width,
    map_to_kernel_blocks,
)
from compiled_kv.integrations.vllm.context_parallel import get_dcp_local_seq_lens
from compiled_kv.integrations.vllm.draft_step import eagle_step_update_slot_mapping_and_metadata

__all__ = [
    "NULL_BLOCK_ID",
    "PADDING_SLOT_ID",
    "PAD_SLOT_ID",
    "BlockTable",
    "BlockTables",
    "eagle_step_update_slot_mapping_and_metadata",
    "get_block_table_width",
    "get_dcp_local_seq_lens",
    "map_to_kernel_blocks",
]
