"""What every contender must have written, in plain torch on any device, from the definition alone."""

from __future__ import annotations

import torch
from torch import Tensor

import compiled_kv as ckv
from compiled_kv.bench.contenders import Contender, new_outputs
from compiled_kv.bench.inputs import Inputs

KEPT = 77  # what stood in the outputs before
AT_ONCE = 1 << 24  # entries looked up at a time


def expected(given: Inputs, rows: Tensor, seq_lens: Tensor, kept: int, windowed: bool) -> ckv.DecodeMetadata:
    """Metadata of plain decode with one query a row; columns past the live ones hold `kept`."""
    out, page_size = new_outputs(given), given.layout.page_size
    out.cache_seqlens.copy_(seq_lens)
    out.cu_seqlens_k[1:] = seq_lens.cumsum(0)
    out.cu_seqlens_q[1:] = torch.arange(1, len(rows) + 1, device=rows.device)
    column = torch.arange(-(-int(seq_lens.max()) // page_size), device=rows.device)
    window = given.layout.window if windowed and given.layout.window else int(seq_lens.max())
    token = given.req_to_token[rows, seq_lens.long() - 1].long()
    assert out.slot_mapping is not None
    out.slot_mapping.copy_(token)
    if given.full_to_swa is not None and out.swa_slot_mapping is not None:
        out.swa_slot_mapping.copy_(given.full_to_swa[token])
    for table in (out.page_table, out.swa_page_table):
        if table is not None:
            table[:, len(column) :] = kept
    for some in torch.arange(len(rows), device=rows.device).split(max(AT_ONCE // len(column), 1)):
        lengths = seq_lens[some, None].long()
        live = column * page_size < lengths
        slots = torch.where(live, given.req_to_token[rows[some, None], column * page_size].long(), 0)
        out.page_table[some, : len(column)] = torch.where(live, slots // page_size, kept).int()
        if given.full_to_swa is not None and out.swa_page_table is not None:
            seen = column >= (lengths - window).clamp(min=0) // page_size
            pages = torch.where(seen, given.full_to_swa[slots] // page_size, 0)
            out.swa_page_table[some, : len(column)] = torch.where(live, pages, kept).int()
    return out


Known = dict[tuple[int, bool, bool, bool], ckv.DecodeMetadata]


def check(given: Inputs, name: str, contender: Contender, index: int, known: Known | None = None) -> None:
    """Call the contender for one batch, over outputs that held something else, and compare everything.

    Args:
        known: what is expected of others, looked up and added to.

    Raises:
        AssertionError: a tensor differs; the text names contender, tensor and cell.
    """
    if contender.out is not None and not contender.persists:
        for tensor in contender.out:
            if tensor is not None:
                tensor.fill_(KEPT)
        # The published designs count on buffers that start zeroed for this entry.
        contender.out.cu_seqlens_q[0] = contender.out.cu_seqlens_k[0] = 0
    returned = contender.step(index)
    found = contender.out if contender.out is not None else returned
    if found is None:
        return
    rows, seq_lens = given.rows[index], given.seq_lens[index]
    if contender.seq_lens is not None:
        rows, seq_lens = given.rows[0], contender.seq_lens[index]
    known, key = {} if known is None else known, (index, contender.clears, contender.windowed, contender.persists)
    if key not in known:
        known[key] = expected(given, rows, seq_lens, 0 if contender.clears else KEPT, contender.windowed)
    wanted = known[key]
    for field, a, b in zip(ckv.DecodeMetadata._fields, found, wanted):
        if a is not None and b is not None and not torch.equal(a, b):
            raise AssertionError(f"{name}: {field} differs in {given.cell.name}")
