"""Decode metadata for paged attention, built on the device, inside the graph that `torch.compile` makes of a decode
step."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from compiled_kv.layout import KVLayout
from compiled_kv.lengths import seqlens
from compiled_kv.metadata import decode_metadata
from compiled_kv.metadata_parts import DecodeMetadata
from compiled_kv.page_tables import flashmla_kv_indices, page_table
from compiled_kv.schedules import flashmla_schedule
from compiled_kv.slots import slot_mapping
from compiled_kv.status import Status
from compiled_kv.translation import translate_slots
from compiled_kv.updates import new_held, update_metadata
from compiled_kv.windows import swa_page_table

if TYPE_CHECKING:
    from compiled_kv.auditor import audit
    from compiled_kv.batches import DecodeBatch
    from compiled_kv.buffers import DecodeBuffers
    from compiled_kv.goldens import assert_graph
    from compiled_kv.replay.check import check_replay
    from compiled_kv.replay.graphs import DecodeGraphs
    from compiled_kv.tracing.fakes import host
    from compiled_kv.tracing.graphs import capture

# Tools around a decode step. Most import dynamo, which a serving process may do without until it needs them.
_TOOLS = {
    "DecodeBatch": "batches",
    "DecodeBuffers": "buffers",
    "DecodeGraphs": "replay.graphs",
    "assert_graph": "goldens",
    "audit": "auditor",
    "capture": "tracing.graphs",
    "check_replay": "replay.check",
    "host": "tracing.fakes",
}

__all__ = [
    "DecodeBatch",
    "DecodeBuffers",
    "DecodeGraphs",
    "DecodeMetadata",
    "KVLayout",
    "Status",
    "assert_graph",
    "audit",
    "capture",
    "check_replay",
    "decode_metadata",
    "flashmla_kv_indices",
    "flashmla_schedule",
    "host",
    "new_held",
    "page_table",
    "seqlens",
    "slot_mapping",
    "swa_page_table",
    "translate_slots",
    "update_metadata",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _TOOLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_TOOLS[name]}"), name)
