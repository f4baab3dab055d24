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
from compiled_kv.integrations.vllm.compressed_slots import (
    compute_kpool_tail_slot_mapping,
    get_compressed_slot_mapping,
)
from compiled_kv.integrations.vllm.context_parallel import get_dcp_local_seq_lens
from compiled_kv.integrations.vllm.draft_step import eagle_step_update_slot_mapping_and_metadata
from compiled_kv.integrations.vllm.positions import prepare_pos_seq_lens
from compiled_kv.integrations.vllm.table_views import expand_page_indices, mamba_get_block_table_tensor

__all__ = [
    "NULL_BLOCK_ID",
    "PADDING_SLOT_ID",
    "PAD_SLOT_ID",
    "BlockTable",
    "BlockTables",
    "compute_kpool_tail_slot_mapping",
    "eagle_step_update_slot_mapping_and_metadata",
    "expand_page_indices",
    "get_block_table_width",
    "get_compressed_slot_mapping",
    "get_dcp_local_seq_lens",
    "mamba_get_block_table_tensor",
    "map_to_kernel_blocks",
    "prepare_pos_seq_lens",
]
