"""Sizes that only a device holds: a context of a million tokens, 512 rows, a pool of more than 2^31 elements.

The oracle is asked about a few rows of each batch, for it goes through them one Python int at a time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import compiled_kv as ckv
from compiled_kv import KVLayout, reference
from tests.cases import needs_cuda

PAGE, SLOTS, WINDOW, QUERIES = 64, 2**22, 4096, 2
DEVICE = [pytest.mark.gpu, needs_cuda]
# The same at a small size checks the test itself where there is no device.
sizes = pytest.mark.parametrize(
    "device, pool_rows, context, batch, mode",
    [
        pytest.param("cpu", 40, 2**10, 24, "eager", id="small-on-the-cpu"),
        pytest.param("cuda", 2100, 2**20, 512, "eager", id="large-on-a-device", marks=DEVICE),
        pytest.param("cuda", 2100, 2**20, 512, "compiled", id="large-on-a-device-compiled", marks=DEVICE),
    ],
)


class Step:
    """A pool of random slots, and a batch over its last rows: long, short and empty ones, bad ones and padding."""

    def __init__(self, device: str, pool_rows: int, context: int, batch: int) -> None:
        seed = torch.Generator(device).manual_seed(1)
        self.pool = torch.randint(SLOTS, (pool_rows, context), dtype=torch.int32, device=device, generator=seed)
        self.token_map = torch.randint(-1, SLOTS, (SLOTS,), device=device, generator=seed)
        self.rows = torch.arange(pool_rows - batch, pool_rows, device=device).flip(0)
        self.lengths = torch.randint(context + 1, (batch,), device=device, generator=seed)
        self.rows[3], self.rows[5] = -1, pool_rows
        self.lengths[:8] = torch.tensor([context, context - 1, 1, 9, 0, 9, PAGE, PAGE + 1])
        self.num_reqs = torch.tensor(batch - 5, device=device)
        self.layout = KVLayout(PAGE, context, window=WINDOW)
        self.batch = batch
        self.asked = [0, 1, 2, 3, 4, 5, 6, 7, batch - 6, batch - 5, batch - 1]

    def lone(self, i: int) -> dict[str, Tensor]:
        """Row `i` as a batch of its own over a pool of its own, on the CPU; a row of no request where it is bad."""
        index = int(self.rows[i])
        good = 0 <= index < len(self.pool) and i < int(self.num_reqs)
        pool = self.pool[index if good else 0][None].cpu()
        return {"req_to_token": pool, "req_pool_indices": torch.tensor([0 if good else -1])}


def function(name: str, mode: str) -> Any:
    public = getattr(ckv, name)
    return public if mode == "eager" else torch.compile(public, fullgraph=True)


@sizes
def test_decode_metadata(device: str, pool_rows: int, context: int, batch: int, mode: str) -> None:
    step = Step(device, pool_rows, context, batch)
    found = function("decode_metadata", mode)(
        step.pool, step.rows, step.lengths, layout=step.layout, q_len=QUERIES, full_to_swa=step.token_map,
        num_reqs=step.num_reqs, pad_seqlen=PAGE + 1,
    )  # fmt: skip
    token_map = step.token_map.cpu()
    for i in step.asked:
        wanted, _ = reference.decode_metadata(
            **step.lone(i), seq_lens=step.lengths[i : i + 1].cpu(), layout=step.layout, q_len=QUERIES,
            full_to_swa=token_map, pad_seqlen=PAGE + 1,
        )  # fmt: skip
        for name in ("cache_seqlens", "page_table", "swa_page_table"):
            assert torch.equal(getattr(found, name)[i].cpu(), getattr(wanted, name)[0]), (name, i)
        tokens = slice(QUERIES * i, QUERIES * (i + 1))
        for name in ("slot_mapping", "swa_slot_mapping"):
            assert torch.equal(getattr(found, name)[tokens].cpu(), getattr(wanted, name)), (name, i)
    lengths = [length for i, length in enumerate(found.cache_seqlens.tolist()) if i not in (3, 5)]
    assert found.cu_seqlens_k[-1].item() == sum(lengths[: int(step.num_reqs) - 2])
    assert found.cu_seqlens_q.tolist() == [QUERIES * min(i, int(step.num_reqs)) for i in range(batch + 1)]


@sizes
def test_page_tables(device: str, pool_rows: int, context: int, batch: int, mode: str) -> None:
    step = Step(device, pool_rows, context, batch)
    step.num_reqs.fill_(batch)  # these operators know no padding but bad rows
    starts = torch.arange(batch, device=device) * 7 % (context // 2)
    found = function("page_table", mode)(step.pool, step.rows, step.lengths, layout=step.layout)
    shifted = function("flashmla_kv_indices", mode)(step.pool, step.rows, step.lengths, starts, layout=step.layout)
    for i in step.asked:
        lone, length = step.lone(i), step.lengths[i : i + 1].cpu()
        wanted = reference.page_table(**lone, cache_seqlens=length, layout=step.layout)
        assert torch.equal(found[i].cpu(), wanted[0]), i
        wanted = reference.flashmla_kv_indices(**lone, kv_lens=length, kv_start=starts[i : i + 1], layout=step.layout)
        assert torch.equal(shifted[i].cpu(), wanted[0]), i


@sizes
def test_slots_of_the_last_positions(device: str, pool_rows: int, context: int, batch: int, mode: str) -> None:
    step = Step(device, pool_rows, context, batch)
    positions = torch.full((batch,), context - 1, device=device)
    found = function("slot_mapping", mode)(step.pool, step.rows, positions, num_reqs=step.num_reqs)
    rows, live = step.rows.tolist(), int(step.num_reqs)
    last = step.pool[:, -1].tolist()
    assert found.tolist() == [last[r] if i < live and 0 <= r < pool_rows else -1 for i, r in enumerate(rows)]
    swa = function("translate_slots", mode)(found, step.token_map)
    table = step.token_map.tolist()
    assert swa.tolist() == [-1 if slot < 0 else table[slot] for slot in found.tolist()]


@sizes
def test_sums_of_many_rows(device: str, pool_rows: int, context: int, batch: int, mode: str) -> None:
    """Rows enough for several chunks of a scan, and sums that pass int32."""
    lengths = torch.arange(10 * batch + 1, device=device) * 524_288
    queries = torch.arange(10 * batch + 1, device=device) % 5
    found = function("seqlens", mode)(lengths, q_len=queries)
    wanted = reference.seqlens(lengths.cpu(), q_len=queries.cpu())
    assert [tensor.tolist() for tensor in found] == [tensor.tolist() for tensor in wanted]


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize(
    "device, context",
    [
        pytest.param("cpu", 2**11, id="small-on-the-cpu"),
        pytest.param("cuda", 2**20, id="large-on-a-device", marks=DEVICE),
    ],
)
def test_three_rows_much_longer_than_others(device: str, context: int, is_mapped: bool, page_size: int) -> None:
    seed = torch.Generator(device).manual_seed(2)
    pool = torch.randint(SLOTS, (40, context), dtype=torch.int32, device=device, generator=seed)
    token_map = torch.randint(SLOTS, (SLOTS,), device=device, generator=seed)
    rows = torch.arange(40, device=device).flip(0)
    lengths = [100] * 40
    lengths[7], lengths[20], lengths[39] = context, context - 5, context // 32 * 31
    layout = KVLayout(page_size, context, window=300 if is_mapped else None)
    found = ckv.decode_metadata(
        pool, rows, torch.tensor(lengths, device=device), layout=layout, full_to_swa=token_map if is_mapped else None
    )
    for i, length in enumerate(lengths):
        slots = pool[39 - i, :length:page_size].long()
        assert torch.equal(found.page_table[i, : len(slots)].long(), slots // page_size), i
        assert not found.page_table[i, len(slots) :].any(), i
        if found.swa_page_table is not None:
            first = max(length - 300, 0) // page_size
            assert torch.equal(
                found.swa_page_table[i, first : len(slots)].long(), token_map[slots[first:]] // page_size
            )
            assert not found.swa_page_table[i, :first].any() and not found.swa_page_table[i, len(slots) :].any(), i
