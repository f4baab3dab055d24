"""Findings that rules over nodes and rules over breaks both make, and what is told to do about them."""

from __future__ import annotations

from compiled_kv.auditor.findings import Finding
from compiled_kv.tracing.events import Place

READ_REMEDY = "keep it on the device: bound it by a host number (layout.max_seqlen_k), or pass it in as one"
SHAPE_REMEDY = "keep the shape: torch.where or masked_fill over all rows, or a static bound and padding of -1"
FRESH_REMEDY = "make it once, outside the step, and keep it on the device (register_buffer), or build it with device="

# Names of calls, or words in what dynamo says of them, that a CUDA graph cannot hold.
UNSAFE = (
    "synchronize", "empty_cache", "manual_seed", "pin_memory", "rng_state", "fork_rng", "torch._C.Generator",
    "memory_stats", "mem_get_info",
)  # fmt: skip


def read_finding(operator: str, what: str, place: Place) -> Finding:
    """The host waits for `what` of the device: a value, or the size of a result."""
    if what == "a size":
        message = f"{operator}: the size of the result depends on data, so the host waits for the device"
        return Finding("data-dependent-shape", "error", *place, message, SHAPE_REMEDY)
    return Finding("host-read", "error", *place, f"{operator}: the host waits for {what} of the device", READ_REMEDY)


def unsafe_finding(what: str, file: str, line: int) -> Finding:
    """A call that no CUDA graph holds."""
    message = f"{what}: not possible, or not repeated, while a CUDA graph is captured"
    return Finding("unsafe-under-capture", "error", file, line, message, "call it outside the captured step")
