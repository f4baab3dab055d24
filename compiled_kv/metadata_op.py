"""`decode_metadata` as registered operators: flat arguments, fixed tuples of tensors, absent outputs of size zero.

Schemas know no NamedTuple argument, no optional result and no `int | Tensor`; the public function in `metadata`
restores them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kv.launch import launch, runs_kernel, size_of
from compiled_kv.metadata_cpu import cpu_body
from compiled_kv.metadata_kernel import decode_metadata_kernel
from compiled_kv.metadata_parts import DecodeMetadata, Inputs, Settings, kernel_arguments
from compiled_kv.overlap import check_distinct_fake
from compiled_kv.registration import operator
from compiled_kv.sharing import CHUNK, ROW_TOKENS, SCAN, chunks, reciprocal_of, split_rows


def _present(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _launch(out: DecodeMetadata, given: Inputs, settings: Settings, clear: bool) -> None:
    batch_size, width = out.page_table.shape
    is_mapped, has_unit_stride = given.swa_map is not None, given.req_to_token.stride(1) == 1
    split = split_rows(batch_size, width, settings.page_size, is_mapped=is_mapped, has_unit_stride=has_unit_stride)
    launch(
        decode_metadata_kernel, (chunks(batch_size) + batch_size * split.parts + split.helpers,),
        **kernel_arguments(out, given, settings, size_of(out.slot_mapping)),
        parts=split.parts, helpers=split.helpers, reciprocal=reciprocal_of(batch_size), CLEAR=clear,
        UNIT_STRIDE=has_unit_stride, BLOCK=split.block, SHORT=split.short, LONG=split.long, SHARED=split.shared,
        TOKENS=ROW_TOKENS, CHUNK=CHUNK, SCAN=SCAN, num_warps=split.warps,
    )  # fmt: skip


@operator("compiled_kv::decode_metadata", mutates_args=("status",))
def _decode_metadata(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, q_lens: Tensor | None, slots: Tensor | None,
    full_to_swa: Tensor | None, page_map: Tensor | None, num_reqs: Tensor | None, status: Tensor | None,
    page_size: int, cap: int, delta: int, q_len: int, pad_seqlen: int, window: int | None, width: int,
    num_tokens: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    given = Inputs(req_to_token, req_pool_indices, seq_lens, q_lens, slots, full_to_swa, page_map, num_reqs, status)
    settings = Settings(page_size, cap, delta, q_len, pad_seqlen, window)
    check_distinct_fake(_present(status=status), given._asdict())
    if runs_kernel(req_to_token):
        out = _new_outputs(given, width, num_tokens)
        _launch(out, given, settings, clear=True)
    else:
        out, _ = cpu_body(given, settings, width, num_tokens)
    absent = [torch.empty(0, dtype=dtype, device=seq_lens.device) for dtype in (torch.int32, torch.int64, torch.int64)]
    swa_table, slot_mapping, swa_slots = (empty if t is None else t for t, empty in zip(out[4:], absent))
    return (*out[:4], swa_table, slot_mapping, swa_slots)


def _new_outputs(given: Inputs, width: int, num_tokens: int | None) -> DecodeMetadata:
    batch_size, swa = given.seq_lens.shape[0], given.swa_map is not None

    def new(dtype: torch.dtype, *shape: int) -> Tensor:
        return given.seq_lens.new_empty(shape, dtype=dtype)

    i32, i64 = torch.int32, torch.int64
    return DecodeMetadata(
        new(i32, batch_size),
        new(i32, batch_size + 1),
        new(i32, batch_size + 1),
        new(i32, batch_size, width),
        new(i32, batch_size, width) if swa else None,
        None if num_tokens is None else new(i64, num_tokens),
        None if num_tokens is None or not swa else new(i64, num_tokens),
    )


@operator("compiled_kv::decode_metadata_out", mutates_args=("status", *DecodeMetadata._fields))
def _decode_metadata_out(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, q_lens: Tensor | None, slots: Tensor | None,
    full_to_swa: Tensor | None, page_map: Tensor | None, num_reqs: Tensor | None, status: Tensor | None,
    cache_seqlens: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, page_table: Tensor,
    swa_page_table: Tensor | None, slot_mapping: Tensor | None, swa_slot_mapping: Tensor | None,
    page_size: int, cap: int, delta: int, q_len: int, pad_seqlen: int, window: int | None, clear: bool,
) -> None:  # fmt: skip
    given = Inputs(req_to_token, req_pool_indices, seq_lens, q_lens, slots, full_to_swa, page_map, num_reqs, status)
    settings = Settings(page_size, cap, delta, q_len, pad_seqlen, window)
    out = DecodeMetadata(
        cache_seqlens, cu_seqlens_q, cu_seqlens_k, page_table, swa_page_table, slot_mapping, swa_slot_mapping
    )
    check_distinct_fake(_present(**out._asdict(), status=status), given._asdict())
    if runs_kernel(req_to_token):
        _launch(out, given, settings, clear)
        return
    values, written = cpu_body(
        given, settings, page_table.shape[1], None if slot_mapping is None else slot_mapping.shape[0]
    )
    for name, target in out._asdict().items():
        value = getattr(values, name)
        if target is not None:
            kept = not clear and name in ("page_table", "swa_page_table")
            target.copy_(value.where(written, target) if kept else value)
