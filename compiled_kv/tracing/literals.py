"""Tensors that a graph makes of Python numbers on a device that this machine lacks, written as fills."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx

from compiled_kv.tracing import counts


def without_literals(graph: fx.GraphModule) -> fx.GraphModule:
    """`torch.tensor(0.5, device="cuda")` as a fill: AOTAutograd cannot make such a tensor where there is no GPU.

    The same for the tensor behind `x[[0]]`.
    """
    if torch.cuda.is_available() or not any(_is_literal(node) or counts.lists_of(node) for node in graph.graph.nodes):
        return graph
    copied = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    for node in copied.graph.nodes:
        if counts.lists_of(node):
            _fill_lists(node)
    for node in filter(_is_literal, copied.graph.nodes):
        made = counts.value_of(node)
        number = node.args[0]
        while isinstance(number, list | tuple):
            number = number[0] if number else 0
        node.target, node.args = torch.full, (tuple(made.shape), number)
        node.kwargs = {"dtype": made.dtype, "device": made.device}
    copied.recompile()
    return copied


def _fill_lists(node: fx.Node) -> None:
    """Write an index that is a list of one number as a fill."""
    source: Any = node.args[0]
    index: Any = node.args[1]
    items = index if isinstance(index, tuple) else (index,)
    device = counts.value_of(source).device
    with node.graph.inserting_before(node):
        kwargs = {"dtype": torch.int64, "device": device}
        filled = [
            node.graph.call_function(torch.full, ((1,), item[0]), kwargs)
            if item in counts.lists_of(node) and len(item) == 1
            else item
            for item in items
        ]
    node.args = (source, tuple(filled) if isinstance(index, tuple) else filled[0])


def _is_literal(node: fx.Node) -> bool:
    made = counts.value_of(node)
    literal = node.target in (torch.tensor, torch.as_tensor) and not node.all_input_nodes
    return literal and isinstance(made, torch.Tensor) and made.numel() <= 1 and made.device.type == "cuda"
