"""A captured step's metadata in place, one launch a call, as SGLang's back ends update theirs before a replay.

Buffers may be larger than the batch: the first `bs` rows are used. A batch of none touches nothing. Columns past a
row's live pages keep their values unless `zero_tail` says otherwise.
"""

from __future__ import annotations

from torch import Tensor

from compiled_kv.checks import INT32, INTS, Sizes, check_int
from compiled_kv.integrations.layouts import first, first_rows, layout_of, width_of, worded
from compiled_kv.layout import INT32_MAX
from compiled_kv.peers.engine_metadata import write_metadata
from compiled_kv.peers.engine_parts import EngineMetadata

Q_NONE, Q_CUMSUM, Q_STRIDED = range(3)


@worded(
    seq_len_delta="seqlen_offset", q_len="qlens", slots="out_cache_loc", full_to_swa="swa_mapping",
    swa_slot_mapping="swa_out_cache_loc",
)  # fmt: skip
def update_trtllm_mha_graph_metadata(
    *, req_pool_indices: Tensor, seq_lens: Tensor, req_to_token: Tensor, bs: int, seqlen_offset: int,
    max_seq_pages: int, page_size: int, cache_seqlens: Tensor, cu_seqlens_k: Tensor, page_table: Tensor | None,
    swa_mapping: Tensor | None = None, swa_page_table: Tensor | None = None, out_cache_loc: Tensor | None = None,
    swa_out_cache_loc: Tensor | None = None, cu_seqlens_q: Tensor | None = None, qlens: Tensor | None = None,
    q_stride: int = 0, q_mode: int = Q_NONE, skip_page_table: bool = False,
) -> None:  # fmt: skip
    """Lengths, prefix sums, page tables and sliding-window slots of a trtllm_mha step.

    Args:
        req_pool_indices, seq_lens: int [bs]; req_to_token: int [R, C].
        seqlen_offset: tokens beyond `seq_lens`: 0 decode, step + 1 draft decode, the drafts for verify.
        max_seq_pages: columns of the tables that may be written.
        cache_seqlens: int32 [bs]; cu_seqlens_k: int32 [bs + 1]; page_table, swa_page_table: int32 [bs, P].
        swa_mapping: int [N], sliding-window slot of each slot; a negative slot or entry gives -1.
        out_cache_loc: int [n], translated into the first n of swa_out_cache_loc, int64 [m]; the others become 0.
        cu_seqlens_q: int32 [bs + 1]: untouched in mode 0, sums of `qlens` [bs] in mode 1, multiples of `q_stride` in 2.
        skip_page_table: leave both tables alone.
    """
    check_int("bs", bs, 0)
    if q_mode not in (Q_NONE, Q_CUMSUM, Q_STRIDED):
        raise ValueError(f"q_mode must be 0, 1 or 2, got {q_mode}")
    if q_mode != Q_NONE and cu_seqlens_q is None:
        raise ValueError(f"cu_seqlens_q must be given where q_mode is {q_mode}, got None")
    queries: int | Tensor = 0
    if q_mode == Q_CUMSUM:
        if qlens is None:
            raise ValueError("qlens must be given where q_mode is 1, got None")
        queries = first("qlens", qlens, bs)
    elif q_mode == Q_STRIDED:
        check_int("q_stride", q_stride, 0, INT32_MAX)
        queries = q_stride
    if not skip_page_table:
        _check_map("swa_mapping", swa_mapping, swa_page_table, bs)
    _write(
        req_to_token, req_pool_indices, seq_lens, bs, page_size, max_seq_pages, seqlen_offset, q_len=queries,
        slots=out_cache_loc, full_to_swa=swa_mapping,
        out=EngineMetadata(
            cache_seqlens, cu_seqlens_q if q_mode != Q_NONE else None, cu_seqlens_k,
            None if skip_page_table else page_table, None if skip_page_table else swa_page_table, swa_out_cache_loc,
        ),
    )  # fmt: skip


@worded(seq_len_delta="seqlen_offset", page_table="block_kv_indices", cache_seqlens="seq_lens_k")
def update_trtllm_mla_graph_metadata(
    *, req_pool_indices: Tensor, seq_lens: Tensor, req_to_token: Tensor, block_kv_indices: Tensor, bs: int,
    seqlen_offset: int, page_size: int, seq_lens_k: Tensor | None = None,
) -> None:  # fmt: skip
    """Block indices, and lengths where `seq_lens_k` is given, of a trtllm_mla step.

    Args:
        req_pool_indices, seq_lens: int [bs]; req_to_token: int [R, C].
        block_kv_indices: int32 [bs, W]; live columns are `ceil((seq_lens + seqlen_offset) / page_size)`, at most W.
        seq_lens_k: int32 [bs].
    """
    out = EngineMetadata(cache_seqlens=seq_lens_k, page_table=block_kv_indices)
    width = width_of("block_kv_indices", block_kv_indices, INT32)
    _write(req_to_token, req_pool_indices, seq_lens, bs, page_size, width, seqlen_offset, out=out)


