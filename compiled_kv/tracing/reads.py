"""What in a captured graph makes the host wait for the device, or read what the CPU holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from compiled_kv.tracing.counts import device_of, nodes, operator_name, value_of

aten = torch.ops.aten

READS = {
    aten._local_scalar_dense.default: "a value",
    aten.item.default: "a value",
    aten.is_nonzero.default: "a truth value",
    aten.equal.default: "a truth value",
    aten.allclose.default: "a truth value",
    aten.nonzero.default: "a size",
    aten.masked_select.default: "a size",
    aten._unique2.default: "a size",
    aten.unique_dim.default: "a size",
    aten.unique_consecutive.default: "a size",
    aten.repeat_interleave.Tensor: "a size",
    aten.bincount.default: "a size",
    aten._linalg_check_errors.default: "an error code",
    aten._linalg_svd.default: "an error code",
    aten._linalg_eigh.default: "an error code",
}
_READ_METHODS = {"item": "a value", "tolist": "values", "nonzero": "a size", "cpu": "a copy to the CPU"}


@dataclass(frozen=True)
class HostRead:
    """One node that makes the host wait for the device, and what it waits for."""

    operator: str
    what: str
    node: fx.Node


def host_reads(graphs: Sequence[fx.GraphModule]) -> list[HostRead]:
    """Every node of a step that makes the host wait; in a step for an accelerator, what the CPU holds costs none."""
    free = {read.node for read in cpu_reads(graphs)}
    return [read for read in _reads(graphs) if read.node not in free]


def cpu_reads(graphs: Sequence[fx.GraphModule]) -> list[HostRead]:
    """Values and sizes that a step for an accelerator takes from CPU tensors."""
    on_device = any(device_of(node) not in ("", "cpu", "meta") for node in nodes(graphs))
    return [read for read in _reads(graphs) if on_device and _reads_the_cpu(read.node)]


def _reads(graphs: Sequence[fx.GraphModule]) -> list[HostRead]:
    return [read for node in nodes(graphs) if (read := host_read_of(node))]


def _reads_the_cpu(node: fx.Node) -> bool:
    kinds = {device_of(source) for source in node.all_input_nodes} - {""}
    return kinds == {"cpu"}


def host_read_of(node: fx.Node) -> HostRead | None:
    """What the host waits for at `node`, or None."""
    if node.op == "call_method" and node.target in _READ_METHODS:
        return HostRead(str(node.target), _READ_METHODS[str(node.target)], node)
    if node.op != "call_function":
        return None
    target: Any = node.args[1] if operator_name(node) == "with_effects" else node.target
    if target in READS and node.kwargs.get("output_size") is None:
        return HostRead(str(target).rpartition(".")[0], READS[target], node)
    if node.target is aten.index.Tensor and any(map(_is_mask, node.args[1])):  # type: ignore[arg-type]
        return HostRead(operator_name(node), "a size", node)
    if _leaves_device(node):
        return HostRead(operator_name(node), "a copy to the CPU", node)
    if node.target is torch.ops.higher_order.cond and device_of(node.args[0]) not in ("", "cpu", "meta"):
        return HostRead(operator_name(node), "a truth value", node)  # compiled code asks for it in Python
    return None


def _is_mask(node: Any) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8)


def _leaves_device(node: fx.Node) -> bool:
    result = value_of(node)
    sources = [value_of(argument) for argument in node.all_input_nodes]
    return (
        isinstance(result, Tensor)
        and result.device.type == "cpu"
        and any(isinstance(value, Tensor) and value.device.type not in ("cpu", "meta") for value in sources)
    )
