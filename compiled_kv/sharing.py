"""How programs share the rows, columns and tokens of a batch: from shapes alone, so that one graph serves every length.

What is measured best stands here as constants, with what they trade; docs/benchmarks.md has the figures.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from compiled_kv.layout import ceil_div

# Warps of a program that fills a row of a page table. Few, for much of a short row's work is the same in every warp.
# Where pages of few tokens take many programs, half as many of twice the warps: a thousand programs take over 1.5 us to
# start, whatever they do.
WARPS = 2
FINE_WARPS = 4
# Columns a program writes at a time, and as many as are worth a program of their own, each of WARPS warps.
BLOCK = 512
LEAST = 128
# Rows a program takes prefix sums of, and rows ahead of these that it adds up at a time.
CHUNK = 64
SCAN = 512
# Tokens a program finds slots for at a time; of one row, of which most have one token.
TOKENS = 128
ROW_TOKENS = 64
# Some four programs for each of 132 multiprocessors fill the device; more would only cost their own start. Pages of few
# tokens share their sectors of memory: there twice the warps measured best, and a quarter more where a map is looked up
# as well, but of one row half as many, which a short row waits less for.
PROGRAMS = 520
FINE_PROGRAMS = 528
FINE_MAPPED_PROGRAMS = 660
FINE_PARTS = 132
# Columns a program after which a row is long; programs that help with what follows, about one for four
# multiprocessors, among which the others stay evenly spread, and columns they take at a time, so few that long rows of
# larger pages are enough for all of them. With pages of few tokens a column takes less time: a row is long later, twice
# as many help, and they take as many columns as others do. All for WARPS warps.
LONG = 1024
HELPERS = 32
SHARED = 512
# Programs that clear what no row owns where rows lie behind one another: one for each multiprocessor.
CLEARERS = 132
# Bits behind the point of `reciprocal_of`.
FRACTION = 20


class Split(NamedTuple):
    """How programs share the rows of page tables; from shapes alone, so that one graph serves every length."""

    block: int
    """Columns a program takes at a time, at most."""
    short: int
    """Columns of each that are enough for the rows to which the quickest way leads."""
    parts: int
    """Programs that take turns over a row."""
    long: int
    """Columns of each after which helpers take what is left of the row."""
    shared: int
    """Columns that a helper takes at a time."""
    helpers: int
    """Programs without a row of their own; none where `parts` programs are enough for any row."""
    warps: int
    """Warps of a program."""


def split_rows(batch_size: int, width: int, page_size: int, is_mapped: bool, has_unit_stride: bool) -> Split:
    """Where a map is looked up as well, fewer columns keep as many loads in flight. Pointers of other strides than one
    take registers of their own, which half the columns leave free; tails are then cleared by as many.
    """
    is_fine = int(page_size) < 8  # a symbol in a dynamic trace; a kernel is compiled for each page size in any case
    warps = FINE_WARPS if is_fine else WARPS
    times = warps // WARPS
    block, short, long, shared = times * (1 if is_mapped else 2) * BLOCK, times * LEAST, times * LONG, SHARED
    parts, most = programs_a_row(batch_size, width, short, PROGRAMS // times), HELPERS
    if is_fine:
        long, most, shared = (2 if is_mapped else 8) * long, 2 * HELPERS, block
        programs = FINE_MAPPED_PROGRAMS if is_mapped else FINE_PROGRAMS
        parts = torch.sym_max(parts, torch.sym_min(programs_a_row(batch_size, width, block, programs), FINE_PARTS))
    if not has_unit_stride:
        block, shared = block // 2, shared // 2
    helpers = torch.sym_min(most, batch_size * ceil_div(torch.sym_max(width - parts * long, 0), shared))
    return Split(block, short, parts, long, shared, helpers, warps)


def reciprocal_of(batch_size: int) -> int:
    """1 / batch_size, by which a program finds its row: dividing takes longer than anything else before its loads."""
    return ceil_div(1 << FRACTION, torch.sym_max(batch_size, 1))


def is_reciprocal_exact(batch_size: int, parts: int) -> bool:
    """Whether it is certain that `parts` programs for each of so many rows find theirs, as those of `split_rows` and
    `new_held` do."""
    return parts == 1 or batch_size**2 * parts <= 1 << FRACTION


def programs_a_row(batch_size: int, width: int, block: int | None = None, programs: int | None = None) -> int:
    """Programs that share a row of `width` columns; from shapes alone, so that one graph serves every length."""
    share = (programs or PROGRAMS) // (batch_size + 1)
    return torch.sym_max(1, torch.sym_min(ceil_div(width, block or BLOCK), share))


def clearers(capacity: int, parts: int, clear: bool) -> int:
    """Groups of `parts` programs that clear what no row owns of so many entries; where nothing is cleared one, for the
    prefix sums."""
    if not clear:
        return 1
    return torch.sym_max(1, torch.sym_min(ceil_div(capacity, BLOCK), CLEARERS) // parts)


def chunks(batch_size: int, rows: int | None = None) -> int:
    """Programs that share the prefix sums of a batch; one for an empty batch, whose sums still begin with 0."""
    return torch.sym_max(1, ceil_div(batch_size, rows or CHUNK))
