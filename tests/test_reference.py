"""The oracle against values worked out by hand, so that everything else may be tested against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_kv import reference
from compiled_kv.layout import KVLayout

# Pages of 4: row 1 owns pages 2, 5, 1; row 2 pages 3, 6 and then nothing; row 3 one page beyond int32.
POOL = torch.tensor(
    [
        [0] * 12,
        [8, 9, 10, 11, 20, 21, 22, 23, 4, 5, 6, 7],
        [12, 13, 14, 15, 24, 25, 26, 27, -1, -1, -1, -1],
        [2**33, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
    ]
)
TOKEN_MAP = torch.tensor([100 + slot for slot in range(26)] + [-1])  # slot 26 unmapped, 27 outside
PAGE_MAP = torch.tensor([0, 11, 12, -1, 14, 15])  # page 3 unmapped, page 6 outside
LAYOUT = KVLayout(page_size=4, max_context_len=12)


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def kept(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.full(shape, 77, dtype=dtype)


PAGE_TABLES = {
    "lengths-around-a-page-edge": ([1, 1, 1, 1], [0, 1, 4, 5], [[0, 0, 0], [2, 0, 0], [2, 0, 0], [2, 5, 0]]),
    "length-to-the-end": ([1], [12], [[2, 5, 1]]),
    "rows-outside-the-pool": ([-1, 4, 1], [5, 5, 5], [[0, 0, 0], [0, 0, 0], [2, 5, 0]]),
    "negative-length": ([1], [-3], [[0, 0, 0]]),
    "too-long": ([1], [2**40], [[2, 5, 1]]),
    "negative-slot": ([2], [9], [[3, 6, -1]]),
    "page-beyond-int32": ([3], [8], [[-1, 1, 0]]),
    "empty-batch": ([], [], []),
}  # fmt: skip


@pytest.mark.parametrize("rows, lengths, expected", PAGE_TABLES.values(), ids=PAGE_TABLES)
def test_page_table(rows: list[int], lengths: list[int], expected: list[list[int]]) -> None:
    table = reference.page_table(POOL, ints(*rows), ints(*lengths), layout=LAYOUT)
    assert (table.dtype, table.tolist()) == (torch.int32, expected)


@pytest.mark.parametrize(
    "tail, expected",
    [
        ("keep", [[2, 5, 77, 77, 77], [77] * 5, [3, 6, -1, 77, 77]]),
        ("clear", [[2, 5, 0, 0, 0], [0] * 5, [3, 6, -1, 0, 0]]),
    ],
)
def test_page_table_writes_and_returns_out(tail: str, expected: list[list[int]]) -> None:
    out = kept(3, 5)
    assert reference.page_table(POOL, ints(1, 9, 2), ints(5, 5, 12), layout=LAYOUT, out=out, tail=tail) is out
    assert out.tolist() == expected


def test_page_table_never_passes_a_narrow_out() -> None:
    out = kept(1, 2)
    assert reference.page_table(POOL, ints(1), ints(12), layout=LAYOUT, out=out).tolist() == [[2, 5]]


FLASHMLA = {
    "no-start": (None, [[2, 5, 0], [3, 6, -1]]),
    "start-inside-a-page": (ints(5, 2), [[5, 1, 0], [3, 6, -1]]),  # positions 5, 9 and 2, 6, 10
    "start-past-the-row": (ints(12, 2**62), [[-1, -1, 0], [-1, -1, -1]]),
    "negative-start": (ints(-5, -1), [[2, 5, 0], [3, 6, -1]]),
}


@pytest.mark.parametrize("kv_start, expected", FLASHMLA.values(), ids=FLASHMLA)
def test_flashmla_kv_indices(kv_start: Tensor | None, expected: list[list[int]]) -> None:
    found = reference.flashmla_kv_indices(POOL, ints(1, 2), ints(8, 9), kv_start, layout=LAYOUT)
    assert (found.dtype, found.tolist()) == (torch.int32, expected)


# Row 1 through the token map: slots 8, 20, 4 -> 108, 120, 104 -> pages 27, 30, 26; row 2: 12, 24 -> 28, 31.
SWA_TABLES = {
    "no-window": (None, 1, [1, 2], [9, 5], [[27, 30, 26], [28, 31, 0]]),
    "window-starts-on-a-page-edge": (5, 1, [1], [9], [[0, 30, 26]]),  # first key 4
    "window-starts-before-a-page-edge": (6, 1, [1], [9], [[27, 30, 26]]),  # first key 3
    "window-of-the-first-of-two-queries": (5, 2, [1], [9], [[27, 30, 26]]),  # first key 3
    "window-of-one": (1, 1, [1], [9], [[0, 0, 26]]),  # first key 8
    "ragged-queries": (5, ints(1, 2), [1, 1], [9, 9], [[0, 30, 26], [27, 30, 26]]),
    "null-outside-minus-one-inside": (5, 1, [2], [9], [[0, 31, -1]]),
    "negative-queries": (5, ints(-4), [1], [9], [[0, 30, 26]]),  # first key 9 - 0 - 5 + 1 = 5
}


@pytest.mark.parametrize("window, q_len, rows, lengths, expected", SWA_TABLES.values(), ids=SWA_TABLES)
def test_swa_page_table(window: int | None, q_len: Any, rows: list[int], lengths: list[int], expected: Any) -> None:
    layout = KVLayout(page_size=4, max_context_len=12, window=window)
    full, swa = reference.swa_page_table(POOL, ints(*rows), ints(*lengths), TOKEN_MAP, layout=layout, q_len=q_len)
    assert swa.tolist() == expected
    assert torch.equal(full, reference.page_table(POOL, ints(*rows), ints(*lengths), layout=layout))


def test_swa_page_table_through_a_page_map() -> None:
    _, swa = reference.swa_page_table(POOL, ints(1, 2, 3), ints(12, 12, 12), page_map=PAGE_MAP, layout=LAYOUT)
    assert swa.tolist() == [[12, 15, 11], [-1, -1, -1], [-1, 11, 12]]


def test_swa_page_table_keeps_both_tails() -> None:
    layout, out = KVLayout(page_size=4, max_context_len=12, window=2), (kept(2, 3), kept(2, 3))
    reference.swa_page_table(POOL, ints(1, -1), ints(6, 6), TOKEN_MAP, layout=layout, out=out, tail="keep")
    assert [table.tolist() for table in out] == [[[2, 5, 77], [77] * 3], [[0, 30, 77], [77] * 3]]


SLOTS = {
    "a-token-a-row": ({}, [1, 2, 1], [0, 7, 11], [8, 27, 7]),
    "positions-outside-the-row": ({}, [1, 1, 1], [-1, 12, 2**62], [-1, -1, -1]),
    "rows-outside-the-pool": ({}, [-1, 4, 1], [0, 0, 0], [-1, -1, 8]),
    "negative-slot": ({}, [2], [8], [-1]),
    "padding-rows": ({"num_reqs": ints(1)}, [1, 1, 1], [0, 1, 2], [8, -1, -1]),
    "num-reqs-below-zero": ({"num_reqs": torch.tensor(-3)}, [1], [0], [-1]),
    "num-reqs-above-the-batch": ({"num_reqs": torch.tensor(9)}, [1], [0], [8]),
    "ragged": ({"cu_seqlens_q": ints(0, 2, 2, 3)}, [1, 2, 2], [4, 5, 0, 0], [20, 21, 12, -1]),
    "ragged-padding": (
        {"cu_seqlens_q": ints(0, 2, 2, 3), "num_reqs": ints(2)},
        [1, 2, 2],
        [4, 5, 0],
        [20, 21, -1],
    ),
    "ragged-empty": ({"cu_seqlens_q": ints(0)}, [], [4, 5], [-1, -1]),
}


@pytest.mark.parametrize("options, rows, positions, expected", SLOTS.values(), ids=SLOTS)
def test_slot_mapping(options: Any, rows: list[int], positions: list[int], expected: list[int]) -> None:
    slots = reference.slot_mapping(POOL, ints(*rows), ints(*positions), **options)
    assert (slots.dtype, slots.tolist()) == (torch.int64, expected)


def test_slot_mapping_from_a_block_table() -> None:
    blocks, rows, positions = ints([7, 0], [2, 9], [0, 0]), ints(0, 1, 2), ints(0, 4, -1)
    slots = reference.slot_mapping(None, rows, positions, block_table=blocks, page_size=4)
    assert slots.tolist() == [28, 36, -1]


def test_slot_mapping_from_bad_blocks() -> None:
    blocks, rows, positions = ints([-1, 2**31, 2**31 - 1]), ints(0, 0, 0, 0), ints(3, 4, 8, 12)
    slots = reference.slot_mapping(None, rows, positions, block_table=blocks, page_size=4)
    assert slots.tolist() == [-1, -1, 4 * (2**31 - 1), -1]


def test_translate_slots() -> None:
    slots = reference.translate_slots(ints(3, -1, 26, 27, -9, 2**40), torch.cat([TOKEN_MAP, ints(-9)]))
    assert (slots.dtype, slots.tolist()) == (torch.int64, [103, -1, -1, -1, -1, -1])


SEQLENS = {
    "plain": ([3, 7], {}, [3, 7], [0, 1, 2], [0, 3, 10]),
    "verify": ([3, 7], {"delta": 2, "q_len": 2}, [5, 9], [0, 2, 4], [0, 5, 14]),
    "ragged": ([3, 7], {"q_len": ints(0, 5)}, [3, 7], [0, 0, 5], [0, 3, 10]),
    "negative": ([-3, 7], {"q_len": ints(2, -5)}, [0, 7], [0, 2, 2], [0, 0, 7]),
    "padding": ([3, 7, 9], {"num_reqs": ints(1), "pad_seqlen": 4}, [3, 4, 4], [0, 1, 1, 1], [0, 3, 3, 3]),
    "all-padding": ([3, 7], {"num_reqs": torch.tensor(0)}, [0, 0], [0, 0, 0], [0, 0, 0]),
    "clamped": ([11, 2**62], {"delta": 2, "layout": LAYOUT}, [12, 12], [0, 1, 2], [0, 12, 24]),
    "saturated": ([2**31 - 1, 2**40], {}, [2**31 - 1] * 2, [0, 1, 2], [0, 2**31 - 1, 2**31 - 1]),
    "empty": ([], {}, [], [0], [0]),
}


@pytest.mark.parametrize("seq_lens, options, cache, cu_q, cu_k", SEQLENS.values(), ids=SEQLENS)
def test_seqlens(seq_lens: list[int], options: Any, cache: list[int], cu_q: list[int], cu_k: list[int]) -> None:
    found = reference.seqlens(ints(*seq_lens), **options)
    assert [(t.dtype, t.tolist()) for t in found] == [(torch.int32, values) for values in (cache, cu_q, cu_k)]


def plain(metadata: reference.Metadata) -> dict[str, Any]:
    return {name: None if field is None else field.tolist() for name, field in metadata._asdict().items()}


def test_decode_metadata_with_every_kind_of_row() -> None:
    """Two live rows, one outside the pool, one beyond `num_reqs`; two queries each."""
    layout = KVLayout(page_size=4, max_context_len=12, window=2)
    rows, seq_lens, rest = (
        ints(1, 2, 9, 1),
        ints(6, 5, 3, 7),
        {"num_reqs": ints(3), "pad_seqlen": 2, "q_len": 2},
    )
    found, status = reference.decode_metadata(POOL, rows, seq_lens, layout=layout, full_to_swa=TOKEN_MAP, **rest)
    assert plain(found) == {
        "cache_seqlens": [6, 5, 2, 2],
        "cu_seqlens_q": [0, 2, 4, 6, 6],
        "cu_seqlens_k": [0, 6, 11, 11, 11],
        "page_table": [[2, 5, 0], [3, 6, 0], [0, 0, 0], [0, 0, 0]],
        "swa_page_table": [[27, 30, 0], [28, 31, 0], [0, 0, 0], [0, 0, 0]],  # first keys 3 and 2
        "slot_mapping": [20, 21, 15, 24, -1, -1, -1, -1],
        "swa_slot_mapping": [120, 121, 115, 124, -1, -1, -1, -1],
    }
    assert status == reference.BAD_ROW


def test_decode_metadata_for_ragged_queries() -> None:
    """The first row's queries reach below position 0, which is no error; the last token is one too many."""
    found, status = reference.decode_metadata(
        POOL,
        ints(1, 2, 1),
        ints(1, 6, 9),
        layout=LAYOUT,
        q_len=ints(2, 0, 3),
        num_tokens=4,
        page_map=PAGE_MAP,
    )
    assert plain(found) == {
        "cache_seqlens": [1, 6, 9],
        "cu_seqlens_q": [0, 2, 2, 5],
        "cu_seqlens_k": [0, 1, 7, 16],
        "page_table": [[2, 0, 0], [3, 6, 0], [2, 5, 1]],
        "swa_page_table": [[12, 0, 0], [-1, -1, 0], [12, 15, 11]],
        "slot_mapping": [-1, 8, 22, 23],
        "swa_slot_mapping": [-1, 48, 62, 63],
    }
    assert status == reference.TOO_MANY_TOKENS | reference.UNMAPPED


