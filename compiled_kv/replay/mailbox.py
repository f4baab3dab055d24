"""Inputs that a captured graph fetches by itself: a step then costs the host its launch, and no copy beside it.

    mailbox = Mailbox(inputs, sizes=[4, 4])
    mailbox.take()                          captured, first in the graph
    mailbox.fill(2, ([7, 8], [40, 50]))     as a Ring is filled
    mailbox.send(9)                         the next replay takes the first 9 numbers
    mailbox.replay(graph)

The device counts the lines it has taken, the host its replays: so both know which line is next without a word between
them. A replay that nothing was sent for leaves the inputs as they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_kv.layout import ceil_div
from compiled_kv.replay.mailbox_kernel import take_line_kernel
from compiled_kv.staging import HALF, WORD, Ring

BLOCK = 512


class Mailbox(Ring):
    """A Ring whose lines are taken by the device, one a replay.

    Args:
        target, sizes, unsigned, most: as of a Ring.
    """

    def __init__(self, target: Tensor, sizes: Sequence[int], unsigned: int = 0, most: int = WORD - 1) -> None:
        super().__init__(target, sizes, unsigned, header=1, most=most)
        self.size_of = [ctypes.c_int64.from_address(line.data_ptr()) for line in self.lines]
        self.taken = torch.empty(ceil_div(len(target), BLOCK), dtype=torch.int64, device=target.device)
        # Copied from the lines: so their allocator knows of this stream, and gives them to nobody before it is done.
        self.taken.copy_(self.block.view(-1)[: len(self.taken)], non_blocking=True)

    def take(self) -> None:
        """Launch the kernel that brings the next line to the target."""
        target = self.target()
        assert target is not None
        take_line_kernel[(len(self.taken),)](
            lines_ptr=self.block, taken_ptr=self.taken, inputs_ptr=target, line_stride=self.block.stride(0),
            capacity=len(target), LINES=len(self.lines), BLOCK=BLOCK, PDL=False,
        )  # fmt: skip

    def restart(self) -> None:
        """Begin with the first line again, after lines were taken that nobody sent."""
        self.taken.zero_()
        self.turn = -1

    def deliver(self) -> None:
        """Copy what was sent and not taken: something else is about to be loaded on top."""
        if self.is_sent:
            target, size = self.target(), self.size_of[self.filling].value
            assert target is not None
            # A clone in pageable memory, which is read before this returns: the line itself is filled next.
            target[:size].copy_(self.lines[self.filling][1 : 1 + size].clone(), non_blocking=True)
            self.is_sent = False

    def send(self, size: int) -> None:
        """Let the next replay take the first `size` numbers of the line filled last."""
        self.size_of[self.filling].value = size
        self.is_sent = True

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Replay a graph that takes a line."""
        if not self.is_sent:
            self.next()
            self.size_of[self.filling].value = 0
        graph.replay()
        self.is_sent = False
        self.turn = turn = self.filling
        if turn % HALF == HALF - 1:
            self.mark(turn)
