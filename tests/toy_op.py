"""A small triton_op to trace: `out[i] = x[i * stride] + 1`, functional, in place, and with two outputs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton


@triton.jit
def _bump_kernel(x_ptr, out_ptr, also_ptr, n, stride, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + at * stride, mask=at < n) + 1
    tl.store(out_ptr + at, value, mask=at < n)
    if also_ptr is not None:
        tl.store(also_ptr + at, value + 1, mask=at < n)


def _launch(x: Tensor, out: Tensor, also: Tensor | None) -> None:
    n = x.shape[0]
    wrap_triton(_bump_kernel)[(-(-n // 128),)](x, out, also, n, x.stride(0), BLOCK=128)


@triton_op("toy::bump", mutates_args=())
def bump(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0])
    _launch(x, out, None)
    return out


@triton_op("toy::bump_out", mutates_args=("out",))
def bump_out(x: Tensor, out: Tensor) -> None:
    _launch(x, out, None)


@triton_op("toy::bump_pair_out", mutates_args=("out", "also"))
def bump_pair_out(x: Tensor, out: Tensor, also: Tensor) -> None:
    _launch(x, out, also)
