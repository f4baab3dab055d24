"""How names, dtypes, sizes and long lines are spelt in the text of a graph."""

from __future__ import annotations

import re

import sympy  # type: ignore[import-untyped]
import torch
from sympy.printing.str import StrPrinter  # type: ignore[import-untyped]

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


class Sizes(StrPrinter):  # type: ignore[misc]
    """Prints Max and Min with their arguments in one order."""

    printmethod = "_spelt"  # torch's own functions would print themselves otherwise

    def _in_order(self, expression: sympy.Expr) -> str:
        numbers = [arg for arg in expression.args if arg.is_number]
        others = sorted(self._print(arg) for arg in expression.args if not arg.is_number)
        return f"{type(expression).__name__}({', '.join([*map(self._print, numbers), *others])})"

    _print_Max = _print_Min = _in_order


def sizes(expression: sympy.Expr) -> str:
    """Arithmetic on sizes in one spelling, whichever torch and sympy made it: `Max(1, floor_div(640, s2))`."""
    expression = expression.replace(_is_ceil_div, _as_ceil_div)
    return str(Sizes().doprint(expression.replace(_is_floor_div, lambda each: sympy.Function("floor_div")(*each.args))))


def _is_floor_div(expression: sympy.Expr) -> bool:
    return type(expression).__name__ in ("FloorDiv", "CleanDiv")


def _is_ceil_div(expression: sympy.Expr) -> bool:
    negated = expression.is_Mul and len(expression.args) == 2 and expression.args[0] == -1
    return bool(negated and _is_floor_div(expression.args[1]))


def _as_ceil_div(expression: sympy.Expr) -> sympy.Expr:
    numerator, denominator = expression.args[1].args
    return sympy.Function("ceil_div")(-numerator, denominator)
