"""Speculative decoding with a small draft model, greedy, so that the output equals plain decoding.

A round of K = 4 over a row with n tokens in the cache and one pending, t:

    draft step k     delta k + 1, q_len 1    reads t d1 d2 d3 one by one, at positions n .. n + 3, and so drafts them
    verify           delta 4, q_len 4        the target reads t d1 d2 d3 at once and says what follows each: d1 d2 x y
    accepted         t d1 d2                 as far as the drafts were right, and x is the next pending token
    draft-extend     ragged, q_len 3         the draft's cache of the accepted tokens, as a prefill would write it

What was rejected lies beyond the row's new length n + 3 in both caches, and the next round writes over it. A whole
round is one step: its stages share a set of buffers, and on CUDA it is one captured graph. Only what the loop hands out
is read back: the tokens and how many of them count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from compiled_kv.buffers import DecodeBuffers
from compiled_kv.demo.decoding import batch_of, buckets, buffers_for, extend_batch, extension
from compiled_kv.demo.evidence import Compiled, ServedStep
from compiled_kv.demo.requests import Running
from compiled_kv.models.step import PagedCausalLM


def draft_step(draft: PagedCausalLM) -> Callable[..., Tensor]:
    """Stage k drafts the token that follows `token_ids` [B, 1]: int64 [B, 1]."""

    def run(buffers: DecodeBuffers, batch_size: int, token_ids: Tensor, number: int) -> Tensor:
        # `number` is k + 2: an int 1 would be a constant to torch, and a graph of its own.
        meta = buffers.metadata(batch_size, number - 1, q_len=1)
        return draft.logits(token_ids, draft.placed(meta, 1)).argmax(-1)

    return run


def verification(model: PagedCausalLM) -> Callable[..., tuple[Tensor, Tensor]]:
    """What follows each of K tokens of a row, int64 [B, K], and how many of those count, int64 [B]."""

    def verify(buffers: DecodeBuffers, batch_size: int, *pending: Tensor) -> tuple[Tensor, Tensor]:
        tokens = torch.cat(pending, dim=1)
        batch = model.placed(buffers.metadata(batch_size), buffers.q_len)
        following = model.logits(tokens, batch).argmax(-1)
        right = (tokens[:, 1:] == following[:, :-1]).cumprod(dim=1)
        return following, 1 + right.sum(dim=1)

    return verify


def draft_extension(draft: PagedCausalLM) -> Callable[..., None]:
    """The draft's cache of the first `count` tokens of each row, as a prefill would write it."""

    def extend(buffers: DecodeBuffers, batch_size: int, count: Tensor, *pending: Tensor) -> None:
        after = buffers.seq_lens[:batch_size] + count
        meta = buffers.metadata(batch_size, 0, q_len=count, seq_lens=after)
        draft.logits(torch.cat(pending, dim=1), draft.placed(meta, buffers.q_len), ragged=True)

    return extend


class SpeculativeDecoder:
    """Up to K tokens a round and row; `draft` has pools of its own and lives by the tables of `model`.

    Attributes:
        accepted: how many drafts were right, over time; `drafted` of them were verified.
    """

    def __init__(
        self, model: PagedCausalLM, draft: PagedCausalLM, backend: str | None = "inductor", *, batch: int, chunk: int
    ) -> None:
        self.batch, self.chunk, self.lookahead = batch, chunk, model.layout.max_draft_tokens
        self.accepted = self.drafted = 0
        self.target_extend = Compiled("extend", extension(model), backend)
        self.prompt_extend = Compiled("draft-prompt", extension(draft), backend)
        self.draft_step = Compiled("draft-step", draft_step(draft), backend)
        self.verify = Compiled("verify", verification(model), backend)
        self.draft_extend = Compiled("draft-extend", draft_extension(draft), backend)
        ragged = buffers_for(model, batch, chunk, ragged=True)
        drafts = buffers_for(model, batch, self.lookahead, delta=self.lookahead)
        both = {self.target_extend: 1, self.prompt_extend: 1}
        stages = {self.draft_step: self.lookahead, self.verify: 1, self.draft_extend: 1}
        self.steps = [
            ServedStep("extend", self.extend_both, ragged, buckets(batch), both),
            ServedStep("round", self.round, drafts, buckets(batch), stages),
        ]

    def extend(self, runs: Sequence[Running], counts: Sequence[int]) -> list[int]:
        return self.steps[0](extend_batch(runs, counts))[: len(runs)].tolist()

    def decode(self, runs: Sequence[Running]) -> list[list[int]]:
        batch = batch_of(runs, [run.cached for run in runs], [run.tokens[-1] for run in runs])
        rounds = self.steps[1](batch)[: len(runs)].tolist()
        self.accepted += sum(count - 1 for count, *_ in rounds)
        self.drafted += len(runs) * (self.lookahead - 1)
        return [tokens[:count] for count, *tokens in rounds]

    def extend_both(self, buffers: DecodeBuffers, batch_size: int) -> Tensor:
        """The prompt's next chunk into both caches; what the target says next, int64 [B]."""
        self.prompt_extend(buffers, batch_size)
        return self.target_extend(buffers, batch_size)

    def round(self, buffers: DecodeBuffers, batch_size: int) -> Tensor:
        """One round from the pending token of each row: int64 [B, 1 + K], a count and as many tokens that count."""
        pending = [buffers.token_ids[:batch_size, None].clone()]
        for k in range(self.lookahead):
            pending.append(self.draft_step(buffers, batch_size, pending[-1], k + 2))
        following, count = self.verify(buffers, batch_size, *pending[:-1])
        self.draft_extend(buffers, batch_size, count, *pending[:-1])
        return torch.cat((count[:, None], following), dim=1)
