"""Rules over captured graphs, one a function: what makes the host wait, and what splits a step."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator

from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from compiled_kv.auditor import places
from compiled_kv.auditor.findings import Finding
from compiled_kv.tracing import counts, reads
from compiled_kv.tracing.graphs import Graphs

READ_REMEDY = "keep it on the device: bound it by a host number (layout.max_seqlen_k), or pass it in as one"
SHAPE_REMEDY = "keep the shape: torch.where or masked_fill over all rows, or a static bound and padding of -1"
FRESH = "a tensor is made of Python numbers on the device here: a copy from the host in every step"
FOLDED = "Inductor makes it once, while compiling; eager code, and other backends, copy it from the host in every step"
FRESH_REMEDY = "make it once, outside the step, and keep it on the device (register_buffer), or build it with device="
BREAK_REMEDY = "move it out of the step, or behind torch.compiler.is_compiling()"

_READING_BREAKS = (
    "generic_jump",
    "Data-dependent",
    "Data dependent operator",
    "Tensor.item()",
    "Could not guard on data",
    "from data-dependent expression",  # a number that was read, where Python needs its value: range(n), table[n]
    "builtin operator `range` with argument types ['Tensor'",
    "Pending unbacked symbols",  # a tensor where a number is wanted
)
_SHAPE_BREAKS = ("Dynamic shape operator", "data-dependent output shape")
_UNSAFE = (
    "synchronize", "empty_cache", "manual_seed", "pin_memory", "rng_state", "fork_rng", "torch._C.Generator",
    "memory_stats", "mem_get_info",
)  # fmt: skip
# What fake tensors raise in code between two graphs, where a value or a size is needed.
UNDECIDED_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
# What torch says where a call needs the device itself, or its libraries, and this machine lacks them.
_NEEDS_DEVICE = (
    "Torch not compiled with CUDA enabled", "Tried to instantiate dummy base class", "Cannot get CUDA generator",
    "Found no NVIDIA driver", "No CUDA GPUs are available", "CUDA driver version is insufficient",
)  # fmt: skip
_DEVICES_OWN = re.compile(r"stream|Event|[gG]enerator|rng|seed|memory|synchronize")
_QUOTES = re.compile(r"\n\s*(Caused by|User Stack|Stack variable|from user code|Original traceback)")


def graph_break(graphs: Graphs) -> Iterator[Finding]:
    """Where dynamo stopped a graph; a break at a host read is reported as that read."""
    for each in graphs.graph_breaks:
        yield from _of_reason(each.reason, each.file, each.line)


def stopped(graphs: Graphs) -> Iterator[Finding]:
    """Where the trace ended early, under fullgraph=True above all."""
    lowered = len(graphs.aot) == len(graphs.dynamo)
    if graphs.stopped is None or not lowered:
        return
    error, text = graphs.stopped, str(graphs.stopped)
    place = places.of_text(text) or places.of_traceback(error)
    if place is None:
        return
    if _makes_real_data(error):
        yield Finding("host-to-device-copy", "error", *place, FRESH, FRESH_REMEDY)
    elif needs_device(error):
        yield _unsafe("a call that only the device can answer (streams, events, generators, memory)", *place)
    elif isinstance(error, DynamicOutputShapeException):
        yield _read(text, "a size", place)
    elif isinstance(error, DataDependentOutputException):
        yield _read(text, "a value", place)
    elif isinstance(error, UnsupportedOperatorException) or places.of_text(text):
        yield from _of_reason(text, *place)


def needs_device(error: BaseException) -> bool:
    """Whether a call could not be traced here, since it asks the device itself for a stream, event or the like."""
    calls = " ".join([str(error)[:300], *(frame.name for frame in traceback.extract_tb(error.__traceback__))])
    return any(text in str(error) for text in _NEEDS_DEVICE) and bool(_DEVICES_OWN.search(calls))


def _makes_real_data(error: BaseException) -> bool:
    """Whether code between two graphs turned Python numbers into a tensor of the device, which is not here."""
    return isinstance(error, NotImplementedError) and "Could not run 'aten::empty_strided'" in str(error)


def _of_reason(reason: str, file: str, line: int) -> Iterator[Finding]:
    first = first_sentence(reason) or "dynamo gave no reason"
    reason = _QUOTES.split(reason)[0]  # behind these words stand the step's own lines
    if any(text in reason for text in _UNSAFE):
        yield _unsafe(first, file, line)
    elif any(text in reason for text in _SHAPE_BREAKS):
        message = "the size of the result depends on data: the host waits to learn it, and the graph breaks here"
        yield Finding("data-dependent-shape", "error", file, line, message, SHAPE_REMEDY)
    elif any(text in reason for text in _READING_BREAKS):
        message = "Python needs a value of the device here: the host waits for it, and the graph breaks"
        yield Finding("host-read", "error", file, line, message, READ_REMEDY)
    else:
        yield Finding("graph-break", "error", file, line, f"the graph breaks here: {first}", BREAK_REMEDY)


def host_read(graphs: Graphs) -> Iterator[Finding]:
    """Every spelling of a device value that becomes a Python one, in the graphs and between them."""
    lowered = set()
    for read in reads.host_reads(graphs.aot):
        place = places.of_node(read.node)
        lowered.add(place)
        yield _read(read.operator, read.what, place)
    for eager in graphs.eager_reads:
        lowered.add((eager.file, eager.line))
        what = next((what for op, what in reads.READS.items() if eager.operator == _name(op)), "a copy to the CPU")
        yield _read(eager.operator, what, (eager.file, eager.line))
    for read in reads.host_reads(graphs.dynamo):
        place = places.of_node(read.node)
        if place not in lowered:
            yield (
                _gone(read.operator, place)
                if len(graphs.aot) == len(graphs.dynamo)
                else _read(read.operator, read.what, place)
            )


def _name(operator: object) -> str:
    return f"{operator.namespace}.{operator._opname}"  # type: ignore[attr-defined]


def _read(operator: str, what: str, place: places.Place) -> Finding:
    if what == "a size":
        message = f"{operator}: the size of the result depends on data, so the host waits for the device"
        return Finding("data-dependent-shape", "error", *place, message, SHAPE_REMEDY)
    return Finding("host-read", "error", *place, f"{operator}: the host waits for {what} of the device", READ_REMEDY)


def _gone(operator: str, place: places.Place) -> Finding:
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


def _place_of(node: fx.Node, source: fx.Node) -> places.Place:
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
        if node.op in ("call_function", "call_method") and any(text in name for text in _UNSAFE):
            yield _unsafe(name, *places.of_node(node))
        elif node.kwargs.get("pin_memory") is True:
            yield _unsafe(f"{name} of pinned memory", *places.of_node(node))
        if counts.is_launch(node) and counts.is_autotuned(node):
            yield _unsafe("an autotuned kernel, which times its configurations on first use", *places.of_node(node))


def _unsafe(what: str, file: str, line: int) -> Finding:
    message = f"{what}: not possible, or not repeated, while a CUDA graph is captured"
    return Finding("unsafe-under-capture", "error", file, line, message, "call it outside the captured step")


def _moves(node: object) -> bool:
    return counts.operator_name(node) in ("aten._to_copy", "aten.copy_", "aten.copy", "prims.device_put")  # type: ignore[arg-type]


def _is_on(node: object, kind: str) -> bool:
    return _on(counts.value_of(node), kind)


def _on(value: object, kind: str) -> bool:
    return isinstance(value, Tensor) and value.device.type == kind


def first_sentence(text: str) -> str:
    """The first line of one of torch's messages, no longer than its first sentence."""
    text = text.rpartition("Graph break encountered:")[2]  # what comes before says what became of the function
    line = next(iter(text.strip().splitlines()), "")
    return line.partition(". ")[0].rstrip(".")


def tensor_text(value: Tensor) -> str:
    """`a float32 tensor [4, 8]`."""
    return f"a {str(value.dtype).removeprefix('torch.')} tensor {list(value.shape)}"
