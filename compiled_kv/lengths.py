"""Committed lengths -> what attention reads, and the prefix sums of keys and queries.

    seq_lens = [5, 3, 9], delta = 1, q_len = 1, num_reqs = 2        row 2 is padding
    cache_seqlens -> [6, 4, 0]    cu_seqlens_q -> [0, 1, 2, 2]    cu_seqlens_k -> [0, 6, 10, 10]

Each program scans a chunk of fixed size and adds up the rows ahead of it: a block as wide as the batch would compile
anew for each batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kv import rows_cpu as cpu
from compiled_kv.batch_triton import prefix_sums
from compiled_kv.checks import INT32, INTS, Sizes, check_int, check_layout, check_tuple
from compiled_kv.launch import dependent_launch, kernel, launch, runs_kernel, stride_of, tl
from compiled_kv.layout import INT32_MAX, KVLayout
from compiled_kv.overlap import check_distinct, check_distinct_fake
from compiled_kv.registration import operator
from compiled_kv.rows_triton import active_rows
from compiled_kv.sharing import CHUNK, SCAN, WARPS, chunks
from compiled_kv.status import DEBUG

Seqlens = tuple[Tensor, Tensor, Tensor]
FIELDS = ("cache_seqlens", "cu_seqlens_q", "cu_seqlens_k")


@kernel
def _seqlens_kernel(
    seq_lens_ptr, q_lens_ptr, num_reqs_ptr, cache_seqlens_ptr, cu_q_ptr, cu_k_ptr,
    seq_stride, q_stride, batch_size, delta, q_len, cap, pad_seqlen, DEBUG: tl.constexpr, PDL: tl.constexpr,
    CHUNK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    if PDL:
        dependent_launch()
    prefix_sums(
        seq_lens_ptr, seq_stride, q_lens_ptr, q_stride, None, 0, 0, active_rows(num_reqs_ptr, batch_size), batch_size,
        delta, q_len, cap, pad_seqlen, cache_seqlens_ptr, cu_q_ptr, cu_k_ptr, None,
        (tl.program_id(0).to(tl.int64) * CHUNK).to(tl.int32), DEBUG, CHUNK, SCAN, False,
    )  # fmt: skip


def _launch(
    out: Seqlens,
    seq_lens: Tensor,
    q_lens: Tensor | None,
    num_reqs: Tensor | None,
    delta: int,
    q_len: int,
    cap: int,
    pad_seqlen: int,
) -> None:
    cache_seqlens, cu_seqlens_q, cu_seqlens_k = out
    launch(
        _seqlens_kernel, (chunks(seq_lens.shape[0]),), seq_lens_ptr=seq_lens, q_lens_ptr=q_lens, num_reqs_ptr=num_reqs,
        cache_seqlens_ptr=cache_seqlens, cu_q_ptr=cu_seqlens_q, cu_k_ptr=cu_seqlens_k,
        seq_stride=seq_lens.stride(0), q_stride=stride_of(q_lens), batch_size=seq_lens.shape[0],
        delta=delta, q_len=q_len, cap=cap, pad_seqlen=pad_seqlen, DEBUG=DEBUG,
        CHUNK=CHUNK, SCAN=SCAN, num_warps=WARPS,
    )  # fmt: skip


def _cpu_body(
    seq_lens: Tensor,
    q_lens: Tensor | None,
    num_reqs: Tensor | None,
    delta: int,
    q_len: int,
    cap: int,
    pad_seqlen: int,
) -> Seqlens:
    rows = cpu.iota(seq_lens.shape[0], seq_lens)
    counted = rows < cpu.active_rows(num_reqs, seq_lens.shape[0])
    lengths = cpu.clamped_length(seq_lens, delta, cap)
    queries = cpu.queries_of_rows(q_lens, q_len, counted)
    ends_q, ends_k = queries.cumsum(0), lengths.where(counted, 0).cumsum(0)
    cpu.report(None, cpu.batch_bits(seq_lens, q_lens, delta, cap, counted), cpu.sum_bits(ends_q, ends_k))
    return lengths.where(counted, pad_seqlen).int(), cpu.prefix_sums(ends_q), cpu.prefix_sums(ends_k)


@operator("compiled_kv::seqlens", mutates_args=())
def _seqlens(
    seq_lens: Tensor,
    q_lens: Tensor | None,
    num_reqs: Tensor | None,
    delta: int,
    q_len: int,
    cap: int,
    pad_seqlen: int,
) -> tuple[Tensor, Tensor, Tensor]:
    if not runs_kernel(seq_lens):
        return _cpu_body(seq_lens, q_lens, num_reqs, delta, q_len, cap, pad_seqlen)
    sizes = (seq_lens.shape[0], seq_lens.shape[0] + 1, seq_lens.shape[0] + 1)
    cache_seqlens, cu_seqlens_q, cu_seqlens_k = (seq_lens.new_empty((size,), dtype=torch.int32) for size in sizes)
    out = (cache_seqlens, cu_seqlens_q, cu_seqlens_k)
    _launch(out, seq_lens, q_lens, num_reqs, delta, q_len, cap, pad_seqlen)
    return out


@operator("compiled_kv::seqlens_out", mutates_args=("cache_seqlens", "cu_seqlens_q", "cu_seqlens_k"))
def _seqlens_out(
    seq_lens: Tensor, q_lens: Tensor | None, num_reqs: Tensor | None,
    cache_seqlens: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    delta: int, q_len: int, cap: int, pad_seqlen: int,
) -> None:  # fmt: skip
    out = (cache_seqlens, cu_seqlens_q, cu_seqlens_k)
    check_distinct_fake(_named(out), {"seq_lens": seq_lens, "q_lens": q_lens, "num_reqs": num_reqs})
    if runs_kernel(seq_lens):
        _launch(out, seq_lens, q_lens, num_reqs, delta, q_len, cap, pad_seqlen)
        return
    for target, value in zip(out, _cpu_body(seq_lens, q_lens, num_reqs, delta, q_len, cap, pad_seqlen)):
        target.copy_(value)


def _named(out: Seqlens) -> dict[str, Tensor]:
    return dict(zip(FIELDS, out))


def seqlens(
    seq_lens: Tensor, *, delta: int = 0, q_len: int | Tensor = 1, num_reqs: Tensor | None = None, pad_seqlen: int = 0,
    layout: KVLayout | None = None, out: Seqlens | None = None,
) -> Seqlens:  # fmt: skip
    """Lengths that attention reads, and the prefix sums of queries and keys.

    Args:
        seq_lens: int [B], committed tokens of each row; a negative one counts as 0.
        delta: tokens this step adds beyond them: 0 for decode, k + 1 for draft step k, the drafts for verify.
        q_len: queries a row, an int or an int tensor [B] for ragged draft-extend.
        num_reqs: int tensor, 0-d or [1], on the device: rows at and beyond it are padding. None: every row is live.
        pad_seqlen: `cache_seqlens` of a padding row; it adds nothing to the prefix sums.
        layout: clamps lengths to layout.max_seqlen_k; without it they clamp to 2^31 - 1.
        out: (int32 [B], int32 [B + 1], int32 [B + 1]), written in place and returned.

    Returns:
        (cache_seqlens int32 [B], cu_seqlens_q int32 [B + 1], cu_seqlens_k int32 [B + 1]). Sums saturate at 2^31 - 1.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device, range or overlap is wrong; the text names it.
    """
    sizes = Sizes()
    sizes.check("seq_lens", seq_lens, INTS, "B")
    if layout is not None:
        check_layout(layout)
    cap = INT32_MAX if layout is None else layout.max_seqlen_k
    q_lens, fixed_q_len = check_queries(sizes, q_len)
    check_int("delta", delta, 0, INT32_MAX)
    check_int("pad_seqlen", pad_seqlen, 0, cap)
    if num_reqs is not None:
        sizes.check_scalar("num_reqs", num_reqs)
    if out is None:
        return torch.ops.compiled_kv.seqlens(seq_lens, q_lens, num_reqs, delta, fixed_q_len, cap, pad_seqlen)
    check_seqlens_output(sizes, out)
    check_distinct(_named(out), {"seq_lens": seq_lens, "q_len": q_lens, "num_reqs": num_reqs})
    torch.ops.compiled_kv.seqlens_out(seq_lens, q_lens, num_reqs, *out, delta, fixed_q_len, cap, pad_seqlen)
    return out


def check_queries(sizes: Sizes, q_len: int | Tensor) -> tuple[Tensor | None, int]:
    """`q_len` as the operators take it: (tensor or None, int)."""
    if isinstance(q_len, Tensor):
        sizes.check("q_len", q_len, INTS, "B")
        return q_len, 0
    check_int("q_len", q_len, 0, INT32_MAX)
    return None, q_len


def check_seqlens_output(sizes: Sizes, out: Seqlens) -> None:
    check_tuple("out", out, FIELDS)
    for (name, tensor), dim in zip(_named(out).items(), ("B", "B+1", "B+1")):
        sizes.check_output(name, tensor, INT32, dim)
