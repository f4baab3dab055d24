"""Positions and lengths of a step, in place, as vLLM's V2 runner prepares its inputs."""

from __future__ import annotations

from torch import Tensor

from compiled_kv.checks import INT32, INT64, INTS, Sizes, check_int
from compiled_kv.integrations.layouts import worded
from compiled_kv.peers.token_positions import place_tokens_


@worded(
    held="num_computed_tokens", positions="pos", cu_seqlens_q="query_start_loc", req_pool_indices="idx_mapping",
)  # fmt: skip
def prepare_pos_seq_lens(
    idx_mapping: Tensor, query_start_loc: Tensor, num_computed_tokens: Tensor, pos: Tensor, seq_lens: Tensor
) -> None:
    """Write the position of each token of the batch, and the tokens of each request, its new ones counted.

    A request outside [0, R), -1 for one, is padding: it has length 0, and its tokens' entries of `pos` keep their
    values, as do those behind the last token.

    Args:
        idx_mapping: int [B], the row of each request.
        query_start_loc: int [B + 1] or longer, non-decreasing from 0: new tokens of each request.
        num_computed_tokens: int [R], tokens of each row that are in the cache; a negative count is 0.
        pos: int64 [N].
        seq_lens: int32 [M], M >= B, every entry is written; those from B on become 0.

    Raises:
        TypeError, ValueError: as `compiled_kv.peers.token_positions.place_tokens_`.
    """
    sizes = Sizes()
    sizes.check("idx_mapping", idx_mapping, INTS, "B")
    bounds = first_bounds(sizes, query_start_loc, idx_mapping.shape[0])
    sizes.check("pos", pos, INT64, "N")
    sizes.check("seq_lens", seq_lens, INT32, "M")
    place_tokens_(pos, num_computed_tokens, bounds, req_pool_indices=idx_mapping, seq_lens=seq_lens)


def first_bounds(sizes: Sizes, query_start_loc: Tensor, batch: int) -> Tensor:
    """The batch's own B + 1 entries of a `query_start_loc` that may be longer."""
    sizes.check("query_start_loc", query_start_loc, INTS, "bounds")
    check_int("the length of query_start_loc", query_start_loc.shape[0], batch + 1)
    return query_start_loc[: batch + 1]
