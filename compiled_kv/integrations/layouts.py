"""What the layers share: the layout that a call's own tensors imply, and functions called the way kernels are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Concatenate, Generic, ParamSpec

from torch import Tensor

from compiled_kv.checks import check_int
from compiled_kv.layout import INT32_MAX, KVLayout

P = ParamSpec("P")
Grid = tuple[int, ...]


def layout_of(page_size: int, *tokens: int) -> KVLayout:
    """The layout of a call that names none: lengths are bounded by what its tensors hold."""
    return KVLayout(page_size, min(*tokens, INT32_MAX))


class Subscripted(Generic[P]):
    """A function called as `name[grid](...)`, as Triton kernels are: the grid says how many requests there are."""

    def __init__(self, function: Callable[Concatenate[Grid, P], None]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __getitem__(self, grid: Grid) -> Callable[P, None]:
        return partial(self.function, grid)


def check_batch(name: str, batch_size: int, req_pool_indices: Tensor) -> None:
    """Refuse a batch of more requests than have a row."""
    if req_pool_indices.ndim > 0:
        check_int(name, batch_size, 0, req_pool_indices.shape[0])


def check_stride(name: str, given: int, tensor: Tensor, of: str) -> None:
    """Refuse a row stride passed beside a tensor that has another."""
    if given != tensor.stride(0):
        raise ValueError(f"{name} must be the row stride of {of}, {tensor.stride(0)}, got {given}")
