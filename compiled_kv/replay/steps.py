"""A decode step as it was handed over: compiled or not, what it takes and what it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from compiled_kv.launch import INTERPRETED

LIMIT = 64


def check_callable(decode_step: Any) -> None:
    if not callable(decode_step):
        raise TypeError(f"decode_step must be a function of (buffers, batch_size), got {type(decode_step).__name__}")


def compiled(step: Callable[..., Any], backend: str) -> Callable[..., Any]:
    if INTERPRETED or hasattr(step, "_torchdynamo_orig_callable") or isinstance(step, torch._dynamo.OptimizedModule):
        return step
    return torch.compile(step, fullgraph=True, dynamic=True, backend=backend, **room("recompile_limit", LIMIT))


def uncompiled(step: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compile made `step` of, or `step`."""
    if isinstance(step, torch._dynamo.OptimizedModule):
        return step._orig_mod
    return getattr(step, "_torchdynamo_orig_callable", step)  # type: ignore[no-any-return]


def room(option: str, value: Any) -> dict[str, Any]:
    """What torch.compile is told so that there is room for more buffers, or steps of one class, in one process than it
    compiles a function for: all share the code. A torch that does not know the option has its limit raised."""
    if option in inspect.signature(torch.compile).parameters:
        return {option: value}
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, LIMIT)
    return {}


def parameters_of(step: Callable[..., Any]) -> list[str]:
    """Names of what the step takes after buffers and batch_size."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][2:]


def name_of(step: Callable[..., Any]) -> str:
    return getattr(step, "__qualname__", type(step).__name__)
