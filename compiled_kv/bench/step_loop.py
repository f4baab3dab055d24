"""A decode loop of Llama over a paged cache, whose metadata is made in one of four ways.

    host read            the host waits for the longest length, gathers tables of that width, replays a captured step
    device, eager        decode_metadata launched by the host, then the captured step
    in the captured step the whole step is one graph
    frozen               the captured step alone, its metadata made once: what metadata that costs nothing would give

Plain: one token a step. Speculative: a small draft model proposes in DRAFTS - 1 short steps, the model verifies DRAFTS
tokens at once, and the device decides how many stand (a fixed random sequence, 1 to DRAFTS of them).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

import compiled_kv as ckv
from compiled_kv.bench import baselines_torch
from compiled_kv.bench.llama import CONFIGS, Llama, Weights

PAGE_SIZE = 64
DRAFTS = 4
CONTEXT = 1 << 17  # the bound that Llama 3 is served with; what a request may grow to
WAYS = ("host read", "device, eager", "in the captured step", "frozen")
Piece = Callable[..., Any]


@cache
def weights(name: str, device: torch.device) -> Weights:
    """Made once for all batches."""
    return Weights(CONFIGS[name], device, torch.bfloat16 if device.type == "cuda" else torch.float32)


class Loop:
    """One batch of requests, its models, and the state that lives on the device between steps."""

    def __init__(
        self, model: str, batch: int, length: int, steps: int, speculative: bool, device: torch.device
    ) -> None:
        self.batch, self.length, self.steps, self.speculative = batch, length, steps, speculative
        self.layout = ckv.KVLayout(PAGE_SIZE, CONTEXT, max_draft_tokens=DRAFTS)
        pages = self.layout.num_pages(length + DRAFTS * (steps + 4))
        page = 1 + torch.randperm(batch * pages, device=device).int().view(batch, pages)
        offset = torch.arange(PAGE_SIZE, device=device, dtype=torch.int32)
        width = self.layout.max_num_pages * PAGE_SIZE
        self.req_to_token = torch.zeros(batch, width, dtype=torch.int32, device=device)
        self.req_to_token[:, : pages * PAGE_SIZE] = (page[:, :, None] * PAGE_SIZE + offset).flatten(1)
        self.rows = torch.arange(batch, device=device)
        slots = (batch * pages + 1) * PAGE_SIZE
        draft = "tiny-draft" if model == "tiny" else "draft"
        self.model = Llama(weights(model, device), slots, PAGE_SIZE)
        self.draft = Llama(weights(draft, device), slots, PAGE_SIZE) if speculative else None
        self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(batch, DRAFTS, dtype=torch.int64, device=device)
        self.accepted = 1 + torch.randint(0, DRAFTS, (512, batch), dtype=torch.int32, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)
        # One set of metadata a forward pass: its queries a row, and the tokens it adds to the committed ones.
        self.passes = [(1, k + 1) for k in range(DRAFTS - 1)] + [(DRAFTS, DRAFTS)] if speculative else [(1, 0)]
        self.metas = [self._new_metadata(queries) for queries, _ in self.passes]
        self.reset()

    def _new_metadata(self, queries: int) -> ckv.DecodeMetadata:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.rows.device)

        batch, slots = self.batch, zeros(self.batch * queries, dtype=torch.int64)
        table = zeros(batch, self.layout.max_num_pages)
        return ckv.DecodeMetadata(zeros(batch), zeros(batch + 1), zeros(batch + 1), table, slot_mapping=slots)

    def reset(self) -> None:
        """Back to the start of a run: its lengths, its first tokens and its sequence of accepted tokens."""
        self.seq_lens.fill_(self.length)
        self.tokens.copy_(torch.arange(self.tokens.numel(), device=self.rows.device).view_as(self.tokens))
        self.count.zero_()

    def freeze(self, steps: int) -> None:
        """Reset, and make all metadata once: of the mean lengths in a run of `steps`, so that as many keys are read."""
        self.reset()
        added = self.accepted[:steps] if self.speculative else torch.ones_like(self.accepted[:steps])
        self.seq_lens += (added.cumsum(0) - added).float().mean(0).round().int()
        for index in range(len(self.passes)):
            self.on_device(index)
        self.reset()

    @property
    def tokens_a_step(self) -> float:
        """Output tokens of a request and step, over the steps of a run."""
        return float(self.accepted[: self.steps].float().mean()) if self.speculative else 1.0

    def on_device(self, index: int) -> None:
        queries, delta = self.passes[index]
        ckv.decode_metadata(
            self.req_to_token, self.rows, self.seq_lens, layout=self.layout, seq_len_delta=delta, q_len=queries,
            out=self.metas[index], tail="keep",
        )  # fmt: skip

    def on_host(self, index: int, longest: int) -> None:
        """The gather, as wide as the longest request."""
        (queries, delta), meta = self.passes[index], self.metas[index]
        width = self.layout.num_pages(longest + delta)
        lengths = self.seq_lens + delta if delta else self.seq_lens
        if queries == 1:
            baselines_torch.gather(self.req_to_token, self.rows, lengths, None, meta, PAGE_SIZE, width)
            return
        single = meta._replace(slot_mapping=torch.empty_like(self.rows))
        baselines_torch.gather(self.req_to_token, self.rows, lengths, None, single, PAGE_SIZE, width)
        meta.cu_seqlens_q.mul_(queries)
        positions = (lengths[:, None] - queries + torch.arange(queries, device=lengths.device)).long()
        assert meta.slot_mapping is not None
        meta.slot_mapping.copy_(self.req_to_token[self.rows[:, None], positions].flatten())

    def forward(self, index: int) -> None:
        """One pass over its metadata; the last one of a step also commits."""
        meta = self.metas[index]
        if not self.speculative:
            self.tokens[:, :1] = self.model.step(self.tokens[:, :1], meta)
            self.seq_lens += 1
        elif index < len(self.passes) - 1:
            assert self.draft is not None
            self.tokens[:, index + 1] = self.draft.step(self.tokens[:, index, None], meta)[:, 0]
        else:
            found = self.model.step(self.tokens, meta)
            accepted = self.accepted[self.count % len(self.accepted)][0]
            self.tokens[:, 0] = found.gather(1, accepted[:, None].long() - 1)[:, 0]
            self.seq_lens += accepted
            self.count += 1

    def longest(self) -> int:
        """The host read."""
        return int(self.seq_lens.max().item())

    def ways(self) -> dict[str, Piece]:
        """One step in each way; everything that can be captured is."""
        passes = range(len(self.passes))
        made = [partial(self.on_device, i) for i in passes]
        computed = [partial(self.forward, i) for i in passes]
        replays = [self._captured(piece) for piece in computed]

        def host_read(known: int | None = None) -> None:
            longest = self.longest() if known is None else known
            for i in passes:
                self.on_host(i, longest)
                replays[i]()

        both = [piece for pair in zip(made, computed) for piece in pair]
        steps = (
            host_read,
            _in_order(*(piece for pair in zip(made, replays) for piece in pair)),
            self._captured(_in_order(*both)),
            self._captured(_in_order(*computed)),
        )
        return dict(zip(WAYS, steps))

    def _captured(self, piece: Piece) -> Piece:
        if not self.rows.is_cuda:
            return piece
        self.freeze(1)
        stream = _capture_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # as capture does, so that nothing is set up while it records
            piece()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            piece()
        torch.cuda.synchronize()
        return graph.replay


@cache
def _capture_stream() -> torch.cuda.Stream:
    """One for all graphs: cuBLAS keeps a workspace for each stream."""
    return torch.cuda.Stream()


def _in_order(*pieces: Piece) -> Piece:
    def run_all() -> None:
        for piece in pieces:
            piece()

    return run_all
