"""Rows so far apart that their offsets pass 2^31, in what the operators behind the integrations read and write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_kv import KVLayout, reference_peers
from compiled_kv.peers.block_tables import gather_block_tables
from compiled_kv.peers.csr import csr_tables
from compiled_kv.peers.draft_indices import draft_kv_indices
from compiled_kv.peers.draft_steps import advance_draft
from compiled_kv.peers.engine_metadata import write_metadata
from compiled_kv.peers.engine_parts import EngineMetadata
from compiled_kv.peers.group_slots import group_slot_mappings
from tests.cases import needs_cuda

# The same a few entries apart checks the test itself where there is no device.
distances = pytest.mark.parametrize(
    "device, apart",
    [
        pytest.param("cpu", 70, id="near-on-the-cpu"),
        pytest.param("cuda", 2**30 + 64, id="far-on-a-device", marks=[pytest.mark.gpu, needs_cuda]),
    ],
)
LAYOUT, ROWS, LENS = KVLayout(4, 24), [2, 0, 1], [22, 0, 9]


def far(values: Tensor, device: str, apart: int) -> Tensor:
    """`values` with rows `apart` entries apart; of several tables the rows count on."""
    rows, width = values.shape[:-1].numel(), values.shape[-1]
    shape, strides = [*values.shape], [apart, 1] if values.ndim == 2 else [apart * values.shape[1], apart, 1]
    storage = torch.empty((rows - 1) * apart + width, dtype=values.dtype, device=device)
    return storage.as_strided(shape, strides).copy_(values)


def pool() -> Tensor:
    return (torch.arange(3 * 28, dtype=torch.int32) * 5 + 4).view(3, 28)


def tensors(device: str) -> tuple[Tensor, Tensor]:
    return torch.tensor(ROWS, device=device), torch.tensor(LENS, device=device)


def same(found: Any, wanted: Any) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a is b is None or a.tolist() == b.tolist()


@distances
def test_static_buffers(device: str, apart: int) -> None:
    def filled(device: str, apart: int, write: Any) -> EngineMetadata:
        tables = (far(torch.full((3, 7), 7, dtype=torch.int32), device, apart) for _ in range(2))
        page_table, swa_page_table = tables
        out = EngineMetadata(page_table=page_table, swa_page_table=swa_page_table)
        token_map = torch.arange(500, device=device).flip(0)
        return write(far(pool(), device, apart), *tensors(device), out, layout=LAYOUT, full_to_swa=token_map)

    same(filled(device, apart, write_metadata), filled("cpu", 70, reference_peers.write_metadata))


@distances
def test_csr_tables(device: str, apart: int) -> None:
    found = csr_tables(far(pool(), device, apart), *tensors(device), layout=LAYOUT)
    same(found, reference_peers.csr_tables(pool(), *tensors("cpu"), layout=LAYOUT))


@distances
def test_draft_indices(device: str, apart: int) -> None:
    options: dict[str, Any] = {"num_steps": 3, "topk": 2, "layout": LAYOUT}
    bounds, entries = torch.zeros(3, 7, dtype=torch.int32), torch.zeros(3, 100, dtype=torch.int32)
    out = far(bounds, device, apart), far(entries, device, apart + 64)
    found = draft_kv_indices(far(pool(), device, apart), *tensors(device), **options, out=out)
    same(found, reference_peers.draft_kv_indices(pool(), *tensors("cpu"), **options, capacity=100))


@distances
def test_block_tables_and_slots_of_groups(device: str, apart: int) -> None:
    blocks, counts = pool()[:, :7].repeat(2, 1).view(2, 3, 7), torch.tensor([[7, 2, 5], [0, 3, 7]])
    rows, sizes = tensors("cpu")[0], torch.tensor([4, 8])
    bounds, positions = torch.tensor([0, 2, 3, 5]), torch.tensor([3, 27, 9, 0, 20])
    wanted = (
        reference_peers.gather_block_tables(blocks, counts, rows),
        reference_peers.group_slot_mappings(blocks, sizes, rows, bounds, positions),
    )
    held = far(blocks, device, apart)
    out = far(torch.zeros(2, 3, 7, dtype=torch.int32), device, apart)
    rows, sizes, bounds, positions, counts = (t.to(device) for t in (rows, sizes, bounds, positions, counts))
    found = (
        gather_block_tables(held, counts, rows, out=out),
        group_slot_mappings(held, sizes, rows, bounds, positions),
    )
    same(found, wanted)


@distances
def test_draft_step(device: str, apart: int) -> None:
    positions, lengths = torch.tensor([26, 3, 9]), torch.tensor([27, 4, 10])
    wanted = reference_peers.advance_draft(positions, pool(), lengths, page_size=1, max_context_len=28)
    held = far(pool(), device, apart)
    same(advance_draft(positions.to(device), held, lengths.to(device), page_size=1, max_context_len=28), wanted)


@pytest.mark.gpu
@needs_cuda
def test_more_indices_than_int32_counts() -> None:
    pool, rows = torch.ones(1, 1, dtype=torch.int32, device="cuda").expand(1, 2**30), torch.zeros(3).long().cuda()
    out = tuple(torch.zeros(size, dtype=torch.int32, device="cuda") for size in (4, 2**31 + 5000, 3))
    lens = torch.tensor([2**30, 2**30, 50], device="cuda")
    csr_tables(pool, rows, lens, layout=KVLayout(1, 2**30), out=out, tail="keep")
    assert out[0].tolist() == [0, 2**30, 2**31 - 1, 2**31 - 1]
    assert out[1][-5001:-4949].tolist() == [1] * 51 + [0]
