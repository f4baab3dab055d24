"""A captured graph takes its inputs from lines of the host: each replay the next one, and none that was not sent."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_kv.batches import DecodeBatch
from compiled_kv.buffers import DecodeBuffers
from compiled_kv.launch import INTERPRETED
from compiled_kv.layout import KVLayout
from compiled_kv.replay.graphs import DecodeGraphs
from compiled_kv.replay.mailbox import Mailbox
from compiled_kv.replay.mailbox_kernel import take_line_kernel
from compiled_kv.staging import HALF
from tests.cases import needs_cuda

interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter: runs in a process of its own")
PADDING = -77


class Graph:
    """A graph of one node: the mailbox's."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.replay = mailbox.take


def take(lines: list[list[int]], taken: int, width: int, block: int) -> tuple[list[int], list[int]]:
    """What one launch makes of inputs that are PADDING, and of its programs' counts."""
    programs = -(-width // block)
    inputs, counts = torch.full((width + 3,), PADDING), torch.full((programs + 1,), taken)
    block_of_lines = torch.tensor(lines)
    take_line_kernel[(programs,)](
        lines_ptr=block_of_lines, taken_ptr=counts, inputs_ptr=inputs, line_stride=block_of_lines.stride(0),
        capacity=width, LINES=len(lines), BLOCK=block, PDL=False,
    )  # fmt: skip
    return inputs.tolist(), counts.tolist()


@interpreted
@pytest.mark.parametrize("block", [2, 4, 8])
def test_a_launch_takes_the_next_line_up_to_its_size_and_counts_it(block: int) -> None:
    lines = [[5, 10, 11, 12, 13, 14], [2, 20, 21, 22, 23, 24], [0, 30, 31, 32, 33, 34]]
    after = [[10, 11, 12, 13, 14], [20, 21, *[PADDING] * 3], [PADDING] * 5]
    programs = -(-5 // block)
    for taken in range(7):
        inputs, counts = take(lines, taken, 5, block)
        assert inputs == [*after[taken % 3], *[PADDING] * 3]
        assert counts == [*[taken + 1] * programs, taken]


@interpreted
def test_a_replay_takes_what_was_sent_and_else_leaves_the_inputs() -> None:
    target = torch.zeros(5, dtype=torch.int64)
    mailbox = Mailbox(target, [2, 2])
    graph: Any = Graph(mailbox)
    mailbox.fill(2, ([7, 8], [40, 50]))
    mailbox.send(5)
    assert target.tolist() == [0] * 5  # nothing is copied before the replay
    mailbox.replay(graph)
    assert target.tolist() == [2, 7, 8, 40, 50]
    target[3] = 99
    mailbox.replay(graph)
    assert target.tolist() == [2, 7, 8, 99, 50]
    mailbox.fill(1, ([1], [2]))
    mailbox.send(5)
    mailbox.fill(1, ([3],))  # sent anew before any replay: on top of the first, as copies would be
    mailbox.send(3)
    mailbox.replay(graph)
    assert target.tolist() == [1, 3, 0, 2, 0]


LAYOUT = KVLayout(page_size=4, max_context_len=32)


def step(buffers: DecodeBuffers, batch_size: int) -> tuple[Any, Any]:
    meta = buffers.metadata(batch_size)
    return meta.cache_seqlens, buffers.token_ids[:batch_size] + 0


class Several(DecodeBuffers):
    """A caller's own `load`, which loads several batches and makes light of one that is refused."""

    batches: tuple[DecodeBatch, ...] = ()

    def load(self, batch: DecodeBatch) -> int:
        for each in self.batches:
            with contextlib.suppress(ValueError):
                super().load(each)
        return super().load(batch)


ONE = DecodeBatch([1], [4], [6], token_ids=[9])
TWO = DecodeBatch([3, 1], [7, 9], [0, 5])
ON_DEVICE = DecodeBatch(torch.tensor([3, 1]), torch.tensor([7, 9]), torch.tensor([0, 5]))
TOO_HIGH = DecodeBatch([2], [2], [2**63], token_ids=[2])
SEVERAL = {
    "tokens-first": ((ONE, TWO), [2, 3, 1, 7, 9, 0, 5, 9, 0]),
    "tensors-behind": ((ONE, ON_DEVICE), [2, 3, 1, 7, 9, 0, 5, 9, 0]),
    "ints-behind": ((ON_DEVICE, ONE), [1, 1, 0, 4, 0, 6, 0, 9, 0]),
    "refused-between": ((ONE, TOO_HIGH, TWO), [2, 3, 1, 7, 9, 0, 5, 9, 0]),
    "refused-behind": ((ONE, TOO_HIGH), [1, 1, 0, 4, 0, 6, 0, 9, 0]),
    "refused-alone": ((TOO_HIGH,), [0] * 9),
}


@interpreted
@pytest.mark.parametrize("fetched", [False, True], ids=["copied", "fetched"])
@pytest.mark.parametrize(("batches", "inputs"), SEVERAL.values(), ids=SEVERAL.keys())
def test_several_loads_before_a_replay_add_up(
    batches: tuple[DecodeBatch, ...], inputs: list[int], fetched: bool
) -> None:
    buffers = Several(LAYOUT, torch.arange(8 * 32).view(8, 32), max_batch_size=2)
    graphs = DecodeGraphs(step, buffers, [2], backend=None)
    if fetched:
        graphs._mailbox = mailbox = buffers.new_ring(Mailbox)
        graphs._graphs = {2: Graph(mailbox)}
    *buffers.batches, last = batches  # type: ignore[assignment]
    if last is TOO_HIGH:
        with pytest.raises(ValueError, match=r"generations\[0\] must be at most"):
            graphs(last)
        graphs.replay(1)
    else:
        graphs(last)
    assert buffers.inputs.tolist() == inputs


@pytest.mark.skipif(INTERPRETED, reason="this process is the interpreted one")
def test_the_same_interpreted() -> None:
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "tests/test_mailbox.py"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=Path(__file__).parent.parent, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:]
    assert "16 passed" in run.stdout


def on_cuda() -> tuple[DecodeBuffers, DecodeGraphs]:
    pool = torch.arange(8 * 32, dtype=torch.int32, device="cuda").view(8, 32)
    buffers = DecodeBuffers(LAYOUT, pool, max_batch_size=4)
    return buffers, DecodeGraphs(step, buffers, [2, 4])


@pytest.mark.gpu
@needs_cuda
def test_a_host_far_ahead_of_the_device_overwrites_no_line() -> None:
    """Kind 22. Many more steps are queued than there are lines, of both buckets, while the device is held up."""
    _, graphs = on_cuda()
    torch.cuda.synchronize()
    seen = []
    torch.cuda._sleep(200_000_000)
    for number in range(5 * HALF):
        rows = [0, 1] if number % 3 else [0, 1, 2]
        lengths = [1 + (number + row) % 30 for row in rows]
        batch = DecodeBatch(rows, lengths, [0] * len(rows), token_ids=[number * 10 + row for row in rows])
        found = graphs(batch)
        seen.append((lengths, batch.token_ids, [tensor[: len(rows)].clone() for tensor in found]))
    for lengths, tokens, (cache_seqlens, token_ids) in seen:
        assert cache_seqlens.tolist() == lengths and token_ids.tolist() == tokens


@pytest.mark.gpu
@needs_cuda
def test_batches_come_by_any_way_and_a_refused_one_leaves_no_trace() -> None:
    buffers, graphs = on_cuda()
    assert graphs(DecodeBatch([3, 1], [7, 9], [0, 0]))[0].tolist() == [7, 9]
    buffers.load(DecodeBatch([2], [5], [0]))  # copied at once, and replayed as it is
    assert buffers.seq_lens.tolist() == [5, 0, 0, 0]
    assert graphs.replay(1)[0].tolist() == [5, 0]
    on_device = [torch.tensor(values, device="cuda") for values in ([1, 2, 3], [11, 12, 13], [0, 0, 0])]
    assert graphs(DecodeBatch(*on_device))[0].tolist() == [11, 12, 13, 0]
    with pytest.raises(ValueError, match=r"batch.rows\[1\] must be at most 7, got 9"):
        graphs(DecodeBatch([3, 9], [7, 9], [0, 0]))
    assert graphs.replay(3)[0].tolist() == [11, 12, 13, 0]
    assert graphs(DecodeBatch([3], [8], [0], token_ids=[4]))[1].tolist() == [4, 0]
    assert buffers.token_ids.tolist() == [4, 0, 0, 0]


@pytest.mark.gpu
@needs_cuda
def test_lines_outlive_graphs_that_are_still_to_be_run() -> None:
    """Pinned memory goes back to its allocator with the graphs, and is not handed out before they have run."""
    _, graphs = on_cuda()
    size = graphs._mailbox.block.shape if graphs._mailbox is not None else ()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    found = graphs(DecodeBatch([3, 1], [7, 9], [0, 0], token_ids=[4, 5]))
    del graphs
    gc.collect()
    others = [torch.full(size, 2, dtype=torch.int64, pin_memory=True) for _ in range(4)]
    assert [tensor.tolist() for tensor in found] == [[7, 9], [4, 5]]
    assert len(others) == 4
