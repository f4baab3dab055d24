"""Hypothesis strategies for whole calls.

A call is decoded from a string of bytes, one byte a choice: a draw for every entry would cost several times as
much, and since a zero byte means the first option, the plainest one, a failing call still shrinks entry by entry.
Lengths lie around page edges; rows, lengths, starts, slots, map entries and live counts are now and then bad.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from compiled_kv.layout import KVLayout
from tests.harness import TABLES, Batch, Form

T = TypeVar("T")
EXTREMES = (-1, -7, 2**31 - 1, 2**31, 2**33 + 3, -(2**31), 2**63 - 1, -(2**63))
BYTES = 96


class Choices:
    """Bytes, spent one a choice; once they are spent every choice is its first option."""

    def __init__(self, data: bytes) -> None:
        self.left = iter(data)

    def of(self, options: Sequence[T]) -> T:
        return options[next(self.left, 0) % len(options)]

    def many(self, options: Sequence[int], count: int) -> Tensor:
        return torch.tensor([self.of(options) for _ in range(count)], dtype=torch.int64)

    def or_extreme(self, options: Sequence[int], count: int) -> Tensor:
        """Mostly of `options`; about one time in seven an extreme value."""
        usual = [*options] * (6 * len(EXTREMES) // len(options) + 1)
        return self.many([*usual, *EXTREMES], count)

    def fill(self, low: int, high: int, *shape: int) -> Tensor:
        """Numbers from [low, high) by a seed of two bytes, with up to three cells replaced by bad values."""
        seed = torch.Generator().manual_seed(256 * self.of(range(256)) + self.of(range(256)))
        table = torch.randint(low, high, shape, generator=seed)
        return self.spoil(table)

    def spoil(self, table: Tensor) -> Tensor:
        for _ in range(self.of((0, 0, 1, 2, 3)) if table.numel() else 0):
            table.view(-1)[self.of(range(table.numel()))] = self.of(EXTREMES)
        return table


def layout_of(choices: Choices) -> KVLayout:
    return KVLayout(
        page_size=choices.of([4, 1, 2, 3, 7, 16]),
        max_context_len=choices.of(range(41)),
        max_draft_tokens=choices.of([0, 1, 3]),
        window=choices.of([None, 1, 2, 5, 9, 100]),
    )


def form_of(choices: Choices, operator: str, in_place: bool) -> Form:
    """Any way to call an operator."""
    mapped = choices.of(["", "token", "page"])
    flags = ("strided", "ragged", "given", "start", "paged")
    return Form(
        operator,
        in_place=in_place,
        tail=choices.of(["clear", "keep"]) if in_place and operator in TABLES else "clear",
        wide=choices.of(range(256)) | choices.of(range(256)) << 8,
        padded=choices.of(["", "scalar", "vector"]),
        mapped=mapped or "token" if operator == "swa_page_table" else mapped,
        bounded=choices.of([True, False]),
        clamped=choices.of([True, False]),
        status=operator == "decode_metadata" and choices.of([False, True]),
        **{flag: choices.of([False, True]) for flag in flags},
    )


def edges(layout: KVLayout) -> list[int]:
    """Lengths at, just below and just above a page's edge, and at the ends."""
    page, cap = layout.page_size, layout.max_seqlen_k
    places = (page, 3 * page, cap, cap - page, layout.window or 0)
    near = {place + step for place in places for step in (-1, 0, 1)}
    return sorted({0, *(length for length in near if length > 0)})


def batch_of(choices: Choices, layout: KVLayout, least: int = 0) -> Batch:
    """Sizes lie between `least` and a few more, so that one graph may serve them all."""
    page, cap = layout.page_size, layout.max_seqlen_k
    size, pool_rows, slack = least + choices.of(range(6)), least + choices.of(range(4)), choices.of(range(3))
    num_tokens, num_slots = least + choices.of(range(8)), least + choices.of(range(8))
    known = max(least, choices.of([31, 30, 12, 1, 0]))
    pages, width = max(layout.max_num_pages + slack, least), max(cap + slack, least)
    blocks = choices.fill(0, 30, pool_rows, pages)
    offsets = torch.arange(pages * page) % page
    pool = (blocks.repeat_interleave(page, 1) * page + offsets)[:, :width].clone()
    smallest = min(least, cap)
    return Batch(
        layout=layout,
        req_to_token=choices.spoil(pool),
        block_table=blocks,
        rows=choices.or_extreme([*range(pool_rows), pool_rows], size),
        seq_lens=choices.or_extreme(edges(layout), size),
        q_lens=choices.or_extreme([0, 1, 2, 3, page, page + 1], size),
        kv_start=choices.or_extreme(edges(layout), size),
        positions=choices.fill(0, cap + 2, max(num_tokens, size)),
        cu_seqlens_q=torch.cat([torch.zeros(1, dtype=torch.int64), choices.many(range(4), size)]).cumsum(0),
        slots=choices.fill(0, 30 * page, num_slots),
        token_map=choices.fill(0, 200, known * page),
        page_map=choices.fill(0, 50, known),
        num_reqs=int(choices.or_extreme([*range(size + 2)], 1)),
        num_tokens=num_tokens,
        q_len=least + choices.of(range(4)),
        delta=choices.of([least, least + 1, 2**31 - 1]),
        pad_seqlen=smallest + choices.of(range(cap - smallest + 1)),
    )


def batches(layout: KVLayout, least: int = 0) -> st.SearchStrategy[Batch]:
    """Inputs for one layout, every size at least `least`."""
    return st.binary(min_size=BYTES, max_size=BYTES).map(lambda data: batch_of(Choices(data), layout, least))


def calls(operator: str, in_place: bool) -> st.SearchStrategy[tuple[Form, Batch]]:
    """Any call of an operator, functional or in place: form, layout and inputs."""

    def decode(data: bytes) -> tuple[Form, Batch]:
        choices = Choices(data)
        return form_of(choices, operator, in_place), batch_of(choices, layout_of(choices))

    return st.binary(min_size=BYTES + 16, max_size=BYTES + 16).map(decode)
