"""How names, dtypes, sizes and long lines are spelt in the text of a graph."""

from __future__ import annotations

import re

import sympy  # type: ignore[import-untyped]
import torch

_DTYPES = {torch.bool: "b8", torch.bfloat16: "bf16"}
_WIDTH = 110


def clean(name: str) -> str:
    """`L_buffers_page_table_` -> `buffers_page_table`."""
    name = re.sub(r"^[Ll]_", "", name).strip("_")
    return re.sub(r"_(modules|parameters|buffers)__?", ".", name).replace("self.", "").strip("._") or "value"


def dtype_name(dtype: torch.dtype) -> str:
    """i64, f32, bf16, b8, u8, f8e4m3fn."""
    plain = str(dtype).removeprefix("torch.")
    return _DTYPES.get(dtype) or re.sub(r"^(int|uint|float|complex)", lambda m: m[1][0], plain).replace("_", "")


def wrap(head: str, items: list[str], comma: str = ", ", end: str = "") -> str:
    """`head` and its items on one line, or on several, indented, where one would be too long to read."""
    lines, line = [], head
    for index, item in enumerate(items):
        piece = item + (end if index == len(items) - 1 else comma)
        if len(line) + len(piece) > _WIDTH and line.strip():
            lines.append(line.rstrip())
            line = "     "
        line += piece
    return "\n".join([*lines, line.rstrip() if items else line.rstrip() + end])


def is_ceil_div(expression: sympy.Expr) -> bool:
    negated = expression.is_Mul and len(expression.args) == 2 and expression.args[0] == -1
    return negated and type(expression.args[1]).__name__ == "FloorDiv"


def as_ceil_div(expression: sympy.Expr) -> sympy.Expr:
    numerator, denominator = expression.args[1].args
    return sympy.Function("ceil_div")(-numerator, denominator)
