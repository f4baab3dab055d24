"""Where Triton meets torch: the kernel decorator, and the launch that a traced operator can hold.

Nothing derived from a batch may enter a kernel's compilation key, or each new batch would compile a new kernel
(NOTE [No specialization]). `kernel` guarantees it: every argument without a `tl.constexpr` annotation is left
unspecialized,
pointers (named `*_ptr`) in their alignment too.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch

from compiled_kv.layout import ceil_div
from compiled_kv.status import DEBUG

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

triton: Any
tl: Any
try:
    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
except ImportError:  # e.g. macOS: the CPU bodies still work
    triton = tl = None

constexpr: Any = int if tl is None else tl.constexpr


def kernel(fn: Callable[..., None]) -> Any:
    """Compile `fn` with Triton, specialized on its `tl.constexpr` arguments and on dtypes alone."""
    if triton is None:
        return fn
    runtime = [p.name for p in inspect.signature(fn).parameters.values() if "constexpr" not in str(p.annotation)]
    return triton.jit(
        fn,
        do_not_specialize=[name for name in runtime if not name.endswith("_ptr")],
        do_not_specialize_on_alignment=[name for name in runtime if name.endswith("_ptr")],
        debug=DEBUG or None,  # without it Triton drops every device_assert
    )


def device_function(fn: Callable[..., Any]) -> Any:
    """Compile `fn` as a piece that kernels call."""
    return fn if triton is None else triton.jit(fn)


def runs_kernel(tensor: torch.Tensor) -> bool:
    """Whether `tensor`'s device takes the Triton kernel; CPU tensors do so only under the interpreter."""
    if (os.environ.get("TRITON_INTERPRET", "0") == "1") != INTERPRETED:
        raise RuntimeError(
            "TRITON_INTERPRET must keep the value it had when compiled_kv was imported "
            f"({'1' if INTERPRETED else 'unset or 0'}): set it before the process starts"
        )
    return tensor.device.type != "cpu" or INTERPRETED


def launch(fn: Any, grid: tuple[Any, ...], **arguments: Any) -> None:
    """Launch a kernel over `grid` so that both eager code and a tracer see it."""
    if triton is None:
        raise RuntimeError("tensors on an accelerator need Triton, which is not installed; tensors on the CPU do not")
    # The interpreter reads data pointers, so wrap_triton, which must trace, refuses it.
    target = fn if INTERPRETED else torch.library.wrap_triton(fn)
    target[grid](**arguments)


# Columns a program writes at a time: four loads in flight for each of 128 threads.
BLOCK = 512
# Rows a prefix sum takes at a time.
SCAN = 256
# Tokens a program finds slots for at a time.
TOKENS = 128
# Some eight programs for each multiprocessor fill the device; more would only cost their own start.
PROGRAMS = 1024


def programs_a_row(batch_size: int, width: int) -> int:
    """Programs that share a row of `width` columns; from shapes alone, so that one graph serves every length.

    At least two: one looks up the row's slots while another looks up its pages.
    """
    return torch.sym_max(2, torch.sym_min(ceil_div(width, BLOCK), ceil_div(PROGRAMS, batch_size + 1)))
