"""A step under torch.compile, and what was really seen of it: graphs, breaks, metadata calls, host reads.

Dynamo hands every graph it makes to the backend below, which counts its nodes and each of its calls; a step that ran
outside its graph, or in more than one, shows as a call count that differs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..tracing import counts


class CompiledStep:
    """`step` compiled whole, one graph for one fixed shape; calling it runs the step.

    Attributes:
        graphs: the graphs that were compiled.
        calls, graph_calls: how often the step was called, and how often a graph of it ran.
    """

    def __init__(self, name: str, step: nn.Module, backend: str = "inductor", **fixed: Any) -> None:
        self.name, self.fixed = name, fixed
        self.graphs: list[fx.GraphModule] = []
        self.calls = self.graph_calls = 0
        self._compile = torch._dynamo.lookup_backend(backend)
        self._run = torch.compile(step, fullgraph=True, dynamic=False, backend=self._backend, **_own_limit())

    def __call__(self, *args: Tensor) -> Any:
        self.calls += 1
        with torch.no_grad():
            return self._run(*args, **self.fixed)

    def _backend(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs.append(graph)
        compiled = self._compile(graph, inputs)

        def counted(*args: Any) -> Any:
            self.graph_calls += 1
            return compiled(*args)

        return counted

    @property
    def whole(self) -> bool:
        """One graph, and every call ran it."""
        return len(self.graphs) == 1 and self.calls == self.graph_calls

    @property
    def metadata_launches(self) -> int:
        """Calls of this package's operators in the graph; on a CUDA device each is one kernel launch."""
        return sum(_namespace(node) == "compiled_kv" for node in counts.nodes(self.graphs))

    @property
    def host_reads(self) -> int:
        """Nodes of the graph that bring a value to the host."""
        return len(counts.host_reads(self.graphs))


def _own_limit() -> dict[str, Any]:
    """Steps of one class share their code, and with it a limit of recompiles, unless torch can tell them apart."""
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        return {"isolate_recompiles": True}
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return {}


def _namespace(node: fx.Node) -> str:
    operator = getattr(node.target, "overloadpacket", node.target)
    return str(operator).split(".")[0] if isinstance(operator, torch._ops.OpOverloadPacket) else ""


def graph_breaks() -> int:
    """Graph breaks that dynamo has counted in this process."""
    return sum(torch._dynamo.utils.counters["graph_break"].values())
