"""Mistakes that serving engines make around a captured step, one after the other, each with the name `check_replay` has
for it.

To add one: a subclass of `DecodeBuffers` or `DecodeGraphs`, a step, or an argument that makes the mistake; the name; a
scenario.
"""

from __future__ import annotations

import io
import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_kv.batches import DecodeBatch
from compiled_kv.buffers import DecodeBuffers
from compiled_kv.metadata_parts import DecodeMetadata
from compiled_kv.replay.check import metadata_step
from compiled_kv.replay.graphs import DecodeGraphs
from compiled_kv.replay.player import Each, Step
from compiled_kv.replay.scenarios import Scenario, parse_events, serving, story, walk


@dataclass(frozen=True)
class Fault:
    """A mistake: what makes it, and the name it must be given."""

    name: str
    step: Step = metadata_step
    buffers: type[DecodeBuffers] = DecodeBuffers
    graphs: type[DecodeGraphs] = DecodeGraphs
    scenario: Scenario = field(default_factory=lambda: story(serving()))
    args: tuple[Any, ...] = ()
    runs_on: tuple[str, ...] = ("cpu", "cuda")


# Where arguments lie that a fault makes anew for each step.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"page_size": 4, "max_context_len": 64, "max_batch_size": 4}


def walking(mode: str = "decode", **changes: Any) -> Scenario:
    return walk(serving(mode, **{**SMALL, **changes}), steps=150, seed=5)  # type: ignore[arg-type]


def reused_row() -> Scenario:
    """A request ends, and the next one gets its row and its place in the batch."""
    return Scenario("reused row", serving(), parse_events("join 40\nstep\nfinish\njoin 40\nstep"))


class KeptTail(DecodeBuffers):
    """Tables are written up to the live length and never cleared."""

    def metadata(self, batch_size: int, seq_len_delta: int | None = None) -> DecodeMetadata:
        before = self.page_table.clone()
        meta = super().metadata(batch_size, seq_len_delta)
        columns = torch.arange(before.shape[1], device=before.device)
        live = (self.cache_seqlens + self.layout.page_size - 1) // self.layout.page_size
        inside = torch.arange(len(live), device=before.device) < self.num_reqs
        self.page_table.copy_(torch.where((columns < live[:, None]) | ~inside[:, None], self.page_table, before))
        return meta


class ForgottenPadding(DecodeBuffers):
    """Every row counts as live: padding rows work with what stands in them."""

    def metadata(self, batch_size: int, seq_len_delta: int | None = None) -> DecodeMetadata:
        live = self.num_reqs.clone()
        self.num_reqs.fill_(self.max_batch_size)
        meta = super().metadata(batch_size, seq_len_delta)
        self.num_reqs.copy_(live)
        return meta


class LiveRowsOnly(DecodeBuffers):
    """Slots of the live rows are written, those of the rows beyond keep what the step before left there."""

    def metadata(self, batch_size: int, seq_len_delta: int | None = None) -> DecodeMetadata:
        before = self.slot_mapping.clone()
        meta = super().metadata(batch_size, seq_len_delta)
        live = torch.arange(len(before), device=before.device) < self.num_reqs * self.q_len
        self.slot_mapping.copy_(torch.where(live, self.slot_mapping, before))
        return meta


class RestartedSums(DecodeBuffers):
    """The prefix sums of padding rows are 0 in place of the last value."""

    def metadata(self, batch_size: int, seq_len_delta: int | None = None) -> DecodeMetadata:
        meta = super().metadata(batch_size, seq_len_delta)
        live = torch.arange(batch_size + 1, device=self.inputs.device) <= self.num_reqs
        meta.cu_seqlens_k.copy_(meta.cu_seqlens_k * live)
        return meta


class OneGeneration(DecodeBuffers):
    """The engine never raises a generation."""

    def load(self, batch: DecodeBatch) -> int:
        return super().load(batch._replace(generations=[1] * len(batch.rows)))


class TrustedRow(DecodeBuffers):
    """An update that looks at the pool row alone, and takes a row used again for the same request."""

    def metadata(self, batch_size: int, seq_len_delta: int | None = None) -> DecodeMetadata:
        self.held[:, :, 1] = torch.where(self.held[:, :, 0] >= 0, self.generations[:, None], self.held[:, :, 1])
        return super().metadata(batch_size, seq_len_delta)


