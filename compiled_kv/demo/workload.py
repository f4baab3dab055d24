"""From lengths to a workload: prompts with a common opening, and pools too small to hold everyone at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..layout import KVLayout, ceil_div
from ..models.step import SLIDING, Architecture, layer_types
from .requests import Request
from .trace import Lengths

PRESSURE = 0.9  # of the pages that a full batch of average requests would need


@dataclass(frozen=True)
class Workload:
    """Requests, and the geometry they are served in."""

    requests: list[Request]
    layout: KVLayout
    batch: int
    chunk: int
    num_pages: int
    num_swa_pages: int


def make_requests(trace: Sequence[Lengths], arch: Architecture, seed: int) -> list[Request]:
    """Random prompts of the trace's lengths; every second one opens with the same tokens, a page and a bit."""
    rng = random.Random(seed)

    def draw(count: int) -> list[int]:
        return [rng.randrange(arch.config.vocab_size) for _ in range(count)]

    opening = draw(arch.page_size + arch.page_size // 2)
    return [Request(opening * (i % 2) + draw(row.context), row.generated) for i, row in enumerate(trace)]


def plan(requests: list[Request], arch: Architecture, *, batch: int, chunk: int, draft_tokens: int = 0) -> Workload:
    """Bounds that hold every request, and pools that hold the longest one, or `PRESSURE` of an average full batch."""
    window = arch.config.sliding_window if SLIDING in layer_types(arch.config) else None
    longest, page_size = max(request.length for request in requests), arch.page_size
    layout = KVLayout(page_size, ceil_div(longest, page_size) * page_size, draft_tokens, window)
    pages = [layout.num_pages(request.length + draft_tokens) for request in requests]
    swa_pages = [min(count, ceil_div((window or 0) + max(chunk, draft_tokens), page_size) + 1) for count in pages]
    num_swa_pages = _pool(swa_pages, batch) if window else 0
    return Workload(requests, layout, batch, chunk, _pool(pages, batch), num_swa_pages)


def _pool(pages: Sequence[int], batch: int) -> int:
    return 1 + max(max(pages), round(PRESSURE * batch * sum(pages) / len(pages)))
