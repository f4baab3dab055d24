"""The layout turns host lengths into capacities, and refuses what they cannot hold."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import compiled_kv as ckv
from compiled_kv import KVLayout
from tests.conftest import INTERPRETED

# page size, context, drafts -> columns of the table
CAPACITIES = {
    "nothing": (64, 0, 0, 0),
    "one-token": (64, 1, 0, 1),
    "one-short-of-a-page": (64, 63, 0, 1),
    "a-page": (64, 64, 0, 1),
    "page-plus-one": (64, 65, 0, 2),
    "drafts-open-a-page": (64, 64, 1, 2),
    "page-size-one": (1, 131072, 4, 131076),
    "divides-nothing": (48, 5000, 0, 105),
    "counted-in-pages-of-32": (32, 5000, 0, 157),  # a loop sized for pages of 64 would fill 79
    "the-largest": (64, 2**31 - 1, 0, 2**25),
}


@pytest.mark.parametrize("page_size, context, drafts, pages", CAPACITIES.values(), ids=CAPACITIES)
def test_max_num_pages(page_size: int, context: int, drafts: int, pages: int) -> None:
    layout = KVLayout(page_size, context, drafts)
    assert (layout.max_num_pages, layout.max_seqlen_k) == (pages, context + drafts)


@pytest.mark.parametrize("length, pages", [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (1024, 64), (1025, 65)])
def test_num_pages(length: int, pages: int) -> None:
    assert KVLayout(16, 2048).num_pages(length) == pages


REFUSED = {
    "a-page-too-many": (KVLayout(256, 4096), [70, 4097], "lengths[1]=4097 needs 17 pages, has 16"),
    "a-token-too-many": (KVLayout(64, 100), [101], "lengths[0]=101 needs 2 pages, has 2 (100 tokens)"),
    "negative": (KVLayout(64, 100), [3, 5, -1], "lengths[2] must not be negative, got -1"),
}


@pytest.mark.parametrize("layout, lengths, sentence", REFUSED.values(), ids=REFUSED)
def test_check_refuses(layout: KVLayout, lengths: list[int], sentence: str) -> None:
    with pytest.raises(ValueError) as raised:
        layout.check(lengths)
    assert sentence in str(raised.value)


@pytest.mark.parametrize("lengths", [[], [0], [4096, 0, 1], range(4097)], ids=["none", "zero", "full", "every"])
def test_check_accepts(lengths: list[int]) -> None:
    KVLayout(256, 4096).check(lengths)


def test_drafts_count_towards_what_check_accepts() -> None:
    KVLayout(256, 4096, max_draft_tokens=4).check([4100])


def test_layouts_are_frozen_values() -> None:
    layout = KVLayout(64, 4096, window=128)
    assert layout == KVLayout(64, 4096, 0, 128) and hash(layout) == hash(KVLayout(64, 4096, 0, 128))
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.page_size = 32  # type: ignore[misc]


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be traced")
def test_a_layout_enters_a_graph_as_host_numbers() -> None:
    """As a global, as an argument and made inside, with no break."""
    pool, rows, lengths = torch.arange(64).reshape(2, 32), torch.tensor([1, 0]), torch.tensor([5, 9])

    def inside() -> torch.Tensor:
        return ckv.page_table(pool, rows, lengths, layout=KVLayout(page_size=4, max_context_len=32))

    def given(layout: KVLayout) -> torch.Tensor:
        return ckv.page_table(pool, rows, lengths, layout=layout)

    expected = [[8, 9, 0, 0, 0, 0, 0, 0], [0, 1, 2, 0, 0, 0, 0, 0]]
    assert torch.compile(inside, fullgraph=True, backend="eager")().tolist() == expected
    assert torch.compile(given, fullgraph=True, backend="eager")(KVLayout(4, 32)).tolist() == expected
