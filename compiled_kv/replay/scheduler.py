"""A serving engine's decisions, as a scenario tells them: who joins, who steps, who leaves, who is evicted.

    join 6        request 0 takes row 0 and the pages of 6 tokens, or waits
    step 0        everyone computes a token: the batch as DecodeBatch, and beside it each row's pages
    fork 0        request 1 shares every page of the one at place 0
    preempt 0     the request at place 0 gives everything back; joining again, it gets other pages

It never looks at a tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from compiled_kv.batches import DecodeBatch
from compiled_kv.layout import ceil_div
from compiled_kv.replay.holdings import Holdings, Request
from compiled_kv.replay.serving import NOWHERE, Planned, RowState, Serving


class Scheduler(Holdings):
    """Plays events."""

    def __init__(self, serving: Serving) -> None:
        super().__init__(serving)
        self.running: list[Request] = []
        self.waiting: deque[tuple[int, int]] = deque()
        self.joined = self.preemptions = 0

    # Events. One that makes no sense now does nothing, so that any part of a scenario is a scenario.

    def join(self, length: int, left: int = 0) -> None:
        """A request of `length` computed tokens joins, or waits in a short queue; it stays for `left` steps, 0: for
        good."""
        length = min(max(length, 1), self.serving.layout.max_context_len - 1)
        if len(self.waiting) < self.serving.max_batch_size:
            self.waiting.append((length, left))
        self._resume()

    def finish(self, index: int, _: int = 0) -> None:
        """The request at `index` leaves, and the last of the batch moves into its place."""
        if self.running:
            index %= len(self.running)
            self.leave(self.running[index])
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
                self.pages.hold(page)
                if swa_page != NOWHERE:
                    self.swa.hold(swa_page)
            self.append(request, source.pages, source.swa_pages)

    def step(self, seed: int, _: int = 0) -> Planned:
        """Everyone computes a token, or some; `seed` says how many are accepted."""
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
                self.trim(request, ceil_div(request.length, self.page_size))
            self.slide(request)
        for request in [r for r in self.running if r.left > 0]:
            request.left -= 1
            if request.left == 0:
                self.finish(self.running.index(request))

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
            while request in self.running and not self.can_grow(request, request.length + grown + self.serving.delta):
                self._evict(self.running[-1])
            if request in self.running:
                request.length += grown
                self.copy_on_write(request, request.length - grown)
                self.grow(request, request.length + self.serving.delta)

    def _has_place(self) -> bool:
        return len(self.running) < self.serving.max_batch_size and bool(self.rows)

    def _admit(self, length: int) -> Request:
        request = Request(self.joined, self.rows.pop(), length)
        self.generations[request.row] += 1
        self.joined += 1
        self.running.append(request)
        return request

    def _resume(self) -> None:
        while self.waiting and self._has_place() and self.has_pages(ceil_div(self.waiting[0][0], self.page_size)):
            length, left = self.waiting.popleft()
            request = self._admit(length)
            request.left = left
            self.grow(request, length)
            self.slide(request)

    def _evict(self, request: Request) -> None:
        self.preemptions += 1
        self.waiting.appendleft((request.length, request.left))
        self.leave(request)
        self.running.remove(request)


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
