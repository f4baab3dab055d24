"""What a checked step may not do: read back, allocate, compile; and the names of what goes wrong when it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_kv.replay.frozen import AFTER_WARM_UP, UNDER_CAPTURE, refuse_cold_start
from compiled_kv.replay.names import Difference
from compiled_kv.replay.steps import uncompiled
from compiled_kv.tracing import reads
from compiled_kv.tracing.events import running

PYTHON_READS = (
    "item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__",
    "__repr__", "__format__",
)  # fmt: skip


class Different(BaseException):
    """A difference on its way to become an error, which no `except Exception` of the step's or of a logging handler
    takes for its own."""

    def __init__(self, difference: Difference) -> None:
        self.difference = difference
        super().__init__(difference.sentence)


# What an error of the step or of its graphs means, by a phrase in it.
PHRASES = {
    f"for the first time {UNDER_CAPTURE}": "cold compile",
    f"for the first time {AFTER_WARM_UP}": "cold compile",
    "changed from": "frozen argument",
    "is an output of these graphs": "output fed back",
    " moved from ": "moved pointer",
    "must not overlap": "overlapping outputs",
    "synchronizing CUDA operation": "host read",
    "operation not permitted when stream is capturing": "host read",
    "operation failed due to a previous error during capture": "host read",
}


@contextmanager
def naming(fault: Callable[[Difference], AssertionError]) -> Iterator[None]:
    """Turn what goes wrong inside into an error of `fault`'s, where it has a name."""
    try:
        yield
    except Different as error:
        raise fault(error.difference) from None
    except (RuntimeError, ValueError) as error:
        for phrase, name in PHRASES.items():
            if phrase in str(error):
                raise fault(Difference(name, str(error).splitlines()[0])) from error
        raise


@contextmanager
def watched(device: torch.device, number: int) -> Iterator[None]:
    """Inside, nothing may compile, wait for the device or, after the first step, allocate on it."""
    if device.type != "cuda":
        with refuse_cold_start("the step", AFTER_WARM_UP):
            yield
        return
    before, mode = torch.cuda.memory_stats(device)["allocation.all.allocated"], torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    made = torch.cuda.memory_stats(device)["allocation.all.allocated"] - before
    if made and number > 1:
        raise Different(Difference("allocation", f"{made} allocations on the device in one step"))


class FunctionReads(TorchFunctionMode):
    """Refuses Python's ways to read a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in PYTHON_READS:
            raise Different(Difference("host read", f"the step calls Tensor.{func.__name__} {_caller()}"))
        return func(*args, **(kwargs or {}))


class DispatchReads(TorchDispatchMode):
    """Refuses operators whose result is a number or a size that the host must know."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masked = func is torch.ops.aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])
        if func in reads.READS or masked:
            raise Different(Difference("host read", f"the step calls {func} {_caller()}"))
        return func(*args, **(kwargs or {}))


def refuse_host_read(
    name: str, step: Callable[..., Any], error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Say which line of a compiled step reads a tensor on the host, if one does, in place of what the compiler said.

    Raises:
        RuntimeError: from `error`, that of the compiler.
    """
    eager = uncompiled(step)
    if eager is step:
        return
    try:
        with FunctionReads(), DispatchReads():
            eager(*args, **kwargs)
    except Different as read:
        raise RuntimeError(
            f"{name} cannot be captured: {read.difference.sentence}, and no graph can wait for a value that the host "
            "reads; compiled-kv audit shows every line of a step that does"
        ) from error
    except Exception:
        return


def _caller() -> str:
    """Where the code that is neither torch's, Python's nor this package's stands now."""
    place = running(str(Path(__file__).parent.parent))
    return f"at {place[0]}:{place[1]}" if place else ""