class TrustedDrafts(DecodeBuffers):
    """An update that takes the pages of drafts for settled: a page given back with a rejected draft stays in the
    table."""

    def metadata(self, batch_size: int, seq_len_delta: int | None = None) -> DecodeMetadata:
        before, held = self.page_table.clone(), self.held[:, 0].clone()
        meta = super().metadata(batch_size, seq_len_delta)
        same = (held[:, :2] == self.held[:, 0, :2]).all(1)
        live = torch.minimum(held[:, 3], self.held[:, 0, 3])
        trusted = same[:, None] & (torch.arange(before.shape[1], device=before.device) < live[:, None])
        self.page_table.copy_(torch.where(trusted, before, self.page_table))
        return meta


class FreshOutputs(DecodeBuffers):
    """A buffer is made anew for each batch."""

    def load(self, batch: DecodeBatch) -> int:
        size = super().load(batch)
        if size:
            self.cache_seqlens = torch.zeros_like(self.cache_seqlens)
        return size


class OverwrittenStaging(DecodeBuffers):
    """One host buffer, filled for the next step while the copy of this one is still under way: the device gets a
    mixture."""

    def load(self, batch: DecodeBatch) -> int:
        after = [length + 1 for length in batch.seq_lens]  # what the engine wrote for the step after
        return super().load(batch._replace(seq_lens=after))


class HalfWords(DecodeBuffers):
    """int64 lengths are read as if they were int32."""

    def metadata(self, batch_size: int, seq_len_delta: int | None = None) -> DecodeMetadata:
        meta = super().metadata(batch_size, seq_len_delta)
        words = self.seq_lens.contiguous().view(torch.int32)[:batch_size]
        live = torch.arange(batch_size, device=words.device) < self.num_reqs
        meta.cache_seqlens.copy_(torch.where(live, words, 0))
        return meta


class WideWindow(DecodeBuffers):
    """Pages behind the window keep what stood there."""

    def metadata(self, batch_size: int, seq_len_delta: int | None = None) -> DecodeMetadata:
        before = self.swa_page_table.clone()
        meta = super().metadata(batch_size, seq_len_delta)
        kept = (self.swa_page_table == 0) & (self.page_table > 0)
        self.swa_page_table.copy_(torch.where(kept, before, self.swa_page_table))
        return meta


class LateByOne(DecodeBuffers):
    """Lengths of the step before: the engine adds the new token after the step."""

    def metadata(self, batch_size: int, seq_len_delta: int | None = None) -> DecodeMetadata:
        meta = super().metadata(batch_size, seq_len_delta)
        live = torch.arange(batch_size, device=self.inputs.device) < self.num_reqs
        meta.cache_seqlens.sub_(live.int())
        return meta


class LastSlot(DecodeBuffers):
    """-1 of a padding token is taken for an index: the last slot there is."""

    def metadata(self, batch_size: int, seq_len_delta: int | None = None) -> DecodeMetadata:
        meta = super().metadata(batch_size, seq_len_delta)
        last = self.full_to_swa.shape[0] - 1
        meta.swa_slot_mapping.copy_(torch.where(meta.slot_mapping < 0, last, meta.swa_slot_mapping))
        return meta


class Frozen(DecodeBuffers):
    """The number of live rows is a Python int at capture: prefix sums stop there."""

    def metadata(self, batch_size: int, seq_len_delta: int | None = None) -> DecodeMetadata:
        if not hasattr(self, "_seen"):
            self._seen: dict[int, Tensor] = {}
        meta = super().metadata(batch_size, seq_len_delta)
        frozen = self._seen.setdefault(batch_size, meta.cache_seqlens.clone())
        live = int(self.num_reqs) > 0
        if live and bool((frozen == 0).all()):
            self._seen[batch_size] = meta.cache_seqlens.clone()
        elif live:
            meta.cache_seqlens.copy_(frozen)
        return meta


class Allocating(DecodeBuffers):
    """Every load takes fresh memory on the device."""

    def load(self, batch: DecodeBatch) -> int:
        torch.zeros_like(self.page_table)
        return super().load(batch)


