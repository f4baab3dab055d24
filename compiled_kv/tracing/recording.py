"""A compiler backend that compiles nothing and keeps every graph, at both tiers, with what torch says on the way."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import RestartAnalysis

from compiled_kv.tracing import counts
from compiled_kv.tracing.events import Frozen, Recompile, frames_in, innermost, of_the_caller, recompiles
from compiled_kv.tracing.listening import Listener
from compiled_kv.tracing.literals import without_literals

_NUMBERS = (torch.SymInt, torch.SymFloat)
_NUMBER = re.compile(r"L\['(\w+)'\] == (-?[\d.]+(?:e-?\d+)?)")
_ARGUMENT = re.compile(r"^L_args_(\d+)_")


class Recorder(Listener):
    """A compiler backend that keeps each graph at each tier, and torch's word that an analysis fell back.

    Args:
        fn: the callable to be traced, whose parameters lend the graphs' inputs their names.
    """

    def __init__(self, fn: Callable[..., Any]):
        super().__init__()
        self.parameters = _parameter_names(fn)
        self.dynamo: list[fx.GraphModule] = []
        self.aot: list[fx.GraphModule] = []
        self.settled: list[fx.GraphModule] = []
        self.frozen: list[Frozen] = []
        self.recompiles: list[Recompile] = []
        self.fed_back: list[fx.Node] = []
        self.outputs: dict[int, Any] = {}
        self.pending: dict[int, Any] = {}
        self.failure: BaseException | None = None

    def guards(self, guards: Any) -> None:
        """What dynamo calls with the guards of each graph."""
        stacks = {guard.name: guard.user_stack for guard in guards if guard.user_stack}
        for guard in guards:
            for code in guard.code_list or ():
                match = _NUMBER.fullmatch(code)
                if match and match[1] in self.parameters:
                    # Of a number that was free first and then fixed, the guard does not say where: its first use does.
                    stack = guard.user_stack or stacks.get(f"L['{match[1]}']", ())
                    frames = [(frame.filename, frame.lineno or 0) for frame in stack]
                    self.frozen.append(Frozen(match[1], match[2], *(of_the_caller(frames) or innermost(frames))))

    def backend(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """What torch.compile calls with each graph that dynamo made."""
        from torch._dynamo.backends.common import aot_autograd

        self.dynamo.append(graph)
        try:
            lower = aot_autograd(fw_compiler=self.lower, keep_inference_input_mutations=True)
            return lower(without_literals(graph), inputs)
        except RestartAnalysis:  # dynamo knows what to do: it traces again, with a number specialized
            self.dynamo.pop()
            raise
        except Exception as error:
            self.failure = self.failure or error
            return graph.forward

    @contextmanager
    def behind_nested_compilers(self) -> Iterator[None]:
        """A function that the step calls, and that is compiled on its own, is kept here too: it must not run."""
        wrappers = (torch._TorchCompileInductorWrapper, torch._TorchCompileWrapper)
        before = [(each, each.__call__) for each in wrappers]
        for each in wrappers:
            each.__call__ = lambda _, graph, inputs: self.backend(graph, inputs)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for each, call in before:
                each.__call__ = call  # type: ignore[method-assign]

    def lower(self, graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        """What AOTAutograd calls with the functionalized graph."""
        self._name_inputs(graph)
        for node in counts.nodes([graph]):
            if counts.is_launch(node):
                counts.kernel_behind(node)
        self.aot.append(graph)
        settled = graph
        try:
            self.settled.append(settled := counts.reused(graph))
        except Exception:  # Inductor's pass is no public face: without it copies are unknown, and said to be
            logging.getLogger(__name__).warning("copies are unknown: Inductor's reinplacing failed", exc_info=True)
        return self._watched(graph, settled)

    def _watched(self, graph: fx.GraphModule, settled: fx.GraphModule) -> Callable[..., Any]:
        """`graph`, and a look at whether an argument is what a graph returned in an earlier call."""
        inputs, copied = (each.graph.find_nodes(op="placeholder") for each in (graph, settled))

        def run(*args: Any) -> Any:
            given = {_storage(value) for value in args}
            for node, twin, value in zip(inputs, copied, args, strict=True):
                node.meta["compiled_kv_between"] = twin.meta["compiled_kv_between"] = _storage(value) in self.pending
            self.fed_back += [node for node, value in zip(inputs, args, strict=True) if _storage(value) in self.outputs]
            results = graph.forward(*args)
            fresh = {_storage(value): value for value in results if _storage(value) not in given}
            self.pending.update(fresh)
            return results

        return run

    @contextmanager
    def call(self, sizes: tuple[int, ...]) -> Iterator[None]:
        """One call of the step, between these batch sizes; what it made is then the result of an earlier call."""
        self.sizes = sizes
        try:
            yield
        finally:
            self.recompiles += [replace(each, sizes=sizes) for each in recompiles(self.callers)]
        self.outputs.update(self.pending)
        self.outputs.pop(0, None)
        self.pending = {}

    def _name_inputs(self, graph: fx.GraphModule) -> None:
        """Name inputs as the caller knows them; where the tiers differ in number the aot graph keeps its own."""
        before = self.dynamo[-1].graph.find_nodes(op="placeholder")
        after = graph.graph.find_nodes(op="placeholder")
        for node in before:
            node.meta["compiled_kv_name"] = _ARGUMENT.sub(self._parameter, str(node.target))
            self._note_number(node)
        if len(before) == len(after):
            for old, new in zip(before, after, strict=True):
                new.meta["compiled_kv_name"] = old.meta["compiled_kv_name"]
                new.meta["compiled_kv_number"] = old.meta["compiled_kv_number"]
                new.meta["compiled_kv_static"] = "_dynamo_static_input_type" in old.meta.get("tensor_dict", {})
                new.meta.setdefault("compiled_kv_users", list(old.users))

    def _note_number(self, node: fx.Node) -> None:
        """A Python number among the arguments that the graph takes as an input, whose value a trace leaves open."""
        name = str(node.meta["compiled_kv_name"]).removeprefix("L_").removesuffix("_")
        is_number = counts.is_wrapped_number(node) or isinstance(counts.value_of(node), _NUMBERS)
        is_argument = is_number and name in self.parameters
        # A later graph of the same call gets as inputs what Python holds between the two.
        node.meta["compiled_kv_number"] = is_argument or (is_number and len(self.dynamo) > 1)
        if is_argument:
            found = (frames_in(user.meta.get("stack_trace") or "") for user in node.users)
            frames = next(filter(None, found), [])
            self.frozen.append(Frozen(name, "", *(of_the_caller(frames) or innermost(frames)), is_input=True))

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
    from torch.fx.experimental import _config as shape_config

    # Equal sizes share a letter, whatever the process has set for its own compilations.
    shapes = shape_config.patch(use_duck_shape=True)  # type: ignore[attr-defined]
    with shapes, dynamo_config.patch(dict(settings)), functorch_config.patch(enable_autograd_cache=False):
        torch._dynamo.reset()
        try:
            yield
        finally:
            torch._dynamo.reset()


def _storage(value: Any) -> int:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else 0
