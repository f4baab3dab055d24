"""Lengths -> FlashMLA's split-KV schedule: which blocks of which requests each part of the GPU reads.

    cache_seqlens = [192, 64, 1280], num_sm_parts = 2, blocks of 64, overhead 5
    blocks 3, 1, 20; payload of a part = ceil((24 + 3 * 5) / 2) + 5 = 25
    part 0 takes requests 0 and 1 (3 + 5 and 1 + 5), has 11 left, and cuts request 2 behind its first 11 - 5 blocks

    tile_scheduler_metadata [[0, 2, 0,  6, 0, 0, 1, 0],      begin_req, end_req, begin_block, end_block, begin_split,
                             [2, 2, 6, 20, 1, 1, 1, 0]]      first request cut, last request cut, unused
    num_splits [0, 1, 2, 4]                                  request 2 in two splits

The algorithm is FlashMLA's, which takes the parts one after the other in one thread; here they are found all at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kv import rows_cpu as cpu
from compiled_kv.checks import INT32, INTS, Sizes, check_int, check_tuple
from compiled_kv.launch import launch, runs_kernel
from compiled_kv.layout import INT32_MAX
from compiled_kv.overlap import check_distinct, check_distinct_fake
from compiled_kv.registration import operator
from compiled_kv.schedule_kernel import WARPS, flashmla_schedule_kernel, scratch_size
from compiled_kv.status import DEBUG, Status

Schedule = tuple[Tensor, Tensor]
FIELDS = ("tile_scheduler_metadata", "num_splits")
FORMS = ("current", "legacy_tokens", "legacy_blocks")
COLUMNS = 8
MAX_LINE = 2**30  # blocks and overheads of a batch, so that their sums fit int32
MAX_OVERHEAD = 1023
PARTS = 256


def _most_blocks(batch_size: int, overhead: int) -> int:
    """Blocks that one request may count, so that all of them fit MAX_LINE."""
    return torch.sym_max(MAX_LINE // torch.sym_max(batch_size, 1) - overhead, 1)


def _launch(
    out: Schedule, cache_seqlens: Tensor, num_reqs: Tensor | None, block_size: int, overhead: int, form: int
) -> None:
    metadata, num_splits = out
    batch_size = cache_seqlens.shape[0]
    scratch = num_splits.new_empty((scratch_size(metadata.shape[0]),))
    launch(
        flashmla_schedule_kernel, (1,), kv_lens_ptr=cache_seqlens, num_reqs_ptr=num_reqs,
        len_stride=cache_seqlens.stride(0), batch_size=batch_size, num_sm_parts=metadata.shape[0],
        reciprocal=INT32_MAX // metadata.shape[0], overhead=overhead,
        most=_most_blocks(batch_size, overhead), scratch_ptr=scratch, num_splits_ptr=num_splits,
        tile_scheduler_metadata_ptr=metadata, BLOCK_SIZE=block_size, IN_TOKENS=FORMS[form] == "legacy_tokens",
        LEGACY=FORMS[form] != "current", DEBUG=DEBUG, PARTS=PARTS, num_warps=WARPS,
    )  # fmt: skip


def _boundaries_met(line: Tensor, active: Tensor | int, quota: Tensor, overhead: int, parts: int) -> Tensor:
    """int64 [parts + 1]: the boundaries at which parts begin, in order from 0; the end again and again once reached."""
    boundary = cpu.iota(line.shape[0], line)
    behind = torch.remainder(line[None, :] - line[:, None], quota)
    met = (boundary[None, :] > boundary[:, None]) & ((behind <= overhead) | (boundary == active)[None, :])
    after = torch.where(met, boundary[None, :], line.shape[0]).amin(1).clamp(max=active)
    count = torch.arange(parts + 1, device=line.device)
    path = torch.zeros_like(count)
    for bit in range(parts.bit_length()):
        path = torch.where((count >> bit) & 1 == 1, after[path], path)
        after = after[after]
    return path


def _cpu_body(
    cache_seqlens: Tensor, num_reqs: Tensor | None, parts: int, block_size: int, overhead: int, form: int
) -> Schedule:
    batch_size = cache_seqlens.shape[0]
    most, active = _most_blocks(batch_size, overhead), cpu.active_rows(num_reqs, batch_size)
    lengths = cache_seqlens.long().clamp(0, INT32_MAX).where(cpu.iota(batch_size, cache_seqlens) < active, 0)
    wanted = cpu.pages_of(lengths, block_size)
    cpu.report(None, cpu.flag(wanted > most, Status.SUM_OVERFLOW))
    blocks = wanted.clamp(1, most)
    weights = torch.where(cpu.iota(batch_size, cache_seqlens) < active, blocks + overhead, 0)
    line = torch.nn.functional.pad(weights.cumsum(0), (1, 0))
    quota = cpu.floor_div(line[-1] + parts - 1, parts).clamp(min=1)

    path = _boundaries_met(line, active, quota, overhead, parts)
    met = (path[1:] > path[:-1]).long()
    taken = met * torch.div(line[path].diff() - overhead + quota - 1, quota, rounding_mode="floor")
    marks, ranks = (torch.nn.functional.pad(each.cumsum(0), (1, 0)) for each in (taken, met))
    boundary = cpu.iota(batch_size + 1, line)
    count = torch.searchsorted(path, boundary, right=True) - 1
    place = marks[count] * quota + line - line[path[count]]
    parts_before = torch.div(place, quota, rounding_mode="floor")
    num_splits = boundary.clamp(max=active) + parts_before - ranks[count]

    mark = torch.arange(parts + 1, device=line.device) * quota
    request = (torch.searchsorted(place, mark, right=True) - 1).clamp(max=active)
    block = torch.where(request < active, mark - place[request], 0)
    return _rows(request, block, lengths, blocks, quota, block_size, form), num_splits.int()


def _rows(
    request: Tensor, block: Tensor, lengths: Tensor, blocks: Tensor, quota: Tensor, block_size: int, form: int
) -> Tensor:
    """int32 [parts, 8] from where each part, and the one behind the last, begins: [parts + 1] both."""
    begin_req, begin_block, end_block = request[:-1], block[:-1], block[1:]
    begin_split = torch.div(begin_block + quota - 1, quota, rounding_mode="floor")
    cut_first, cut_last = begin_block > 0, end_block > 0
    end_req = request[1:] - (~cut_last).long()
    length = cpu.gather(lengths, end_req, end_req >= 0).clamp(min=0)
    whole = cpu.gather(blocks, end_req, length > 0).clamp(min=0)
    zero = torch.zeros_like(begin_req)
    end_at = torch.where(cut_last, end_block, whole)
    if FORMS[form] == "legacy_tokens":
        begin_block, end_at = begin_block * block_size, torch.where(cut_last, end_block * block_size, length)
    if FORMS[form] != "current":
        columns = [begin_req, begin_block, end_req, end_at, begin_split, zero, zero, zero]
    else:
        either = (begin_req == end_req) & (cut_first | cut_last)
        flags = [(cut_first | either).long(), (cut_last | either).long()]
        columns = [begin_req, end_req, begin_block, end_at, begin_split, *flags, zero]
    return torch.stack(columns, 1).int()


@operator("compiled_kv::flashmla_schedule", mutates_args=())
def _flashmla_schedule(
    cache_seqlens: Tensor, num_reqs: Tensor | None, parts: int, block_size: int, overhead: int, form: int
) -> tuple[Tensor, Tensor]:
    if not runs_kernel(cache_seqlens):
        return _cpu_body(cache_seqlens, num_reqs, parts, block_size, overhead, form)
    metadata = cache_seqlens.new_empty((parts, COLUMNS), dtype=torch.int32)
    num_splits = cache_seqlens.new_empty((cache_seqlens.shape[0] + 1,), dtype=torch.int32)
    _launch((metadata, num_splits), cache_seqlens, num_reqs, block_size, overhead, form)
    return metadata, num_splits


@operator("compiled_kv::flashmla_schedule_out", mutates_args=FIELDS)
def _flashmla_schedule_out(
    cache_seqlens: Tensor, num_reqs: Tensor | None, tile_scheduler_metadata: Tensor, num_splits: Tensor,
    block_size: int, overhead: int, form: int,
) -> None:  # fmt: skip
    out = (tile_scheduler_metadata, num_splits)
    check_distinct_fake(_named(out), {"cache_seqlens": cache_seqlens, "num_reqs": num_reqs})
    if runs_kernel(cache_seqlens):
        _launch(out, cache_seqlens, num_reqs, block_size, overhead, form)
        return
    parts = tile_scheduler_metadata.shape[0]
    for target, value in zip(out, _cpu_body(cache_seqlens, num_reqs, parts, block_size, overhead, form)):
        target.copy_(value)


def _named(out: Schedule) -> dict[str, Tensor]:
    return dict(zip(FIELDS, out))


def flashmla_schedule(
    cache_seqlens: Tensor, *, num_sm_parts: int, block_size: int = 64, fixed_overhead_blocks: int = 5,
    num_reqs: Tensor | None = None, form: str = "current", out: Schedule | None = None,
) -> Schedule:  # fmt: skip
    """FlashMLA's split-KV schedule, entry for entry; one launch on CUDA, independent of everything but the lengths.

    Args:
        cache_seqlens: int [B], tokens attention reads of each row; a negative one counts as 0, and 0 as one block.
        num_sm_parts: parts S that share the work; FlashMLA says how many from its head counts.
        block_size: tokens a block.
        fixed_overhead_blocks: what a request costs a part besides its blocks, in blocks, at most 1023.
        num_reqs: int tensor, 0-d or [1], on the device: rows at and beyond it have no work. None: every row has.
        form: "current" [begin_req, end_req, begin_block, end_block, begin_split, first_cut, last_cut, 0];
            "legacy_tokens" [begin_req, begin_token, end_req, end_token, begin_split, 0, 0, 0];
            "legacy_blocks" the same in blocks. Requests end inclusive, blocks and tokens exclusive.
        out: (int32 [S, 8], int32 [B + 1]), contiguous, written in place and returned.

    Returns:
        (tile_scheduler_metadata int32 [S, 8], num_splits int32 [B + 1]). A part without work begins at request
        `num_reqs` and ends at the one before. `num_splits` counts the splits of the rows before each.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device, range or overlap is wrong; the text names it.
    """
    sizes = Sizes()
    sizes.check("cache_seqlens", cache_seqlens, INTS, "B")
    check_int("num_sm_parts", num_sm_parts, 1)
    check_int("block_size", block_size, 1)
    check_int("fixed_overhead_blocks", fixed_overhead_blocks, 0, MAX_OVERHEAD)
    if num_reqs is not None:
        sizes.check_scalar("num_reqs", num_reqs)
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(map(repr, FORMS))}, got {form!r}")
    inputs = (cache_seqlens, num_reqs)
    settings = (block_size, fixed_overhead_blocks, FORMS.index(form))
    if out is None:
        return torch.ops.compiled_kv.flashmla_schedule(*inputs, num_sm_parts, *settings)
    _check_out(sizes, out, num_sm_parts)
    check_distinct(_named(out), {"cache_seqlens": cache_seqlens, "num_reqs": num_reqs})
    torch.ops.compiled_kv.flashmla_schedule_out(*inputs, *out, *settings)
    return out


def _check_out(sizes: Sizes, out: Schedule, num_sm_parts: int) -> None:
    check_tuple("out", out, FIELDS)
    sizes.named |= {"S": num_sm_parts, "8": COLUMNS}
    sizes.check_output("tile_scheduler_metadata", out[0], INT32, "S", "8")
    sizes.check_output("num_splits", out[1], INT32, "B+1")
    if not out[0].is_contiguous():
        raise ValueError(f"tile_scheduler_metadata must be contiguous, got strides {list(out[0].stride())}")
