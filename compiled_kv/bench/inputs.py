"""Inputs of a cell: a pool of scattered pages, and several batches over it, so that no run lives off one warm row."""

from __future__ import annotations

import csv
import itertools
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

import compiled_kv as ckv
from compiled_kv.bench.cells import SHORT, WINDOW, Cell
from compiled_kv.layout import ceil_div

POOL_ENTRIES = 1 << 29  # of a pool with more rows than a batch
AT_ONCE = 1 << 26  # entries made at a time
SPREAD = 8  # how many batches' worth of rows a pool holds, where they fit
# Quantiles of prompt and answer together in the Azure LLM conversation trace of 2023, for want of the trace itself.
QUANTILES = ((0.0, 60), (0.05, 230), (0.5, 1150), (0.95, 4400), (0.99, 4700), (1.0, 14500))


@dataclass
class Inputs:
    """`sets` batches over one pool: `rows` int64 [sets, B], `seq_lens` int32 [sets, B]."""

    cell: Cell
    layout: ckv.KVLayout
    req_to_token: Tensor  # int32 [R, C]
    block_table: Tensor  # int32 [R, W]
    rows: Tensor
    seq_lens: Tensor
    full_to_swa: Tensor | None  # int64 [slots]

    @property
    def sets(self) -> int:
        return self.rows.shape[0]

    @property
    def live_pages(self) -> int:
        """Table entries a set writes, on average over the sets."""
        page_size = self.layout.page_size
        return int(((self.seq_lens.long() + page_size - 1) // page_size).sum()) // self.sets


def make_inputs(cell: Cell, device: torch.device, sets: int, trace: Path | None = None, seed: int = 0) -> Inputs:
    pick = random.Random(f"{cell.name}-{seed}")
    lengths = [draw_lengths(cell, pick, trace) for _ in range(sets)]
    window = WINDOW if cell.swa == "window" else None
    layout = ckv.KVLayout(cell.page_size, cell.context, window=window)
    longest = max(max(each) for each in lengths)
    pages = layout.num_pages(longest)
    rows = cell.batch * max(1, min(SPREAD, POOL_ENTRIES // (cell.batch * cell.context)))
    block_table = torch.zeros(rows, layout.max_num_pages, dtype=torch.int32, device=device)
    block_table[:, :pages] = scattered(rows * pages, device).view(rows, pages)
    req_to_token = torch.zeros(rows, layout.max_num_pages * cell.page_size, dtype=torch.int32, device=device)
    offset = torch.arange(cell.page_size, dtype=torch.int32, device=device)
    for some in torch.arange(rows).split(max(AT_ONCE // (pages * cell.page_size), 1)):
        chunk = slice(int(some[0]), int(some[-1]) + 1)
        slots = block_table[chunk, :pages, None] * cell.page_size + offset
        req_to_token[chunk, : pages * cell.page_size] = slots.flatten(1)
    full_to_swa = None
    if cell.swa != "off":
        swa_pages = torch.cat((block_table.new_zeros(1), scattered(rows * pages, device, 3))).long()
        full_to_swa = (swa_pages[:, None] * cell.page_size + offset).flatten()
    picked = torch.tensor([pick.sample(range(rows), cell.batch) for _ in range(sets)], device=device)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    return Inputs(cell, layout, req_to_token, block_table, aligned(picked), aligned(seq_lens), full_to_swa)


def aligned(batches: Tensor) -> Tensor:
    """The same [sets, B], each batch at 16 bytes, as an engine's own buffers are: Triton and Inductor compile anew for
    others."""
    padded = batches.new_zeros(len(batches), ceil_div(batches.shape[1], 4) * 4)
    padded[:, : batches.shape[1]] = batches
    return padded[:, : batches.shape[1]]


def scattered(count: int, device: torch.device, turn: int = 0) -> Tensor:
    """Each of 1 .. count once, neighbours far apart; int32."""
    step = next(p for p in (7919, 104729, 1299709, 15485863)[turn % 2 :] if count % p)
    index = torch.arange(count, device=device)
    return (index.mul_(step).add_(turn).remainder_(count).add_(1)).int()


def draw_lengths(cell: Cell, pick: random.Random, trace: Path | None) -> list[int]:
    if cell.lengths == "skewed":
        lengths = [SHORT] * cell.batch
        lengths[pick.randrange(cell.batch)] = cell.length - pick.randrange(cell.length // 8 + 1)
        return lengths
    if cell.lengths == "trace":
        known = trace_lengths(trace) if trace else None
        drawn = (pick.choice(known) if known else _from_quantiles(pick) for _ in range(cell.batch))
        return [min(length, cell.context) for length in drawn]
    return [cell.length - pick.randrange(cell.length // 8 + 1) for _ in range(cell.batch)]


def _from_quantiles(pick: random.Random) -> int:
    at = pick.random()
    for (low, least), (high, most) in itertools.pairwise(QUANTILES):
        if at <= high:
            return round(least + (most - least) * (at - low) / (high - low))
    return QUANTILES[-1][1]


@cache
def trace_lengths(path: Path) -> list[int]:
    """Prompt and answer of each request of a trace with columns ContextTokens and GeneratedTokens."""
    with path.open(newline="") as file:
        return [int(row["ContextTokens"]) + int(row["GeneratedTokens"]) for row in csv.DictReader(file)]
