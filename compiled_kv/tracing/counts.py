"""What a captured graph holds of the things a decode step pays for, kernel launches and copies; what its nodes are."""

from __future__ import annotations

import copy
import inspect
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

_COPIES = (aten.clone.default, aten.copy_.default)
_SCATTERS = (
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.as_strided_scatter.default,
    aten.diagonal_scatter.default,
)
_UPDATES = (aten.index_copy.default, aten.index_fill.int_Scalar, aten.index_add.default)
_LAUNCHES = ("triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation")


@dataclass(frozen=True)
class Launch:
    """One Triton kernel launch: the kernel's name, its grid, its arguments by name, and which of them it writes."""

    kernel: str
    grid: tuple[Any, ...]
    arguments: dict[str, Any]
    writes: tuple[str, ...]


@dataclass(frozen=True)
class Copy:
    """A copy of a tensor left after the compiler reused what it could; bytes is None where a size is unbacked."""

    operator: str
    bytes: int | None
    node: fx.Node


def launch_of(node: fx.Node) -> Launch | None:
    """The Triton launch that `node` is, or None."""
    if not is_launch(node):
        return None
    kernel, constants = kernel_behind(node)
    given = {**constants, **node.kwargs["kwargs"]}  # type: ignore[dict-item]
    order = [name for name in kernel.arg_names if name in given]
    writes = node.kwargs.get("tensors_to_clone", ())
    grid = list(node.kwargs["grid"][0])  # type: ignore[index, arg-type]
    while len(grid) > 1 and grid[-1] == 1:
        grid.pop()
    return Launch(kernel.fn.__name__, tuple(grid), {name: given[name] for name in order}, tuple(sorted(writes)))  # type: ignore[arg-type]


def is_launch(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") in _LAUNCHES


def kernel_behind(node: fx.Node) -> tuple[Any, dict[str, Any]]:
    """The JIT function of a launch and its constant arguments, pinned to the node: torch's table may be reset later."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    if "compiled_kv_kernel" not in node.meta:
        kernel: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])  # type: ignore[arg-type]
        node.meta["compiled_kv_autotuned"] = len(getattr(kernel, "configs", ())) > 1
        kernel = kernel if hasattr(kernel, "arg_names") and hasattr(kernel.fn, "__name__") else kernel.fn
        constants = kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])  # type: ignore[arg-type]
        node.meta["compiled_kv_kernel"] = (kernel, dict(constants))
    return node.meta["compiled_kv_kernel"]


def is_autotuned(node: fx.Node) -> bool:
    """Whether a launch times several configurations of its kernel."""
    kernel_behind(node)
    return bool(node.meta["compiled_kv_autotuned"])


def nodes(graphs: Sequence[fx.GraphModule]) -> Iterator[fx.Node]:
    """Every node of every graph, and of the graphs nested in them (control flow)."""
    for graph in graphs:
        for module in graph.modules():
            if isinstance(module, fx.GraphModule):
                yield from module.graph.nodes


def launches(graphs: Sequence[fx.GraphModule]) -> list[Launch]:
    return [launch for node in nodes(graphs) if (launch := launch_of(node))]


def copies(graphs: Sequence[fx.GraphModule]) -> list[Copy]:
    """Copies left in `graphs` once they went through `reused`."""
    found = (node for node in nodes(graphs) if node.op == "call_function" and node.target in _COPIES + _SCATTERS)
    return [Copy(operator_name(node), tensor_bytes(value_of(node)), node) for node in found if not _is_update(node)]


def _is_update(node: fx.Node) -> bool:
    """Whether a write-back is one of rows that Inductor, which lowers it to index_put, writes in place."""
    source = node.args[1] if node.target is aten.copy_.default else None
    return isinstance(source, fx.Node) and source.target in _UPDATES and source.args[0] is node.args[0]


def reused(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy of an aot graph in which Inductor has decided which arguments are written in place, which cloned."""
    from torch._guards import detect_fake_mode
    from torch._inductor.fx_passes.post_grad import (
        decompose_auto_functionalized,
        decompose_triton_kernel_wrapper_functional,
    )
    from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops
    from torch._inductor.fx_utils import FakeTensorUpdater
    from torch._inductor.virtualized import V

    graph = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    values = [value for node in graph.graph.nodes if isinstance(value := value_of(node), Tensor)]
    with V.set_fake_mode(detect_fake_mode(values)):
        takes_module = "gm" in inspect.signature(FakeTensorUpdater).parameters  # torch 2.11 takes the graph
        updater: Any = FakeTensorUpdater
        reinplace_inplaceable_ops(updater(graph if takes_module else graph.graph), graph.graph)
        decompose_triton_kernel_wrapper_functional(graph.graph)
        decompose_auto_functionalized(graph.graph)
    return graph


def operator_name(node: fx.Node) -> str:
    """`aten.clone` for aten.clone.default; a method's or function's own name for what is no operator."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._opname}"
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name.replace("::", ".")
    if isinstance(target, str):
        return target
    return getattr(target, "__name__", str(target))


def lists_of(node: fx.Node) -> list[list[int]]:
    """The lists of Python numbers that a tensor of an accelerator is indexed with at `node`, as in `x[[2, 0]]`."""
    if node.target is not operator.getitem or device_of(node) in ("", "cpu", "meta"):
        return []
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return [each for each in index if isinstance(each, list) and each and all(isinstance(n, int) for n in each)]


def is_wrapped_number(node: fx.Node) -> bool:
    """Whether an input is a Python float that dynamo hands over as a tensor, to leave its value open."""
    value = value_of(node)
    return (
        node.op == "placeholder" and isinstance(value, Tensor) and value.dim() == 0 and value.device.type == "cpu"
        and "tensor_dict" not in node.meta and str(node.target).startswith("L_")
    )  # fmt: skip


def value_of(node: Any) -> Any:
    """The fake value a node stands for, at either tier."""
    return node.meta.get("val", node.meta.get("example_value")) if isinstance(node, fx.Node) else node


def device_of(node: Any) -> str:
    """The device type of the tensor a node stands for; "" for anything else."""
    value = value_of(node)
    return value.device.type if isinstance(value, Tensor) else ""


def tensor_bytes(value: Any) -> int | None:
    """Bytes of a tensor; a symbolic size counts as the example it was traced with."""
    if not isinstance(value, Tensor):
        return None
    sizes: list[Any] = [getattr(size, "node", size) for size in value.shape]
    sizes = [getattr(size, "hint", size) for size in sizes]
    return None if None in sizes else math.prod(sizes) * value.element_size()