def test_decode_metadata_omits_what_was_not_asked_for() -> None:
    found, status = reference.decode_metadata(POOL, ints(1), ints(6), layout=LAYOUT, q_len=ints(1))
    assert (found.swa_page_table, found.slot_mapping, found.swa_slot_mapping, status) == (None, None, None, 0)


GIVEN = {
    "all-live": ({}, [5, 6], [5, 6], 0),
    "negative": ({}, [5, -6], [5, -1], 0),
    "padded-to-num-tokens": ({"num_tokens": 4}, [5, 6], [5, 6, -1, -1], 0),
    "beyond-the-active-ones": ({"num_reqs": ints(1)}, [5, 6], [5, -1], 0),
    "too-few": ({}, [5], [5], reference.TOO_MANY_TOKENS),
    "too-few-tokens": ({"num_tokens": 1}, [5, 6], [5], reference.TOO_MANY_TOKENS),
    "bad-row": ({"req_pool_indices": ints(9, 2)}, [5, 6], [-1, 6], reference.BAD_ROW),
    "ragged-bad-row": (
        {"req_pool_indices": ints(9, 1), "q_len": ints(2, 1), "num_tokens": 5},
        [5, 6, 7, 8],
        [-1, -1, 7, -1, -1],
        reference.BAD_ROW,
    ),
}


