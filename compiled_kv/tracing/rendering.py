"""A captured graph as text for people, the same from process to process and from one torch version to the next.

    in   block_table i32[s0, 16], req_pool_indices i64[s1], positions i64[s1]
    slot_mapping = compiled_kv.slot_mapping(block_table, req_pool_indices, positions, 64)   i64[s1]
    out  slot_mapping
    launches 1  copies 0  host reads 0

Sizes are lettered in order of appearance, arithmetic on sizes and fresh buffers are written where they are used, and
what only says how a tensor was made (device, layout, memory format) is left out.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from compiled_kv.tracing import counts
from compiled_kv.tracing.reads import host_read_of
from compiled_kv.tracing.spelling import clean, wrap
from compiled_kv.tracing.values import Values

if TYPE_CHECKING:
    from compiled_kv.tracing.graphs import Graphs

_FRESH = re.compile(r"aten\.(new_)?empty(_like|_strided|_permuted)?")
_NOISE = {"device", "layout", "pin_memory", "memory_format", "dtype", "requires_grad", "non_blocking", "_stacklevel"}
_SIZES = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Size)
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_TORCHS_OWN = ("aten", "prims", "prim", "higher_order")


def render(graphs: Graphs, tier: str, detail: str = "full") -> str:
    """One tier ("dynamo" or "aot") of captured graphs, and the line of counts.

    `detail` is "full", "own" (kernel launches and operators that are not torch's own), or "counts" (how often each
    operator occurs).
    """
    return body(graphs, tier, detail) + "\n" + summary(graphs)


def body(graphs: Graphs, tier: str, detail: str = "full") -> str:
    """`render` without the line of counts."""
    shown = graphs.dynamo if tier == "dynamo" else graphs.aot
    return "\n--- graph break ---\n".join(Rendering(graph).text(detail) for graph in shown)


def summary(graphs: Graphs) -> str:
    """`launches 1  copies 0  host reads 0`; what could not be counted is unknown, never 0."""
    known = {
        "launches": None if graphs.launches is None else sum(graphs.launches.values()),
        "copies": None if graphs.copies is None else len(graphs.copies),
        "host reads": None if graphs.host_reads is None else len(graphs.host_reads),
    }
    line = "  ".join(f"{name} {'unknown' if value is None else value}" for name, value in known.items())
    if graphs.graph_breaks:
        line += f"  graph breaks {len(graphs.graph_breaks)}"
    return line


class Rendering(Values):
    """Writes one graph: names for its values, letters for its sizes."""

    def text(self, detail: str = "full") -> str:
        """The graph in as much detail as `render` says."""
        if detail == "counts":
            return self.operators()
        inputs = [self.input(node) for node in self.graph.find_nodes(op="placeholder")]
        lines = [wrap("in   ", [text for text in inputs if text])]
        for node in self.graph.nodes:
            if node.op not in ("placeholder", "output") and (line := self.statement(node)):
                if detail == "full" or is_own(node):
                    lines.append(line)
        if detail == "own":
            return "\n".join(lines[1:])
        (output,) = self.graph.find_nodes(op="output")
        results = output.args[0] if isinstance(output.args[0], list | tuple) else [output.args[0]]
        return "\n".join([*lines, wrap("out  ", [self.value(item) for item in results])])

    def operators(self) -> str:
        """`aten.add 12  aten.clamp 4`, sorted by name: what differs from one torch to the next is left out.

        The same computation twice counts once, whether torch merged them or not, and views do not count.
        """
        shown = (node for node in self.distinct() if not (self.is_inline(node) or is_view(node)))
        counted = Counter(map(counts.operator_name, shown))
        return wrap("", [f"{name} {count}" for name, count in sorted(counted.items())], "  ")

    def distinct(self) -> Iterator[fx.Node]:
        """Each call, without those that compute again what an earlier one did."""
        first: dict[str, fx.Node] = {}
        same: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            if node.op not in ("call_function", "call_method"):
                continue
            given = fx.node.map_arg((node.args, node.kwargs), lambda each: same.get(each, each))
            pure = isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable
            same[node] = first.setdefault(f"{node.target} {given}", node) if pure else node
            if same[node] is node:
                yield node

    def input(self, node: fx.Node) -> str:
        value = counts.value_of(node)
        if not isinstance(value, Tensor):
            return ""  # a size: its letter stands where it is used
        self.names[node] = self.fresh(clean(str(node.meta.get("compiled_kv_name", node.target))))
        return f"{self.names[node]} {self.type(value)}"

    def statement(self, node: fx.Node) -> str:
        if self.is_inline(node):
            return ""
        if node.target is counts.aten.copy_.default:  # the value from here on is what was written into
            self.names[node] = self.value(node.args[0])
            return f"aten.copy_({self.names[node]}, {self.value(node.args[1])})"
        if launch := counts.launch_of(node):
            return self.launch(node, launch)
        if node.op == "get_attr":
            self.names[node] = self.fresh(clean(str(node.target)))
            return f"{self.names[node]} = constant   {self.type(counts.value_of(node))}"
        name = counts.operator_name(node)
        given = self.own_arguments(node) if is_own(node) else [self.value(item) for item in node.args]
        given += [f"{key}={self.value(item)}" for key, item in node.kwargs.items() if key not in _NOISE]
        value = counts.value_of(node)
        if node.target is operator.getitem:
            self.names[node] = self.fresh("item")
            return f"{self.names[node]} = {given[0]}[{given[1]}]   {self.type(value)}"
        if value is None or not (node.users or isinstance(value, Tensor)):
            return wrap(f"{name}(", given, end=")")
        self.names[node] = self.fresh(name.rpartition(".")[2].strip("_"))
        call = wrap(f"{self.names[node]} = {name}(", given, end=")")
        return call + ("\n     " if "\n" in call else "   ") + self.type(value)

    def own_arguments(self, node: fx.Node) -> list[str]:
        """Arguments by the names of the operator's schema, without those that are None."""
        target: Any = node.target
        schema = (target if isinstance(target, torch._ops.OpOverload) else target.default)._schema
        given = {argument.name: item for argument, item in zip(schema.arguments, node.args, strict=False)}
        texts = {name: self.value(item) for name, item in given.items() if item is not None}
        return [text if text == name else f"{name}={text}" for name, text in texts.items()]

    def launch(self, node: fx.Node, launch: counts.Launch) -> str:
        self.names[node] = self.fresh(launch.kernel.strip("_").removesuffix("_kernel"))
        arguments = [f"{name.removesuffix('_ptr')}={self.value(item)}" for name, item in launch.arguments.items()]
        grid = ", ".join(self.value(size) for size in launch.grid)
        writes = ", ".join(name.removesuffix("_ptr") for name in launch.writes)
        head = f"{self.names[node]} = launch {launch.kernel}[{grid}]"
        return "\n".join([head, f"     writes {writes}", wrap("     ", arguments)])

    def is_inline(self, node: fx.Node) -> bool:
        """Whether a node is written where it is used (sizes, items of a result, fresh buffers) or checks something."""
        if host_read_of(node):
            return False
        if node.target is operator.getitem and _is_tuple(node.args[0]):
            return True
        name = counts.operator_name(node)
        if name.startswith(("aten._assert", "aten.sym_constrain", "_check")):
            return True
        fresh = _FRESH.fullmatch(name) or isinstance(counts.value_of(node), _SIZES)
        return bool(fresh) or self.same_as(node) is not node


def is_own(node: fx.Node) -> bool:
    """Whether a node is a kernel launch or an operator that torch does not bring along."""
    return counts.is_launch(node) or (isinstance(node.target, _OPERATORS) and namespace(node) not in _TORCHS_OWN)


def is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def namespace(node: fx.Node) -> str:
    return counts.operator_name(node).partition(".")[0]


def _is_tuple(node: Any) -> bool:
    return isinstance(node, fx.Node) and not isinstance(counts.value_of(node), Tensor)
