"""Rules over what torch says where a graph breaks or a trace ends early: what of it is a read, and what is unsafe."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from compiled_kv.auditor import places
from compiled_kv.auditor.findings import Finding
from compiled_kv.auditor.kinds import FRESH_REMEDY, READ_REMEDY, SHAPE_REMEDY, UNSAFE, read_finding, unsafe_finding
from compiled_kv.tracing.graphs import Graphs

BREAK_REMEDY = "move it out of the step, or behind torch.compiler.is_compiling()"
FRESH = "a tensor is made of Python numbers on the device here: a copy from the host in every step"

_READING_BREAKS = (
    "generic_jump",
    "Data-dependent",
    "Data dependent operator",
    "Tensor.item()",
    "Could not guard on data",
    "from data-dependent expression",  # a number that was read, where Python needs its value: range(n), table[n]
    "builtin operator `range` with argument types ['Tensor'",
    "Pending unbacked symbols",  # a tensor where a number is wanted
    "TensorVariable() is not a constant",  # a tensor where dynamo itself wants a value: format(t, ".2f")
)
_SHAPE_BREAKS = ("Dynamic shape operator", "data-dependent output shape")
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
        yield unsafe_finding("a call that only the device can answer (streams, events, generators, memory)", *place)
    elif isinstance(error, DynamicOutputShapeException):
        yield read_finding(text, "a size", place)
    elif isinstance(error, DataDependentOutputException):
        yield read_finding(text, "a value", place)
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
    if any(text in reason for text in UNSAFE):
        yield unsafe_finding(first, file, line)
    elif any(text in reason for text in _SHAPE_BREAKS):
        message = "the size of the result depends on data: the host waits to learn it, and the graph breaks here"
        yield Finding("data-dependent-shape", "error", file, line, message, SHAPE_REMEDY)
    elif any(text in reason for text in _READING_BREAKS):
        message = "Python needs a value of the device here: the host waits for it, and the graph breaks"
        yield Finding("host-read", "error", file, line, message, READ_REMEDY)
    else:
        yield Finding("graph-break", "error", file, line, f"the graph breaks here: {first}", BREAK_REMEDY)


def first_sentence(text: str) -> str:
    """The first line of one of torch's messages, no longer than its first sentence."""
    text = text.rpartition("Graph break encountered:")[2]  # what comes before says what became of the function
    line = next(iter(text.strip().splitlines()), "")
    return line.partition(". ")[0].rstrip(".")