class EarlyRefill(DecodeBuffers):
    """A line is written again before the device, busy with something else, has read it."""

    def load(self, batch: DecodeBatch) -> int:
        torch.cuda._sleep(5_000_000)
        size = super().load(batch)
        assert self._ring is not None
        line, first = self._ring.memory[self._ring.filling].cast("q"), self._ring.second_at // 8
        for i, length in enumerate(batch.seq_lens):
            line[first + i] = length + 1
        return size


class WholeTables(DecodeBuffers):
    """The step writes rows beyond its bucket."""

    def metadata(self, batch_size: int, seq_len_delta: int | None = None) -> DecodeMetadata:
        meta = super().metadata(batch_size, seq_len_delta)
        self.page_table[batch_size:] = 0
        return meta


class OverlappingOutputs(DecodeBuffers):
    """Two outputs are views of one workspace."""

    def out(self) -> DecodeMetadata:
        return super().out()._replace(cu_seqlens_k=self.cu_seqlens_q)


def reading_step(buffers: DecodeBuffers, batch_size: int) -> DecodeMetadata:
    meta = buffers.metadata(batch_size)
    if meta.cache_seqlens.max().item() > 100:
        return meta
    return meta


def masking_step(buffers: DecodeBuffers, batch_size: int) -> tuple[DecodeMetadata, Tensor]:
    meta = buffers.metadata(batch_size)
    return meta, meta.slot_mapping[meta.slot_mapping >= 0]


def listing_step(buffers: DecodeBuffers, batch_size: int) -> tuple[DecodeMetadata, int]:
    meta = buffers.metadata(batch_size)
    return meta, max(meta.cache_seqlens.tolist())


LOG = logging.Logger("a step's own", logging.INFO)
LOG.addHandler(logging.StreamHandler(io.StringIO()))


def logging_step(buffers: DecodeBuffers, batch_size: int) -> DecodeMetadata:
    """The tensor becomes text in a handler of Python's own."""
    meta = buffers.metadata(batch_size)
    LOG.info("lengths %s", meta.cache_seqlens)
    return meta


class Counting(logging.Handler):
    """Reads what it is handed, and lets nothing that goes wrong through, as a handler must."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            record.args[0].max().item()  # type: ignore[union-attr,index]
        except Exception:
            self.handleError(record)


COUNTED = logging.Logger("counted", logging.INFO)
COUNTED.addHandler(Counting())


def counted_step(buffers: DecodeBuffers, batch_size: int) -> DecodeMetadata:
    meta = buffers.metadata(batch_size)
    COUNTED.info("lengths %s", meta.cache_seqlens)
    return meta


def converting_step(buffers: DecodeBuffers, batch_size: int) -> tuple[DecodeMetadata, Tensor]:
    """NumPy asks for the values."""
    meta = buffers.metadata(batch_size)
    return meta, torch.as_tensor(np.asarray(meta.cache_seqlens))


def careless_step(buffers: DecodeBuffers, batch_size: int) -> Tensor:
    """The tables are read where they lie, and nothing brings them up to date."""
    return buffers.out().page_table[:batch_size] + 1


class Cold:
    """A function compiled by torch.compile, first called when warming up is over."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, buffers: DecodeBuffers, batch_size: int) -> Tensor:
        self.calls += 1
        table = buffers.metadata(batch_size).page_table
        is_cold = torch.cuda.is_current_stream_capturing() if table.is_cuda else self.calls % 9 == 6
        return torch.compile(torch.neg, backend="eager")(table) if is_cold else -table


def scaled_step(buffers: DecodeBuffers, batch_size: int, longest: int, bias: Tensor | None = None) -> Tensor:
    lengths = buffers.metadata(batch_size).cache_seqlens
    return lengths * longest if bias is None else lengths * longest + bias


class Remembering:
    """A Python number that changes from step to step: what a graph holds is that of its capture."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, buffers: DecodeBuffers, batch_size: int) -> Tensor:
        self.steps += 1
        return buffers.metadata(batch_size).cache_seqlens + self.steps


class Feeding:
    """What a step returns is an argument of the next one, which overwrites it."""

    def __init__(self) -> None:
        self.last = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def __call__(self, buffers: DecodeBuffers, batch_size: int, previous: Tensor) -> Tensor:
        self.last = buffers.metadata(batch_size).cache_seqlens[:1] + previous
        return self.last


FEEDING = Feeding()


class Masked(DecodeBuffers):
    """Buffers with a mask of the tokens that a row sees, and a page table of the step's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        shape = self.max_batch_size, self.layout.max_seqlen_k
        self.register_buffer("mask", torch.zeros(shape, dtype=torch.bool, device=self.inputs.device), persistent=False)
        self.register_buffer("own_table", torch.zeros_like(self.page_table), persistent=False)


