"""Checks of shapes, dtypes and devices; beside `overlap`, the only place that words an input error.

    sizes = Sizes()
    sizes.check("req_pool_indices", req_pool_indices, INTS, "B")
    sizes.check("page_table", out, INT32, "B", "P")
    -> ValueError: page_table must be [B, P] with B=4, got [5, 8]

Only metadata is looked at, never a value: nothing here reads a device or adds a node to a graph. A public function
finishes its checks before it writes anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_kv.layout import INT32_MAX, KVLayout

INTS = (torch.int32, torch.int64)
INT32 = (torch.int32,)
INT64 = (torch.int64,)
TAILS = ("clear", "keep")


class Sizes:
    """Sizes that named dimensions take in one call, and the device its tensors share."""

    def __init__(self) -> None:
        self.named: dict[str, int] = {}
        self.device: torch.device | None = None
        self.device_of = ""

    def check(self, name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], *dims: str) -> None:
        """Require `tensor` to have one of `dtypes`, these dimensions, and the device of those before it.

        "B+1", the length of prefix sums, is one more than B where B is known.
        """
        self._check_kind(name, tensor, dtypes)
        if "B+1" in dims and "B" in self.named:
            self.named.setdefault("B+1", self.named["B"] + 1)
        fits = tensor.ndim == len(dims)
        for dim, size in zip(dims, tensor.shape):
            fits = fits and self.named.setdefault(dim, size) == size
        if not fits:
            self._raise_shape(name, tensor, dims)

    def _check_kind(self, name: str, tensor: Tensor, dtypes: Sequence[torch.dtype]) -> None:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided:
            raise TypeError(f"{name} must be a dense tensor, got layout {tensor.layout}")
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name} must be {_names(dtypes)}, got {_name(tensor.dtype)}")
        if self.device is None:
            self.device, self.device_of = tensor.device, name
        elif tensor.device != self.device:
            raise ValueError(f"{name} must be on {self.device}, as {self.device_of} is, got {tensor.device}")

    def check_output(self, name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], *dims: str) -> None:
        """`check`, and a unit column stride and rows that do not overlap."""
        self.check(name, tensor, dtypes, *dims)
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} must have unit column stride, got strides {list(tensor.stride())}")
        if tensor.ndim == 2 and tensor.shape[0] > 1 and tensor.stride(0) < tensor.shape[1]:
            raise ValueError(f"{name} must have rows that do not overlap, got strides {list(tensor.stride())}")

    def check_scalar(self, name: str, tensor: Tensor, dtypes: Sequence[torch.dtype] = INTS) -> None:
        """Require a 0-d or one-element tensor, which a kernel reads on the device."""
        self._check_kind(name, tensor, dtypes)
        if tensor.ndim > 1 or tensor.numel() != 1:
            raise ValueError(f"{name} must be 0-d or [1], got {list(tensor.shape)}")

    def _raise_shape(self, name: str, tensor: Tensor, dims: Sequence[str]) -> None:
        known = ", ".join(f"{dim}={self.named[dim]}" for dim in dims if dim in self.named)
        rule = f"[{', '.join(dims)}]" + (f" with {known}" if known else "")
        raise ValueError(f"{name} must be {rule}, got {list(tensor.shape)}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(_name(dtype) for dtype in dtypes)


def check_int(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Require an int (a symbolic one too) in [least, most]."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")


def check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")


def check_tuple(name: str, value: Any, fields: Sequence[str]) -> None:
    """Require a tuple of as many entries as there are `fields`."""
    if not isinstance(value, tuple):
        raise TypeError(f"{name} must be ({', '.join(fields)}), got {type(value).__name__}")
    if len(value) != len(fields):
        raise ValueError(f"{name} must be ({', '.join(fields)}), got {len(value)} entries")


def check_least(name: str, size: int, least: int, what: str, of: str = "") -> None:
    """Require room for `least` rows, entries or columns, or for all those `of` something."""
    if size < least:
        wanted = f"the {least} {what} of {of}" if of else f"{least} {what}"
        raise ValueError(f"{name} must have at least {wanted}, got {size}")


def check_width(name: str, width: int, least: int, unit: str) -> None:
    """Require a table wide enough for the layout."""
    check_least(name, width, least, f"{unit} for this layout")


def check_presence(name: str, tensor: Tensor | None, wanted: bool) -> None:
    """Require a tensor where a call fills one, and None where it does not."""
    if (tensor is not None) != wanted:
        came = "None" if tensor is None else "a tensor"
        raise ValueError(f"{name} must be {'a tensor' if wanted else 'None'} for this call, got {came}")


def check_layout(layout: KVLayout) -> None:
    if not isinstance(layout, KVLayout):
        raise TypeError(f"layout must be a KVLayout, got {type(layout).__name__}")


def check_token_pool(sizes: Sizes, req_to_token: Tensor, layout: KVLayout) -> None:
    check_layout(layout)
    sizes.check("req_to_token", req_to_token, INTS, "R", "C")
    check_width("req_to_token", req_to_token.shape[1], layout.max_seqlen_k, "columns")


def check_pool(sizes: Sizes, req_to_token: Tensor, req_pool_indices: Tensor, layout: KVLayout) -> None:
    """The checks that every reader of a token pool shares."""
    check_token_pool(sizes, req_to_token, layout)
    sizes.check("req_pool_indices", req_pool_indices, INTS, "B")


def check_entry_pool(
    sizes: Sizes, pool: Tensor, req_pool_indices: Tensor, entry_page_size: int, layout: KVLayout
) -> None:
    """`check_pool` for a pool that has an entry for each `entry_page_size` positions: a token slot, or a page."""
    check_layout(layout)
    sizes.check("pool", pool, INTS, "R", "C")
    check_int("entry_page_size", entry_page_size, 1, INT32_MAX)
    check_width("pool", pool.shape[1] * entry_page_size, layout.max_seqlen_k, "tokens a row")
    sizes.check("req_pool_indices", req_pool_indices, INTS, "B")


def check_table_output(sizes: Sizes, name: str, table: Tensor, layout: KVLayout, rows: str = "B") -> None:
    sizes.check_output(name, table, INT32, rows, "P")
    check_width(name, table.shape[1], layout.max_num_pages, "columns")


def check_strided_table(sizes: Sizes, name: str, table: Tensor, *dims: str) -> None:
    """`Sizes.check_output` for kernels that take a column stride: any strides that keep entries apart."""
    sizes.check(name, table, INT32, *dims)
    (rows, columns), (row_stride, column_stride) = table.shape, table.stride()
    by_rows = column_stride >= 1 and (rows <= 1 or row_stride > (columns - 1) * column_stride)
    by_columns = row_stride >= 1 and (columns <= 1 or column_stride > (rows - 1) * row_stride)
    if rows > 0 and columns > 0 and not (by_rows or by_columns):
        raise ValueError(f"{name} must have entries that do not overlap, got strides {list(table.stride())}")


def check_blocks_output(sizes: Sizes, name: str, tables: Tensor, dtypes: Sequence[torch.dtype], *dims: str) -> None:
    """`Sizes.check_output` for tables [G, N, W] of several groups."""
    sizes.check(name, tables, dtypes, *dims)
    groups, rows, width = tables.shape
    apart = tables.stride(2) == 1 or width <= 1
    apart = apart and (rows <= 1 or tables.stride(1) >= width)
    if not apart or (groups > 1 and tables.stride(0) < (rows - 1) * tables.stride(1) + width):
        strides = list(tables.stride())
        raise ValueError(f"{name} must have unit column stride and rows that do not overlap, got strides {strides}")


def check_tail(tail: str, out: object) -> None:
    if tail not in TAILS:
        raise ValueError(f"tail must be 'clear' or 'keep', got {tail!r}")
    if tail == "keep" and out is None:
        raise ValueError("tail='keep' needs out: a fresh table has no columns to keep")


def check_map(sizes: Sizes, full_to_swa: Tensor | None, page_map: Tensor | None) -> None:
    """A map into the sliding-window pool, where there is one."""
    if full_to_swa is not None and page_map is not None:
        raise ValueError("at most one of full_to_swa and page_map may be given, got both")
    if full_to_swa is not None:
        sizes.check("full_to_swa", full_to_swa, INTS, "N")
    if page_map is not None:
        sizes.check("page_map", page_map, INTS, "NP")


def check_one_of(**given: Tensor | None) -> None:
    """Require one of two arguments."""
    present = [name for name, tensor in given.items() if tensor is not None]
    if len(present) != 1:
        raise ValueError(f"exactly one of {' and '.join(given)} must be given, got {'both' if present else 'neither'}")
