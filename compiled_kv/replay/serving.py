"""What is served in a scenario, and one step of it as the scheduler plans it.

serving    decode, 16 tokens a page, a batch of 8, 154 pages, of which page 0 is the null page
planned    the batch that the engine loads, and beside it each row: request 0, pages [1, 2], 18 tokens, 1 query
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from compiled_kv.batches import DecodeBatch
from compiled_kv.layout import KVLayout

NOWHERE = -1


@dataclass(frozen=True)
class Serving:
    """What is served, and with how much: bounds that a scenario is played within.

    Args:
        layout: page size, bounds, window.
        max_batch_size: rows of a batch.
        num_pages, num_swa_pages: pages of the pools, null pages included; no sliding pool where the latter is 0.
        mode: "decode" (a token a step), "verify" (max_draft_tokens drafts, some of which are accepted) or "extend" (1
            to q_len tokens a row).
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
