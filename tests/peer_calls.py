"""Drawn calls of the operators behind `compiled_kv.integrations`: good values, bad ones, every optional part.

A call is drawn from a seed, so that the operator and the oracle are each given tensors of their own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiled_kv import reference_peers
from compiled_kv.layout import KVLayout
from compiled_kv.peers.block_tables import gather_block_tables
from compiled_kv.peers.csr import csr_tables, fill_kv_indices
from compiled_kv.peers.draft_indices import draft_kv_indices
from compiled_kv.peers.draft_steps import advance_draft, advance_draft_
from compiled_kv.peers.engine_metadata import write_metadata
from compiled_kv.peers.engine_parts import EngineMetadata
from compiled_kv.peers.group_slots import group_slot_mappings
from compiled_kv.peers.token_positions import place_tokens_
from tests.harness import POISON, _moved, around, poisoned

BATCHES = (0, 1, 2, 3, 5, 9)  # of up to three chunks, where interpreted kernels take four rows at a time
EXTREMES = (-1, -7, 2**31 - 1, 2**31, 2**33 + 3, -(2**31), 2**63 - 1, -(2**63))


class Draw(random.Random):
    """A seeded source of sizes and tensors on one device."""

    def __init__(self, seed: int, device: str) -> None:
        super().__init__(seed)
        self.device = device

    def ints(self, low: int, high: int, *shape: int, bad: float = 0.12) -> Tensor:
        """int32 or int64 in [low, high), a few of them extreme, in plain or in wide strides."""
        dtype = self.choice((torch.int32, torch.int64))
        tensor = torch.tensor(
            [self.choice(EXTREMES) if self.random() < bad else self.randrange(low, high) for _ in range(_prod(shape))]
        )
        limits = torch.iinfo(dtype)
        tensor = tensor.long().clamp(limits.min, limits.max).to(dtype).reshape(shape)
        if self.random() < 0.5:
            return tensor.to(self.device)
        whole = torch.full([2 * size + 3 for size in shape], POISON[dtype], dtype=dtype)
        place = whole[tuple(slice(1, 1 + 2 * size, 2) for size in shape)]
        return _moved(place.copy_(tensor), self.device)

    def plain(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=self.choice((torch.int32, torch.int64)), device=self.device)

    def out(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return poisoned(shape, dtype, self.device)

    def maybe(self, tensor: Any) -> Any:
        return tensor if self.random() < 0.6 else None


def _prod(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def draw_write_metadata(draw: Draw) -> dict[str, Any]:
    batch, rows, page_size = draw.choice(BATCHES), draw.randrange(1, 5), draw.choice((1, 3, 4))
    layout = KVLayout(page_size, draw.randrange(20), draw.choice((0, 2)))
    width = layout.max_num_pages + draw.choice((0, 2))
    tokens, room = draw.randrange(9), batch + draw.choice((0, 0, 2))
    tables = [draw.out(torch.int32, room, width) for _ in range(2)]
    if draw.random() < 0.4:  # columns apart, or a transposed table
        wide = draw.out(torch.int32, room, 2 * width + 1)
        tables = [wide[:, 1 : 1 + 2 * width : 2], draw.out(torch.int32, width, room).t()]
    by_pages = draw.random() < 0.5
    has_table, swa_table = draw.random() < 0.8, draw.maybe(tables[1])
    mapped = swa_table is not None and has_table and by_pages
    token_map = None if mapped else draw.ints(0, 60, draw.choice((0, 50, 200)))
    out = EngineMetadata(
        draw.maybe(draw.out(torch.int32, room)), draw.maybe(draw.out(torch.int32, room + 1)),
        draw.maybe(draw.out(torch.int32, room + 1)), tables[0] if has_table else None,
        swa_table if has_table else None, None if mapped else draw.maybe(draw.out(torch.int64, tokens)),
    )  # fmt: skip
    return {
        "req_to_token": draw.ints(0, 80, rows, layout.max_seqlen_k + draw.choice((0, 3))),
        "req_pool_indices": draw.ints(0, rows, batch),
        "seq_lens": draw.ints(0, 22, batch),
        "out": out,
        "layout": layout,
        "seq_len_delta": draw.choice((0, 1, 3)),
        "q_len": draw.choice((0, 2, draw.ints(0, 4, batch))),
        "slots": draw.maybe(draw.ints(0, 60, draw.randrange(9))),
        "full_to_swa": token_map,
        "page_map": draw.maybe(draw.ints(-1, 20, draw.choice((0, 15, 60)))),
        "swa_page_map": draw.ints(-1, 20, draw.choice((0, 15, 60))) if mapped else None,
        "width": draw.choice((None, layout.max_num_pages, width)),
        "tail": draw.choice(("keep", "clear")),
    }


def draw_gather_block_tables(draw: Draw) -> dict[str, Any]:
    groups, rows, width, batch = draw.randrange(1, 4), draw.randrange(4), draw.randrange(12), draw.choice(BATCHES)
    windowed = draw.random() < 0.5
    out = draw.maybe(draw.out(torch.int32, groups, batch + draw.randrange(3), width))
    return {
        "block_tables": draw.ints(0, 90, groups, rows, width),
        "num_blocks": draw.ints(0, width + 2, groups, rows),
        "req_pool_indices": draw.ints(-1, max(rows, 1), batch),
        "block_sizes": draw.ints(1, 5, groups) if windowed else None,
        "reach": draw.ints(0, 9, groups) if windowed else None,
        "num_computed_tokens": draw.ints(0, 30, rows) if windowed else None,
        "out": out,
        "tail": "clear" if out is None else draw.choice(("keep", "clear")),
    }


def draw_group_slot_mappings(draw: Draw) -> dict[str, Any]:
    groups, rows, width, batch = draw.randrange(1, 4), draw.randrange(4), draw.randrange(6), draw.choice(BATCHES)
    counts = [draw.randrange(4) for _ in range(batch)]
    tokens, cp_size = sum(counts) + draw.choice((-1, 0, 0, 2)), draw.choice((1, 2, 3))
    tokens = max(tokens, 0)
    out = draw.maybe(draw.out(torch.int64, groups, tokens + draw.randrange(3)))
    return {
        "block_tables": draw.ints(0, 90, groups, rows, width),
        "block_sizes": draw.ints(0, 5, groups),
        "req_pool_indices": draw.ints(-1, max(rows, 1), batch),
        "cu_seqlens_q": draw.plain([sum(counts[:i]) for i in range(batch + 1)]),
        "positions": draw.ints(0, 25, tokens),
        "sharded": draw.maybe(draw.ints(0, 2, groups)),
        "cp_size": cp_size,
        "cp_rank": draw.randrange(cp_size),
        "cp_interleave": draw.choice((1, 2, 4)),
        "num_tokens": draw.maybe(tokens + 2) if out is None else None,
        "out": out,
    }


def draw_advance_draft(draw: Draw) -> dict[str, Any]:
    batch, width = draw.choice(BATCHES), draw.randrange(5)
    return {
        "positions": draw.ints(-1, 17, batch),
        "block_table": draw.ints(0, 90, batch, width),
        "seq_lens": draw.ints(0, 18, batch),
        "page_size": draw.choice((1, 3, 4)),
        "max_context_len": draw.choice((1, 12, 2**31 - 1)),
        "num_tokens": draw.maybe(batch + draw.randrange(3)),
    }


def draw_advance_draft_(draw: Draw) -> dict[str, Any]:
    given = draw_advance_draft(draw)
    batch = len(given["positions"])
    positions, lengths = draw.out(torch.int64, batch), draw.out(torch.int32, batch)
    positions.copy_(given["positions"])
    lengths.copy_(given["seq_lens"].clamp(-(2**31), 2**31 - 1))
    return given | {"positions": positions, "seq_lens": lengths, "slot_mapping": draw.out(torch.int64, batch + 2)}


def draw_csr_inputs(draw: Draw) -> dict[str, Any]:
    batch, rows = draw.choice(BATCHES), draw.randrange(1, 5)
    layout = KVLayout(draw.choice((1, 3, 4)), draw.randrange(18))
    entry_page_size = draw.choice((1, 1, 2, 4))
    width = -(-layout.max_seqlen_k // entry_page_size) + draw.choice((0, 2))
    return {
        "pool": draw.ints(0, 80, rows, width),
        "req_pool_indices": draw.ints(0, rows, batch),
        "kv_lens": draw.ints(0, 19, batch),
        "kv_start": draw.maybe(draw.ints(0, 9, batch)),
        "layout": layout,
        "entry_page_size": entry_page_size,
        "token_map": draw.maybe(draw.ints(0, 60, draw.choice((0, 50, 400)))),
    }


def draw_csr_tables(draw: Draw) -> dict[str, Any]:
    given = draw_csr_inputs(draw)
    batch, room = len(given["kv_lens"]), draw.choice((0, 5, 40))
    indices = draw.out(draw.choice((torch.int32, torch.int64)), room)
    out = draw.maybe((draw.out(torch.int32, batch + 1), indices, draw.out(torch.int32, batch)))
    return given | {
        "num_reqs": draw.maybe(draw.ints(0, batch + 1)),
        "capacity": draw.maybe(room) if out is None else None,
        "out": out,
        "tail": "clear" if out is None else draw.choice(("keep", "clear")),
    }


def draw_fill_kv_indices(draw: Draw) -> dict[str, Any]:
    given = draw_csr_inputs(draw)
    bounds = [draw.choice((0, 2))]
    for _ in given["kv_lens"]:
        bounds.append(bounds[-1] + draw.randrange(8))
    indices = draw.out(draw.choice((torch.int32, torch.int64)), draw.choice((0, 9, 60)))
    return given | {"kv_indptr": draw.plain(bounds), "kv_indices": indices}


def draw_draft_kv_indices(draw: Draw) -> dict[str, Any]:
    batch, rows, topk, steps = draw.choice(BATCHES), draw.randrange(1, 4), draw.choice((1, 2, 3)), draw.randrange(1, 4)
    layout, entry_page_size = KVLayout(draw.choice((1, 3, 4)), draw.randrange(14)), draw.choice((1, 1, 2))
    width = -(-layout.max_seqlen_k // entry_page_size) + draw.choice((0, 4, 12))
    room, out = draw.choice((0, 11, 120)), None
    if draw.random() < 0.6:
        dtype = draw.choice((torch.int32, torch.int64))
        more = draw.choice((0, 0, 2))
        out = (draw.out(torch.int32, steps + more, batch * topk + 1 + more), draw.out(dtype, steps + more, room))
    return {
        "pool": draw.ints(0, 80, rows, width),
        "req_pool_indices": draw.ints(0, rows, batch),
        "seq_lens": draw.ints(0, 15, batch),
        "num_steps": steps,
        "topk": topk,
        "layout": layout,
        "positions": draw.maybe(draw.ints(0, 15, batch * topk)),
        "page_map": draw.maybe(draw.ints(-1, 40, draw.choice((0, 20, 90)))),
        "entry_page_size": entry_page_size,
        "window": draw.choice((0, 0, 1, 4)),
        "sinks": draw.choice((0, 1, 3)),
        "capacity": draw.maybe(room) if out is None else None,
        "out": out,
        "tail": "clear" if out is None else draw.choice(("keep", "clear")),
    }


def draw_place_tokens_(draw: Draw) -> dict[str, Any]:
    batch, rows, mapped = draw.choice(BATCHES), draw.randrange(4), draw.random() < 0.5
    counts = [draw.randrange(4) for _ in range(batch)]
    tokens = max(sum(counts) + draw.choice((-1, 0, 0, 2)), 0)
    return {
        "positions": draw.out(draw.choice((torch.int32, torch.int64)), tokens),
        "held": draw.ints(0, 20, rows if mapped else batch),
        "cu_seqlens_q": draw.plain([sum(counts[:i]) for i in range(batch + 1)]),
        "req_pool_indices": draw.ints(-1, max(rows, 1), batch) if mapped else None,
        "counted": draw.random() < 0.5,
        "batch_indices": draw.maybe(draw.out(torch.int32, tokens)),
        "seq_lens": draw.maybe(draw.out(torch.int32, batch + draw.randrange(3))),
    }


IN_PLACE = ("advance_draft_", "fill_kv_indices", "place_tokens_")


CALLS: dict[str, tuple[Callable[..., Any], Callable[[Draw], dict[str, Any]]]] = {
    "write_metadata": (write_metadata, draw_write_metadata),
    "gather_block_tables": (gather_block_tables, draw_gather_block_tables),
    "group_slot_mappings": (group_slot_mappings, draw_group_slot_mappings),
    "csr_tables": (csr_tables, draw_csr_tables),
    "fill_kv_indices": (fill_kv_indices, draw_fill_kv_indices),
    "draft_kv_indices": (draft_kv_indices, draw_draft_kv_indices),
    "advance_draft": (advance_draft, draw_advance_draft),
    "advance_draft_": (advance_draft_, draw_advance_draft_),
    "place_tokens_": (place_tokens_, draw_place_tokens_),
}


def outputs_of(result: Any, given: dict[str, Any]) -> list[Tensor]:
    """Everything a call returned or may have written to."""
    parts = [result] if isinstance(result, Tensor) else list(result or ())
    into = given.get("out")
    parts += [into] if isinstance(into, Tensor) else list(into or ())
    return [part for part in parts if part is not None]


def check_call(operator: str, seed: int, device: str, call: Callable[..., Any] | None = None) -> None:
    """Call the operator (or `call`, a compiled one) and its oracle; demand the same bytes, around the outputs too."""
    function, drawn = CALLS[operator]
    given, wanted = drawn(Draw(seed, device)), drawn(Draw(seed, "cpu"))
    found = outputs_of((call or function)(**given), given)
    expected = outputs_of(getattr(reference_peers, operator)(**wanted), wanted)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.tolist() == b.tolist(), f"seed {seed}: {wanted}"
        if given.get("out") is not None or operator in IN_PLACE:
            assert torch.equal(around(a), around(b)), f"seed {seed}: memory around an output was written"
