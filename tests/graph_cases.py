"""Every operator in every form that has a golden: a step with named arguments, and example tensors for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import compiled_kv as ckv
from compiled_kv import DecodeMetadata, KVLayout

B, R, C, T = 4, 8, 1024, 12  # batch, pool rows, positions a row, tokens of a ragged batch
LAYOUT = KVLayout(page_size=64, max_context_len=C - 4, max_draft_tokens=4)
WINDOWED = KVLayout(page_size=64, max_context_len=C - 4, max_draft_tokens=4, window=256)
P = LAYOUT.max_num_pages
PARTS = 66  # of a FlashMLA schedule


def i32(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def i64(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


POOL, ROWS, LENS, TABLE = i32(R, C), i64(B), i32(B), i32(R, P)
BATCH = (POOL, ROWS, LENS)
FULL_TO_SWA, PAGE_MAP = i64(4096), i32(64)


class Case(NamedTuple):
    """A step, and its arguments in the order of the step's parameters."""

    step: Callable[..., Any]
    arguments: tuple[Any, ...]


def page_table(req_to_token: Tensor, req_pool_indices: Tensor, cache_seqlens: Tensor) -> Tensor:
    return ckv.page_table(req_to_token, req_pool_indices, cache_seqlens, layout=LAYOUT)


def page_table_out(req_to_token: Tensor, req_pool_indices: Tensor, cache_seqlens: Tensor, out: Tensor) -> Tensor:
    return ckv.page_table(req_to_token, req_pool_indices, cache_seqlens, layout=LAYOUT, out=out, tail="keep")


def swa_by_tokens(req_to_token: Tensor, req_pool_indices: Tensor, cache_seqlens: Tensor, full_to_swa: Tensor) -> Any:
    return ckv.swa_page_table(req_to_token, req_pool_indices, cache_seqlens, full_to_swa, layout=WINDOWED)


def swa_by_pages(req_to_token: Tensor, req_pool_indices: Tensor, cache_seqlens: Tensor, page_map: Tensor) -> Any:
    return ckv.swa_page_table(req_to_token, req_pool_indices, cache_seqlens, page_map=page_map, layout=WINDOWED)


def swa_out(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    cache_seqlens: Tensor,
    full_to_swa: Tensor,
    full: Tensor,
    swa: Tensor,
) -> Any:
    return ckv.swa_page_table(
        req_to_token, req_pool_indices, cache_seqlens, full_to_swa, layout=WINDOWED, out=(full, swa), tail="keep"
    )


def kv_indices(req_to_token: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, kv_start: Tensor) -> Tensor:
    return ckv.flashmla_kv_indices(req_to_token, req_pool_indices, kv_lens, kv_start, layout=LAYOUT)


def kv_indices_out(
    req_to_token: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, kv_start: Tensor, out: Tensor
) -> Tensor:
    return ckv.flashmla_kv_indices(req_to_token, req_pool_indices, kv_lens, kv_start, layout=LAYOUT, out=out)


def slots(req_to_token: Tensor, req_pool_indices: Tensor, positions: Tensor) -> Tensor:
    return ckv.slot_mapping(req_to_token, req_pool_indices, positions)


def ragged_slots(
    block_table: Tensor, req_pool_indices: Tensor, positions: Tensor, cu_seqlens_q: Tensor, num_reqs: Tensor
) -> Tensor:
    return ckv.slot_mapping(
        None, req_pool_indices, positions, block_table=block_table, page_size=64, cu_seqlens_q=cu_seqlens_q,
        num_reqs=num_reqs,
    )  # fmt: skip


def slots_out(req_to_token: Tensor, req_pool_indices: Tensor, positions: Tensor, out: Tensor) -> Tensor:
    return ckv.slot_mapping(req_to_token, req_pool_indices, positions, out=out)


def translate(slots: Tensor, full_to_swa: Tensor) -> Tensor:
    return ckv.translate_slots(slots, full_to_swa)


def translate_out(slots: Tensor, full_to_swa: Tensor, out: Tensor) -> Tensor:
    return ckv.translate_slots(slots, full_to_swa, out=out)


def seqlens(seq_lens: Tensor) -> Any:
    return ckv.seqlens(seq_lens)


def padded_seqlens(seq_lens: Tensor, q_len: Tensor, num_reqs: Tensor) -> Any:
    return ckv.seqlens(seq_lens, delta=4, q_len=q_len, num_reqs=num_reqs, pad_seqlen=1, layout=LAYOUT)


