"""What torch.compile is made to tell while it traces: graphs at both tiers, breaks, host reads between graphs."""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from compiled_kv import counts

_ARGUMENT = re.compile(r"^L_args_(\d+)_")


@dataclass(frozen=True)
class GraphBreak:
    """Where dynamo stopped a graph, and why, in its own words."""

    reason: str
    file: str
    line: int


@dataclass(frozen=True)
class EagerRead:
    """A host read between two graphs, in code that no graph holds; the trace went on with a made-up value."""

    operator: str
    file: str
    line: int


class Recorder(logging.Handler):
    """A compiler backend that keeps each graph at each tier, and torch's word that an analysis fell back.

    Args:
        fn: the callable to be traced, whose parameters lend the graphs' inputs their names.
    """

    def __init__(self, fn: Callable[..., Any]):
        super().__init__(logging.WARNING)
        self.parameters = _parameter_names(fn)
        self.dynamo: list[fx.GraphModule] = []
        self.aot: list[fx.GraphModule] = []
        self.settled: list[fx.GraphModule] = []
        self.fallbacks: list[str] = []
        self.failure: BaseException | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """What torch would print of breaks and failures goes on record here instead."""
        logger = logging.getLogger("torch._dynamo")
        handlers, propagate = logger.handlers, logger.propagate
        logger.handlers, logger.propagate = [self], False
        try:
            yield
        finally:
            logger.handlers, logger.propagate = handlers, propagate

    def emit(self, record: logging.LogRecord) -> None:
        if "assuming every input is mutated" in record.getMessage():
            cause = record.exc_info[1] if record.exc_info else None
            self.fallbacks.append(f"{type(cause).__name__}: {cause}")

    def backend(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """What torch.compile calls with each graph that dynamo made."""
        from torch._dynamo.backends.common import aot_autograd

        self.dynamo.append(graph)
        try:
            return aot_autograd(fw_compiler=self.lower, keep_inference_input_mutations=True)(graph, inputs)
        except Exception as error:
            self.failure = self.failure or error
            return graph.forward

    def lower(self, graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        """What AOTAutograd calls with the functionalized graph."""
        self._name_inputs(graph)
        for node in counts.nodes([graph]):
            if counts.is_launch(node):
                counts.kernel_behind(node)
        self.aot.append(graph)
        try:
            self.settled.append(counts.reused(graph))
        except Exception:  # Inductor's pass is no public face: without it copies are unknown, and said to be
            logging.getLogger(__name__).warning("copies are unknown: Inductor's reinplacing failed", exc_info=True)
        return graph.forward

    def _name_inputs(self, graph: fx.GraphModule) -> None:
        """Name inputs as the caller knows them; where the tiers differ in number the aot graph keeps its own."""
        before = self.dynamo[-1].graph.find_nodes(op="placeholder")
        after = graph.graph.find_nodes(op="placeholder")
        for node in before:
            node.meta["compiled_kv_name"] = _ARGUMENT.sub(self._parameter, str(node.target))
        if len(before) == len(after):
            for old, new in zip(before, after, strict=True):
                new.meta["compiled_kv_name"] = old.meta["compiled_kv_name"]

    def _parameter(self, match: re.Match[str]) -> str:
        index = int(match[1])
        return f"L_{self.parameters[index]}_" if index < len(self.parameters) else match[0]


def _parameter_names(fn: Callable[..., Any]) -> list[str]:
    """Names of positional parameters, where a wrapper (a module's __call__) hides them from dynamo."""
    try:
        parameters = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


@contextmanager
def compiler(settings: Mapping[str, Any]) -> Iterator[None]:
    """A compiler without memory of earlier traces, which forgets this one too."""
    from torch._dynamo import config as dynamo_config
    from torch._functorch import config as functorch_config

    with dynamo_config.patch(dict(settings)), functorch_config.patch(enable_autograd_cache=False):
        torch._dynamo.reset()
        try:
            yield
        finally:
            torch._dynamo.reset()


def recording_mode(reads: list[EagerRead]) -> FakeTensorMode:
    """Fake tensors whose values, where code between graphs asks for one, read as 1, so that the trace goes on.

    Each such read is appended to `reads`. Not a subclass: higher-order operators look rules up by the mode's type.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    dispatch = mode.dispatch

    def recording(func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (func in counts.READS or _leaves_device(func, args, kwargs)) and (place := _user_frame()):
            reads.append(EagerRead(f"{func.namespace}.{func._opname}", *place))
        if func is counts.aten._local_scalar_dense.default:
            return True if args[0].dtype is torch.bool else 1.0 if args[0].dtype.is_floating_point else 1
        if func is counts.aten.nonzero.default:
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        return dispatch(func, types, args, kwargs)

    mode.dispatch = recording  # type: ignore[method-assign]
    return mode


def _leaves_device(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if func is counts.aten._to_copy.default:
        return args[0].device.type != "cpu" and torch.device(kwargs.get("device") or args[0].device).type == "cpu"
    return func is counts.aten.copy_.default and args[0].device.type == "cpu" and args[1].device.type != "cpu"


_INSIDE = (str(Path(torch.__file__).parent), __file__)


def _user_frame() -> tuple[str, int] | None:
    """File and line of the code that asked, unless a compiled graph did."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if name.startswith("<eval_with_key>"):
            return None
        if not name.startswith(_INSIDE):
            return name, frame.f_lineno
        frame = frame.f_back
    return None


def graph_breaks() -> list[GraphBreak]:
    """The breaks of the trace just made."""
    from torch._dynamo.utils import graph_break_reasons

    return [_graph_break(reason) for reason in graph_break_reasons]


def _graph_break(reason: Any) -> GraphBreak:
    stack = reason.user_stack
    place = (stack[-1].filename, stack[-1].lineno or 0) if stack else ("", 0)
    return GraphBreak(str(reason.reason), *place)
