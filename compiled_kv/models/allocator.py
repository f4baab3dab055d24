"""Rows and pages of a paged model: who holds which, prefixes kept for later, sliding pages freed behind the window.

page_size=4, a prompt of 10 tokens       -> row 2, pages [3, 7, 9]: req_to_token[2, :12] = 12..15, 28..31, 36..39
another prompt with the same 8 tokens    -> row 5, pages [3, 7, 11]: two shared, one of its own
window=4, next query at position 10      -> the sliding page of tokens 0..3 goes back; full_to_swa says -1 there
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from compiled_kv.layout import ceil_div
from compiled_kv.models.state import SLIDING, PagedState
from compiled_kv.page_pool import PagePool


@dataclass
class Holding:
    """What a running request holds: a row, its pages in order, and the first whose sliding page it still needs.

    Requests that have a row one after the other differ in its generation.
    """

    row: int
    generation: int = 0
    pages: list[int] = field(default_factory=list)
    first_swa: int = 0


class Allocator:
    """Hands out rows and pages of `model` and keeps its `req_to_token` and `full_to_swa` in step.

    Attributes:
        shared_pages: pages that requests got from the prefix of another, over time.
    """

    def __init__(self, model: PagedState, num_pages: int, num_swa_pages: int = 0) -> None:
        self.model, self.page_size, self.window = model, model.layout.page_size, model.layout.window
        self.rows = list(range(model.req_to_token.shape[0] - 1, -1, -1))
        self.generations = [0] * len(self.rows)
        self.full, self.swa = PagePool(num_pages), PagePool(num_swa_pages)
        self.slides = SLIDING in model.layer_types
        self.swa_of: dict[int, int] = {}
        self.prefixes: dict[tuple[int, ...], int] = {}
        self.shared_pages = 0
        model.full_to_swa.fill_(-1)
        model.full_to_swa[: self.page_size] = 0

    def admit(self, tokens: Sequence[int]) -> tuple[Holding, int] | None:
        """A row with whatever pages hold a prefix of `tokens` already, and how many tokens those are.

        None where there is no row, or not enough free pages for `tokens`; none is taken yet, so that others may still
        be faster. The last token is never part of the prefix: its logits are yet to be computed.
        """
        if not self.rows:
            return None
        holding = self.take_row()
        for page in self._prefix(tokens):
            self._hold(holding, page)
        if not self._make_free(self._lacking(holding, len(tokens)), 0):
            self.release(holding)
            return None
        cached = len(holding.pages) * self.page_size
        self.shared_pages += len(holding.pages)
        self.slide(holding, cached)
        return holding, cached

    def take_row(self) -> Holding:
        """A free row, in a generation of its own, that holds no page yet."""
        row = self.rows.pop()
        self.generations[row] += 1
        return Holding(row, self.generations[row])

    def grow(self, holding: Holding, length: int) -> bool:
        """Take pages until `length` tokens have slots; False, and nothing taken, where the pools run short."""
        needed = self._lacking(holding, length)
        if not self._make_free(needed, needed if self.slides else 0):
            return False
        for _ in range(needed):
            page = self.full.take()
            if self.slides:
                self._map(page, self.swa.take())
            self._append(holding, page)
        return True

    def trim(self, holding: Holding, length: int) -> None:
        """Give back the pages that lie wholly beyond `length` tokens."""
        while len(holding.pages) > ceil_div(length, self.page_size):
            page = holding.pages.pop()
            self._release(page, swa=len(holding.pages) >= holding.first_swa)

    def slide(self, holding: Holding, length: int) -> None:
        """Give back the sliding pages that no query at position `length` or later sees."""
        first = 0 if self.window is None else max(length - self.window + 1, 0) // self.page_size
        for index in range(holding.first_swa, first) if self.slides else ():
            self._release_swa(holding.pages[index])
        holding.first_swa = max(holding.first_swa, first)

    def release(self, holding: Holding) -> None:
        """Give back the row and every page."""
        self.trim(holding, 0)
        self.rows.append(holding.row)

    def publish(self, holding: Holding, tokens: Sequence[int], length: int) -> None:
        """Keep the full pages of the first `length` tokens, which are computed, for requests with the same prefix."""
        for index in range(holding.first_swa if self.slides else 0, length // self.page_size):
            page, key = holding.pages[index], tuple(tokens[: (index + 1) * self.page_size])
            if key not in self.prefixes:
                self.prefixes[key] = page
                self.full.hold(page)
                if self.slides:
                    self.swa.hold(self.swa_of[page])

    def forget(self) -> None:
        """Let go of the prefix published last: one is of no use without the pages before it."""
        self._release(self.prefixes.pop(next(reversed(self.prefixes))), swa=True)

    def _lacking(self, holding: Holding, length: int) -> int:
        return max(ceil_div(length, self.page_size) - len(holding.pages), 0)

    def _make_free(self, pages: int, swa_pages: int) -> bool:
        while len(self.full.free) < pages or len(self.swa.free) < swa_pages:
            if not self.prefixes:
                return False
            self.forget()
        return True

    def _prefix(self, tokens: Sequence[int]) -> list[int]:
        pages: list[int] = []
        for end in range(self.page_size, len(tokens), self.page_size):
            page = self.prefixes.get(tuple(tokens[:end]))
            if page is None:
                break
            pages.append(page)
        return pages

    def _hold(self, holding: Holding, page: int) -> None:
        self.full.hold(page)
        if self.slides:
            self.swa.hold(self.swa_of[page])
        self._append(holding, page)

    def _append(self, holding: Holding, page: int) -> None:
        start = len(holding.pages) * self.page_size
        slots = self.model.req_to_token[holding.row, start : start + self.page_size]
        slots.copy_(page * self.page_size + torch.arange(len(slots), device=slots.device))
        holding.pages.append(page)

    def _map(self, page: int, swa_page: int) -> None:
        self.swa_of[page] = swa_page
        slots = self.model.full_to_swa[page * self.page_size : (page + 1) * self.page_size]
        slots.copy_(swa_page * self.page_size + torch.arange(len(slots), device=slots.device))

    def _release(self, page: int, swa: bool) -> None:
        if swa and self.slides:
            self._release_swa(page)
        self.full.release(page)

    def _release_swa(self, page: int) -> None:
        if self.swa.release(self.swa_of[page]):
            del self.swa_of[page]
            self.model.full_to_swa[page * self.page_size : (page + 1) * self.page_size] = -1
