"""Decode metadata for paged attention, built on the device, inside the graph that `torch.compile` makes of a decode
step."""

from compiled_kv.layout import KVLayout
from compiled_kv.lengths import seqlens
from compiled_kv.metadata import decode_metadata
from compiled_kv.metadata_op import DecodeMetadata
from compiled_kv.page_tables import flashmla_kv_indices, page_table
from compiled_kv.schedules import flashmla_schedule
from compiled_kv.slots import slot_mapping
from compiled_kv.status import Status
from compiled_kv.translation import translate_slots
from compiled_kv.windows import swa_page_table

__all__ = [
    "DecodeMetadata",
    "KVLayout",
    "Status",
    "decode_metadata",
    "flashmla_kv_indices",
    "flashmla_schedule",
    "page_table",
    "seqlens",
    "slot_mapping",
    "swa_page_table",
    "translate_slots",
]
__version__ = "0.1.0"
