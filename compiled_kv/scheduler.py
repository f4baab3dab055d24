"""A serving engine's bookkeeping in Python lists and ints: who holds which row and pages, and what every step is about.

    join 6 tokens      request 0 takes row 0, pages [1, 2]
    step               it decodes: seq_lens [7], slot of position 6; the batch as DecodeBatch, each row's pages beside it
    fork               request 1 shares both pages; the first to write into page 2 gets a copy, and its row a new generation
    preempt            pages and row go back; joining again, it takes others

It hands out the page given back last, the worst case for anything stale, and never looks at a tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from compiled_kv.buffers import DecodeBatch
from compiled_kv.layout import KVLayout, ceil_div

NOWHERE = -1


@dataclass(frozen=True)
class Serving:
    """What is served, and with how much: bounds that a scenario is played within.

    Args:
        layout: page size, bounds, window.
        max_batch_size: rows of a batch.
        num_pages, num_swa_pages: pages of the pools, null pages included; no sliding pool where the latter is 0.
        mode: "decode" (a token a step), "verify" (max_draft_tokens drafts, some of which are accepted) or "extend" (1 to q_len
            tokens a row).
        q_len: the most queries of a row in mode "extend".
        page_map: the sliding pool is mapped page by page; else slot by slot.
    """

    layout: KVLayout
    max_batch_size: int
    num_pages: int
    num_swa_pages: int = 0
    mode: str = "decode"
    q_len: int = 3
    page_map: bool = False

    @property
    def max_reqs(self) -> int:
        """Rows of the pool: two more than of a batch."""
        return self.max_batch_size + 2

    @property
    def queries(self) -> int:
        """The most queries of a row in one step."""
        return {"decode": 1, "verify": self.layout.max_draft_tokens, "extend": self.q_len}[self.mode]

    @property
    def delta(self) -> int:
        """Tokens a step adds to `seq_lens`."""
        return self.layout.max_draft_tokens if self.mode == "verify" else 0


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


class RowState(NamedTuple):
    """A live row of a step: who it is, and where its tokens lie."""

    request: int
    pages: list[int]
    swa_pages: list[int]
    cache_seqlen: int
    queries: int


class Planned(NamedTuple):
    """One step: the batch as the engine hands it over, and each row in the engine's own words."""

    batch: DecodeBatch
    rows: list[RowState]


class Write(NamedTuple):
    """Slots (or map entries) that the engine writes to a tensor of its own: name, row, first column, values."""

    name: str
    row: int
    start: int
    values: list[int]


class Pages:
    """Pages of one pool, with a count of holders each; page 0 is the null page."""

    def __init__(self, num_pages: int) -> None:
        self.free, self.holders = list(range(num_pages - 1, 0, -1)), [0] * num_pages

    def take(self) -> int:
        self.holders[self.free[-1]] = 1
        return self.free.pop()

    def release(self, page: int) -> bool:
        """Let go once; True if nobody holds the page any more."""
        self.holders[page] -= 1
        if not self.holders[page]:
            self.free.append(page)
        return not self.holders[page]


