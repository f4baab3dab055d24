"""Positions and lengths of a step, in place, as vLLM's V2 runner prepares its inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kv.checks import INT32, INT64, INTS, Sizes, check_distinct, check_int
from compiled_kv.integrations.layouts import row_of_token
from compiled_kv.rows_cpu import gather, iota


def prepare_pos_seq_lens(
    idx_mapping: Tensor, query_start_loc: Tensor, num_computed_tokens: Tensor, pos: Tensor, seq_lens: Tensor
) -> None:
    """Write the position of each token of the batch, and the tokens of each request, its new ones counted.

    Plain torch, two kernels where the step around it is compiled. A request outside [0, R), -1 for one, is padding: it
    has length 0, and its tokens' entries of `pos` keep their values, as do those behind the last token.

    Args:
        idx_mapping: int [B], the row of each request.
        query_start_loc: int [B + 1] or longer, non-decreasing from 0: new tokens of each request.
        num_computed_tokens: int [R], tokens of each row that are in the cache; a negative count is 0.
        pos: int64 [N].
        seq_lens: int32 [M], M >= B, every entry is written; those from B on become 0.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device or overlap is wrong; the text names it.
    """
    sizes = Sizes()
    sizes.check("idx_mapping", idx_mapping, INTS, "B")
    batch = sizes.named["B"]
    bounds = first_bounds(sizes, query_start_loc, batch)
    sizes.check("num_computed_tokens", num_computed_tokens, INTS, "R")
    sizes.check_output("pos", pos, INT64, "N")
    sizes.check_output("seq_lens", seq_lens, INT32, "M")
    check_int("the length of seq_lens", seq_lens.shape[0], batch)
    inputs = {"idx_mapping": idx_mapping, "query_start_loc": bounds, "num_computed_tokens": num_computed_tokens}
    check_distinct({"pos": pos, "seq_lens": seq_lens}, inputs)

    def computed(request: Tensor) -> tuple[Tensor, Tensor]:
        row = gather(idx_mapping, request, request < batch)
        return gather(num_computed_tokens, row, row >= 0).clamp(min=0), (row >= 0) & (row < sizes.named["R"])

    request = iota(seq_lens.shape[0], seq_lens)
    done, live = computed(request)
    fresh = gather(bounds, request + 1, live) - gather(bounds, request, live)
    seq_lens.copy_(torch.where(live, done + fresh.clamp(min=0), 0).int())
    token = iota(pos.shape[0], pos)
    request = row_of_token(bounds, token)
    done, live = computed(request)
    pos.copy_(torch.where(live, done + token - gather(bounds, request, live), pos))


def first_bounds(sizes: Sizes, query_start_loc: Tensor, batch: int) -> Tensor:
    """The batch's own B + 1 entries of a `query_start_loc` that may be longer."""
    sizes.check("query_start_loc", query_start_loc, INTS, "bounds")
    check_int("the length of query_start_loc", query_start_loc.shape[0], batch + 1)
    return query_start_loc[: batch + 1]
