"""What every buffer must hold after a step, in Python ints from the scheduler's own lists, and the name of what it holds instead.

Nothing here reads `req_to_token` or a map, calls an operator, or goes through `DecodeBuffers`: a row's pages are the list that the
scheduler handed out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_kv.layout import ceil_div
from compiled_kv.metadata_op import DecodeMetadata
from compiled_kv.scheduler import NOWHERE, Planned, RowState, Serving

NOBODY = [-1, 0, 0, 0, 0]
TABLES = ("page_table", "swa_page_table")
SLOTS = ("slot_mapping", "swa_slot_mapping")


class Difference(NamedTuple):
    """A fault by name, and where it was seen."""

    fault: str
    sentence: str


class Expected:
    """The buffers of `DecodeBuffers` as nested lists, by name; rows beyond a step's bucket stay as they were."""

    def __init__(self, serving: Serving, parts: int) -> None:
        batch, tokens, width = (
            serving.max_batch_size,
            serving.max_batch_size * serving.queries,
            serving.layout.max_num_pages,
        )
        self.serving, self.parts, self.bucket, self.rows = serving, parts, 0, list[RowState]()
        self.values: dict[str, Any] = {"inputs": {}, "cache_seqlens": [0] * batch}
        self.values |= {name: [0] * (batch + 1) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        mapped = (True, serving.num_swa_pages > 0)
        self.values |= {name: [[0] * width for _ in range(batch)] for name, there in zip(TABLES, mapped) if there}
        self.values |= {name: [0] * tokens for name, there in zip(SLOTS, mapped) if there}
        self.values |= {"held": [[NOBODY] * parts for _ in range(batch)], "status": [0]}
        self.before: dict[str, Any] = {}
        self.rows_before: list[RowState] = []

    def step(self, planned: Planned, bucket: int) -> None:
        """Take in one step, which runs in the graph of `bucket` rows."""
        self.before = {name: value[:] for name, value in self.values.items() if name != "inputs"}
        self.rows_before, self.rows, self.bucket = self.rows, planned.rows, bucket
        padding, values, queries = bucket - len(planned.rows), self.values, self.serving.queries
        values["inputs"] = self._inputs(planned)
        lengths = [row.cache_seqlen for row in planned.rows]
        values["cache_seqlens"][:bucket] = lengths + [0] * padding
        values["cu_seqlens_q"][: bucket + 1] = _sums([row.queries for row in planned.rows], padding)
        values["cu_seqlens_k"][: bucket + 1] = _sums(lengths, padding)
        for name in TABLES:
            if name in values:
                values[name][:bucket] = [self._table_row(name, row) for row in planned.rows] + [
                    self._null_row()
                ] * padding
        for name in SLOTS:
            if name in values:
                slots = [slot for row in planned.rows for slot in self._slots(name, row)]
                values[name][: bucket * queries] = slots + [-1] * (bucket * queries - len(slots))
        records = [self._record(planned, i) for i in range(len(planned.rows))] + [NOBODY] * padding
        values["held"][:bucket] = [[record] * self.parts for record in records]

    def _inputs(self, planned: Planned) -> dict[str, list[int]]:
        batch, size, tokens = (
            planned.batch,
            self.serving.max_batch_size,
            self.serving.max_batch_size * self.serving.queries,
        )

        def padded(values: Any, pad: int = 0, to: int = size) -> list[int]:
            return [*values, *[pad] * (to - len(values))]

        fields = {"num_reqs": [len(planned.rows)], "rows": padded(batch.rows, -1), "seq_lens": padded(batch.seq_lens)}
        fields["generations"] = padded(batch.generations)
        fields |= {"q_lens": padded(batch.q_lens)} if batch.q_lens is not None else {}
        return fields | {"token_ids": padded(batch.token_ids, to=tokens)}

    def first_column(self, row: RowState) -> int:
        """The first column of the window, 0 without one."""
        layout = self.serving.layout
        return (
            0
            if layout.window is None
            else max(row.cache_seqlen - row.queries - layout.window + 1, 0) // layout.page_size
        )

    def live_columns(self, row: RowState) -> int:
        return ceil_div(row.cache_seqlen, self.serving.layout.page_size)

    def _null_row(self) -> list[int]:
        return [0] * self.serving.layout.max_num_pages

    def _table_row(self, name: str, row: RowState) -> list[int]:
        live, first = self.live_columns(row), self.first_column(row)
        pages = row.pages[:live] if name == "page_table" else [0] * first + row.swa_pages[first:live]
        return pages + [0] * (self.serving.layout.max_num_pages - len(pages))

    def _slots(self, name: str, row: RowState) -> list[int]:
        page_size, slots = self.serving.layout.page_size, []
        for position in range(row.cache_seqlen - row.queries, row.cache_seqlen):
            page = (row.pages if name == "slot_mapping" else row.swa_pages)[position // page_size]
            slots.append(-1 if page == NOWHERE else page * page_size + position % page_size)
        return slots

    def _record(self, planned: Planned, i: int) -> list[int]:
        row, batch = planned.rows[i], planned.batch
        settled = ceil_div(batch.seq_lens[i], self.serving.layout.page_size)
        return [batch.rows[i], batch.generations[i], settled, self.live_columns(row), self.first_column(row)]

    def compare(self, found: dict[str, Any]) -> Difference | None:
        """The first difference there is, by name; `found` as `values`."""
        for name, wanted in self.values.items():
            if found[name] != wanted:
                return self._name(name, found[name], wanted)
        return None

    def _name(self, name: str, found: Any, wanted: Any) -> Difference:
        if name == "inputs":
            return self._name_input(found, wanted)
        if name in TABLES:
            i = _first(found, wanted)
            return self._name_page(name, i, _first(found[i], wanted[i]), found, wanted)
        i = _first(found, wanted)
        where = f"{name}[{i}] holds {found[i]}, expected {wanted[i]}"
        if name == "status":
            return Difference("status bit", where)
        if name == "held":
            return Difference("wrong record", where)
        live = len(self.rows)
        if name in SLOTS:
            tokens, kind = sum(row.queries for row in self.rows), "wrong slot"
            inside = self.bucket * self.serving.queries
        else:
            kind = "wrong length" if name == "cache_seqlens" else "wrong prefix sum"
            tokens, inside = live + (name != "cache_seqlens"), self.bucket + (name != "cache_seqlens")
        if i >= inside:
            return Difference("write outside the bucket", where)
        if i >= tokens:
            return Difference("forgotten padding row", f"{where}: {live} of {self.bucket} rows are live")
        if name == "cache_seqlens" and _is_int64_read_as_int32(
            found, self.values["inputs"]["seq_lens"], self.serving.delta, live
        ):
            return Difference(
                "int64 read as int32", f"{name} holds {found[:live]}, every other word of {wanted[:live]}"
            )
        if found[i] == self.before[name][i] != wanted[i]:
            return Difference("frozen value", f"{where}: what it held in the step before")
        return Difference(kind, where)

    def _name_input(self, found: dict[str, list[int]], wanted: dict[str, list[int]]) -> Difference:
        name = next(name for name in wanted if found[name] != wanted[name])
        i = _first(found[name], wanted[name])
        where = f"input {name}[{i}] holds {found[name][i]}, loaded was {wanted[name][i]}"
        if name == "generations":
            return Difference("wrong generation", where)
        if name != "num_reqs" and i >= len(self.rows) * (self.serving.queries if name == "token_ids" else 1):
            return Difference("forgotten padding row", where)
        return Difference("late input", f"{where}: the host's copy was overwritten before the device had read it")

    def _name_page(self, name: str, i: int, p: int, found: Any, wanted: Any) -> Difference:
        value, where = found[i][p], f"{name}[{i}, {p}] holds {found[i][p]}, expected {wanted[i][p]}"
        if i >= self.bucket:
            return Difference("write outside the bucket", where)
        if i >= len(self.rows):
            return Difference("forgotten padding row", f"{where}: {len(self.rows)} of {self.bucket} rows are live")
        row = self.rows[i]
        if p >= self.live_columns(row):
            return Difference("stale tail", f"{where}: row {i} has {self.live_columns(row)} live columns")
        if (p < self.first_column(row)) if name == "swa_page_table" else False:
            return Difference("window not followed", f"{where}: the window begins in column {self.first_column(row)}")
        if value == 0 and name == "swa_page_table":
            return Difference("window not followed", f"{where}: column {p} is inside the window")
        if value == self.before[name][i][p]:
            same = i < len(self.rows_before) and self.rows_before[i].request == row.request
            if same:
                return Difference(
                    "stale page", f"{where}: request {row.request} has another page there since the step before"
                )
            return Difference(
                "stale request", f"{where}: a page of the request that was in row {i} before request {row.request}"
            )
        return Difference("wrong page", where)


class ReferenceBuffers:
    """What a step reads in place of `DecodeBuffers`, filled from `Expected`: for the eager run that outputs are compared with."""

    def __init__(self, expected: Expected, buffers: Any) -> None:
        self.layout, self.max_batch_size, self.q_len = buffers.layout, buffers.max_batch_size, buffers.q_len
        self.seq_len_delta, self.pad_seqlen = buffers.seq_len_delta, buffers.pad_seqlen
        self.req_to_token, self.full_to_swa, self.page_map = buffers.req_to_token, buffers.full_to_swa, buffers.page_map
        self.status = torch.zeros_like(buffers.status)
        device = buffers.inputs.device
        inputs = {name: torch.tensor(values, device=device) for name, values in expected.values["inputs"].items()}
        self.num_reqs, self.req_pool_indices, self.seq_lens = inputs["num_reqs"], inputs["rows"], inputs["seq_lens"]
        self.generations, self.q_lens, self.token_ids = inputs["generations"], inputs.get("q_lens"), inputs["token_ids"]
        self.slots: Tensor | None = None
        self._out = DecodeMetadata(
            *(
                torch.tensor(expected.values[name], dtype=torch.int64 if name in SLOTS else torch.int32, device=device)
                if name in expected.values
                else None
                for name in DecodeMetadata._fields
            )  # type: ignore[arg-type]
        )

    def out(self) -> DecodeMetadata:
        return self._out

    def metadata(self, batch_size: int, seq_len_delta: int | None = None) -> DecodeMetadata:
        if seq_len_delta not in (None, self.seq_len_delta):
            raise ValueError(
                f"seq_len_delta must be the buffers' own in a checked step, {self.seq_len_delta}, got {seq_len_delta}"
            )
        rows, tokens = batch_size, batch_size * self.q_len
        sizes = (rows, rows + 1, rows + 1, rows, rows, tokens, tokens)
        return DecodeMetadata(*(None if t is None else t[:size] for t, size in zip(self._out, sizes)))  # type: ignore[misc]


def _sums(values: list[int], padding: int) -> list[int]:
    sums = [0]
    for value in values + [0] * padding:
        sums.append(sums[-1] + value)
    return sums


def _first(found: list[Any], wanted: list[Any]) -> int:
    return next(i for i, (a, b) in enumerate(zip(found, wanted)) if a != b)


def _is_int64_read_as_int32(found: list[int], seq_lens: list[int], delta: int, live: int) -> bool:
    words = [word for length in seq_lens for word in (length, 0)]
    return live > 1 and found[:live] == [word + delta for word in words[:live]]
