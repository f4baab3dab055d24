"""A batch may be made of anything that holds ints, also of the buffers themselves, and under any defaults of torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from compiled_kv.batches import DecodeBatch
from compiled_kv.buffers import DecodeBuffers
from compiled_kv.layout import KVLayout
from compiled_kv.replay.graphs import DecodeGraphs
from compiled_kv.staging import HALF, PACKERS, Ring
from tests.cases import DEVICES, needs_cuda, pool_of_pages

devices = pytest.mark.parametrize("device", DEVICES)
LAYOUT = KVLayout(page_size=4, max_context_len=28)
POOL, _ = pool_of_pages(6, 7, 4)


def make(device: str = "cpu", **given: Any) -> DecodeBuffers:
    return DecodeBuffers(LAYOUT, POOL.to(device), max_batch_size=4, **given)


def loaded(buffers: DecodeBuffers, count: int) -> list[list[int]]:
    """Rows, lengths and generations of `count` requests; everything behind them is padding."""
    fields = [t.tolist() for t in (buffers.req_pool_indices, buffers.seq_lens, buffers.generations)]
    assert buffers.num_reqs.tolist() == [count]
    assert all(field[count:] == [0] * (4 - count) for field in fields)
    return [field[:count] for field in fields]


def views(*fields: str) -> Any:
    """A batch of the requests behind the first, made of views of these fields."""

    def of(buffers: DecodeBuffers) -> DecodeBatch:
        rows, lengths, generations = (getattr(buffers, name)[1:3] for name in fields)
        return DecodeBatch(rows, lengths, generations)

    return of


ROWS, LENGTHS, GENERATIONS = [3, 1, 5], [5, 7, 9], [2, 4, 6]


@devices
@pytest.mark.parametrize(
    ("batch", "wanted"),
    [
        (views("req_pool_indices", "seq_lens", "generations"), [[1, 5], [7, 9], [4, 6]]),
        (views("req_pool_indices", "generations", "seq_lens"), [[1, 5], [4, 6], [7, 9]]),
        (views("generations", "req_pool_indices", "req_pool_indices"), [[4, 6], [1, 5], [1, 5]]),
        (lambda b: DecodeBatch(b.req_pool_indices[:2], b.seq_lens[:2], b.generations[:2]), [[3, 1], [5, 7], [2, 4]]),
        (lambda b: DecodeBatch(b.num_reqs.expand(2), b.inputs[1:7:3], b.inputs[5:7]), [[3, 3], [3, 0], [5, 7]]),
    ],
    ids=["first-left", "fields-exchanged", "one-twice", "in-place", "across-fields"],
)
def test_a_batch_of_views_of_the_inputs_is_read_before_it_is_written(
    batch: Any, wanted: list[list[int]], device: str
) -> None:
    buffers = make(device)
    buffers.load(DecodeBatch(ROWS, LENGTHS, GENERATIONS))
    buffers.load(batch(buffers))
    assert loaded(buffers, 2) == wanted


def test_arrays_of_ints_come_beside_lists_and_between_them() -> None:
    buffers = make()
    for number, generations in enumerate([[0, 2], np.array([0, 2]), np.array([1, 2]), (1, 3), [0, 2]]):
        buffers.load(DecodeBatch([3, 1], [7 + number, 4], generations))  # type: ignore[arg-type]
        assert loaded(buffers, 2) == [[3, 1], [7 + number, 4], list(generations)]


@pytest.mark.parametrize("given", [{}, {"ragged": True, "q_len": 2}], ids=["plain", "ragged"])
def test_arrays_are_loaded_and_refused_as_lists_are(given: dict[str, Any]) -> None:
    buffers = make(**given)
    q_lens = np.array([1, 1]) if given else None
    batch = DecodeBatch(np.array([3, 1]), np.array([7, 4]), np.array([1, 2**62]), q_lens, None, np.array([8, 9]))
    buffers.load(batch)
    assert loaded(buffers, 2) == [[3, 1], [7, 4], [1, 2**62]]
    for name, wrong, message in [
        ("rows", [3, 6], r"rows\[1\] must be at most 5, got 6"),
        ("seq_lens", [7, -4], r"seq_lens\[1\] must be at least 0, got -4"),
        ("seq_lens", [7.0, 4.0], r"seq_lens\[0\] must be an int, got float64"),
        ("token_ids", [8.0, 9.0], r"token_ids\[0\] must be an int, got float64"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            buffers.load(batch._replace(**{name: np.array(wrong)}))
    assert loaded(buffers, 2) == [[3, 1], [7, 4], [1, 2**62]]


def test_numbers_changed_in_place_are_read_anew() -> None:
    buffers, rows = make(), [torch.tensor(3), torch.tensor(1)]
    for row in (3, 2, 5):
        rows[0].fill_(row)
        buffers.load(DecodeBatch(rows, [7, 4], [0, 0]))  # type: ignore[arg-type]
        assert loaded(buffers, 2) == [[row, 1], [7, 4], [0, 0]]


def test_torchs_default_device_has_no_say() -> None:
    with torch.device("meta"):
        buffers = make()
        buffers.load(DecodeBatch([3, 1], [7, 4], [0, 0]))
        meta = buffers.metadata(2)
    assert loaded(buffers, 2) == [[3, 1], [7, 4], [0, 0]]
    assert meta.cache_seqlens.tolist() == [7, 4]


@devices
@pytest.mark.parametrize("tensors", [False, True], ids=["ints", "tensors"])
def test_a_query_that_was_given_no_slot_has_none(tensors: bool, device: str) -> None:
    """Not slot 0, nor what the batch before left."""
    buffers = make(device, given_slots=True, q_len=2)
    for slots, wanted in [([8, 9, 10, 11], [8, 9, 10, 11]), ([5, 6, 7], [5, 6, 7, -1]), ([], [-1] * 4)]:
        fields = [3, 1], [7, 4], [0, 0], None, slots
        on_device = (
            None if field is None else torch.tensor(field, dtype=torch.int64, device=device) for field in fields
        )
        buffers.load(DecodeBatch(*(on_device if tensors else fields)))
        slot_mapping = buffers.metadata(3).slot_mapping
        assert slot_mapping is not None and slot_mapping.tolist() == [*wanted, -1, -1]


def test_a_slot_too_many_for_the_queries_of_a_ragged_batch_is_refused() -> None:
    buffers = make(given_slots=True, ragged=True, q_len=2)
    batch = DecodeBatch([3, 1], [7, 4], [0, 0], [1, 2], [8, 9, 10])
    buffers.load(batch)
    with pytest.raises(ValueError, match=r"batch\.slots must have at most 3 entries, got 4"):
        buffers.load(batch._replace(slots=[1, 2, 3, 4]))
    with pytest.raises(ValueError, match=r"batch\.generations\[0\] must be at most"):
        buffers.load(batch._replace(generations=[2**63, 0]))
    assert buffers.slots is not None and buffers.slots.tolist() == [8, 9, 10, -1, *[0] * 4]


def test_a_replay_on_another_stream_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = make()
    graphs = DecodeGraphs(lambda b, size: b.metadata(size).cache_seqlens, buffers, [4], backend=None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0x20, raising=False)
    buffers._stream = 0x10
    for call in (lambda: graphs.replay(0), lambda: graphs(DecodeBatch([3], [7], [0]))):
        with pytest.raises(RuntimeError, match="stream they were made on, 0x10, but stream 0x20 is current"):
            call()
    buffers._stream = 0x20
    assert graphs(DecodeBatch([3], [7], [0])).tolist() == graphs.replay(1).tolist() == [7, 0, 0, 0]


def test_formats_of_lines_do_not_pile_up() -> None:
    target = torch.zeros(1 + 2 * 60, dtype=torch.int64)
    ring = Ring(target, [60, 60])
    for first in range(60):
        for second in range(0, 60, 2):
            ring.fill(1, ([7] * first, [9] * second))
            assert len(ring.packers) <= PACKERS
    ring.send(len(target))
    assert target.tolist() == [1, *[7] * 59, 0, *[9] * 58, 0, 0]


def lengths_and_slots(buffers: DecodeBuffers, batch_size: int) -> tuple[Tensor, Tensor]:
    meta = buffers.metadata(batch_size)
    assert meta.slot_mapping is not None
    return meta.cache_seqlens, meta.slot_mapping


def serve_in_turn(devices: list[str]) -> None:
    """A set on each device, with a pool of its own: many more steps than a ring has lines, of graphs and without."""
    pools = [1000 * at + torch.arange(6 * 28).view(6, 28) for at in range(len(devices))]
    sets = [DecodeBuffers(LAYOUT, pool.to(device), max_batch_size=4) for pool, device in zip(pools, devices)]
    graphs = [DecodeGraphs(lengths_and_slots, each, [2, 4], backend=None) for each in sets]
    seen = []
    for device in devices:
        if device != "cpu":
            torch.cuda.synchronize(device)
            with torch.cuda.device(device):
                torch.cuda._sleep(200_000_000)
    for number in range(5 * HALF):
        for at, (buffers, step) in enumerate(zip(sets, graphs)):
            rows, lengths = [at, 3], [1 + (number + at) % 28, 1 + number % 13]
            batch = DecodeBatch(rows, lengths, [0, 0])
            if number % 3:
                found = step(batch)
            else:
                buffers.load(batch)
                found = lengths_and_slots(buffers, 2)
            slots = [1000 * at + 28 * row + length - 1 for row, length in zip(rows, lengths)]
            seen.append((devices[at], lengths, slots, [tensor.clone() for tensor in found]))
    for device, lengths, slots, found in seen:
        assert [str(tensor.device) for tensor in found] == [device] * 2
        assert [tensor.tolist() for tensor in found] == [lengths, slots]


@devices
def test_two_sets_are_served_in_turn(device: str) -> None:
    serve_in_turn(["cpu" if device == "cpu" else "cuda:0"] * 2)


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")


@pytest.mark.gpu
@needs_cuda
@needs_two
@pytest.mark.parametrize("current", [0, 1])
def test_sets_on_two_devices_are_served_in_turn_whichever_is_current(current: int) -> None:
    with torch.cuda.device(current):
        serve_in_turn(["cuda:0", "cuda:1"])


@pytest.mark.gpu
@needs_cuda
@needs_two
def test_buffers_of_a_device_that_is_not_current_overwrite_no_line() -> None:
    buffers = make("cuda:1")
    seen = torch.zeros(5 * HALF, 4, dtype=torch.int64, device="cuda:1")
    with torch.cuda.device(1):
        torch.cuda._sleep(200_000_000)
    for step in range(len(seen)):
        buffers.load(DecodeBatch([1, 2], [step % 28, step % 13], [0, 0]))
        seen[step].copy_(buffers.seq_lens)
    assert seen.tolist() == [[step % 28, step % 13, 0, 0] for step in range(len(seen))]
