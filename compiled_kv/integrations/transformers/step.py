"""The decode step of any causal model of transformers, for `torch.compile(fullgraph=True)`.

    rows 2 and 0 hold 70 and 3 tokens, the ones to compute included; the third row is padding

    token_ids [[17], [250], [0]]   req_pool_indices [2, 0, 0]   seq_lens [70, 3, 0]   num_reqs [2]   -> [3, 1, vocab]

Each call makes a `Cache` of its own out of the shared pools and one metadata call, and hands it to the model.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from compiled_kv.checks import INTS, Sizes, check_int
from compiled_kv.integrations.transformers.cache import PagedCache
from compiled_kv.integrations.transformers.layer import layers
from compiled_kv.integrations.transformers.model import cache_name, check_model, check_rows
from compiled_kv.models.state import Batch, PagedState, of_last_token


class DecodeStep(PagedState):
    """One step of a model over the pools and tables of a paged cache; every row has its own length.

    Args:
        model: the model that `cache` was made for, in eval mode.
        cache: whose pools and tables it uses; the lengths are those of each call.
        seq_len_delta: tokens that a step adds to `seq_lens`: 0 where they are counted already, K to verify K drafts.

    Raises:
        TypeError, ValueError: as in PagedCache; or the model takes no positions of each row's own.
    """

    def __init__(self, model: Any, cache: PagedCache, *, seq_len_delta: int = 0) -> None:
        nn.Module.__init__(self)  # the pools and tables are the cache's
        if not isinstance(cache, PagedCache):
            raise TypeError(f"cache must be a PagedCache, got {type(cache).__name__}")
        if check_model(model, cache.state.layout)[: len(cache.state.pools)] != cache.state.layer_types:
            raise ValueError(f"model must be the one that cache was made for, got another {type(model).__name__}")
        check_rows(model)
        check_int("seq_len_delta", seq_len_delta, 0)
        self.model, self.seq_len_delta, self._cache_name = model, seq_len_delta, cache_name(model)
        self.layout, self.layer_types, self.pools = cache.state.layout, cache.state.layer_types, cache.state.pools
        for name in ("req_to_token", "full_to_swa", "status"):
            self.register_buffer(name, getattr(cache.state, name), persistent=False)

    def forward(self, token_ids: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, num_reqs: Tensor | None = None,
                q_lens: Tensor | None = None) -> Tensor:  # fmt: skip
        """One step over B rows of Q tokens, all of which have slots in `req_to_token`.

        Args:
            token_ids: int64 [B, Q]; of a ragged row the first `q_lens[i]` count.
            req_pool_indices: int [B], the rows of `req_to_token`.
            seq_lens: int [B], committed tokens.
            num_reqs: int [1], rows in use; the others are padding. None: all.
            q_lens: int [B], the tokens of each row in a ragged step.

        Returns:
            float [B, Q, vocab]; [B, 1, vocab] in a ragged step, of each row's last token.

        Raises:
            TypeError, ValueError: an argument's type, dtype, shape or device is wrong; the text names it.
        """
        sizes = Sizes()
        sizes.check("token_ids", token_ids, INTS, "B", "Q")
        sizes.check("req_pool_indices", req_pool_indices, INTS, "B")
        if q_lens is not None:
            sizes.check("q_lens", q_lens, INTS, "B")
        q_max = token_ids.shape[1]
        batch = self.batch(q_max, req_pool_indices, seq_lens, num_reqs, q_lens, self.seq_len_delta)
        return self.logits(token_ids, batch, ragged=q_lens is not None)

    @torch.no_grad()
    def logits(self, token_ids: Tensor, batch: Batch, ragged: bool = False) -> Tensor:
        """The step over a batch whose places are known, say from `DecodeBuffers`; as `forward` returns it."""
        logits = self.model(
            input_ids=token_ids, position_ids=batch.positions.clamp(min=0), use_cache=True,
            **{self._cache_name: Cache(layers=layers(self, batch))},
        ).logits  # fmt: skip
        return cast(Tensor, of_last_token(logits, batch.counts) if ragged else logits)
