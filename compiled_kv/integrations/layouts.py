"""What the layers share: the layout that a call's own tensors imply, errors in a layer's words, kernel-like calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Concatenate, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from compiled_kv.checks import INTS, Sizes, check_int
from compiled_kv.layout import INT32_MAX, KVLayout

P = ParamSpec("P")
T = TypeVar("T")
Grid = tuple[int, ...]
WORD = re.compile(r"(?:\bout\.)?\b(\w+)")


def layout_of(page_size: int, tokens: int, columns: int | None = None) -> KVLayout:
    """The layout of a call that names none: lengths are bounded by what its pool and its table hold."""
    check_int("page_size", page_size, 1)
    held = tokens if columns is None else min(tokens, columns * page_size)
    return KVLayout(page_size, min(held, INT32_MAX))


def worded(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Errors of a function in its own words: `names` has its argument for each one of the operator that it calls.

        worded(page_table="block_kv_indices")    out.page_table must be int32, got int64
                                              -> block_kv_indices must be int32, got int64

    While a graph is traced errors stay as they are: a handler would be traced too.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            try:
                return function(*args, **kwargs)
            except (TypeError, ValueError) as error:
                sentence = WORD.sub(lambda found: names.get(found[1], found[1]), str(error))
                raise type(error)(sentence) from None

        return call

    return decorate


class Subscripted(Generic[P]):
    """A function called as `name[grid](...)`, as Triton kernels are: the grid says how many requests there are."""

    def __init__(self, function: Callable[Concatenate[Grid, P], None]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __getitem__(self, grid: Grid) -> Callable[P, None]:
        if not isinstance(grid, tuple):
            raise TypeError(f"grid must be a tuple of ints, got {type(grid).__name__}")
        return partial(self.function, grid)


def width_of(name: str, table: Tensor, dtypes: Sequence[torch.dtype] = INTS) -> int:
    """Columns of a table, which is first seen to be one."""
    Sizes().check(name, table, dtypes, "rows", "columns")
    return table.shape[1]


def first(name: str, tensor: Tensor, count: int) -> Tensor:
    """The batch's own entries of a tensor that may hold more."""
    Sizes().check(name, tensor, INTS, "entries")
    return tensor[:count]


def first_rows(batch_name: str, batch_size: int, name: str, req_pool_indices: Tensor) -> Tensor:
    """`first` of the pool's rows; a batch of more requests than have one is refused."""
    Sizes().check(name, req_pool_indices, INTS, "entries")
    check_int(batch_name, batch_size, 0, req_pool_indices.shape[0])
    return req_pool_indices[:batch_size]


def check_stride(name: str, given: int, tensor: Tensor, of: str, dtypes: Sequence[torch.dtype] = INTS) -> None:
    """Refuse a row stride passed beside a table that has another."""
    width_of(of, tensor, dtypes)
    if given != tensor.stride(0):
        raise ValueError(f"{name} must be the row stride of {of}, {tensor.stride(0)}, got {given}")
