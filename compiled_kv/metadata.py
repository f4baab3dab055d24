"""Everything a decode step needs to know about its batch, in one kernel launch.

    layout = KVLayout(page_size=4, max_context_len=16)
    seq_lens = [6, 3, 9], req_pool_indices = [1, 0, 2], num_reqs = 2           row 2 is padding

    cache_seqlens [6, 3, 0]    cu_seqlens_q [0, 1, 2, 2]    cu_seqlens_k [0, 6, 9, 9]
    page_table    [[2, 1, 0, 0], [4, 0, 0, 0], [0, 0, 0, 0]]
    slot_mapping  [5, 18, -1]                                                  position 5 of row 1, 2 of row 0, none

The four modes of a serving engine are two numbers:

    plain decode          delta 0        q_len 1            the token to compute is already counted in seq_lens
    speculative verify    delta K        q_len K            K drafts behind the committed tokens
    draft step k          delta k + 1    q_len 1
    draft-extend          delta 0        q_len tensor [B]   ragged, num_tokens bounds the total

SGLang publishes the fusion of these tables for its trtllm_mha back end (decode, verify and draft-extend).
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kv import metadata_op  # noqa: F401  registers the operators
from compiled_kv.checks import (
    INT32,
    INT64,
    INTS,
    Sizes,
    check_int,
    check_map,
    check_pool,
    check_presence,
    check_table_output,
    check_tail,
)
from compiled_kv.layout import INT32_MAX, KVLayout
from compiled_kv.lengths import check_queries
from compiled_kv.metadata_parts import DecodeMetadata
from compiled_kv.overlap import check_distinct

INPUTS = (
    "req_to_token",
    "req_pool_indices",
    "seq_lens",
    "q_len",
    "slots",
    "full_to_swa",
    "page_map",
    "num_reqs",
    "status",
)


def decode_metadata(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, *, layout: KVLayout,
    seq_len_delta: int = 0, q_len: int | Tensor = 1, slots: Tensor | None = None, num_tokens: int | None = None,
    full_to_swa: Tensor | None = None, page_map: Tensor | None = None, num_reqs: Tensor | None = None,
    pad_seqlen: int = 0, status: Tensor | None = None, out: DecodeMetadata | None = None, tail: str = "clear",
) -> DecodeMetadata:  # fmt: skip
    """Lengths, prefix sums, page tables and slots of one step; one launch on CUDA, one node in a graph.

    Args:
        req_to_token: int [R, C], token slot of each position of each pool row; C >= layout.max_seqlen_k.
        req_pool_indices: int [B], the pool row of each batch entry; one outside the pool makes its row padding.
        seq_lens: int [B], committed tokens (in plain decode and draft-extend with those this step computes).
        layout: page size, bounds and window: host ints.
        seq_len_delta: tokens this step adds to seq_lens.
        q_len: queries a row: an int, or an int tensor [B] for ragged batches.
        slots: int [n], the slots the allocator gave this step's tokens. None: they are looked up in req_to_token.
        num_tokens: static bound T of the tokens, for `slots` (at least n) and for a tensor `q_len`; what is beyond
            the live tokens holds -1. A tensor `q_len` with neither `slots` nor `num_tokens` gives no slot mapping.
        full_to_swa, page_map: int [N] or [NP], a map into the sliding-window pool, of slots or of pages; at most one.
        num_reqs: int tensor, 0-d or [1], on the device: rows at and beyond it are padding. None: every row is live.
        pad_seqlen: `cache_seqlens` of a padding row.
        status: int32 [1] on the device; bits of `Status` are OR-ed in.
        out: a DecodeMetadata whose None fields are exactly those this call omits, written in place and returned.
        tail: what becomes of table columns past the live ones: "clear" to the null page, or "keep" (needs out).

    Returns:
        DecodeMetadata, or `out` itself.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device, range, width or overlap is wrong; the text
        names it.
    """
    sizes = Sizes()
    q_lens, fixed_q_len, tokens = check_step(
        sizes, req_to_token, req_pool_indices, seq_lens, layout, seq_len_delta, q_len, slots, num_tokens, full_to_swa,
        page_map, num_reqs, pad_seqlen, status,
    )  # fmt: skip
    check_tail(tail, out)
    inputs = (req_to_token, req_pool_indices, seq_lens, q_lens, slots, full_to_swa, page_map, num_reqs, status)
    settings = (layout.page_size, layout.max_seqlen_k, seq_len_delta, fixed_q_len, pad_seqlen, layout.window)
    has_swa, has_slots = full_to_swa is not None or page_map is not None, tokens is not None
    outputs = {} if status is None else {"status": status}
    if out is None:
        check_distinct(outputs, dict(zip(INPUTS, inputs)))
        made = torch.ops.compiled_kv.decode_metadata(*inputs, *settings, layout.max_num_pages, tokens)
        absent = (not has_swa, not has_slots, not (has_swa and has_slots))
        return DecodeMetadata(*made[:4], *(None if gone else t for t, gone in zip(made[4:], absent)))
    _check_out(sizes, out, layout, has_swa, tokens)
    outputs |= {name: t for name, t in zip(DecodeMetadata._fields, out) if t is not None}
    check_distinct(outputs, dict(zip(INPUTS, inputs)))
    torch.ops.compiled_kv.decode_metadata_out(*inputs, *out, *settings, tail == "clear")
    return out


def check_step(
    sizes: Sizes, req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, layout: KVLayout,
    seq_len_delta: int, q_len: int | Tensor, slots: Tensor | None, num_tokens: int | None, full_to_swa: Tensor | None,
    page_map: Tensor | None, num_reqs: Tensor | None, pad_seqlen: int, status: Tensor | None,
) -> tuple[Tensor | None, int, int | None]:  # fmt: skip
    """The checks of a step's inputs; returns `q_len` as the operators take it, and the tokens of the slot mapping."""
    check_pool(sizes, req_to_token, req_pool_indices, layout)
    sizes.check("seq_lens", seq_lens, INTS, "B")
    q_lens, fixed_q_len = check_queries(sizes, q_len)
    check_int("seq_len_delta", seq_len_delta, 0, INT32_MAX)
    check_int("pad_seqlen", pad_seqlen, 0, layout.max_seqlen_k)
    check_map(sizes, full_to_swa, page_map)
    if num_reqs is not None:
        sizes.check_scalar("num_reqs", num_reqs)
    if status is not None:
        sizes.check_scalar("status", status, INT32)
    return q_lens, fixed_q_len, _token_capacity(sizes, q_lens, fixed_q_len, slots, num_tokens)


