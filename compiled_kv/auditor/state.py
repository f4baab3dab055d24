"""Rules over what a step does to its arguments, and over what changes from call to call."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, fx

from compiled_kv.auditor import places
from compiled_kv.auditor.findings import Finding
from compiled_kv.tracing import counts
from compiled_kv.tracing.events import Limit, Place, Recompile
from compiled_kv.tracing.graphs import Graphs
from compiled_kv.tracing.spelling import clean

_SCATTERS = ("aten.slice_scatter", "aten.select_scatter", "aten.as_strided_scatter", "aten.diagonal_scatter")


def hidden_copy(graphs: Graphs) -> Iterator[Finding]:
    """Copies that nobody wrote: clones that the compiler puts before a launch, and scatters back into a buffer."""
    if graphs.fallbacks:
        return  # what is cloned then says nothing: see analysis_fallback
    written = {node.name for node in counts.nodes(graphs.aot)}
    remedy = "give each output a buffer of its own instead of a slice of a shared one"
    for copy in graphs.copies or ():
        if copy.operator == "aten.clone" and copy.node.name not in written:
            base = places.base_of(copy.node.args[0])  # type: ignore[arg-type]
            message = f"hidden copy of {_bytes(copy)} for argument {name_of(base)}"
            yield Finding("hidden-copy", "warning", *places.of_node(copy.node), message, remedy)
        elif copy.operator == "aten.copy_" and _is_scatter(copy.node.args[1]) and not _is_between(copy.node.args[0]):
            message = f"hidden copy of {_bytes(copy)}: argument {name_of(copy.node.args[0])} is written back whole"
            yield Finding("hidden-copy", "warning", *places.of_node(copy.node), message, remedy)


def cloned(graphs: Graphs) -> dict[str, int]:
    """Bytes of the copies left in a step by the argument that they are for, largest first; those known alone."""
    found: Counter[str] = Counter()
    for copy in graphs.copies or ():
        base = places.base_of(copy.node.args[0])  # type: ignore[arg-type]
        while _is_scatter(base):
            base = places.base_of(base.args[0])  # type: ignore[arg-type]
        found[name_of(base) if base.op == "placeholder" else "the step's own tensors"] += copy.bytes or 0
    return {name: size for name, size in found.most_common() if size}


def mutated_input(graphs: Graphs) -> Iterator[Finding]:
    """Arguments written in place: mode="reduce-overhead" skips CUDA graphs for them."""
    remedy = "register it as a buffer of a module (compiled_kv's buffers do), or capture the step by hand"
    for node in _writes(graphs):
        target: Any = node.args[0]
        if not target.meta.get("compiled_kv_static") and not _is_between(target):
            message = f'argument {name_of(target)} is written in place; mode="reduce-overhead" skips CUDA graphs for it'
            yield Finding("mutated-input", "warning", *places.of_node(node), message, remedy)


def aliased_mutation(graphs: Graphs) -> Iterator[Finding]:
    """An argument that is written while it, or a view of it, is read as another argument."""
    remedy = "pass separate tensors, or let the step make the view itself"
    for node in counts.nodes(graphs.aot):
        launch = counts.launch_of(node)
        if launch is None:
            continue
        tensors = {name: item for name, item in launch.arguments.items() if isinstance(item, fx.Node)}
        for name in launch.writes:
            others = [other for other, item in tensors.items() if other != name and item is tensors.get(name)]
            if others:
                message = f"{launch.kernel} writes {name} and reads the same tensor as {', '.join(others)}"
                yield Finding("aliased-mutation", "warning", *places.of_node(node), message, remedy)
    for dynamo, aot in zip(graphs.dynamo, graphs.aot, strict=False):
        groups = _aliases(dynamo)
        writes = list(_writes_of(aot))
        if groups and writes:
            names = " and ".join(name_of(node) for node in groups[0])
            message = f"arguments {names} share memory, and the step writes to it"
            yield Finding("aliased-mutation", "warning", *places.of_node(writes[0]), message, remedy)


def _aliases(graph: fx.GraphModule) -> list[list[fx.Node]]:
    groups: dict[int, list[fx.Node]] = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        if isinstance(value := counts.value_of(node), Tensor):
            groups.setdefault(value.untyped_storage()._cdata, []).append(node)
    return [group for group in groups.values() if len(group) > 1]


def frozen_argument(graphs: Graphs) -> Iterator[Finding]:
    """Python numbers among the arguments: a captured graph keeps the value that it was captured with."""
    remedy = (
        "pass a tensor on the device, or a field of the layout; close over a number that each capture may keep, such "
        "as the batch size of its bucket: lambda buffers: step(buffers, 8)"
    )
    for each in graphs.frozen:
        message = (
            f"argument {each.name} is frozen at {each.value}: another value compiles again, and a replay ignores it"
        )
        if each.is_input:
            message = f"argument {each.name} is a Python number: a captured graph keeps the value it was captured with"
        yield Finding("frozen-argument", "warning", each.file, each.line, message, remedy)


def recompile(graphs: Graphs) -> Iterator[Finding]:
    """Calls that no compiled graph fitted, and dynamo's limit on them."""
    remedy = (
        "keep changing numbers in tensors on the device; where sizes change compile with dynamic=True (--dynamic) or "
        "mark them with torch._dynamo.mark_dynamic; torch compiles a size of 0 or 1 on its own in any case"
    )
    by_place: dict[Place, list[Recompile]] = {}
    for each in graphs.recompiles:
        by_place.setdefault((each.file, each.line), []).append(each)
    for place, found in by_place.items():
        alike: dict[str, list[Recompile]] = {}
        for each in found:
            alike.setdefault(re.sub(r"\d+", "", each.reason), []).append(each)
        message = "; ".join(f"a later call compiles again{_between(some)}: {some[0].reason}" for some in alike.values())
        yield Finding("recompile", "warning", *place, message, remedy)
    if graphs.limits:
        place = next(reversed(by_place), ("", 0))
        message = f"recompile limit hit, now eager{_between(graphs.limits)}: {graphs.limits[0].reason.splitlines()[0]}"
        yield Finding("recompile", "error", *place, message, remedy)


