"""What the layers share: the layout that a call's own tensors imply, and functions called the way kernels are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec

from torch import Tensor

from compiled_kv.layout import INT32_MAX, KVLayout

P = ParamSpec("P")


def layout_of(page_size: int, *tokens: int) -> KVLayout:
    """The layout of a call that names none: lengths are bounded by what its tensors hold."""
    return KVLayout(page_size, min(*tokens, INT32_MAX))


class Subscripted(Generic[P]):
    """A function called as `name[grid](...)`, as Triton kernels are. The grid is not used: operators know their own."""

    def __init__(self, function: Callable[P, None]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __getitem__(self, grid: Any) -> Callable[P, None]:
        return self.function


def check_stride(name: str, given: int, tensor: Tensor, of: str) -> None:
    """Refuse a row stride passed beside a tensor that has another."""
    if given != tensor.stride(0):
        raise ValueError(f"{name} must be the row stride of {of}, {tensor.stride(0)}, got {given}")
