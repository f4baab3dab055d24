"""`update_metadata` in Python ints: what is on record for a row, and which of its columns a call writes.

Lengths, prefix sums and slots do not depend on what was there before: they are `reference.decode_metadata`'s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_kv import reference
from compiled_kv.layout import KVLayout, ceil_div

NOBODY = (-1, 0, 0, 0, 0)


class Tables:
    """Persistent outputs of M rows and tokens, poisoned but for the tables, and what each row holds."""

    def __init__(self, layout: KVLayout, capacity: int, num_tokens: int | None, mapped: bool, width: int) -> None:
        def new(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full((size,), -77, dtype=dtype)

        def table() -> Tensor:
            return torch.zeros(capacity, width, dtype=torch.int32)

        self.layout = layout
        tokens = [None if num_tokens is None else new(num_tokens, torch.int64) for _ in range(2)]
        self.fields = [new(capacity), new(capacity + 1), new(capacity + 1), table(), table() if mapped else None]
        self.fields += [tokens[0], tokens[1] if mapped else None]
        self.held = [NOBODY] * capacity

    def update(self, call: dict[str, Any]) -> int:
        """Bring the first rows up to date; returns the status bits of this call."""
        call = dict(call)
        generations = call.pop("generations").tolist()
        fresh, bits = reference.decode_metadata(**call)
        for target, values in zip(self.fields, fresh, strict=True):
            if target is not None and target.ndim == 1:
                target[: len(values)] = values
        step = reference.Step(self.layout, call.get("full_to_swa"), call.get("page_map"))
        delta = call.get("seq_len_delta", 0)
        rows = step.rows(call["req_to_token"], call["req_pool_indices"], call["seq_lens"], call.get("q_len", 1), delta,
                         call.get("num_reqs"), call.get("pad_seqlen", 0))  # fmt: skip
        step.bits, others = 0, bits & ~(reference.BAD_SLOT | reference.UNMAPPED)
        for i, row in enumerate(rows):
            owner = int(call["req_pool_indices"][i])
            self._row(step, i, row, owner, generations[i], int(call["seq_lens"][i]))
        return others | step.bits | self._token_bits(call, rows)

    def _row(self, step: Any, i: int, row: Any, owner: int, generation: int, seq_len: int) -> None:
        page_size, width = self.layout.page_size, self.fields[3].shape[1]
        before, now = self.held[i], NOBODY
        if row.slots is not None:
            live = min(ceil_div(row.length, page_size), width)
            committed = min(max(seq_len, 0), self.layout.max_seqlen_k, max(row.length - row.queries, 0))
            settled = min(ceil_div(committed, page_size), live)
            first = 0
            if self.layout.window is not None:
                first = max(row.length - row.queries - self.layout.window + 1, 0) // page_size
            now = (owner, generation, settled, live, min(first, live))
        same = before[:2] == now[:2] and now[2] >= before[2]
        start = before[2] if same else 0
        if now[4] < before[4]:
            start = min(start, now[4])
        for table, page in ((self.fields[3], step.page), (self.fields[4], step.swa_page)):
            if table is not None:
                line = table[i]
                line[now[3] : max(before[3], now[3])] = 0
                if page == step.swa_page:
                    line[before[4] : max(min(now[4], start), before[4])] = 0
                for column in range(start, now[3]):
                    line[column] = page(row, column)
        self.held[i] = now

    def _token_bits(self, call: dict[str, Any], rows: list[Any]) -> int:
        """Bits of the slot mapping alone."""
        if self.fields[5] is None:
            return 0
        step = reference.Step(self.layout, call.get("full_to_swa"), call.get("page_map"))
        given = call.get("slots")
        num_tokens = call.get("num_tokens")
        if num_tokens is None:
            num_tokens = len(given) if given is not None else len(rows) * call.get("q_len", 1)
        mapping = step.token_slots(rows, num_tokens, None if given is None else given.tolist())
        if self.fields[6] is not None:
            for slot in mapping:
                step.swa_slot(slot)
        return step.bits
