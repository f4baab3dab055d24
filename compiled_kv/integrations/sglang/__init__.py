"""SGLang's names over this package's operators: page tables, captured metadata, block and token indices.

    from compiled_kv.integrations.sglang import build_trtllm_mha_page_table

Arguments, their order, and what is written and what is left alone are those of SGLang 0.5.23. Where its kernels read
outside a table or follow a slot of none, these give -1: see docs/integrations/sglang.md.
"""

from compiled_kv.integrations.sglang.draft_indices import generate_draft_decode_kv_indices
from compiled_kv.integrations.sglang.graph_metadata import (
    draft_extend_set_metadata,
    normal_decode_set_metadata,
    update_trtllm_mha_graph_metadata,
    update_trtllm_mla_graph_metadata,
)
from compiled_kv.integrations.sglang.kv_indices import (
    create_flashinfer_kv_indices_triton,
    kv_indices_num_token_blocks,
)
from compiled_kv.integrations.sglang.page_tables import (
    build_trtllm_mha_page_table,
    create_flashmla_kv_indices_triton,
    get_num_kv_index_blocks_flashmla,
)

__all__ = [
    "build_trtllm_mha_page_table",
    "create_flashinfer_kv_indices_triton",
    "create_flashmla_kv_indices_triton",
    "draft_extend_set_metadata",
    "generate_draft_decode_kv_indices",
    "get_num_kv_index_blocks_flashmla",
    "kv_indices_num_token_blocks",
    "normal_decode_set_metadata",
    "update_trtllm_mha_graph_metadata",
    "update_trtllm_mla_graph_metadata",
]
