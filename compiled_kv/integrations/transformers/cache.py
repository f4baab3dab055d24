"""A paged `Cache` for `past_key_values`: `generate()` with it gives the tokens that it gives with its own.

    page_size=4, a prompt of 6 tokens for 2 rows   -> reserve(2, 6): pages [1, 2] and [3, 4]
    two tokens later                               -> the 9th position starts pages 5 and 6

The first layer of a forward pass takes pages and makes the one metadata call; every layer writes and reads by it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache

import compiled_kv as ckv
from compiled_kv.checks import check_int
from compiled_kv.integrations.transformers.layer import PagedLayer, layers
from compiled_kv.integrations.transformers.model import check_model, observe
from compiled_kv.models.allocator import Allocator, Holding
from compiled_kv.models.state import SLIDING, Batch, PagedState


class PagedCache(Cache):
    """A paged cache for `past_key_values`, whose rows all have the same length, as `generate()` has them.

    Args:
        model: a causal model that attends through "compiled_kv". One token is run through it, to see what each layer
            caches.
        layout: page size and longest context; `window` is the model's `sliding_window` where layers slide.
        max_reqs: the most rows a batch has.
        num_pages: pages of each full-attention pool, the null page included.
        num_swa_pages: pages of each sliding-window pool, the null page included; as many as `num_pages` unless given.

    Attributes:
        state: pools and tables, a module with the buffers `req_to_token`, `full_to_swa` and `status`.
        allocator: hands out rows and pages of it; a serving loop of yours may use it instead of `reserve`.

    Raises:
        TypeError, ValueError: the model cannot decode through this cache, or the layout is not the model's.
    """

    def __init__(
        self, model: Any, layout: ckv.KVLayout, *, max_reqs: int, num_pages: int, num_swa_pages: int | None = None
    ) -> None:
        kinds = check_model(model, layout)
        num_swa_pages = num_pages if num_swa_pages is None else num_swa_pages
        for name, value in (("max_reqs", max_reqs), ("num_pages", num_pages), ("num_swa_pages", num_swa_pages)):
            check_int(name, value, 1)
        pages = {"num_pages": num_pages, "num_swa_pages": num_swa_pages if SLIDING in kinds else 0}
        cached, like = observe(model)
        self.state = PagedState(layout, kinds[: len(cached)], cached, like, max_reqs=max_reqs, **pages)
        self.allocator = Allocator(self.state, **pages)
        self.holdings: list[Holding] = []
        super().__init__(layers=layers(self.state))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As transformers' own; with the first layer, a forward pass makes room for its tokens.

        Raises:
            TypeError, ValueError: these are keys and values of another model than the cache was made for.
        """
        if layer_idx >= len(self.layers):
            raise ValueError(f"layer_idx must be at most {len(self.layers) - 1}, the cache's last, got {layer_idx}")
        if layer_idx == 0:
            cast(PagedLayer, self.layers[0]).check(key_states, value_states)
            self._advance(key_states.shape[0], key_states.shape[2])
        return cast(tuple[Tensor, Tensor], super().update(key_states, value_states, layer_idx, *args, **kwargs))

    def reserve(self, batch_size: int, length: int) -> Tensor:
        """Rows for `batch_size` requests, each with pages for `length` tokens.

        Returns:
            int64 [batch_size], the rows of `req_to_token`: `req_pool_indices` of a decode step.

        Raises:
            ValueError: the batch is larger than the cache or not the one it holds, the length is beyond the layout, or
                pages are too few. Nothing is taken then.
        """
        held, rows, state = len(self.holdings), self.allocator.rows, self.state
        if not held and batch_size > len(rows):
            raise ValueError(f"batch_size must be at most {len(rows)}, the free rows of the cache, got {batch_size}")
        if held not in (0, batch_size):
            raise ValueError(f"batch_size must be {held} until reset(), got {batch_size}")
        state.layout.check([length] * batch_size)
        lacking = batch_size * state.layout.num_pages(length) - sum(len(holding.pages) for holding in self.holdings)
        pools = {"num_pages": self.allocator.full, "num_swa_pages": self.allocator.swa}
        for name, pool in list(pools.items())[: 1 + (SLIDING in state.layer_types)]:
            if lacking > len(pool.free):
                raise ValueError(
                    f"{name} must leave {lacking} pages for {batch_size} rows of {length} tokens, "
                    f"{len(pool.free)} are free"
                )
        self.holdings = self.holdings or [self.allocator.take_row() for _ in range(batch_size)]
        for holding in self.holdings:
            self.allocator.grow(holding, length)
        return torch.tensor([holding.row for holding in self.holdings], device=state.status.device)

    def reset(self) -> None:
        """Give back every row and page."""
        for holding in self.holdings:
            self.allocator.release(holding)
        self.holdings = []
        self._place(None, 0)

    def _advance(self, batch_size: int, q_len: int) -> None:
        """Make room for `q_len` more tokens in every row, and tell the layers where."""
        past, counts = self.get_seq_length(), [layer.get_seq_length() for layer in self.layers]
        if any(count != past for count in counts):
            raise ValueError(f"the forward pass before must have ended, got layers of {counts} tokens: call reset()")
        for holding in self.holdings:
            self.allocator.slide(holding, past)
        rows = self.reserve(batch_size, past + q_len)
        seq_lens = torch.full_like(rows, past + q_len, dtype=torch.int32)
        self._place(self.state.batch(q_len, rows, seq_lens), past)

    def _place(self, batch: Batch | None, length: int) -> None:
        for layer, kind in zip(self.layers, self.state.layer_types):
            layer.place, layer.seq_length = None if batch is None else batch.places[kind], length

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "a PagedCache serves neither beams nor drafts: its rows cannot be reordered or cropped"
        )

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse
