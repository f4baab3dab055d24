"""Steps of the loop as `DecodeGraphs` serves them, and what was really seen of the graphs inside.

Dynamo hands every graph it makes to the backend below, which counts its nodes and each of its calls; a function that
ran outside its graph, or in more than one, shows as a call count that differs. On CUDA nothing of it may run at all
once it is captured: what serves then are replays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from compiled_kv.batches import DecodeBatch
from compiled_kv.buffers import DecodeBuffers
from compiled_kv.replay.graphs import DecodeGraphs
from compiled_kv.replay.steps import room
from compiled_kv.tracing import counts
from compiled_kv.tracing.reads import host_reads


class Compiled:
    """A function `run(buffers, batch_size, ...)` compiled whole, one graph for every batch size from 2 up.

    Args:
        backend: of torch.compile; None leaves the function as it is.

    Attributes:
        graphs: the graphs that were compiled.
        calls, graph_calls: how often the function was called, and how often a graph of it ran.
    """

    def __init__(self, name: str, run: Callable[..., Any], backend: str | None = "inductor") -> None:
        self.name, self._run = name, run
        self.graphs: list[fx.GraphModule] = []
        self.calls = self.graph_calls = 0
        if backend is not None:
            self._compile = torch._dynamo.lookup_backend(backend)
            # Steps of one class share their code, and with it a limit of recompiles, unless torch can tell them apart.
            apart = room("isolate_recompiles", True)
            self._run = torch.compile(run, fullgraph=True, dynamic=True, backend=self._backend, **apart)

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self.graphs:
            return self._run(*args)
        # Else a dynamic graph takes each float of the model, an epsilon or a scale, as a tensor on the CPU to read.
        with torch._dynamo.config.patch(specialize_float=True):
            return self._run(*args)

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
        return len(host_reads(self.graphs))


class ServedStep:
    """`run(buffers, batch_size)` through `DecodeGraphs`; calling it with a batch serves the batch.

    Args:
        parts: the compiled functions that one step consists of, and how often each runs in it.
    """

    def __init__(
        self, name: str, run: Callable[..., Any], buffers: DecodeBuffers, batch_sizes: Sequence[int],
        parts: Mapping[Compiled, int],
    ) -> None:  # fmt: skip
        self.name, self.parts = name, dict(parts)
        self.graphs = DecodeGraphs(run, buffers, batch_sizes, backend=None)  # its parts are compiled already
        self._warm = {part: part.calls for part in parts}

    def __call__(self, batch: DecodeBatch) -> Any:
        return self.graphs(batch)

    @property
    def served(self) -> int:
        """Batches served."""
        return self.graphs.served

    @property
    def metadata_launches(self) -> int:
        """Of one step, all parts together."""
        return sum(part.metadata_launches * times for part, times in self.parts.items())

    @property
    def status(self) -> int:
        """Bits that metadata has set so far."""
        return int(self.graphs.buffers.status)

    @property
    def strays(self) -> dict[str, int]:
        """Calls of each part, beyond those that serving on this device takes; on CUDA, where graphs serve, that is
        none."""
        served = 0 if self.graphs.on_cuda else self.served
        beyond = {p.name: p.calls - self._warm[p] - times * served for p, times in self.parts.items()}
        return {name: count for name, count in beyond.items() if count}


def _namespace(node: fx.Node) -> str:
    operator = getattr(node.target, "overloadpacket", node.target)
    return str(operator).split(".")[0] if isinstance(operator, torch._ops.OpOverloadPacket) else ""


def graph_breaks() -> int:
    """Graph breaks that dynamo has counted in this process."""
    return sum(torch._dynamo.utils.counters["graph_break"].values())
