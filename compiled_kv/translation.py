"""Full-attention slots -> sliding-window slots, one by one.

full_to_swa = [0, 5, -1, 7]
translate_slots([3, -1, 2, 9]) -> [7, -1, -1, -1]        mapped, none, unmapped, outside the map
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kv import rows_cpu as cpu
from compiled_kv.checks import INT64, INTS, Sizes
from compiled_kv.launch import dependent_launch, kernel, launch, runs_kernel, tl
from compiled_kv.layout import ceil_div
from compiled_kv.overlap import check_distinct, check_distinct_fake
from compiled_kv.registration import operator
from compiled_kv.rows_triton import load_at, through_map
from compiled_kv.sharing import TOKENS


@kernel
def _translate_slots_kernel(
    slots_ptr, map_ptr, out_ptr, slots_stride, map_stride, map_size, num_tokens,
    PDL: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    if PDL:
        dependent_launch()
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    in_range = token < num_tokens
    slot = load_at(slots_ptr, token, slots_stride, in_range, -1)
    tl.store(out_ptr + token, through_map(slot, map_ptr, map_stride, map_size, in_range), mask=in_range)


def _launch_translate(out: Tensor, slots: Tensor, full_to_swa: Tensor) -> None:
    launch(
        _translate_slots_kernel, (ceil_div(out.shape[0], TOKENS),), slots_ptr=slots, map_ptr=full_to_swa, out_ptr=out,
        slots_stride=slots.stride(0), map_stride=full_to_swa.stride(0), map_size=full_to_swa.shape[0],
        num_tokens=out.shape[0], TOKENS=TOKENS,
    )  # fmt: skip


@operator("compiled_kv::translate_slots", mutates_args=())
def _translate_slots(slots: Tensor, full_to_swa: Tensor) -> Tensor:
    if not runs_kernel(slots):
        return cpu.swa_slot_of(slots.long(), full_to_swa, None, 1)
    out = slots.new_empty(slots.shape, dtype=torch.int64)
    _launch_translate(out, slots, full_to_swa)
    return out


@operator("compiled_kv::translate_slots_out", mutates_args=("out",))
def _translate_slots_out(slots: Tensor, full_to_swa: Tensor, out: Tensor) -> None:
    check_distinct_fake({"out": out}, {"slots": slots, "full_to_swa": full_to_swa})
    if runs_kernel(slots):
        _launch_translate(out, slots, full_to_swa)
    else:
        out.copy_(cpu.swa_slot_of(slots.long(), full_to_swa, None, 1))


def translate_slots(slots: Tensor, full_to_swa: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Sliding-window slot of each full-attention slot.

    Args:
        slots: int [T]; -1 stays -1.
        full_to_swa: int [N], sliding-window slot of each full-attention slot, negative for none.
        out: int64 [T], written in place and returned.

    Returns:
        int64 [T]; -1 for a slot that is negative, outside the map, or unmapped.

    Raises:
        TypeError, ValueError: a dtype, shape, device or overlap is wrong; the text names the argument.
    """
    sizes = Sizes()
    sizes.check("slots", slots, INTS, "T")
    sizes.check("full_to_swa", full_to_swa, INTS, "N")
    if out is None:
        return torch.ops.compiled_kv.translate_slots(slots, full_to_swa)
    sizes.check_output("out", out, INT64, "T")
    check_distinct({"out": out}, {"slots": slots, "full_to_swa": full_to_swa})
    torch.ops.compiled_kv.translate_slots_out(slots, full_to_swa, out)
    return out
