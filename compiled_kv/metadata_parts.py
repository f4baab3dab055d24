"""What `decode_metadata` and `update_metadata` share: inputs, settings, outputs, and arguments of both kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from compiled_kv.launch import size_of, stride_of
from compiled_kv.status import DEBUG


class Inputs(NamedTuple):
    req_to_token: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    q_lens: Tensor | None
    slots: Tensor | None
    full_to_swa: Tensor | None
    page_map: Tensor | None
    num_reqs: Tensor | None
    status: Tensor | None

    @property
    def swa_map(self) -> Tensor | None:
        return self.page_map if self.full_to_swa is None else self.full_to_swa


class Settings(NamedTuple):
    page_size: int
    cap: int
    delta: int
    q_len: int
    pad_seqlen: int
    window: int | None


class DecodeMetadata(NamedTuple):
    """What attention and the K/V write of one step read. B rows, P columns, T tokens; absent parts are None."""

    cache_seqlens: Tensor
    """int32 [B], tokens attention reads of each row."""
    cu_seqlens_q: Tensor
    """int32 [B + 1], prefix sums of queries."""
    cu_seqlens_k: Tensor
    """int32 [B + 1], prefix sums of `cache_seqlens` of live rows."""
    page_table: Tensor
    """int32 [B, P], page ids; 0 is the null page, -1 none."""
    swa_page_table: Tensor | None = None
    """int32 [B, P], the same in the sliding-window pool; None without a map."""
    slot_mapping: Tensor | None = None
    """int64 [T], where each token's K/V is written; -1 for none."""
    swa_slot_mapping: Tensor | None = None
    """int64 [T], the same in the sliding-window pool."""


def kernel_arguments(out: DecodeMetadata, given: Inputs, settings: Settings, num_tokens: int) -> dict[str, Any]:
    """Arguments of `decode_metadata_kernel` that `update_metadata_kernel` takes too."""
    pool, rows, lengths, swa_map = given.req_to_token, given.req_pool_indices, given.seq_lens, given.swa_map
    return {
        "req_to_token_ptr": pool, "req_pool_indices_ptr": rows, "seq_lens_ptr": lengths, "q_lens_ptr": given.q_lens,
        "slots_ptr": given.slots, "map_ptr": swa_map, "num_reqs_ptr": given.num_reqs, "status_ptr": given.status,
        "cache_seqlens_ptr": out.cache_seqlens, "cu_q_ptr": out.cu_seqlens_q, "cu_k_ptr": out.cu_seqlens_k,
        "page_table_ptr": out.page_table, "swa_page_table_ptr": out.swa_page_table,
        "slot_mapping_ptr": out.slot_mapping, "swa_slot_mapping_ptr": out.swa_slot_mapping,
        "pool_rows": pool.shape[0], "pool_width": pool.shape[1],
        "pool_row_stride": pool.stride(0), "pool_stride": pool.stride(1),
        "index_stride": rows.stride(0), "seq_stride": lengths.stride(0), "q_stride": stride_of(given.q_lens),
        "slots_stride": stride_of(given.slots), "num_slots": size_of(given.slots),
        "map_stride": stride_of(swa_map), "map_size": size_of(swa_map),
        "page_row_stride": out.page_table.stride(0), "swa_row_stride": stride_of(out.swa_page_table),
        "batch_size": lengths.shape[0], "width": out.page_table.shape[1], "num_tokens": num_tokens,
        "delta": settings.delta, "q_len": settings.q_len, "cap": settings.cap, "pad_seqlen": settings.pad_seqlen,
        "window": settings.window or 0, "PAGE_SIZE": settings.page_size, "PAGE_MAP": given.page_map is not None,
        "WINDOWED": settings.window is not None, "DEBUG": DEBUG,
    }  # fmt: skip
