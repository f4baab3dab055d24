"""Host memory that a device copies its inputs from: refilled only once the copies out of it have landed.

    ring = Ring(inputs, sizes=[4, 4])       a count, then fields of up to 4 numbers each
    ring.fill(2, ([7, 8], [40, 50]))        a line that no copy reads any more: 2 | 7 8 0 0 | 40 50 0 0
    ring.send(9)                            copies it to `inputs`, asynchronously

The ring has two halves. An event is recorded when the last line of a half has been sent, and waited for when that half
begins anew, so that most steps touch no event at all.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

HALF = 8


class Ring:
    """Lines of int64: a count, then fields at fixed places, zeros beyond their values; pinned for CUDA.

    On the CPU, where a copy is done when it returns, one line is enough.

    Args:
        target: int64 [n], on any device, what lines are copied to.
        sizes: the most numbers of each field; the count and they fill a line.
        unsigned: how many of the first fields take no negative number.
    """

    def __init__(self, target: Tensor, sizes: Sequence[int], unsigned: int = 0) -> None:
        # Weak: whoever looks into a module for its tensors is to find this one where it is registered.
        self.target, self.on_cuda, self.turn = weakref.ref(target), target.device.type == "cuda", -1
        self.filling = -1
        self.sizes, self.unsigned = sizes, unsigned
        count = 2 * HALF if self.on_cuda else 1
        self.lines = [torch.zeros(len(target), dtype=torch.int64, pin_memory=self.on_cuda) for _ in range(count)]
        self.memory = [(ctypes.c_char * (8 * len(target))).from_address(line.data_ptr()) for line in self.lines]
        self.packers: dict[tuple[int, ...], struct.Struct] = {}
        self.heads: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.sent = [torch.cuda.Event(), torch.cuda.Event()] if self.on_cuda else []

    def fill(self, count: int, fields: Sequence[Any]) -> None:
        """Write `count` and the values of the first fields into the next line.

        Raises:
            struct.error: a value is no 64-bit int, or negative where it may not be; the line stays the next one.
        """
        packer, line = self.next(tuple(map(len, fields)))
        packer.pack_into(line, 0, count, *chain.from_iterable(fields))
        self.turn = self.filling

    def next(self, lengths: tuple[int, ...]) -> tuple[struct.Struct, Any]:
        """What packs a count and fields of these lengths, and the next line, which no copy reads any more; once it is
        packed, `turn` becomes `filling`."""
        self.filling = turn = (self.turn + 1) % len(self.lines)
        if self.on_cuda and turn % HALF == 0:
            self.sent[turn // HALF].synchronize()
        return self.packers.get(lengths) or self._packer(lengths), self.memory[turn]

    def _packer(self, lengths: tuple[int, ...]) -> struct.Struct:
        kinds = "Q" * self.unsigned + "q" * len(self.sizes)
        fields = (f"{n}{kind}{8 * (size - n)}x" for n, size, kind in zip(lengths, self.sizes, kinds))
        return self.packers.setdefault(lengths, struct.Struct("=q" + "".join(fields)))

    def send(self, size: int) -> None:
        """Copy the first `size` numbers of the line filled last to the target, on the current stream."""
        if size not in self.heads:
            target = self.target()
            assert target is not None
            self.heads[size] = [(target[:size], line[:size]) for line in self.lines]
        head, line = self.heads[size][self.turn]
        head.copy_(line, non_blocking=True)
        if self.on_cuda and self.turn % HALF == HALF - 1:
            self.sent[self.turn // HALF].record()
