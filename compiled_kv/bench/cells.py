"""The matrix: batch, live length, context bound, page size, sliding window, distribution of lengths.

default_cells()  the measured table of the design, every extreme corner, trace batches, and all pairs of values
full_cells()     every valid combination
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

K, M = 1 << 10, 1 << 20
AXES: dict[str, tuple[Any, ...]] = {
    "batch": (1, 8, 64, 256, 512),
    "length": (128, K, 8 * K, 32 * K, 128 * K, M),
    "context": (8 * K, 128 * K, M),
    "page_size": (1, 16, 32, 64, 128),
    "swa": ("off", "row", "window"),
    "lengths": ("uniform", "skewed"),
}
WINDOW = 4096
SHORT = 128  # tokens of the other requests in a skewed batch
MAX_LIVE = 1 << 26  # tokens of a batch that a cell may hold: 512 requests of 128 K
DEFAULT_CELLS = 150


@dataclass(frozen=True)
class Cell:
    """One point of the matrix; `length` is the longest request of a batch."""

    batch: int
    length: int
    context: int
    page_size: int
    swa: str = "off"
    lengths: str = "uniform"

    @property
    def name(self) -> str:
        sizes = "-".join(_short(n) for n in (self.batch, self.length, self.context))
        return f"{sizes}-page{self.page_size}-{self.swa}-{self.lengths}"

    @property
    def live_tokens(self) -> int:
        return self.batch * self.length if self.lengths == "uniform" else self.length + (self.batch - 1) * SHORT

    @property
    def is_valid(self) -> bool:
        if self.lengths == "trace":
            return True
        skewed = self.lengths == "skewed"
        return self.length <= self.context and self.live_tokens <= MAX_LIVE and not (
            skewed and (self.batch == 1 or self.length <= SHORT)
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}


def _short(n: int) -> str:
    return f"{n // M}M" if n % M == 0 else f"{n // K}K" if n % K == 0 else str(n)


# The table of the design notes, and what the claims about it compare.
MEASURED = [
    Cell(1, K, 128 * K, 64), Cell(1, M, M, 64), Cell(64, 8 * K, 128 * K, 64), Cell(64, 128 * K, 128 * K, 64),
    Cell(256, 4 * K, M, 64), Cell(512, K, M, 64), Cell(64, 128 * K, 128 * K, 16), Cell(64, 128 * K, 128 * K, 1),
    Cell(64, 128 * K, 128 * K, 1, "row"), Cell(256, 32 * K, 128 * K, 32),
]  # fmt: skip
# The same live lengths under the three context bounds.
BOUNDS = [
    Cell(batch, length, context, page_size)
    for batch, length, page_size in ((1, K, 64), (64, 8 * K, 64), (256, 8 * K, 16), (512, K, 64))
    for context in AXES["context"]
]
TRACES = [
    Cell(batch, 16 * K, context, page_size, "off", "trace")
    for batch, context, page_size in (
        (8, 128 * K, 64), (64, 128 * K, 16), (64, M, 64), (256, 128 * K, 32), (512, 128 * K, 64), (512, M, 16),
    )
]  # fmt: skip
QUICK = [Cell(8, K, 8 * K, 16), Cell(8, K, 8 * K, 64, "window", "skewed")]


def full_cells() -> list[Cell]:
    cells = (Cell(*values) for values in itertools.product(*AXES.values()))
    return [cell for cell in (*cells, *MEASURED, *TRACES) if cell.is_valid]


def corners() -> Iterator[Cell]:
    """First and last value of every axis, in all combinations; the longest length that the bounds allow.

    Batch and length alternate fastest, so that the first of them already differ most.
    """
    for backwards in itertools.product(*((axis[0], axis[-1]) for axis in reversed(AXES.values()))):
        values = backwards[::-1]
        cell = Cell(*values)
        lengths = [n for n in AXES["length"] if n <= cell.length]
        fitting = (Cell(cell.batch, n, *values[2:]) for n in reversed(lengths))
        yield next((each for each in fitting if each.is_valid), cell)


def default_cells(count: int = DEFAULT_CELLS) -> list[Cell]:
    """About `count` cells, the same in every run: what is named above, corners, then whatever covers most new pairs."""
    chosen = dict.fromkeys(cell for cell in (*MEASURED, *BOUNDS, *TRACES, *corners()) if cell.is_valid)
    pick, everything = random.Random(0), full_cells()
    missing = set().union(*(_pairs(cell) for cell in everything)).difference(*(_pairs(cell) for cell in chosen))
    while len(chosen) < count:
        candidates = [cell for cell in pick.sample(everything, 200) if cell not in chosen]
        best = max(candidates, key=lambda cell: len(_pairs(cell) & missing))
        chosen[best] = None
        missing -= _pairs(best)
    return list(chosen)


def _pairs(cell: Cell) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(asdict(cell).items(), 2))