def mask_of(buffers: Any, lengths: Tensor) -> Tensor:
    return torch.arange(buffers.layout.max_seqlen_k, device=lengths.device) < lengths[:, None]


def unclearing_step(buffers: Any, batch_size: int) -> Tensor:
    """A mask gets bits and loses none."""
    mask = buffers.mask[:batch_size]
    return mask.logical_or_(mask_of(buffers, buffers.metadata(batch_size).cache_seqlens))


def copying_step(buffers: Any, batch_size: int) -> Tensor:
    """Live columns are copied into a table of the step's own, whose tails nobody clears."""
    table, wanted = buffers.own_table[:batch_size], buffers.metadata(batch_size).page_table
    return table.copy_(torch.where(wanted > 0, wanted, table))


class Alternating:
    """A Python int that is not what it was at capture."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        return self.calls % 2


FAULTS: dict[str, Fault] = {
    "tail-kept": Fault("stale tail", buffers=KeptTail),
    "padding-row-forgotten": Fault("forgotten padding row", buffers=ForgottenPadding),
    "slots-of-padding-kept": Fault("forgotten padding row", buffers=LiveRowsOnly),
    "sums-of-padding-restarted": Fault("forgotten padding row", buffers=RestartedSums),
    "generation-never-raised": Fault("wrong generation", buffers=OneGeneration),
    "row-trusted": Fault("stale request", buffers=TrustedRow, scenario=reused_row()),
    "rollback-forgotten": Fault("stale page", buffers=TrustedDrafts, scenario=walking("verify")),
    "output-made-anew": Fault("moved pointer", buffers=FreshOutputs),
    "input-made-anew": Fault(
        "moved pointer", step=scaled_step, args=(2, Each(lambda: torch.zeros(1, dtype=torch.int32, device=DEVICE)))
    ),
    "staging-overwritten": Fault("late input", buffers=OverwrittenStaging),
    "int64-read-as-int32": Fault("int64 read as int32", buffers=HalfWords),
    "window-not-followed": Fault("window not followed", buffers=WideWindow, scenario=walking(window=9)),
    "length-late-by-one": Fault("wrong length", buffers=LateByOne),
    "minus-one-indexes": Fault("forgotten padding row", buffers=LastSlot, scenario=walking(window=9)),
    "lengths-frozen": Fault("frozen value", buffers=Frozen, runs_on=("cpu",)),
    "rows-beyond-the-bucket": Fault("write outside the bucket", buffers=WholeTables, scenario=walking()),
    "outputs-overlap": Fault("overlapping outputs", buffers=OverlappingOutputs),
    "int-frozen": Fault("frozen argument", step=scaled_step, args=(Each(Alternating()),)),
    "value-read": Fault("host read", step=reading_step),
    "size-read": Fault("host read", step=masking_step),
    "list-read": Fault("host read", step=listing_step),
    "tensor-logged": Fault("host read", step=logging_step),
    "read-in-a-handler": Fault("host read", step=counted_step),
    "array-made": Fault("host read", step=converting_step),
    "metadata-never-made": Fault("metadata not asked for", step=careless_step),
    "cold-compile": Fault("cold compile", step=Cold()),
    "memory-taken-in-each-step": Fault("allocation", buffers=Allocating, runs_on=("cuda",)),
    "staging-refilled-early": Fault("late input", buffers=EarlyRefill, runs_on=("cuda",)),
    "output-fed-back": Fault("output fed back", step=FEEDING, args=(Each(lambda: FEEDING.last),)),
    "own-mask-never-cleared": Fault("wrong output", step=unclearing_step, buffers=Masked),
    "own-tails-kept": Fault("wrong output", step=copying_step, buffers=Masked),
    "number-remembered": Fault("wrong output", step=Remembering()),
}
"""Every mistake by a name of its own."""
