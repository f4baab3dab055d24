"""What a callable or an argument holds, and which of it goes along when it moves to a device."""

from __future__ import annotations

import types
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

# Operators, streams, locks: copied by reference.
_OPAQUE = {"torch", "triton", "logging", "threading", "_thread", "weakref"}
LEAVES = (
    str, bytes, int, float, complex, type(None), type, types.ModuleType, types.BuiltinFunctionType, torch.dtype,
    torch.device,
)  # fmt: skip


def is_opaque(value: Any) -> bool:
    """Whether `value` is copied by reference."""
    return type(value).__module__.partition(".")[0] in _OPAQUE and not isinstance(
        value, nn.Module | dict | list | tuple
    )


def inside(value: Any, moves: bool) -> Iterable[tuple[Any, bool]]:
    """What `value` holds, each with whether its tensors move."""
    if isinstance(value, nn.Module):
        yield from ((child, False) for child in value._modules.values())
        yield from ((tensor, True) for tensor in (*value._parameters.values(), *value._buffers.values()))
        moves = False
    if isinstance(value, dict):
        yield from ((item, moves) for pair in value.items() for item in pair)
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((item, moves) for item in value)
    if isinstance(value, types.MethodType):
        yield from ((value.__self__, moves), (value.__func__, moves))
    elif isinstance(value, partial):
        yield from ((item, moves) for item in (value.func, value.args, value.keywords))
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        hidden = ("_parameters", "_buffers", "_modules") if isinstance(value, nn.Module) else ()
        yield from ((item, moves) for name, item in attributes.items() if name not in hidden)
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and not name.startswith("__"):
                yield getattr(value, name), moves
