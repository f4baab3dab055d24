"""A fake mode that goes on where code between two graphs asks a tensor for its value, and keeps a record of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from compiled_kv.tracing.events import TORCH, Place, running
from compiled_kv.tracing.lines import Formats
from compiled_kv.tracing.reads import READS, aten


@dataclass(frozen=True)
class EagerRead:
    """A host read between two graphs, in code that no graph holds; the trace went on with a made-up value."""

    operator: str
    file: str
    line: int


def recording_mode(reads: list[EagerRead], device: torch.device | None = None) -> FakeTensorMode:
    """Fake tensors whose values, where code between graphs asks for one, read as 1, so that the trace goes on.

    Each such read is appended to `reads`, but for reads of CPU tensors where `device` is another. Not a subclass:
    higher-order operators look rules up by the mode's type.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    away = device is not None and device.type != "cpu"

    def recording(func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        waits = func in READS and not (away and args[0].device.type == "cpu")
        if (waits or _leaves_device(func, args, kwargs)) and (place := _place()):
            reads.append(EagerRead(f"{func.namespace}.{func._opname}", *place))
        if func is aten._local_scalar_dense.default:
            return _one(args[0].dtype)
        if func in _STAND_INS:
            return _STAND_INS[func](*args, **kwargs)
        return type(mode).dispatch(mode, func, types, args, kwargs)

    mode.dispatch = recording  # type: ignore[method-assign]
    return mode


def _one(dtype: torch.dtype) -> bool | float | int:
    """The value that is made up for a number of this dtype."""
    return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1


@contextmanager
def formatting_recorded(reads: list[EagerRead]) -> Iterator[None]:
    """Append to `reads` where code between two graphs prints or formats a tensor of an accelerator."""
    before, formats = torch._tensor_str._str, Formats()

    def note(place: Place) -> None:
        for each in formats.running((_OWN, *_FORMATTERS)) or [place]:
            reads.append(EagerRead("aten._local_scalar_dense", *each))

    def text(tensor: Any, **given: Any) -> str:
        if tensor.device.type != "cpu" and (place := _formatting_frame()):
            note(place)
        return before(tensor, **given)

    def formatted(tensor: Any, spec: str) -> str:
        """A fake tensor would take no format, `:.2f` say, where a real one of a single number is read."""
        if type(tensor) is not FakeTensor or tensor.dim() or not spec:
            return with_format(tensor, spec)
        if tensor.device.type != "cpu" and (place := _place()):
            note(place)
        return format(_one(tensor.dtype), spec)

    with_format = Tensor.__format__
    torch._tensor_str._str = torch._dynamo.disable(text)  # type: ignore[assignment]
    Tensor.__format__ = torch._dynamo.disable(formatted)  # type: ignore[method-assign]
    try:
        with formats.noted():
            yield
    finally:
        torch._tensor_str._str, Tensor.__format__ = before, with_format  # type: ignore[method-assign]


def _formatting_frame() -> Place | None:
    """File and line that formats a tensor, where the step does and not the compiler in one of its messages."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename in _FORMATTERS:
        frame = frame.f_back
    return None if frame.f_code.co_filename.startswith(TORCH) else _place()


_OWN = str(Path(__file__).parent)
_FORMATTERS = tuple(f"{TORCH}{name}.py" for name in ("_tensor", "_tensor_str", "overrides", "_dynamo/eval_frame"))


def _unique(x: Any, *_: Any, **__: Any) -> Any:
    return x.new_empty(x.numel()), x.new_empty(x.shape, dtype=torch.int64), x.new_empty(x.numel(), dtype=torch.int64)


_STAND_INS: dict[Any, Callable[..., Any]] = {
    aten.nonzero.default: lambda x: x.new_empty((x.numel(), x.dim()), dtype=torch.int64),
    aten.masked_select.default: lambda x, mask: x.new_empty(x.numel()),
    aten._unique2.default: _unique,
    aten.repeat_interleave.Tensor: lambda repeats, **_: repeats.new_empty(repeats.shape[0], dtype=torch.int64),
    aten.equal.default: lambda *_: True,
    aten.allclose.default: lambda *_, **__: True,
    aten.is_nonzero.default: lambda *_: True,
}


def _leaves_device(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if func is aten._to_copy.default:
        return args[0].device.type != "cpu" and torch.device(kwargs.get("device") or args[0].device).type == "cpu"
    return func is aten.copy_.default and args[0].device.type == "cpu" and args[1].device.type != "cpu"


def _place() -> Place | None:
    """File and line of the code that asked, unless a compiled graph did."""
    return running(_OWN, ("<eval_with_key>",))
