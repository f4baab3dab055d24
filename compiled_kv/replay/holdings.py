"""Who holds which row and pages in a scenario, in Python lists and ints, and what that makes the allocator write.

    grow to 6 tokens       pages [1, 2], slots 16 .. 47 written to row 0 of `req_to_token` (page size 16)
    shared, then written   the page that a token falls into is replaced by a copy, and the row gets a new generation
    leave                  pages go back, the first one first; whoever comes next gets them in another order

What was given back last is handed out first, the worst case for anything stale.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from compiled_kv.layout import ceil_div
from compiled_kv.page_pool import PagePool
from compiled_kv.replay.serving import NOWHERE, Serving


@dataclass(eq=False)
class Request:
    """One running request. `swa_pages` has a page for each of `pages`, NOWHERE where it went back."""

    number: int
    row: int
    length: int
    pages: list[int] = field(default_factory=list)
    swa_pages: list[int] = field(default_factory=list)
    queries: int = 1
    left: int = 0  # steps until it leaves by itself; 0: it does not


class Write(NamedTuple):
    """Slots (or map entries) that the engine writes to a tensor of its own: name, row, first column, values."""

    name: str
    row: int
    start: int
    values: list[int]


class Holdings:
    """Rows and pages; `writes` is what the allocator's tensors are to hold, in order, since they were last taken."""

    def __init__(self, serving: Serving) -> None:
        self.serving, self.page_size = serving, serving.layout.page_size
        self.pages, self.swa = PagePool(serving.num_pages), PagePool(serving.num_swa_pages)
        self.rows, self.generations = list(range(serving.max_reqs - 1, -1, -1)), [0] * serving.max_reqs
        self.writes: list[Write] = []

    @property
    def slides(self) -> bool:
        """Whether there is a sliding pool."""
        return self.serving.num_swa_pages > 0

    def take_writes(self) -> list[Write]:
        """What was written since this was last asked for."""
        writes, self.writes = self.writes, []
        return writes

    def can_grow(self, request: Request, length: int) -> bool:
        """Whether there are pages for `length` tokens, and one more for a copy on write."""
        needed = ceil_div(length, self.page_size) - len(request.pages) + 1
        return len(self.pages.free) >= needed and (not self.slides or len(self.swa.free) >= needed)

    def copy_on_write(self, request: Request, position: int) -> None:
        """Before token `position` is written: a shared page it falls into becomes the request's own."""
        index = position // self.page_size
        if index < len(request.pages) and self.pages.holders[request.pages[index]] > 1:
            self.generations[request.row] += 1
            self._release(request.pages[index], request.swa_pages[index])
            page, swa_page = self._take()
            request.pages[index], request.swa_pages[index] = page, swa_page
            self._write_pages(request, index)

    def grow(self, request: Request, length: int) -> None:
        """Take pages until `length` tokens have slots."""
        for _ in range(ceil_div(length, self.page_size) - len(request.pages)):
            page, swa_page = self._take()
            self.append(request, [page], [swa_page])

    def _take(self) -> tuple[int, int]:
        page = self.pages.take()
        if not self.slides:
            return page, NOWHERE
        swa_page = self.swa.take()
        self._write_map(page, swa_page)
        return page, swa_page

    def append(self, request: Request, pages: list[int], swa_pages: list[int]) -> None:
        """Let `request` hold these pages, behind those it holds."""
        begin = len(request.pages)
        request.pages += pages
        request.swa_pages += swa_pages
        for index in range(begin, len(request.pages)):
            self._write_pages(request, index)

    def _write_pages(self, request: Request, index: int) -> None:
        first = request.pages[index] * self.page_size
        self.writes.append(
            Write("req_to_token", request.row, index * self.page_size, list(range(first, first + self.page_size)))
        )

    def _write_map(self, page: int, swa_page: int) -> None:
        if self.serving.page_map:
            self.writes.append(Write("page_map", 0, page, [swa_page]))
            return
        first = swa_page * self.page_size
        slots = [NOWHERE] * self.page_size if swa_page == NOWHERE else list(range(first, first + self.page_size))
        self.writes.append(Write("full_to_swa", 0, page * self.page_size, slots))

    def trim(self, request: Request, count: int) -> None:
        """Keep the first `count` pages."""
        while len(request.pages) > count:
            index = len(request.pages) - 1
            self.writes.append(Write("req_to_token", request.row, index * self.page_size, [NOWHERE] * self.page_size))
            self._release(request.pages.pop(), request.swa_pages.pop())

    def slide(self, request: Request) -> None:
        """Give back the sliding pages that no later query sees."""
        window = self.serving.layout.window
        if self.slides and window is not None:
            for index in range(min(max(request.length - window + 1, 0) // self.page_size, len(request.pages))):
                if request.swa_pages[index] != NOWHERE:
                    self._release_swa(request.pages[index], request.swa_pages[index])
                    request.swa_pages[index] = NOWHERE

    def _release(self, page: int, swa_page: int) -> None:
        if swa_page != NOWHERE:
            self._release_swa(page, swa_page)
        self.pages.release(page)

    def _release_swa(self, page: int, swa_page: int) -> None:
        if self.swa.release(swa_page):
            self._write_map(page, NOWHERE)

    def has_pages(self, pages: int) -> bool:
        """Whether more than `pages` pages are free."""
        return len(self.pages.free) > pages and (not self.slides or len(self.swa.free) > pages)

    def leave(self, request: Request) -> None:
        """Give everything back."""
        # The first page first: whoever takes them next gets them in another order.
        for page, swa_page in zip(request.pages, request.swa_pages):
            self._release(page, swa_page)
        self.writes.append(Write("req_to_token", request.row, 0, [NOWHERE] * (len(request.pages) * self.page_size)))
        self.rows.append(request.row)
