"""`update_metadata`, and the operators that only a peer's contract asks for, in every form that has a golden."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from compiled_kv import DecodeMetadata, new_held, update_metadata
from compiled_kv.peers.block_tables import gather_block_tables
from compiled_kv.peers.csr import csr_tables, fill_kv_indices
from compiled_kv.peers.draft_indices import draft_kv_indices
from compiled_kv.peers.draft_steps import advance_draft, advance_draft_
from compiled_kv.peers.engine_metadata import write_metadata
from compiled_kv.peers.engine_parts import EngineMetadata
from compiled_kv.peers.group_slots import group_slot_mappings
from compiled_kv.peers.token_positions import place_tokens_
from tests.graph_cases import BATCH, FULL_TO_SWA, LAYOUT, LENS, PAGE_MAP, ROWS, WINDOWED, B, Case, P, R, T
from tests.graph_cases import i32 as ints
from tests.graph_cases import i64 as longs

G, S, STEPS, TOPK = 2, 48, 3, 2  # KV groups, entries of kv_indices, draft steps, branches of a draft
ROOM = 6  # rows of the tables that persist
GENERATIONS = longs(B)
TABLES, SIZES = ints(G, R, P), ints(G)


def update(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, generations: Tensor, held: Tensor,
    out: DecodeMetadata,
) -> DecodeMetadata:  # fmt: skip
    return update_metadata(req_to_token, req_pool_indices, seq_lens, generations, layout=LAYOUT, held=held, out=out)


def update_verify(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, generations: Tensor, held: Tensor,
    out: DecodeMetadata,
) -> DecodeMetadata:  # fmt: skip
    return update_metadata(
        req_to_token, req_pool_indices, seq_lens, generations, layout=LAYOUT, held=held, out=out, seq_len_delta=4,
        q_len=4,
    )  # fmt: skip


def update_extend(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, generations: Tensor, q_len: Tensor,
    full_to_swa: Tensor, num_reqs: Tensor, status: Tensor, held: Tensor, out: DecodeMetadata,
) -> DecodeMetadata:  # fmt: skip
    return update_metadata(
        req_to_token, req_pool_indices, seq_lens, generations, layout=WINDOWED, held=held, out=out, q_len=q_len,
        num_tokens=T, full_to_swa=full_to_swa, num_reqs=num_reqs, pad_seqlen=1, status=status,
    )  # fmt: skip


def engine_decode(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, slots: Tensor, full_to_swa: Tensor,
    out: EngineMetadata,
) -> EngineMetadata:  # fmt: skip
    return write_metadata(
        req_to_token, req_pool_indices, seq_lens, out, layout=LAYOUT, slots=slots, full_to_swa=full_to_swa
    )


def engine_page_maps(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, q_len: Tensor, page_map: Tensor,
    swa_page_map: Tensor, out: EngineMetadata,
) -> EngineMetadata:  # fmt: skip
    return write_metadata(
        req_to_token, req_pool_indices, seq_lens, out, layout=LAYOUT, q_len=q_len, page_map=page_map,
        swa_page_map=swa_page_map, tail="clear",
    )  # fmt: skip


def csr(pool: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, num_reqs: Tensor) -> Any:
    return csr_tables(pool, req_pool_indices, kv_lens, layout=LAYOUT, num_reqs=num_reqs, capacity=S)


def csr_out(
    pool: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, kv_start: Tensor, token_map: Tensor, kv_indptr: Tensor,
    kv_indices: Tensor, kv_last_page_len: Tensor,
) -> Any:  # fmt: skip
    return csr_tables(
        pool, req_pool_indices, kv_lens, kv_start, layout=LAYOUT, token_map=token_map,
        out=(kv_indptr, kv_indices, kv_last_page_len), tail="keep",
    )  # fmt: skip


def csr_fill(pool: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, kv_indptr: Tensor, kv_indices: Tensor) -> Tensor:
    return fill_kv_indices(pool, req_pool_indices, kv_lens, kv_indptr, kv_indices, layout=LAYOUT)


def drafts(pool: Tensor, req_pool_indices: Tensor, seq_lens: Tensor) -> Any:
    return draft_kv_indices(pool, req_pool_indices, seq_lens, num_steps=STEPS, topk=TOPK, layout=LAYOUT, capacity=S)


def drafts_out(
    pool: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, positions: Tensor, kv_indptr: Tensor, kv_indices: Tensor
) -> Any:
    return draft_kv_indices(
        pool, req_pool_indices, seq_lens, num_steps=STEPS, topk=TOPK, layout=LAYOUT, positions=positions, window=256,
        sinks=4, out=(kv_indptr, kv_indices), tail="keep",
    )  # fmt: skip


def advance(positions: Tensor, block_table: Tensor, seq_lens: Tensor) -> Any:
    return advance_draft(positions, block_table, seq_lens, page_size=64, max_context_len=1024)


def advance_in_place(positions: Tensor, block_table: Tensor, seq_lens: Tensor, slot_mapping: Tensor) -> Any:
    return advance_draft_(positions, block_table, seq_lens, slot_mapping, page_size=64, max_context_len=1024)


def place(positions: Tensor, held: Tensor, cu_seqlens_q: Tensor, batch_indices: Tensor) -> Any:
    return place_tokens_(positions, held, cu_seqlens_q, counted=True, batch_indices=batch_indices)


def place_by_row(
    positions: Tensor, held: Tensor, cu_seqlens_q: Tensor, req_pool_indices: Tensor, seq_lens: Tensor
) -> Any:
    return place_tokens_(positions, held, cu_seqlens_q, req_pool_indices=req_pool_indices, seq_lens=seq_lens)


def group_slots(
    block_tables: Tensor, block_sizes: Tensor, req_pool_indices: Tensor, cu_seqlens_q: Tensor, positions: Tensor
) -> Tensor:
    return group_slot_mappings(block_tables, block_sizes, req_pool_indices, cu_seqlens_q, positions)


def group_slots_out(
    block_tables: Tensor, block_sizes: Tensor, req_pool_indices: Tensor, cu_seqlens_q: Tensor, positions: Tensor,
    sharded: Tensor, out: Tensor,
) -> Tensor:  # fmt: skip
    return group_slot_mappings(
        block_tables, block_sizes, req_pool_indices, cu_seqlens_q, positions, sharded=sharded, cp_size=2, cp_rank=1,
        out=out,
    )  # fmt: skip


def gather(block_tables: Tensor, num_blocks: Tensor, req_pool_indices: Tensor) -> Tensor:
    return gather_block_tables(block_tables, num_blocks, req_pool_indices)


def gather_out(
    block_tables: Tensor, num_blocks: Tensor, req_pool_indices: Tensor, block_sizes: Tensor, reach: Tensor,
    num_computed_tokens: Tensor, out: Tensor,
) -> Tensor:  # fmt: skip
    return gather_block_tables(
        block_tables, num_blocks, req_pool_indices, block_sizes=block_sizes, reach=reach,
        num_computed_tokens=num_computed_tokens, out=out, tail="keep",
    )  # fmt: skip


def held() -> Tensor:
    return new_held(LAYOUT, ROOM, "cpu")


def tables(tokens: int, swa: bool = False) -> DecodeMetadata:
    """Persistent tables for update_metadata."""
    swa_table = ints(ROOM, P) if swa else None
    swa_slots = longs(tokens) if swa else None
    return DecodeMetadata(
        ints(ROOM), ints(ROOM + 1), ints(ROOM + 1), ints(ROOM, P), swa_table, longs(tokens), swa_slots
    )


def engine_buffers(swa_tokens: int | None = None) -> EngineMetadata:
    swa_slots = None if swa_tokens is None else longs(swa_tokens)
    return EngineMetadata(ints(B), ints(B + 1), ints(B + 1), ints(B, P), ints(B, P), swa_slots)


QUERIES = (TABLES, SIZES, ROWS, ints(B + 1), longs(T))
EXTEND = (ints(B), FULL_TO_SWA, ints(1), ints(1))

ENGINE_CASES: dict[str, dict[str, Case]] = {
    "update_metadata": {
        "plain decode": Case(update, (*BATCH, GENERATIONS, held(), tables(ROOM))),
        "verify": Case(update_verify, (*BATCH, GENERATIONS, held(), tables(4 * ROOM))),
        "ragged draft-extend, sliding window, padded, status": Case(
            update_extend, (*BATCH, GENERATIONS, *EXTEND, held(), tables(T, swa=True))
        ),
    },
    "write_metadata": {
        "token map, tail kept": Case(engine_decode, (*BATCH, longs(3), FULL_TO_SWA, engine_buffers(B))),
        "page maps, ragged": Case(engine_page_maps, (*BATCH, ints(B), PAGE_MAP, ints(32), engine_buffers())),
    },
    "csr_tables": {
        "functional, padded": Case(csr, (*BATCH, ints(1))),
        "out, tail kept": Case(csr_out, (*BATCH, ints(B), FULL_TO_SWA, ints(B + 1), ints(S), ints(B))),
    },
    "fill_kv_indices": {"in place": Case(csr_fill, (*BATCH, ints(B + 1), ints(S)))},
    "draft_kv_indices": {
        "functional": Case(drafts, BATCH),
        "out, sliding window, tail kept": Case(
            drafts_out, (*BATCH, ints(B * TOPK), ints(STEPS, B * TOPK + 1), ints(STEPS, S))
        ),
    },
    "advance_draft": {
        "functional": Case(advance, (longs(B), ints(B, P), LENS)),
        "in place": Case(advance_in_place, (longs(B), ints(B, P), ints(B), longs(B))),
    },
    "place_tokens": {
        "counted, in place": Case(place, (ints(T), LENS, ints(B + 1), ints(T))),
        "by pool row, in place": Case(place_by_row, (longs(T), ints(R), ints(B + 1), ROWS, ints(ROOM))),
    },
    "group_slot_mappings": {
        "functional": Case(group_slots, QUERIES),
        "out, over ranks": Case(group_slots_out, (*QUERIES, ints(G), longs(G, T))),
    },
    "gather_block_tables": {
        "functional": Case(gather, (TABLES, ints(G, R), ROWS)),
        "out, sliding window, tail kept": Case(
            gather_out, (TABLES, ints(G, R), ROWS, SIZES, ints(G), ints(R), ints(G, B, P))
        ),
    },
}