def _between(found: Sequence[Recompile | Limit]) -> str:
    """Between which batch sizes, where they are known: those of each call and of the call before it."""
    pairs = dict.fromkeys(each.sizes for each in found if each.sizes)
    texts = [f"{before} and {now}" for before, now in pairs if before != now]
    same = [f", at batch size {now}" for before, now in pairs if before == now]
    return "".join([*same, *([f", between batch sizes {', '.join(texts)}"] if texts else [])])


def output_fed_back(graphs: Graphs) -> Iterator[Finding]:
    """A result of one call that comes back as an argument of the next: under CUDA graphs its memory is reused."""
    remedy = "copy it into a buffer that you own, and pass that"
    for node in graphs.fed_back:
        message = f"{name_of(node)} is a result of an earlier call: a CUDA graph's replay overwrites it"
        yield Finding("output-fed-back", "warning", *places.of_use(node), message, remedy)


def analysis_fallback(graphs: Graphs) -> Iterator[Finding]:
    """Torch could not tell which arguments a kernel writes, and assumed all of them."""
    launch = next((node for node in counts.nodes(graphs.aot) if counts.is_launch(node)), None)
    place = places.of_node(launch) if launch else ("", 0)
    for reason in graphs.fallbacks:
        message = (
            f"torch could not tell what a kernel writes and assumed every argument, so clones are unknown: {reason}"
        )
        remedy = "the kernel must compile to Triton's IR: check it alone with triton.compile"
        yield Finding("analysis-fallback", "warning", *place, message, remedy)


def _writes(graphs: Graphs) -> Iterator[fx.Node]:
    for graph in graphs.aot:
        yield from _writes_of(graph)


def _writes_of(graph: fx.GraphModule) -> Iterator[fx.Node]:
    for node in graph.graph.nodes:
        if counts.operator_name(node) == "aten.copy_" and getattr(node.args[0], "op", "") == "placeholder":
            yield node


def _is_between(node: Any) -> bool:
    """Whether an input is what an earlier graph of the same call made: the break's doing, and no argument."""
    return bool(node.meta.get("compiled_kv_between"))


def _is_scatter(node: Any) -> bool:
    return isinstance(node, fx.Node) and counts.operator_name(node) in _SCATTERS


def name_of(node: Any) -> str:
    """An input by its caller's name."""
    return clean(str(node.meta.get("compiled_kv_name", node.name)))


def _bytes(copy: counts.Copy) -> str:
    return "an unknown number of bytes" if copy.bytes is None else f"{copy.bytes:,} bytes"
