"""Speculative decoding with a small draft model, greedy, so that the output equals plain decoding.

A round of K = 4 over a row with n tokens in the cache and one pending, t:

    draft step k     delta k + 1, q_len 1    reads t d1 d2 d3 one by one, at positions n .. n + 3, and so drafts them
    verify           delta 4, q_len 4        the target reads t d1 d2 d3 at once and says what follows each: d1 d2 x y
    accepted         t d1 d2                 as far as the drafts were right, and x is the next pending token
    draft-extend     ragged, q_len 3         the draft's cache of the accepted tokens, as a prefill would write it

What was rejected lies beyond the row's new length n + 3 in both caches, and the next round writes over it. Only what
the loop hands out is read back: the tokens and how many of them count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.step import PagedCausalLM
from .decoding import Inputs, extend_inputs
from .evidence import CompiledStep
from .requests import Running


class SpeculativeDecoder:
    """Up to K tokens a round and row; `draft` shares the tables of `model` and has pools of its own.

    Attributes:
        accepted: how many drafts were right, over time; `drafted` of them were verified.
    """

    def __init__(
        self, model: PagedCausalLM, draft: PagedCausalLM, backend: str = "inductor", *, batch: int, chunk: int
    ) -> None:
        self.batch, self.chunk, self.lookahead = batch, chunk, model.layout.max_draft_tokens
        self.accepted = self.drafted = 0
        device = model.req_to_token.device
        draft.req_to_token, draft.full_to_swa = model.req_to_token, model.full_to_swa
        self.ragged = Inputs(batch, chunk, device, ragged=True)
        self.single = Inputs(batch, 1, device)
        self.extend_step = CompiledStep("extend", model, backend)
        self.verify_step = CompiledStep("verify", model, backend, seq_len_delta=self.lookahead)
        self.draft_extend_step = CompiledStep("draft-extend", draft, backend)
        self.draft_steps = [
            CompiledStep(f"draft-step-{k}", draft, backend, seq_len_delta=k + 1) for k in range(self.lookahead)
        ]
        self.steps = [self.extend_step, self.verify_step, self.draft_extend_step, *self.draft_steps]
        self.extend_step(*self.ragged.tensors)  # compile, with no live row, which writes nothing
        self.round(*self.single.tensors)

    def extend(self, runs: Sequence[Running], counts: Sequence[int]) -> list[int]:
        inputs = extend_inputs(self.ragged, runs, counts)
        self.draft_extend_step(*inputs)
        return self.extend_step(*inputs)[: len(runs), 0].argmax(-1).tolist()

    def decode(self, runs: Sequence[Running]) -> list[list[int]]:
        inputs = self.single.load(runs, [run.tokens[-1:] for run in runs], [run.cached for run in runs])
        rounds = self.round(*inputs)[: len(runs)].tolist()
        self.accepted += sum(count - 1 for count, *_ in rounds)
        self.drafted += len(runs) * (self.lookahead - 1)
        return [tokens[:count] for count, *tokens in rounds]

    def round(self, token_ids: Tensor, rows: Tensor, seq_lens: Tensor, num_reqs: Tensor) -> Tensor:
        """One round from the pending tokens [B, 1]: int64 [B, 1 + K], a count and as many tokens that count."""
        pending = [token_ids]
        for step in self.draft_steps:
            pending.append(step(pending[-1], rows, seq_lens, num_reqs).argmax(-1))
        tokens = torch.cat(pending[:-1], dim=1)
        following = self.verify_step(tokens, rows, seq_lens, num_reqs).argmax(-1)
        right = (tokens[:, 1:] == following[:, :-1]).cumprod(dim=1)
        count = 1 + right.sum(dim=1, dtype=torch.int32)
        padded = torch.nn.functional.pad(tokens, (0, self.chunk - tokens.shape[1]))
        self.draft_extend_step(padded, rows, seq_lens + count, num_reqs, count)
        return torch.cat((count[:, None], following), dim=1)