def seqlens_out(seq_lens: Tensor, cache_seqlens: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Any:
    return ckv.seqlens(seq_lens, out=(cache_seqlens, cu_seqlens_q, cu_seqlens_k))


def schedule(cache_seqlens: Tensor) -> Any:
    return ckv.flashmla_schedule(cache_seqlens, num_sm_parts=PARTS)


def padded_schedule(cache_seqlens: Tensor, num_reqs: Tensor) -> Any:
    return ckv.flashmla_schedule(cache_seqlens, num_sm_parts=PARTS, num_reqs=num_reqs, form="legacy_tokens")


def schedule_out(cache_seqlens: Tensor, tile_scheduler_metadata: Tensor, num_splits: Tensor) -> Any:
    return ckv.flashmla_schedule(cache_seqlens, num_sm_parts=PARTS, out=(tile_scheduler_metadata, num_splits))


def decode(req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor) -> DecodeMetadata:
    return ckv.decode_metadata(req_to_token, req_pool_indices, seq_lens, layout=LAYOUT)


def verify(req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor) -> DecodeMetadata:
    return ckv.decode_metadata(req_to_token, req_pool_indices, seq_lens, layout=LAYOUT, seq_len_delta=4, q_len=4)


def draft(req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor) -> DecodeMetadata:
    return ckv.decode_metadata(req_to_token, req_pool_indices, seq_lens, layout=LAYOUT, seq_len_delta=3)


def extend(req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, q_len: Tensor) -> DecodeMetadata:
    return ckv.decode_metadata(req_to_token, req_pool_indices, seq_lens, layout=LAYOUT, q_len=q_len, num_tokens=T)


def extend_no_slots(req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, q_len: Tensor) -> DecodeMetadata:
    return ckv.decode_metadata(req_to_token, req_pool_indices, seq_lens, layout=LAYOUT, q_len=q_len)


def given_slots(req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, slots: Tensor) -> DecodeMetadata:
    return ckv.decode_metadata(req_to_token, req_pool_indices, seq_lens, layout=LAYOUT, slots=slots, num_tokens=B)


def padded(req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, num_reqs: Tensor) -> DecodeMetadata:
    return ckv.decode_metadata(req_to_token, req_pool_indices, seq_lens, layout=LAYOUT, num_reqs=num_reqs, pad_seqlen=1)


def window_tokens(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, full_to_swa: Tensor
) -> DecodeMetadata:
    return ckv.decode_metadata(req_to_token, req_pool_indices, seq_lens, layout=WINDOWED, full_to_swa=full_to_swa)


def window_pages(req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, page_map: Tensor) -> DecodeMetadata:
    return ckv.decode_metadata(req_to_token, req_pool_indices, seq_lens, layout=WINDOWED, page_map=page_map)


def status_bits(req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, status: Tensor) -> DecodeMetadata:
    return ckv.decode_metadata(req_to_token, req_pool_indices, seq_lens, layout=LAYOUT, status=status)


def decode_out(req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, out: DecodeMetadata) -> DecodeMetadata:
    return ckv.decode_metadata(req_to_token, req_pool_indices, seq_lens, layout=LAYOUT, out=out, tail="keep")


def everything_out(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, q_len: Tensor, full_to_swa: Tensor,
    num_reqs: Tensor, status: Tensor, out: DecodeMetadata,
) -> DecodeMetadata:  # fmt: skip
    return ckv.decode_metadata(
        req_to_token, req_pool_indices, seq_lens, layout=WINDOWED, q_len=q_len, num_tokens=T, full_to_swa=full_to_swa,
        num_reqs=num_reqs, pad_seqlen=1, status=status, out=out,
    )  # fmt: skip


def buffers(tokens: int = B, swa: bool = False) -> DecodeMetadata:
    """Outputs of their own for decode_metadata."""
    return DecodeMetadata(
        i32(B), i32(B + 1), i32(B + 1), i32(B, P), i32(B, P) if swa else None, i64(tokens), i64(tokens) if swa else None
    )


CASES: dict[str, dict[str, Case]] = {
    "page_table": {
        "functional": Case(page_table, BATCH),
        "out, tail kept": Case(page_table_out, (*BATCH, i32(B, P))),
    },
    "swa_page_table": {
        "token map": Case(swa_by_tokens, (*BATCH, FULL_TO_SWA)),
        "page map": Case(swa_by_pages, (*BATCH, PAGE_MAP)),
        "out, tail kept": Case(swa_out, (*BATCH, FULL_TO_SWA, i32(B, P), i32(B, P))),
    },
    "flashmla_kv_indices": {
        "functional": Case(kv_indices, (*BATCH, i32(B))),
        "out": Case(kv_indices_out, (*BATCH, i32(B), i32(B, P))),
    },
    "slot_mapping": {
        "token pool": Case(slots, (POOL, ROWS, i64(B))),
        "block table, ragged, padded": Case(ragged_slots, (TABLE, ROWS, i64(T), i32(B + 1), i32(1))),
        "out": Case(slots_out, (POOL, ROWS, i64(B), i64(B))),
    },
    "translate_slots": {
        "functional": Case(translate, (i64(T), FULL_TO_SWA)),
        "out": Case(translate_out, (i64(T), FULL_TO_SWA, i64(T))),
    },
    "seqlens": {
        "functional": Case(seqlens, (LENS,)),
        "ragged, padded": Case(padded_seqlens, (LENS, i32(B), i32(1))),
        "out": Case(seqlens_out, (LENS, i32(B), i32(B + 1), i32(B + 1))),
    },
    "flashmla_schedule": {
        "functional": Case(schedule, (LENS,)),
        "padded, legacy tokens": Case(padded_schedule, (LENS, i32(1))),
        "out": Case(schedule_out, (LENS, i32(PARTS, 8), i32(B + 1))),
    },
    "decode_metadata": {
        "plain decode": Case(decode, BATCH),
        "verify": Case(verify, BATCH),
        "draft step 2": Case(draft, BATCH),
        "ragged draft-extend": Case(extend, (*BATCH, i32(B))),
        "ragged draft-extend, no slots": Case(extend_no_slots, (*BATCH, i32(B))),
        "slots given": Case(given_slots, (*BATCH, i64(3))),
        "padded": Case(padded, (*BATCH, i32(1))),
        "sliding window, token map": Case(window_tokens, (*BATCH, FULL_TO_SWA)),
        "sliding window, page map": Case(window_pages, (*BATCH, PAGE_MAP)),
        "status": Case(status_bits, (*BATCH, i32(1))),
        "out, tail kept": Case(decode_out, (*BATCH, buffers())),
        "everything, out": Case(everything_out, (*BATCH, i32(B), FULL_TO_SWA, i32(1), i32(1), buffers(T, swa=True))),
    },
}
