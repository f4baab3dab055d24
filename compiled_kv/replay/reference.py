"""What every buffer must hold after a step, in Python ints from the scheduler's own lists.

Nothing here reads `req_to_token` or a map, calls an operator, or goes through `DecodeBuffers`: a row's pages are the
list that the scheduler handed out.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from compiled_kv.layout import ceil_div
from compiled_kv.replay.names import SLOTS, TABLES, Difference, name_difference
from compiled_kv.replay.serving import NOWHERE, Planned, RowState, Serving

NOBODY = [-1, 0, 0, 0, 0]


class Expected:
    """The buffers of `DecodeBuffers` as nested lists, by name; rows beyond a step's bucket stay as they were."""

    def __init__(self, serving: Serving, parts: int) -> None:
        batch, width = serving.max_batch_size, serving.layout.max_num_pages
        tokens = batch * serving.queries
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

        def padded(values: Any, to: int = size) -> list[int]:
            return [*values, *[0] * (to - len(values))]

        fields = {"num_reqs": [len(planned.rows)], "rows": padded(batch.rows), "seq_lens": padded(batch.seq_lens)}
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
        assert not (isinstance(batch.rows, Tensor) or isinstance(batch.seq_lens, Tensor))
        assert not isinstance(batch.generations, Tensor)
        ahead = min(batch.seq_lens[i], row.cache_seqlen - row.queries)
        settled = ceil_div(ahead, self.serving.layout.page_size)
        return [batch.rows[i], batch.generations[i], settled, self.live_columns(row), self.first_column(row)]

    def compare(self, found: dict[str, Any]) -> Difference | None:
        """The first difference there is, by name; `found` as `values`."""
        for name, wanted in self.values.items():
            if found[name] != wanted:
                return name_difference(self, name, found[name], wanted)
        return None


def _sums(values: list[int], padding: int) -> list[int]:
    sums = [0]
    for value in values + [0] * padding:
        sums.append(sums[-1] + value)
    return sums
