"""How the loop turns pending tokens into new ones: one compiled step a round, whose inputs are allocated once.

extend   ragged: up to `chunk` pending tokens a row, the next token of each row comes back
decode   one pending token a row
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..models.step import PagedCausalLM
from .evidence import CompiledStep
from .requests import Running


class Decoder(Protocol):
    """What the loop needs: `batch` bounds rows, `chunk` an extend; a decode writes up to `lookahead` tokens a row."""

    batch: int
    chunk: int
    lookahead: int
    steps: list[CompiledStep]

    def extend(self, runs: Sequence[Running], counts: Sequence[int]) -> list[int]:
        """Compute the next `counts` pending tokens of each run; the token that follows each."""
        ...

    def decode(self, runs: Sequence[Running]) -> list[list[int]]:
        """The tokens that follow the one pending token of each run."""
        ...


class Inputs:
    """The inputs of one step on the device, as `PagedCausalLM.forward` takes them.

    token_ids int64 [B, Q], rows int64 [B], seq_lens int32 [B], num_reqs int32 [1]; q_lens int32 [B] in a ragged step.
    Only live rows are written; the rows beyond them keep what the last round left.
    """

    def __init__(self, batch: int, q_max: int, device: torch.device, ragged: bool = False) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.token_ids, self.rows = zeros(batch, q_max, dtype=torch.int64), zeros(batch, dtype=torch.int64)
        self.seq_lens, self.num_reqs = zeros(batch), zeros(1)
        self.q_lens = zeros(batch) if ragged else None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """In the order of `PagedCausalLM.forward`."""
        fixed = (self.token_ids, self.rows, self.seq_lens, self.num_reqs)
        return fixed if self.q_lens is None else (*fixed, self.q_lens)

    def load(
        self, runs: Sequence[Running], tokens: Sequence[Sequence[int]], seq_lens: Sequence[int]
    ) -> tuple[Tensor, ...]:
        """Fill in the live rows; `tensors`."""
        width, live = self.token_ids.shape[1], len(runs)
        _fill(self.token_ids, [[*row, *[0] * (width - len(row))] for row in tokens])
        _fill(self.rows, [run.holding.row for run in runs])
        _fill(self.seq_lens, seq_lens)
        if self.q_lens is not None:
            _fill(self.q_lens, [len(row) for row in tokens])
        self.num_reqs.fill_(live)
        return self.tensors


def extend_inputs(inputs: Inputs, runs: Sequence[Running], counts: Sequence[int]) -> tuple[Tensor, ...]:
    """`inputs` filled in with the next `counts` pending tokens of each run."""
    ends = [run.cached + count for run, count in zip(runs, counts, strict=True)]
    tokens = [run.tokens[run.cached : end] for run, end in zip(runs, ends, strict=True)]
    return inputs.load(runs, tokens, ends)


def _fill(buffer: Tensor, values: Sequence[Any]) -> None:
    buffer[: len(values)].copy_(torch.tensor(values, dtype=buffer.dtype))


class PlainDecoder:
    """One token a round and row."""

    lookahead = 1

    def __init__(self, model: PagedCausalLM, backend: str = "inductor", *, batch: int, chunk: int) -> None:
        self.batch, self.chunk, device = batch, chunk, model.req_to_token.device
        self.ragged, self.single = Inputs(batch, chunk, device, ragged=True), Inputs(batch, 1, device)
        self.steps = [CompiledStep("extend", model, backend), CompiledStep("decode", model, backend)]
        for step, inputs in zip(self.steps, (self.ragged, self.single), strict=True):
            step(*inputs.tensors)  # compiles with no live row, which writes nothing

    def extend(self, runs: Sequence[Running], counts: Sequence[int]) -> list[int]:
        logits = self.steps[0](*extend_inputs(self.ragged, runs, counts))
        return logits[: len(runs), 0].argmax(-1).tolist()

    def decode(self, runs: Sequence[Running]) -> list[list[int]]:
        inputs = self.single.load(runs, [run.tokens[-1:] for run in runs], [run.cached + 1 for run in runs])
        return self.steps[1](*inputs)[: len(runs)].argmax(-1).tolist()
