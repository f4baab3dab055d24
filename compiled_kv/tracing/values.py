"""How the values of a captured graph are called: names for its nodes, letters for its sizes."""

from __future__ import annotations

import operator
import sys
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx

from compiled_kv.tracing import counts
from compiled_kv.tracing.spelling import dtype_name, sizes


class Values:
    """Writes the values of one graph."""

    def __init__(self, graph: fx.GraphModule):
        self.graph = graph.graph
        self.names: dict[fx.Node, str] = {}
        self.taken: dict[str, int] = {}
        self.letters: dict[sympy.Symbol, sympy.Symbol] = {}

    def same_as(self, node: fx.Node) -> Any:
        """What a node merely passes on: the source of a functional copy, what is sliced whole, a scalar."""
        aten = counts.aten
        if node.target is aten.copy.default and _alike(*node.args[:2]):
            return node.args[1]
        if node.target is aten.slice.Tensor and _alike(node, node.args[0]):
            return node.args[0]
        if node.target is aten.alias.default:
            return node.args[0]
        if node.target is aten.scalar_tensor.default:
            return node.args[0]
        if node.target is aten.full.default and node.args[0] == []:
            return node.args[1]
        return node

    def value(self, item: Any) -> str:
        while isinstance(item, fx.Node) and (source := self.same_as(item)) is not item:
            item = source
        if isinstance(item, fx.Node):
            return self.node(item)
        if isinstance(item, list | tuple):
            return f"[{', '.join(map(self.value, item))}]"
        if isinstance(item, dict):
            return "{" + ", ".join(f"{key}: {self.value(value)}" for key, value in item.items()) + "}"
        if isinstance(item, slice):
            ends = ("" if end is None else self.value(end) for end in (item.start, item.stop, item.step))
            return ":".join(ends).removesuffix(":") or ":"
        if isinstance(item, torch.dtype):
            return dtype_name(item)
        if isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self.expression(item.node.expr)
        if item == sys.maxsize and isinstance(item, int):
            return "end"
        return str(item) if not isinstance(item, str) else repr(item)

    def node(self, node: fx.Node) -> str:
        if node in self.names:
            return self.names[node]
        value = counts.value_of(node)
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            source = node.args[0]
            key = node.args[1]
            if counts.launch_of(source):
                return f"{self.value(source)}.{str(key).removesuffix('_ptr')}"
            if not isinstance(value, int | torch.SymInt):
                return f"{self.value(source)}[{key}]"
        if isinstance(value, Tensor):
            return f"new {self.type(value)}"
        return self.value(value)

    def type(self, value: Any) -> str:
        if isinstance(value, list | tuple):
            return f"({', '.join(map(self.type, value))})"
        if not isinstance(value, Tensor):
            return "size" if isinstance(value, torch.SymInt) else type(value).__name__
        return f"{dtype_name(value.dtype)}[{', '.join(self.value(size) for size in value.shape)}]"

    def expression(self, expression: sympy.Expr) -> str:
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self.letters:
                self.letters[symbol] = sympy.Symbol(f"s{len(self.letters)}", integer=True)
        return sizes(expression.xreplace(self.letters))

    def fresh(self, name: str) -> str:
        self.taken[name] = self.taken.get(name, 0) + 1
        return name if self.taken[name] == 1 else f"{name}_{self.taken[name]}"


def _alike(one: Any, other: Any) -> bool:
    a, b = counts.value_of(one), counts.value_of(other)
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    return a.dtype == b.dtype and str(a.shape) == str(b.shape)  # comparing sizes would put a guard on them
