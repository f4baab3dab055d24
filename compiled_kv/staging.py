"""Host memory that a device copies its inputs from: refilled only once the copies out of it have landed.

    ring = Ring(inputs, {0: (1, 5), 1: (5, 9)}, pads={0: -1})
    ring.fill(2, ([7, 8], [40, 50]))        a line that no copy reads any more: 2 | 7 8 -1 -1 | 40 50 0 0
    ring.send(9)                            copies it to `inputs`, asynchronously

The ring has two halves. An event is recorded when the last line of a half has been sent, and waited for when that half
begins anew, so that most steps touch no event at all.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

HALF = 8


@cache
def _packer(count: int) -> struct.Struct:
    return struct.Struct(f"{count}q")


class Ring:
    """Lines of int64: a count, then fields at fixed places; pinned for CUDA.

    On the CPU, where a copy is done when it returns, one line is enough.

    Args:
        target: int64 [n], on any device, what lines are copied to.
        places: begin and end of each field in a line, by the field's place in what `fill` is given.
        pads: what fills a field beyond its values, where that is not 0.
    """

    def __init__(self, target: Tensor, places: Mapping[int, tuple[int, int]], pads: Mapping[int, int]) -> None:
        # Weak: whoever looks into a module for its tensors is to find this one where it is registered.
        self.target, self.on_cuda, self.turn = weakref.ref(target), target.device.type == "cuda", -1
        size = len(target)
        count = 2 * HALF if self.on_cuda else 1
        self.lines = [torch.zeros(size, dtype=torch.int64, pin_memory=self.on_cuda) for _ in range(count)]
        self.memory = [(ctypes.c_char * (8 * size)).from_address(line.data_ptr()) for line in self.lines]
        self.places, self.pads = dict(places), pads
        self.used = [[end - begin for begin, end in places.values()] for _ in self.lines]
        self.heads: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.sent = [torch.cuda.Event(), torch.cuda.Event()] if self.on_cuda else []

    def fill(self, count: int, fields: Sequence[Any]) -> None:
        """Write `count` and the fields that are not None into the next line."""
        self.turn = turn = (self.turn + 1) % len(self.lines)
        if self.on_cuda and turn % HALF == 0:
            self.sent[turn // HALF].synchronize()
        memory, used = self.memory[turn], self.used[turn]
        _packer(1).pack_into(memory, 0, count)
        for order, (field, (begin, _)) in enumerate(self.places.items()):
            values = fields[field]
            if values is not None:
                length, before = len(values), used[order]
                _packer(length).pack_into(memory, 8 * begin, *values)
                if before > length:
                    pads = [self.pads.get(field, 0)] * (before - length)
                    _packer(before - length).pack_into(memory, 8 * (begin + length), *pads)
                used[order] = length

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