class Scheduler:
    """Plays events; `writes` is what its tensors are to hold, in order, since they were last taken."""

    def __init__(self, serving: Serving) -> None:
        self.serving, self.page_size = serving, serving.layout.page_size
        self.pages, self.swa = Pages(serving.num_pages), Pages(serving.num_swa_pages)
        self.rows, self.generations = list(range(serving.max_reqs - 1, -1, -1)), [0] * serving.max_reqs
        self.running: list[Request] = []
        self.waiting: deque[tuple[int, int]] = deque()
        self.joined = self.steps = self.preemptions = 0
        self.writes: list[Write] = []

    @property
    def slides(self) -> bool:
        return self.serving.num_swa_pages > 0

    # Events. One that makes no sense now does nothing, so that any part of a scenario is a scenario.

    def join(self, length: int, left: int = 0) -> None:
        """A request of `length` computed tokens joins, or waits in a short queue; it stays for `left` steps, 0: for good."""
        length = min(max(length, 1), self.serving.layout.max_context_len - 1)
        if len(self.waiting) < self.serving.max_batch_size:
            self.waiting.append((length, left))
        self._resume()

    def finish(self, index: int, _: int = 0) -> None:
        """The request at `index` leaves, and the last of the batch moves into its place."""
        if self.running:
            index %= len(self.running)
            self._leave(self.running[index])
            last = self.running.pop()
            if index < len(self.running):
                self.running[index] = last

    def swap(self, index: int, other: int) -> None:
        """Two requests change places in the batch."""
        if self.running:
            a, b = index % len(self.running), other % len(self.running)
            self.running[a], self.running[b] = self.running[b], self.running[a]

    def preempt(self, index: int, _: int = 0) -> None:
        """The request at `index` is evicted; it joins again when it can."""
        if self.running:
            self._evict(self.running[index % len(self.running)])

    def fork(self, index: int, _: int = 0) -> None:
        """A new request shares every page of the one at `index`, the last one half full as it is."""
        if self.running and self._has_place():
            source = self.running[index % len(self.running)]
            request = self._admit(source.length)
            for page, swa_page in zip(source.pages, source.swa_pages):
                self.pages.holders[page] += 1
                if swa_page != NOWHERE:
                    self.swa.holders[swa_page] += 1
            self._append(request, source.pages, source.swa_pages)

    def step(self, seed: int, _: int = 0) -> Planned:
        """Everyone computes a token, or some; `seed` says how many are accepted."""
        self.steps += 1
        self._resume()
        self._make_room(seed)
        rows = [
            RowState(r.number, r.pages[:], r.swa_pages[:], r.length + self.serving.delta, r.queries)
            for r in self.running
        ]
        return Planned(self._batch(), rows)

    def settle(self, seed: int) -> None:
        """After a step: drafts that were not accepted are rolled back, and pages behind the window go back."""
        for request in self.running:
            if self.serving.mode == "verify":
                accepted = 1 + _draw(seed, request.number, self.serving.delta)
                request.length = min(request.length + accepted, self.serving.layout.max_context_len)
                self._trim(request, ceil_div(request.length, self.page_size))
            self._slide(request)
        for request in [r for r in self.running if r.left > 0]:
            request.left -= 1
            if request.left == 0:
                self.finish(self.running.index(request))

    def take_writes(self) -> list[Write]:
        writes, self.writes = self.writes, []
        return writes

    def token(self, request: int, position: int) -> int:
        """A made-up token id, the same whenever it is asked for."""
        return 1 + (request * 31 + position * 7) % 499

    def _batch(self) -> DecodeBatch:
        ragged, tokens = self.serving.mode == "extend", []
        for r in self.running:
            end = r.length + self.serving.delta
            tokens += [self.token(r.number, position) for position in range(end - r.queries, end)]
        return DecodeBatch(
            rows=[r.row for r in self.running],
            seq_lens=[r.length for r in self.running],
            generations=[self.generations[r.row] for r in self.running],
            q_lens=[r.queries for r in self.running] if ragged else None,
            token_ids=tokens,
        )

    def _make_room(self, seed: int) -> None:
        """Give every running request pages for this step; who is too long leaves, who came last is evicted."""
        for request in list(self.running):
            request.queries = self.serving.queries
            if self.serving.mode == "extend":
                request.queries = 1 + _draw(seed, request.number, self.serving.q_len)
            least = 1 if self.serving.mode == "verify" else request.queries
            if request.length + least > self.serving.layout.max_context_len:
                self.finish(self.running.index(request))
        for request in list(self.running):
            grown = 0 if self.serving.mode == "verify" else request.queries
            while request in self.running and not self._can_grow(request, request.length + grown + self.serving.delta):
                self._evict(self.running[-1])
            if request in self.running:
                request.length += grown
                self._copy_on_write(request, request.length - grown)
                self._grow(request, request.length + self.serving.delta)

    def _can_grow(self, request: Request, length: int) -> bool:
        needed = ceil_div(length, self.page_size) - len(request.pages) + 1  # one more for a copy on write
        return len(self.pages.free) >= needed and (not self.slides or len(self.swa.free) >= needed)

    def _copy_on_write(self, request: Request, position: int) -> None:
        """Before token `position` is written: a shared page it falls into becomes the request's own."""
        index = position // self.page_size
        if index < len(request.pages) and self.pages.holders[request.pages[index]] > 1:
            self.generations[request.row] += 1
            self._release(request.pages[index], request.swa_pages[index])
            page, swa_page = self._take()
            request.pages[index], request.swa_pages[index] = page, swa_page
            self._write_pages(request, index)

    def _grow(self, request: Request, length: int) -> None:
        for _ in range(ceil_div(length, self.page_size) - len(request.pages)):
            page, swa_page = self._take()
            self._append(request, [page], [swa_page])

    def _take(self) -> tuple[int, int]:
        page = self.pages.take()
        if not self.slides:
            return page, NOWHERE
        swa_page = self.swa.take()
        self._write_map(page, swa_page)
        return page, swa_page

    def _append(self, request: Request, pages: list[int], swa_pages: list[int]) -> None:
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

    def _trim(self, request: Request, count: int) -> None:
        while len(request.pages) > count:
            index = len(request.pages) - 1
            self.writes.append(Write("req_to_token", request.row, index * self.page_size, [NOWHERE] * self.page_size))
            self._release(request.pages.pop(), request.swa_pages.pop())

    def _slide(self, request: Request) -> None:
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

    def _has_place(self) -> bool:
        return len(self.running) < self.serving.max_batch_size and bool(self.rows)

    def _has_pages(self, pages: int) -> bool:
        return len(self.pages.free) > pages and (not self.slides or len(self.swa.free) > pages)

    def _admit(self, length: int) -> Request:
        request = Request(self.joined, self.rows.pop(), length)
        self.generations[request.row] += 1
        self.joined += 1
        self.running.append(request)
        return request

    def _resume(self) -> None:
        while self.waiting and self._has_place() and self._has_pages(ceil_div(self.waiting[0][0], self.page_size)):
            length, left = self.waiting.popleft()
            request = self._admit(length)
            request.left = left
            self._grow(request, length)
            self._slide(request)

    def _evict(self, request: Request) -> None:
        self.preemptions += 1
        self.waiting.appendleft((request.length, request.left))
        self._leave(request)
        self.running.remove(request)

    def _leave(self, request: Request) -> None:
        # The first page first: whoever takes them next gets them in another order.
        for page, swa_page in zip(request.pages, request.swa_pages):
            self._release(page, swa_page)
        self.writes.append(Write("req_to_token", request.row, 0, [NOWHERE] * (len(request.pages) * self.page_size)))
        self.rows.append(request.row)


def _draw(seed: int, request: int, choices: int) -> int:
    """A number below `choices` that looks random and is always the same."""
    return (seed * 2654435761 + request * 40503 + 12345) % 4294967291 % choices


def play(serving: Serving, events: list[tuple[str, int, int]]) -> Iterator[tuple[Scheduler, Planned]]:
    """The steps of a scenario, one at a time; the scheduler stands as it did when the step was planned."""
    scheduler = Scheduler(serving)
    for what, a, b in events:
        if what == "step":
            yield scheduler, scheduler.step(a)
            scheduler.settle(a)
        else:
            getattr(scheduler, what)(a, b)
