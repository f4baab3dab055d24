"""Where Triton meets torch: the kernel decorator, and the launch that a traced operator can hold.

Nothing derived from a batch may enter a kernel's compilation key, or each new batch would compile a new kernel.
`kernel` guarantees it: every argument without a `tl.constexpr` annotation is left unspecialized, pointers (named
`*_ptr`) in their alignment too.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch

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
Registers = Callable[[Mapping[str, Any]], int | None]


def kernel(fn: Callable[..., None] | None = None, *, registers: Registers | None = None) -> Any:
    """Compile `fn` with Triton, specialized on its `tl.constexpr` arguments and on dtypes alone.

    `registers`: the most that a thread may take, from a launch's arguments; of NVIDIA GPUs, launched by ourselves.
    """
    if fn is None:
        return partial(kernel, registers=registers)
    if triton is None:
        return fn
    runtime = [p.name for p in inspect.signature(fn).parameters.values() if "constexpr" not in str(p.annotation)]
    jitted = triton.jit(
        fn,
        do_not_specialize=[name for name in runtime if not name.endswith("_ptr")],
        do_not_specialize_on_alignment=[name for name in runtime if name.endswith("_ptr")],
        debug=DEBUG or None,  # without it Triton drops every device_assert
    )
    if not INTERPRETED:
        jitted.registers = registers
        jitted.run = _on_the_tensors_device(jitted.run, list(inspect.signature(fn).parameters), registers)
    return jitted


# NOTE [Dependent launch]
# On NVIDIA GPUs from sm_90 on, a kernel may start before the one ahead of it in its stream has ended, which hides the
# start of its programs (programmatic dependent launch). One with a `PDL` parameter waits in every program ahead of its
# first load or store, so that nothing is read or written before all that came ahead is done and seen: each kernel in a
# chain ends after the one before it. Launched by ourselves, it gets `PDL=True`, and a CUDA graph keeps that. A trace
# sees `PDL=False`: torch's analysis of mutated arguments does not know the instructions, and Inductor could not launch
# so. A kernel of yours that is launched so must wait too before it reads what any of them wrote: behind an update it
# may start while the one ahead of that still runs.
def _on_the_tensors_device(
    run: Callable[..., Any], names: list[str], registers: Registers | None
) -> Callable[..., Any]:
    """`run` of a kernel with these parameters where its tensors are: Triton would take the current device, whatever
    theirs is. Torch passes some or all arguments by position."""
    at = names.index("PDL") if "PDL" in names else None

    def launched(*args: Any, **kwargs: Any) -> Any:
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        device = next((tensor.device.index for tensor in tensors if tensor.is_cuda), None)
        if device is None:
            return run(*args, **kwargs)
        if at is not None and _is_hopper_or_later(device):
            if at < len(args):
                args = (*args[:at], True, *args[at + 1 :])
            else:
                kwargs["PDL"] = True
            kwargs["launch_pdl"] = True
        if registers is not None and torch.version.hip is None:
            most = registers({**dict(zip(names, args)), **kwargs})
            kwargs |= {} if most is None else {"maxnreg": most}
        if device == torch.cuda.current_device():
            return run(*args, **kwargs)
        with torch.cuda.device(device):
            return run(*args, **kwargs)

    return launched


@cache
def _is_hopper_or_later(device: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def device_function(fn: Callable[..., Any]) -> Any:
    """Compile `fn` as a piece that kernels call."""
    return fn if triton is None else triton.jit(fn)


@device_function
def launch_dependents():
    """Let the next kernel get ready. Ahead of the wait in a kernel of few programs, whose usual work is short."""
    tl.extra.cuda.gdc_launch_dependents()


@device_function
def dependent_launch():
    """Wait for the kernel ahead, and only then let the next one get ready to wait for this one: programs of two kernels
    waiting at once leave a long one no even share of the multiprocessors (17 % slower at worst)."""
    tl.extra.cuda.gdc_wait()
    launch_dependents()


@device_function
def wait_knowing(values):
    """Wait for the kernel ahead, and before that compute these values: a tuple of addresses and ints, not all 0.

    A compiler moves what it can behind the wait, where it takes time, the loads of arguments too. It cannot know that
    not all values are 0, so a wait on that condition needs each of them.
    """
    known = tl.zeros([], tl.int64)
    for each in tl.static_range(len(values)):
        known |= values[each].to(tl.int64)
    tl.inline_asm_elementwise(
        "{ .reg .pred %p; setp.ne.s64 %p, $1, 0; @%p griddepcontrol.wait; mov.u64 $0, $1; }", "=l,l", [known],
        dtype=tl.int64, is_pure=False, pack=1,
    )  # fmt: skip


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
    if "PDL" in fn.arg_names:
        arguments["PDL"] = False  # NOTE [Dependent launch]
    # The interpreter reads data pointers, so wrap_triton, which must trace, refuses it.
    target = fn if INTERPRETED else torch.library.wrap_triton(fn)
    target[grid](**arguments)


def stride_of(tensor: torch.Tensor | None, dim: int = 0) -> int:
    """What a launch says of the stride of a tensor that may be absent."""
    return 0 if tensor is None else tensor.stride(dim)


def size_of(tensor: torch.Tensor | None) -> int:
    """What a launch says of the length of a tensor that may be absent."""
    return 0 if tensor is None else tensor.shape[0]
