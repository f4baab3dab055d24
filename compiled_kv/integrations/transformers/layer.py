"""One layer of a paged cache, as transformers calls it: `update` writes by slot and reads by page."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

import compiled_kv as ckv
from compiled_kv.checks import Sizes
from compiled_kv.models.state import SLIDING, Batch, PagedState, Place


class PagedLayer(CacheLayerMixin):
    """The cached keys and values of one layer.

    Args:
        pools: a PagedPool of keys and one of values.
        layout: page size and capacity.
        slides: whether it is a sliding-window layer.
        place: where the current forward pass writes and reads.
        seq_length: tokens before that pass, of every row or int [B].
    """

    supports_early_init = False

    def __init__(
        self, pools: Any, layout: ckv.KVLayout, slides: bool, place: Place | None = None, seq_length: int | Tensor = 0
    ) -> None:
        super().__init__()
        self.pools, self.layout, self.is_sliding = pools, layout, slides
        self.place, self.seq_length = place, seq_length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write this pass's [B, heads, Q, dim], and read every page of every row: [B, heads, P * page_size, dim].

        Raises:
            TypeError, ValueError: as `check`.
        """
        assert self.place is not None
        self.check(key_states, value_states)
        for pool, fresh in zip(self.pools, (key_states, value_states)):
            pool.write(self.place.slots, fresh.detach().transpose(1, 2))
        if isinstance(self.seq_length, int):  # counted by each layer as it writes: some ask in between
            self.seq_length += key_states.shape[2]
        keys, values = (pool.read(self.place.page_table) for pool in self.pools)
        return keys, values

    def check(self, key_states: Tensor, value_states: Tensor) -> None:
        """Refuse what the model that the cache was made for does not cache."""
        for name, pool, fresh in zip(("key_states", "value_states"), self.pools, (key_states, value_states)):
            sizes = Sizes()
            sizes.check("the pool", pool.data, (pool.data.dtype,), "slots", "heads", "dim")
            sizes.check(name, fresh, (pool.data.dtype,), "B", "heads", "Q", "dim")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a read returns, and the position of the first."""
        return self.layout.max_num_pages * self.layout.page_size, 0

    def get_seq_length(self) -> int | Tensor:
        """Tokens before the current forward pass; where rows are alike, with those that it has written here."""
        return self.seq_length

    def get_max_length(self) -> int:
        """Tokens that a row can hold."""
        return self.layout.max_seqlen_k

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the pools are there from the start."""


def layers(state: PagedState, batch: Batch | None = None) -> list[PagedLayer]:
    """A layer for each pair of pools, placed by `batch`."""
    made = [PagedLayer(pools, state.layout, kind == SLIDING) for pools, kind in zip(state.pools, state.layer_types)]
    if batch is not None:
        for layer, kind in zip(made, state.layer_types):
            layer.place, layer.seq_length = batch.places[kind], batch.positions[:, 0]
    return made
