"""Continuous batching: requests join while others run, take pages as they grow, and give rows and pages back.

Every iteration admits what fits, extends the rows whose known tokens are not in the cache yet by up to a chunk each
(one ragged step), and decodes every other row. Where pages run out, the request that joined last is evicted; what it
has generated stays known, so that joining again recomputes its cache and goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from compiled_kv.demo.decoding import Decoder
from compiled_kv.demo.requests import Request, Running
from compiled_kv.models.allocator import Allocator


class Loop:
    """Serves requests through `decoder`, with rows and pages from `allocator`.

    Attributes:
        preemptions: how often a request was evicted.
    """

    def __init__(
        self, decoder: Decoder, allocator: Allocator, on_tokens: Callable[[int], None] = lambda count: None
    ) -> None:
        self.decoder, self.allocator, self.on_tokens = decoder, allocator, on_tokens
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self.preemptions = 0

    def serve(self, requests: Sequence[Request]) -> list[list[int]]:
        """The generated tokens of every request, in order."""
        everyone = [Running(i, request, list(request.prompt)) for i, request in enumerate(requests)]
        self.waiting.extend(everyone)
        while self.waiting or self.running:
            self.admit()
            self.extend()
            self.decode()
        return [run.tokens[len(run.request.prompt) :] for run in everyone]

    def admit(self) -> None:
        """Let waiting requests join while the batch has a place and the pools a row and pages for every known token."""
        while self.waiting and len(self.running) < self.decoder.batch:
            run = self.waiting[0]
            admitted = self.allocator.admit(run.tokens)
            if admitted is None:
                return
            run.holding, run.cached = admitted
            self.running.append(self.waiting.popleft())

    def extend(self) -> None:
        """One chunk for every row with more than one pending token."""
        chunk = self.decoder.chunk
        runs = self.make_room([(run, min(run.pending, chunk)) for run in self.running if run.pending > 1])
        counts = [min(run.pending, chunk) for run in runs]
        for run, count, token in zip(runs, counts, self.decoder.extend(runs, counts) if runs else (), strict=True):
            run.cached += count
            self.allocator.publish(run.holding, run.tokens, run.cached)
            self.settle(run, [] if run.pending else [token])

    def decode(self) -> None:
        """The next tokens of every row that has exactly one pending."""
        runs = self.make_room([(run, self.decoder.lookahead) for run in self.running if run.pending == 1])
        for run, tokens in zip(runs, self.decoder.decode(runs) if runs else (), strict=True):
            run.cached += len(tokens)
            self.allocator.trim(run.holding, run.cached)
            self.settle(run, tokens)

    def make_room(self, wanted: Sequence[tuple[Running, int]]) -> list[Running]:
        """Pages for so many more tokens of each run; those that still run afterwards."""
        for run, count in wanted:
            while run in self.running and not self.allocator.grow(run.holding, run.cached + count):
                self.evict(self.running[-1])
        return [run for run, _ in wanted if run in self.running]

    def evict(self, run: Running) -> None:
        """Take everything from `run` and put it first in the queue."""
        if len(self.running) == 1:
            raise RuntimeError(f"too few pages for request {run.index} alone, which has {len(run.tokens)} tokens")
        self.running.remove(run)
        self.allocator.release(run.holding)
        run.cached = 0
        self.waiting.appendleft(run)
        self.preemptions += 1

    def settle(self, run: Running, tokens: list[int]) -> None:
        """Hand out `tokens`, and free what the run needs no more."""
        wanted = tokens[: run.request.length - len(run.tokens)]
        run.tokens += wanted
        self.on_tokens(len(wanted))
        if run.done:
            self.running.remove(run)
            self.allocator.release(run.holding)
        else:
            self.allocator.slide(run.holding, run.cached)
