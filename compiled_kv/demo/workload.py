"""From lengths to a workload: prompts with a common opening, and pools too small to hold everyone at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compiled_kv.demo.requests import Request
from compiled_kv.layout import KVLayout, ceil_div
from compiled_kv.models.state import SLIDING
from compiled_kv.models.step import Architecture, PagedCausalLM, layer_types
from compiled_kv.request_traces import Lengths


@dataclass(frozen=True)
class Workload:
    """Requests, and the geometry they are served in."""

    requests: list[Request]
    layout: KVLayout
    batch: int
    chunk: int
    num_pages: int
    num_swa_pages: int

    def paged(self, arch: Architecture, model: Any) -> PagedCausalLM:
        """`model` over pools of this size, with more rows than a batch has."""
        return arch.paged(
            model, self.layout, max_reqs=2 * self.batch, num_pages=self.num_pages, num_swa_pages=self.num_swa_pages
        )


def make_requests(trace: Sequence[Lengths], arch: Architecture, seed: int) -> list[Request]:
    """Random prompts of the trace's lengths; every second one opens with the same tokens, a page and a bit."""
    rng = random.Random(seed)

    def draw(count: int) -> list[int]:
        return [rng.randrange(arch.config.vocab_size) for _ in range(count)]

    opening = draw(arch.page_size + arch.page_size // 2)
    return [Request(opening * (i % 2) + draw(row.context), row.generated) for i, row in enumerate(trace)]


def plan(
    requests: list[Request], arch: Architecture, *, batch: int, chunk: int, draft_tokens: int, pool: float
) -> Workload:
    """Bounds that hold every request, and pools of `pool` times the pages that a full batch of average ones needs.

    A pool always holds the longest request, so that one can finish whatever becomes of the others.
    """
    window = arch.config.sliding_window if SLIDING in layer_types(arch.config) else None
    longest, page_size, chunk = max(request.length for request in requests), arch.page_size, max(chunk, draft_tokens)
    layout = KVLayout(page_size, ceil_div(longest, page_size) * page_size, draft_tokens, window)
    pages = [layout.num_pages(request.length + draft_tokens) for request in requests]
    sliding = [min(count, ceil_div((window or 0) + chunk, page_size) + 1) for count in pages]

    def size(needed: Sequence[int]) -> int:
        return 1 + max(max(needed), round(pool * batch * sum(needed) / len(needed)))

    return Workload(requests, layout, batch, chunk, size(pages), size(sliding) if window else 0)