def _token_capacity(
    sizes: Sizes, q_lens: Tensor | None, q_len: int, slots: Tensor | None, num_tokens: int | None
) -> int | None:
    """T, the length of the slot mapping; None where the call has none."""
    if slots is not None:
        sizes.check("slots", slots, INTS, "n")
        if num_tokens is None:
            return slots.shape[0]
        check_int("num_tokens", num_tokens, 0, INT32_MAX)
        if num_tokens < slots.shape[0]:
            raise ValueError(f"num_tokens must be at least the {slots.shape[0]} entries of slots, got {num_tokens}")
        return num_tokens
    if q_lens is not None:
        if num_tokens is not None:
            check_int("num_tokens", num_tokens, 0, INT32_MAX)
        return num_tokens
    if num_tokens is not None:
        raise ValueError(
            f"num_tokens goes with slots or a tensor q_len: an int q_len has B * q_len tokens, got {num_tokens}"
        )
    return sizes.named["B"] * q_len


def _check_out(sizes: Sizes, out: DecodeMetadata, layout: KVLayout, has_swa: bool, tokens: int | None) -> None:
    if not isinstance(out, DecodeMetadata):
        raise TypeError(f"out must be a DecodeMetadata, got {type(out).__name__}")
    present = (True, True, True, True, has_swa, tokens is not None, has_swa and tokens is not None)
    for name, tensor, wanted in zip(DecodeMetadata._fields, out, present):
        check_presence(f"out.{name}", tensor, wanted)
    if tokens is not None:
        sizes.named["T"] = tokens
    for name, dim in (("cache_seqlens", "B"), ("cu_seqlens_q", "B+1"), ("cu_seqlens_k", "B+1")):
        sizes.check_output(f"out.{name}", getattr(out, name), INT32, dim)
    for name in ("page_table", "swa_page_table"):
        if (table := getattr(out, name)) is not None:
            check_table_output(sizes, f"out.{name}", table, layout)
    for name in ("slot_mapping", "swa_slot_mapping"):
        if (mapping := getattr(out, name)) is not None:
            sizes.check_output(f"out.{name}", mapping, INT64, "T")
