"""How the loop turns pending tokens into new ones: a step a round, captured for a few batch sizes and replayed.

extend   ragged: up to `chunk` pending tokens a row, the next token of each row comes back
decode   one pending token a row
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from compiled_kv.batches import DecodeBatch
from compiled_kv.buffers import DecodeBuffers
from compiled_kv.demo.evidence import Compiled, ServedStep
from compiled_kv.demo.requests import Running
from compiled_kv.models.state import SLIDING, by_row
from compiled_kv.models.step import PagedCausalLM

Run = Callable[[DecodeBuffers, int], Tensor]


class Decoder(Protocol):
    """What the loop needs: `batch` bounds rows, `chunk` an extend; a decode writes up to `lookahead` tokens a row."""

    batch: int
    chunk: int
    lookahead: int
    steps: list[ServedStep]

    def extend(self, runs: Sequence[Running], counts: Sequence[int]) -> list[int]:
        """Compute the next `counts` pending tokens of each run; the token that follows each."""
        ...

    def decode(self, runs: Sequence[Running]) -> list[list[int]]:
        """The tokens that follow the one pending token of each run."""
        ...


def buckets(batch: int) -> list[int]:
    """Powers of two up to `batch`, and `batch`. 1 only where it is all: torch would compile a graph of its own for
    it."""
    return sorted({min(1 << i, batch) for i in range(1, batch.bit_length() + 1)})


def buffers_for(
    model: PagedCausalLM, batch: int, q_len: int = 1, *, delta: int = 0, ragged: bool = False
) -> DecodeBuffers:
    """Buffers over the tables of `model`."""
    return DecodeBuffers(
        model.layout, model.req_to_token, max_batch_size=batch, q_len=q_len, ragged=ragged, seq_len_delta=delta,
        full_to_swa=model.full_to_swa if SLIDING in model.layer_types else None,
    )  # fmt: skip


def extension(model: PagedCausalLM) -> Run:
    """A ragged step: the token that follows the last loaded one of each row, int64 [B]."""

    def extend(buffers: DecodeBuffers, batch_size: int) -> Tensor:
        meta = buffers.metadata(batch_size)
        tokens = by_row(buffers.token_ids, meta.cu_seqlens_q, buffers.q_len).clamp(min=0)
        return model.logits(tokens, model.placed(meta, buffers.q_len), ragged=True)[:, 0].argmax(-1)

    return extend


def plain_step(model: PagedCausalLM) -> Run:
    """A token a row: the one that follows it, int64 [B, 1]."""

    def decode(buffers: DecodeBuffers, batch_size: int) -> Tensor:
        meta = buffers.metadata(batch_size)
        return model.logits(buffers.token_ids[:batch_size, None], model.placed(meta, 1)).argmax(-1)

    return decode


def extend_batch(runs: Sequence[Running], counts: Sequence[int]) -> DecodeBatch:
    """The next `counts` pending tokens of each run; its length counts them."""
    ends = [run.cached + count for run, count in zip(runs, counts, strict=True)]
    tokens = [token for run, end in zip(runs, ends, strict=True) for token in run.tokens[run.cached : end]]
    return batch_of(runs, ends, tokens)._replace(q_lens=counts)


def batch_of(runs: Sequence[Running], seq_lens: Sequence[int], token_ids: Sequence[int]) -> DecodeBatch:
    """`runs` as the buffers take them."""
    holdings = [run.holding for run in runs]
    return DecodeBatch(
        rows=[holding.row for holding in holdings], seq_lens=seq_lens, token_ids=token_ids,
        generations=[holding.generation for holding in holdings],
    )  # fmt: skip


class PlainDecoder:
    """One token a round and row."""

    lookahead = 1

    def __init__(self, model: PagedCausalLM, backend: str | None = "inductor", *, batch: int, chunk: int) -> None:
        self.batch, self.chunk = batch, chunk
        ragged, single = buffers_for(model, batch, chunk, ragged=True), buffers_for(model, batch)
        extend, decode = Compiled("extend", extension(model), backend), Compiled("decode", plain_step(model), backend)
        self.steps = [
            ServedStep("extend", extend, ragged, buckets(batch), {extend: 1}),
            ServedStep("decode", decode, single, buckets(batch), {decode: 1}),
        ]

    def extend(self, runs: Sequence[Running], counts: Sequence[int]) -> list[int]:
        return self.steps[0](extend_batch(runs, counts))[: len(runs)].tolist()

    def decode(self, runs: Sequence[Running]) -> list[list[int]]:
        batch = batch_of(runs, [run.cached + 1 for run in runs], [run.tokens[-1] for run in runs])
        return self.steps[1](batch)[: len(runs)].tolist()
