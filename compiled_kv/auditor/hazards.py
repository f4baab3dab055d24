"""Rules over the nodes of captured graphs, one a function: what makes the host wait, and what no capture can hold."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, fx

from compiled_kv.auditor import places
from compiled_kv.auditor.findings import Finding
from compiled_kv.auditor.kinds import FRESH_REMEDY, READ_REMEDY, UNSAFE, read_finding, unsafe_finding
from compiled_kv.tracing import counts, reads
from compiled_kv.tracing.events import Place
from compiled_kv.tracing.graphs import Graphs

FOLDED = "Inductor makes it once, while compiling; eager code, and other backends, copy it from the host in every step"


def host_read(graphs: Graphs) -> Iterator[Finding]:
    """Every spelling of a device value that becomes a Python one, in the graphs and between them."""
    lowered = set()
    for read in reads.host_reads(graphs.aot):
        place = places.of_node(read.node)
        lowered.add(place)
        yield read_finding(read.operator, read.what, place)
    for eager in graphs.eager_reads:
        lowered.add((eager.file, eager.line))
        what = next((what for op, what in reads.READS.items() if eager.operator == _name(op)), "a copy to the CPU")
        yield read_finding(eager.operator, what, (eager.file, eager.line))
    for read in reads.host_reads(graphs.dynamo):
        place = places.of_node(read.node)
        if place not in lowered:
            yield (
                _gone(read.operator, place)
                if len(graphs.aot) == len(graphs.dynamo)
                else read_finding(read.operator, read.what, place)
            )


def _name(operator: object) -> str:
    return f"{operator.namespace}.{operator._opname}"  # type: ignore[attr-defined]


def _gone(operator: str, place: Place) -> Finding:
    message = (
        f"{operator}: with scalars captured (fullgraph=True) torch turns this read back into a tensor; without, the "
        "graph breaks here and the host waits"
    )
    return Finding("host-read", "note", *place, message, READ_REMEDY)


def host_to_device_copy(graphs: Graphs) -> Iterator[Finding]:
    """Fresh data that travels from the host to the device in every step."""
    for node in counts.nodes(graphs.aot):
        source = [value for value in map(counts.value_of, node.all_input_nodes) if isinstance(value, Tensor)]
        if node.op == "call_function" and _is_on(node, "cuda") and _moves(node) and any(_on(v, "cpu") for v in source):
            text, place = tensor_text(source[-1]), places.of_node(node)
            if _is_constant(node):
                message = f"{text} of constants goes from the host to the device here: {FOLDED}"
                yield Finding("host-to-device-copy", "warning", *place, message, FRESH_REMEDY)
            else:
                message = f"{text} is copied from the host to the device here, in every step"
                yield Finding("host-to-device-copy", "error", *place, message, FRESH_REMEDY)
    for node in counts.nodes(graphs.dynamo):
        fresh = counts.operator_name(node) in ("tensor", "as_tensor") and not node.all_input_nodes
        if node.op == "call_function" and (fresh or counts.lists_of(node)) and _is_on(node, "cuda"):
            message = f"a tensor is made of constants on the device here: {FOLDED}"
            yield Finding("host-to-device-copy", "warning", *places.of_node(node), message, FRESH_REMEDY)


def _is_constant(node: fx.Node) -> bool:
    """Whether nothing that a caller passes goes into `node`."""
    if node.op == "placeholder":
        return False
    return all(map(_is_constant, node.all_input_nodes))


def cpu_tensor(graphs: Graphs) -> Iterator[Finding]:
    """A CPU tensor in a step for an accelerator: CUDA graphs are skipped, and its value is frozen or copied."""
    remedy = "make it on the device of its neighbours, or pass a Python number"
    for node in counts.nodes(graphs.aot):
        if node.op != "call_function" or not _is_on(node, "cuda") or _moves(node):
            continue
        for source in node.all_input_nodes:
            if _is_on(source, "cpu") and not (_is_inlined(source) or _is_a_number(source)):
                text = tensor_text(counts.value_of(source))
                message = f"{text} on the CPU meets tensors of the device; CUDA graphs are skipped for it"
                yield Finding("cpu-tensor", "warning", *_place_of(node, source), message, remedy)

    for read in reads.cpu_reads(graphs.aot):
        if not any(map(_is_a_number, read.node.all_input_nodes)):
            message = f"{read.operator}: {read.what} of a CPU tensor is read here; a captured graph keeps what it read"
            yield Finding("cpu-tensor", "warning", *places.of_node(read.node), message, remedy)


def _place_of(node: fx.Node, source: fx.Node) -> Place:
    """The line of `node`; where the compiler made it, the line that first uses the input behind `source`."""
    while places.of_node(node) == ("", 0) and source.all_input_nodes:
        source = source.all_input_nodes[-1]
    return places.of_node(node) if places.of_node(node)[0] else places.of_use(source)


def _is_inlined(node: fx.Node) -> bool:
    """Whether a CPU tensor is a Python number of the step's own code, which the compiler writes into the kernel."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.op == "get_attr" and counts.tensor_bytes(counts.value_of(node)) == counts.value_of(node).element_size()


def _is_a_number(node: fx.Node) -> bool:
    """Whether a CPU tensor is made of nothing but Python numbers among the arguments: see frozen_argument."""
    if node.op == "placeholder":
        return bool(node.meta.get("compiled_kv_number"))
    return bool(node.all_input_nodes) and all(
        _is_on(each, "cpu") and _is_a_number(each) for each in node.all_input_nodes
    )


def unsafe_under_capture(graphs: Graphs) -> Iterator[Finding]:
    """Calls that a CUDA graph cannot hold: synchronization, allocator and generator calls, autotuning."""
    for node in [*counts.nodes(graphs.dynamo), *counts.nodes(graphs.aot)]:
        name = counts.operator_name(node)
        if node.op in ("call_function", "call_method") and any(text in name for text in UNSAFE):
            yield unsafe_finding(name, *places.of_node(node))
        elif node.kwargs.get("pin_memory") is True:
            yield unsafe_finding(f"{name} of pinned memory", *places.of_node(node))
        if counts.is_launch(node) and counts.is_autotuned(node):
            what = "an autotuned kernel, which times its configurations on first use"
            yield unsafe_finding(what, *places.of_node(node))


def _moves(node: object) -> bool:
    return counts.operator_name(node) in ("aten._to_copy", "aten.copy_", "aten.copy", "prims.device_put")  # type: ignore[arg-type]


def _is_on(node: object, kind: str) -> bool:
    return _on(counts.value_of(node), kind)


def _on(value: object, kind: str) -> bool:
    return isinstance(value, Tensor) and value.device.type == kind


def tensor_text(value: Tensor) -> str:
    """`a float32 tensor [4, 8]`."""
    return f"a {str(value.dtype).removeprefix('torch.')} tensor {list(value.shape)}"