@pytest.mark.parametrize("options, slots, expected, bits", GIVEN.values(), ids=GIVEN)
def test_decode_metadata_takes_given_slots(options: Any, slots: list[int], expected: list[int], bits: int) -> None:
    arguments = {"req_pool_indices": ints(1, 2), **options}
    found, status = reference.decode_metadata(POOL, seq_lens=ints(6, 5), layout=LAYOUT, slots=ints(*slots), **arguments)
    assert found.slot_mapping is not None
    assert (found.slot_mapping.tolist(), status) == (expected, bits)


STATUS = {
    "nothing": ([1], [12], {}, 0),
    "too-long": ([1], [13], {}, reference.TOO_LONG),
    "too-long-by-its-delta": ([1], [12], {"seq_len_delta": 1}, reference.TOO_LONG),
    "negative-length": ([1], [-1], {}, reference.NEGATIVE_LENGTH),
    "negative-queries": ([1], [3], {"q_len": ints(-1)}, reference.NEGATIVE_LENGTH),
    "bad-row-hides-the-rest": ([4], [-1], {"q_len": ints(-1)}, reference.BAD_ROW),
    "bad-slot-in-a-column": ([2], [9], {"q_len": ints(0)}, reference.BAD_SLOT),
    "bad-slot-of-a-token": ([2], [9], {}, reference.BAD_SLOT),
    "page-beyond-int32": ([3], [1], {"q_len": ints(0), "full_to_swa": TOKEN_MAP}, reference.BAD_SLOT),
    "unmapped-page": (
        [2],
        [9],
        {"page_map": PAGE_MAP, "q_len": ints(0)},
        reference.BAD_SLOT | reference.UNMAPPED,
    ),
    "unmapped-token": ([2], [7], {"full_to_swa": TOKEN_MAP}, reference.UNMAPPED),
    "queries-overflow": ([1, 1], [1, 1], {"q_len": ints(2**31 - 1, 1)}, reference.SUM_OVERFLOW),
    "padding-rows-are-not-read": ([1, 9], [1, -1], {"num_reqs": ints(1), "q_len": ints(1, -1)}, 0),
}


@pytest.mark.parametrize("rows, seq_lens, options, bits", STATUS.values(), ids=STATUS)
def test_decode_metadata_reports(rows: list[int], seq_lens: list[int], options: Any, bits: int) -> None:
    _, status = reference.decode_metadata(POOL, ints(*rows), ints(*seq_lens), layout=LAYOUT, **options)
    assert status == bits


def test_decode_metadata_keeps_the_tail_and_returns_the_fields_of_out() -> None:
    out = reference.Metadata(kept(2), kept(3), kept(3), kept(2, 3), None, kept(2, dtype=torch.int64), None)
    found, _ = reference.decode_metadata(
        POOL, ints(1, 1), ints(8, 8), layout=LAYOUT, num_reqs=ints(1), pad_seqlen=5, out=out, tail="keep"
    )
    assert all(a is b for a, b in zip(found, out, strict=True))
    assert plain(found) == {
        "cache_seqlens": [8, 5],
        "cu_seqlens_q": [0, 1, 1],
        "cu_seqlens_k": [0, 8, 8],
        "page_table": [[2, 5, 77], [0, 0, 77]],
        "swa_page_table": None,
        "slot_mapping": [23, -1],
        "swa_slot_mapping": None,
    }