@worded(
    cache_seqlens="cache_seqlens_int32", full_to_swa="full_to_swa_index_mapping", page_map="full_v2p",
    swa_page_map="swa_v2p", bs="the length of seq_lens",
)  # fmt: skip
def normal_decode_set_metadata(
    cache_seqlens_int32: Tensor, cu_seqlens_k: Tensor, page_table: Tensor | None, req_to_token: Tensor,
    req_pool_indices: Tensor, max_seq_pages: int, seq_lens: Tensor, seq_len_delta: int, page_size: int,
    swa_page_table: Tensor | None = None, full_to_swa_index_mapping: Tensor | None = None,
    skip_page_table: bool = False, full_v2p: Tensor | None = None, swa_v2p: Tensor | None = None,
    zero_tail: bool = False,
) -> None:  # fmt: skip
    """Lengths, prefix sums of keys and page tables of a decode step; inputs and tables have any strides.

    Args:
        cache_seqlens_int32: int32 [bs]; cu_seqlens_k: int32 [bs + 1]; page_table, swa_page_table: int32 [bs, P].
        max_seq_pages: columns of the tables that may be written; `zero_tail` zeroes those of them that are not live.
        seq_lens: int [bs]. seq_len_delta: tokens beyond them.
        full_to_swa_index_mapping: int [N], slots to slots. swa_v2p: int [NS], pages to pages. One goes with
            `swa_page_table`.
        full_v2p: int [NP], virtual to physical pages of `page_table`. An unbound page gives page 0 in either.
        skip_page_table: leave both tables alone.
    """
    if skip_page_table:
        page_table = swa_page_table = None
    tables = EngineMetadata(cache_seqlens_int32, None, cu_seqlens_k, page_table, swa_page_table)
    _write(
        req_to_token, req_pool_indices, seq_lens, _size_of(seq_lens), page_size, max_seq_pages, seq_len_delta,
        full_to_swa=full_to_swa_index_mapping, page_map=full_v2p, swa_page_map=swa_v2p, clear=zero_tail, out=tables,
    )  # fmt: skip


@worded(
    cache_seqlens="cache_seqlens_int32", q_len="extend_seq_lens", slots="out_cache_loc",
    full_to_swa="full_to_swa_index_mapping", swa_slot_mapping="swa_out_cache_loc", bs="the length of seq_lens",
)  # fmt: skip
def draft_extend_set_metadata(
    cache_seqlens_int32: Tensor, cu_seqlens_k: Tensor, cu_seqlens_q: Tensor, page_table: Tensor, req_to_token: Tensor,
    req_pool_indices: Tensor, seq_lens: Tensor, extend_seq_lens: Tensor, page_size: int,
    full_to_swa_index_mapping: Tensor | None = None, swa_page_table: Tensor | None = None,
    out_cache_loc: Tensor | None = None, swa_out_cache_loc: Tensor | None = None,
) -> None:  # fmt: skip
    """Lengths, both prefix sums, page tables and sliding-window slots of a ragged draft-extend step.

    Args:
        cache_seqlens_int32: int32 [bs]; cu_seqlens_k, cu_seqlens_q: int32 [bs + 1].
        page_table, swa_page_table: int32 [bs, P]; req_to_token: int [R, C].
        req_pool_indices, seq_lens, extend_seq_lens: int [bs]; `seq_lens` counts the tokens of this step.
        full_to_swa_index_mapping: int [N], slots to slots; no counterpart gives -1.
        out_cache_loc: int [n], translated into swa_out_cache_loc, int64 [n], those of padded rows too.
    """
    out = EngineMetadata(cache_seqlens_int32, cu_seqlens_q, cu_seqlens_k, page_table, swa_page_table, swa_out_cache_loc)
    bs, width = _size_of(seq_lens), width_of("page_table", page_table, INT32)
    _check_map("full_to_swa_index_mapping", full_to_swa_index_mapping, swa_page_table, bs)
    _write(
        req_to_token, req_pool_indices, seq_lens, bs, page_size, width, 0,
        q_len=first("extend_seq_lens", extend_seq_lens, bs), slots=out_cache_loc,
        full_to_swa=full_to_swa_index_mapping, out=out,
    )  # fmt: skip


def _size_of(seq_lens: Tensor) -> int:
    Sizes().check("seq_lens", seq_lens, INTS, "bs")
    return seq_lens.shape[0]


def _check_map(name: str, token_map: Tensor | None, swa_page_table: Tensor | None, bs: int) -> None:
    if token_map is None and swa_page_table is not None and bs > 0:
        raise ValueError(f"{name} must be given where swa_page_table is, got None")


def _write(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, bs: int, page_size: int, width: int, delta: int,
    *, out: EngineMetadata, q_len: int | Tensor = 0, slots: Tensor | None = None,
    full_to_swa: Tensor | None = None, page_map: Tensor | None = None, swa_page_map: Tensor | None = None,
    clear: bool = False,
) -> None:  # fmt: skip
    """The first `bs` rows and `width` columns, through the operator."""
    rows = first_rows("bs", bs, "req_pool_indices", req_pool_indices)
    if bs == 0:
        return
    # A step without tables is not bound by their width.
    columns = None if out.page_table is None else width
    if columns is not None:
        check_int("max_seq_pages", columns, 0)
    layout = layout_of(page_size, width_of("req_to_token", req_to_token), columns)
    write_metadata(
        req_to_token, rows, first("seq_lens", seq_lens, bs), out, layout=layout, seq_len_delta=delta, q_len=q_len,
        slots=slots, full_to_swa=full_to_swa, page_map=page_map, swa_page_map=swa_page_map, width=columns,
        tail="clear" if clear else "keep",
    )  # fmt: skip
