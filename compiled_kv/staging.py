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
import sys
import weakref
from collections.abc import Sequence
from itertools import chain
from operator import index
from typing import Any

import torch
from torch import Tensor

HALF = 8
# Formats remembered: ragged batches bring ever new ones.
PACKERS = 1024
WORD, ORDER = 2**32, sys.byteorder
# A number below WORD in the 64 bits of an int64: packing refuses any other.
SHORT = "I4x" if ORDER == "little" else "4xI"
as_int = int.from_bytes
# What packs so many numbers of the second field, and where; what each may grow by, and the upper halves of all; what
# takes each but 0 and 1 to its upper half, and the bit there.
Second = tuple[struct.Struct, slice, int, int, int, int]


class Ring:
    """Lines of int64: a count, then fields at fixed places, zeros beyond their values; pinned for CUDA.

    On the CPU, where a copy is done when it returns, one line is enough.

    Args:
        target: int64 [n], on any device, what lines are copied to.
        sizes: the most numbers of each field; the count and they fill a line.
        unsigned: how many of the first fields take no negative number.
        header: numbers in front of each line, which filling leaves alone.
        most: what no number of the second field may exceed, where that field is filled alone; below 2**32.
    """

    def __init__(
        self, target: Tensor, sizes: Sequence[int], unsigned: int = 0, header: int = 0, most: int = WORD - 1
    ) -> None:
        # Weak: whoever looks into a module for its tensors is to find this one where it is registered.
        self.target, self.device, self.on_cuda = weakref.ref(target), target.device, target.device.type == "cuda"
        self.turn = self.filling = -1
        self.is_sent = False
        self.sizes, self._kinds = sizes, "Q" * unsigned + "q" * (len(sizes) - unsigned)
        count = 2 * HALF if self.on_cuda else 1
        self.block = torch.zeros(count, header + len(target), dtype=torch.int64, device="cpu", pin_memory=self.on_cuda)
        self.lines = list(self.block)
        length = 8 * len(target)
        starts = [line[header:].data_ptr() for line in self.lines]
        self.memory = [memoryview((ctypes.c_char * length).from_address(start)).cast("B") for start in starts]
        self.packers: dict[tuple[int, ...], struct.Struct] = {}
        self.kept: tuple[Any, Any] | None = None
        self.version, self.stamps = 1, [0] * count
        self.most, self.second_at = most, 8 * (1 + sizes[0])
        self.seconds: dict[int, Second] = {}
        self.fourths, self.fourth_at = dict[int, struct.Struct](), 8 * (1 + sum(sizes[:3]))
        self.heads: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.sent = [torch.cuda.Event(), torch.cuda.Event()] if self.on_cuda else []

    def fill(self, count: int, fields: Sequence[Any]) -> None:
        """Write `count` and the values of the first fields into the next line.

        Raises:
            struct.error: a value is no 64-bit int, or negative where it may not be; the line stays the next one.
            TypeError: a value is a bool.
        """
        values = [*chain.from_iterable(fields)]
        _refuse_bools(values)
        line, lengths = self.next(), tuple(map(len, fields))
        self.stamps[self.filling] = 0
        packer = self.packers.get(lengths) or self._packer(lengths)
        packer.pack_into(line, 0, count, *values)

    def keep(self, first: Any, third: Any) -> None:
        """Say that the line just filled, and those to come, hold these in their first and third fields; lists or
        tuples."""
        # As ints of our own: what the caller's lists hold may be changed in place too.
        self.kept = (type(first)(map(index, first)), type(third)(map(index, third)))
        self.second = self.seconds.get(len(first)) or self._second(len(first))
        self.image = bytes(self.memory[self.filling][: self.fourth_at])
        self.version += 1
        self.stamps[self.filling] = self.version

    def fill_second(self, values: Any, fourth: Any = None) -> None:
        """Fill the next line with what is kept and these, as many: a third of the work of `fill`.

        Args:
            values: of the second field.
            fourth: of the fourth field; without, that one is left alone.

        Raises:
            struct.error: as for `fill`, and where a value of the second field is above `most`.
            TypeError: a value of the second field is a bool.
        """
        packer, place, room, above, far, bits = self.second
        packed = packer.pack(*values)
        number = as_int(packed, ORDER)
        # All values at once: what is above `most` reaches the upper half of its 64 bits, and never the next value's.
        if number + room & above:
            raise struct.error(f"a value is above {self.most}")
        # A bool is packed as 0 or 1, the only numbers that stay in the lower half here; types are looked at then alone.
        if number + far & bits != bits:
            _refuse_bools(values)
        line = self.next()
        if self.stamps[self.filling] != self.version:
            line[: self.fourth_at] = self.image
            self.stamps[self.filling] = self.version
        line[place] = packed
        if fourth is not None:
            (self.fourths.get(len(fourth)) or self._fourth(len(fourth))).pack_into(line, self.fourth_at, *fourth)

    def next(self) -> Any:
        """The next line, which no copy reads any more; what was sent in it and not taken is delivered first."""
        if self.is_sent:
            self.deliver()
        self.filling = turn = (self.turn + 1) % len(self.lines)
        if turn % HALF == 0 and self.on_cuda:
            self.sent[turn // HALF].synchronize()
        return self.memory[turn]

    def _second(self, size: int) -> Second:
        ones = sum(1 << 64 * i for i in range(size))
        place = slice(self.second_at, self.second_at + 8 * size)
        packer, room, above = struct.Struct("=" + size * SHORT), ones * (WORD - 1 - self.most), ones * (WORD - 1) * WORD
        return self.seconds.setdefault(size, (packer, place, room, above, ones * (WORD - 2), ones * WORD))

    def _fourth(self, size: int) -> struct.Struct:
        padding = 8 * (self.sizes[3] - size)
        return self.fourths.setdefault(size, struct.Struct(f"={size}{self._kinds[3]}{padding}x"))

    def _packer(self, lengths: tuple[int, ...]) -> struct.Struct:
        if len(self.packers) >= PACKERS:
            self.packers.clear()
        fields = (f"{n}{kind}{8 * (size - n)}x" for n, size, kind in zip(lengths, self.sizes, self._kinds))
        return self.packers.setdefault(lengths, struct.Struct("=q" + "".join(fields)))

    def send(self, size: int) -> None:
        """Copy the first `size` numbers of the line filled last to the target, on the current stream."""
        if size not in self.heads:
            target = self.target()
            assert target is not None
            self.heads[size] = [(target[:size], line[:size]) for line in self.lines]
        self.turn = turn = self.filling
        head, line = self.heads[size][turn]
        head.copy_(line, non_blocking=True)
        if self.on_cuda and turn % HALF == HALF - 1:
            self.mark(turn)

    def mark(self, turn: int) -> None:
        """Record the event of a half whose last line the device has just been told to read."""
        # Of the target's device: an event takes the current device's stream if it is not told.
        self.sent[turn // HALF].record(torch.cuda.current_stream(self.device))

    def deliver(self) -> None:
        """Bring to the target what was sent and waits to be taken: here nothing ever does."""


def _refuse_bools(values: Sequence[Any]) -> None:
    if bool in set(map(type, values)):
        raise TypeError("a value is a bool")
