"""One table of named batches, used by every operator test, and the devices that they run on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_kv.layout import KVLayout
from tests.harness import Batch, Form

HUGE = 2**62
INT32_MAX = 2**31 - 1

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])]


def pool_of_pages(rows: int, pages: int, page_size: int) -> tuple[Tensor, Tensor]:
    """A token pool whose every row owns distinct, scattered pages, and the block table that says the same."""
    count = rows * pages
    step = next(s for s in (7, 11, 13, 17) if (count + 1) % s)  # coprime to count + 1: every page once
    block_table = 1 + (torch.arange(1, count + 1).reshape(rows, pages) * step) % (count + 1)
    slots = block_table[:, :, None] * page_size + torch.arange(page_size)
    return slots.reshape(rows, pages * page_size), block_table


LAYOUT = KVLayout(page_size=4, max_context_len=24, max_draft_tokens=4, window=6)


def batch(layout: KVLayout = LAYOUT, **changes: Any) -> Batch:
    """Three rows over a pool of five, with `changes` to the layout or to any field; lists become int64 tensors."""
    layout = replace(layout, **{name: changes.pop(name) for name in LAYOUT.__dict__ if name in changes})
    page_size = layout.page_size
    pages = layout.max_num_pages + 1
    pool, block_table = pool_of_pages(5, pages, page_size)
    known = 5 * pages + 2
    token_map = (torch.arange(known * page_size) * 3 + 8) % 160
    page_map = (torch.arange(known) * 3 + 2) % 40
    token_map[:page_size], page_map[0] = 0, 0
    fields: dict[str, Any] = {
        "req_to_token": pool,
        "block_table": block_table,
        "rows": [3, 1, 4],
        "seq_lens": [5, 9, 22],
        "q_lens": [1, 2, 3],
        "kv_start": [0, 3, 8],
        "positions": [4, 7, 8, 19, 20, 21, 5, 6],
        "cu_seqlens_q": [0, 1, 3, 6],
        "slots": [50, 51, 52, 53, 54, 55],
        "token_map": token_map,
        "page_map": page_map,
        **changes,
    }
    tensors = {k: torch.tensor(v, dtype=torch.int64) if isinstance(v, list) else v for k, v in fields.items()}
    return Batch(layout=layout, **tensors)


def _with(values: Tensor, **places: int) -> Tensor:
    """`values` with some entries replaced: `at_3_1=-1` sets [3, 1]."""
    values = values.clone()
    for place, value in places.items():
        values[tuple(int(i) for i in place.split("_")[1:])] = value
    return values


def _bad_pool(**places: int) -> Tensor:
    return _with(batch().req_to_token, **places)


def batch_of(size: int, **changes: Any) -> Batch:
    """`size` rows of every kind, good ones, bad ones and padding; about three tokens for two rows."""
    counts = [i % 3 for i in range(size)]
    fields: dict[str, Any] = {
        "rows": [i % 6 for i in range(size)],
        "seq_lens": [i % 40 - 2 for i in range(size)],
        "q_lens": counts,
        "kv_start": [i % 9 for i in range(size)],
        "positions": [i % 31 for i in range(size + size // 2)],
        "cu_seqlens_q": [sum(counts[:i]) for i in range(size + 1)],
        "slots": [100 + i for i in range(size + size // 2)],
        "num_reqs": size - size // 4,
        "num_tokens": size + size // 2 + 3,
    }
    return batch(**{**fields, **changes})


CASES: dict[str, Batch] = {
    "plain": batch(),
    "distinct-sizes": batch(  # so that a graph compiled for it takes no two sizes for one
        slots=list(range(50, 64)),
        positions=list(range(13)),
        num_tokens=17,
        token_map=batch().token_map[:97],
        page_map=batch().page_map[:37],
        delta=6,
        q_len=9,
        pad_seqlen=7,
    ),
    "page-edges": batch(seq_lens=[3, 4, 5], delta=4),
    "page-plus-one": batch(seq_lens=[9, 13, 25], kv_start=[1, 4, 5], delta=0),
    "one-short-of-everything": batch(seq_lens=[23, 27, 26], delta=0),
    "zero-lengths": batch(seq_lens=[0, 0, 0], delta=0, q_len=0, q_lens=[0, 0, 0]),
    "no-queries": batch(q_len=0, q_lens=[0, 0, 0], cu_seqlens_q=[0, 0, 0, 0]),
    "ragged-with-zero-q": batch(q_lens=[0, 3, 0], cu_seqlens_q=[0, 0, 3, 3]),
    "ragged-ends-before-the-tokens": batch(q_lens=[1, 1, 1], cu_seqlens_q=[0, 1, 2, 3]),
    "queries-longer-than-the-row": batch(seq_lens=[1, 2, 0], q_lens=[3, 4, 2], delta=0, num_tokens=12),
    "negative-queries": batch(q_lens=[-1, 2, -HUGE]),
    "queries-overflow": batch(q_lens=[2, INT32_MAX, 5]),
    "queries-of-one-row-overflow": batch(q_lens=[2**31, 0, 2]),
    "queries-beyond-64-bits": batch(q_lens=[HUGE, HUGE, HUGE]),
    "too-many-queries": batch(q_lens=[3, 3, 3], num_tokens=5, q_len=3),
    "padding-rows": batch(rows=[3, 4, 4], seq_lens=[5, HUGE, -1], q_lens=[2, HUGE, -5], num_reqs=1),
    "padding-row-between-good-ones": batch(rows=[3, -1, 4], q_lens=[1, 3, 2], num_reqs=3),
    "all-padding": batch(num_reqs=0),
    "num-reqs-below-zero": batch(num_reqs=-HUGE),
    "num-reqs-above-the-batch": batch(num_reqs=HUGE),
    "pad-seqlen-zero": batch(num_reqs=1, pad_seqlen=0),
    "pad-seqlen-of-many-pages": batch(num_reqs=1, pad_seqlen=17),
    "bad-row-index": batch(rows=[-1, 5, 1], num_reqs=3, q_lens=[2, -3, 1]),
    "bad-row-extremes": batch(rows=[HUGE, -HUGE, 0], num_reqs=3),
    "the-same-row-twice": batch(rows=[2, 2, 2]),
    "negative-length": batch(seq_lens=[-1, -7, 3], kv_start=[-1, -8, -HUGE]),
    "too-long": batch(seq_lens=[27, 28, 29], delta=0),
    "too-long-by-its-delta": batch(seq_lens=[25, 26, 27], delta=2),
    "length-extremes": batch(seq_lens=[2**63 - 1, -(2**63), INT32_MAX], delta=INT32_MAX),
    "start-past-the-row": batch(kv_start=[31, 32, HUGE], seq_lens=[9, 9, 28]),
    "negative-slot": batch(req_to_token=_bad_pool(at_3_4=-1, at_1_8=-9, at_4_23=-1, at_1_10=-HUGE)),
    "page-beyond-int32": batch(req_to_token=_bad_pool(at_3_0=2**33, at_1_4=2**33 - 1, at_4_20=HUGE)),
    "bad-pages-of-blocks": batch(block_table=_with(batch().block_table, at_3_1=HUGE, at_1_1=2**31, at_1_2=-1)),
    "positions-outside-the-row": batch(positions=[-1, -HUGE, 32, HUGE, 31, INT32_MAX, 0, 0]),
    "slots-with-holes": batch(slots=[50, -1, 52, -HUGE, 2**40, 55]),
    "fewer-slots-than-tokens": batch(slots=[50, 51, 52], num_tokens=9),
    "slots-for-the-live-rows-alone": batch(slots=[50, 51], num_tokens=4, num_reqs=1),
    "more-slots-than-tokens": batch(slots=list(range(60, 75)), num_tokens=4),
    "window-edges": batch(window=6, seq_lens=[9, 10, 11], delta=0, q_len=1, q_lens=[1, 1, 1]),
    "window-edges-of-queries": batch(window=5, seq_lens=[12, 13, 14], delta=0, q_len=3, q_lens=[2, 3, 4]),
    "window-of-one": batch(window=1, seq_lens=[4, 5, 28], delta=0, q_len=1, q_lens=[1, 0, 9]),
    "window-beyond-the-context": batch(window=1000),
    "window-and-queries-at-the-end-of-64-bits": batch(
        page_size=6, window=5, seq_lens=[0, 1, 2], q_lens=[2**63 - 1] * 3, delta=0
    ),
    "window-of-int32": batch(window=INT32_MAX, seq_lens=[1, 2, 0], q_lens=[HUGE, 4, 5]),
    "no-window": batch(window=None),
    "unmapped-swa": batch(
        window=None,
        token_map=torch.where(torch.arange(160) % 3 == 0, batch().token_map[:160], -1),
        page_map=torch.where(torch.arange(40) % 3 == 0, batch().page_map[:40], -1),
    ),
    "map-entries-below-minus-one": batch(token_map=torch.full((170,), -9), page_map=torch.full((42,), -HUGE)),
    "map-entries-beyond-int32": batch(
        window=None, token_map=torch.full((170,), 2**33 + 5), page_map=torch.full((42,), HUGE)
    ),
    "map-too-short": batch(window=None, token_map=batch().token_map[:30], page_map=batch().page_map[:7]),
    "page-size-one": batch(page_size=1, max_draft_tokens=0),
    "page-size-seven": batch(page_size=7, seq_lens=[6, 7, 8], max_context_len=45),
    "page-beyond-the-context": batch(page_size=64, seq_lens=[5, 28, 29]),
    "wide-batch": batch_of(40, num_reqs=37, num_tokens=63),
    "long-rows": batch_of(
        24, max_context_len=200, seq_lens=[150 + i if i % 7 == 3 else i % 5 for i in range(24)], num_reqs=22
    ),
    "one-long-row": batch_of(12, max_context_len=200, seq_lens=[3] * 5 + [197] + [3] * 6, num_reqs=12, window=None),
    "long-rows-without-a-row-of-the-pool": batch_of(
        9, max_context_len=120, rows=[0, -1, 4, 9, 2, 1, 0, 3, 3], seq_lens=[119] * 9, num_reqs=8
    ),
}

# Sizes of 0 and 1, which a graph compiled for other sizes may not serve.
SMALL_CASES: dict[str, Batch] = {
    "one-row": batch(rows=[3], seq_lens=[5], q_lens=[2], kv_start=[4], cu_seqlens_q=[0, 2], num_reqs=1),
    "one-token": batch(
        rows=[3], seq_lens=[5], q_lens=[1], q_len=1, kv_start=[4], cu_seqlens_q=[0, 1], positions=[4],
        slots=[9], num_reqs=1, num_tokens=1, delta=1, pad_seqlen=1,
    ),
    "one-padding-row": batch(
        rows=[9], seq_lens=[5], q_lens=[2], kv_start=[4], cu_seqlens_q=[0, 2], num_reqs=0
    ),
    "empty-batch": batch(rows=[], seq_lens=[], q_lens=[], kv_start=[], cu_seqlens_q=[0], num_reqs=0),
    "empty-batch-and-no-tokens": batch(
        rows=[], seq_lens=[], q_lens=[], kv_start=[], cu_seqlens_q=[0], positions=[], slots=[], num_tokens=0
    ),
    "no-tokens": batch(slots=[], num_tokens=0, q_len=0, cu_seqlens_q=[0, 0, 0, 0]),
    "empty-maps": batch(window=None, token_map=[], page_map=[]),
    "maps-of-one": batch(window=None, token_map=[4], page_map=[1], slots=[0, 1, -1]),
    "pool-of-one-row": batch(
        rows=[0, 1, -1], req_to_token=batch().req_to_token[:1], block_table=batch().block_table[:1]
    ),
    "empty-pool": batch(
        rows=[0, 1, -1], req_to_token=batch().req_to_token[:0], block_table=batch().block_table[:0]
    ),
    "width-zero": batch(
        max_context_len=0, max_draft_tokens=0, pad_seqlen=0,
        req_to_token=batch().req_to_token[:, :0], block_table=batch().block_table[:, :0],
    ),
    "width-one": batch(max_context_len=1, max_draft_tokens=0, pad_seqlen=1, seq_lens=[0, 1, 2], delta=0),
}  # fmt: skip

ALL_CASES = CASES | SMALL_CASES

# How each operator is compiled: every optional argument, both integer widths and mixes of them, each form of output.
FORMS = [
    Form("page_table"),
    Form("page_table", in_place=True, tail="keep", wide=0xFFFF),
    Form("page_table", wide=0x5555, strided=True),
    Form("page_table", in_place=True, wide=0xAAAA),
    Form("swa_page_table", mapped="token"),
    Form("swa_page_table", mapped="page", ragged=True, in_place=True, tail="keep", wide=0xFFFF, strided=True),
    Form("swa_page_table", mapped="page", wide=0x5555),
    Form("swa_page_table", mapped="token", ragged=True, in_place=True, wide=0xAAAA),
    Form("flashmla_kv_indices"),
    Form("flashmla_kv_indices", start=True, in_place=True, tail="keep", wide=0xFFFF, strided=True),
    Form("flashmla_kv_indices", start=True, wide=0x5555),
    Form("flashmla_kv_indices", in_place=True, wide=0xAAAA),
    Form("slot_mapping"),
    Form("slot_mapping", paged=True, padded="scalar", in_place=True, wide=0xFFFF),
    Form("slot_mapping", ragged=True, padded="vector", wide=0x5555, strided=True),
    Form("slot_mapping", paged=True, ragged=True, in_place=True, wide=0xAAAA),
    Form("translate_slots"),
    Form("translate_slots", in_place=True, wide=0xFFFF),
    Form("translate_slots", wide=0x5555, strided=True),
    Form("translate_slots", in_place=True, wide=0xAAAA),
    Form("seqlens"),
    Form("seqlens", ragged=True, padded="scalar", in_place=True, wide=0xFFFF),
    Form("seqlens", ragged=True, padded="vector", clamped=False, wide=0x5555, strided=True),
    Form("seqlens", padded="scalar", clamped=False, in_place=True, wide=0xAAAA),
    Form("decode_metadata", status=True),
    Form("decode_metadata", mapped="token", padded="scalar", status=True, in_place=True, tail="keep", wide=0xFFFF),
    Form("decode_metadata", mapped="page", ragged=True, padded="vector", status=True, wide=0x5555, strided=True),
    Form("decode_metadata", mapped="token", ragged=True, given=True, status=True, in_place=True, wide=0xAAAA),
    Form("decode_metadata", mapped="page", given=True, bounded=False, padded="scalar", status=True, wide=0xFFFF),
    Form("decode_metadata", ragged=True, bounded=False, in_place=True, tail="keep"),
]
