"""Trace a step as torch.compile would, and name what stands between it and one graph that a GPU can replay."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError

from compiled_kv.auditor import hazards, state
from compiled_kv.auditor.comparison import UNDECIDED
from compiled_kv.auditor.findings import Finding, Report, merge
from compiled_kv.tracing import counts
from compiled_kv.tracing.graphs import Graphs, trace
from compiled_kv.tracing.rendering import render

RULES: tuple[Callable[[Graphs], Any], ...] = (
    hazards.graph_break,
    hazards.stopped,
    hazards.host_read,
    hazards.host_to_device_copy,
    hazards.cpu_tensor,
    hazards.unsafe_under_capture,
    state.hidden_copy,
    state.mutated_input,
    state.aliased_mutation,
    state.frozen_argument,
    state.recompile,
    state.output_fed_back,
    state.analysis_fallback,
)
CALLS = 3  # the first, and two more: a number that dynamo makes dynamic on the second call stays so on the third


class StepError(Exception):
    """The step itself raised; its own exception is the cause."""


def audit(
    fn: Callable[..., Any], *args: Any, target: str = "cuda:sm_90", dynamic: bool | None = False,
    batches: Sequence[Sequence[Any]] = (), fullgraph: bool = False, capture_scalars: bool = True, **kwargs: Any,
) -> Report:  # fmt: skip
    """Audit one decode step for a device, on a machine that need not have one.

    Args:
        fn, args, kwargs: as in `capture`; nothing is run or allocated, and nothing of the caller's changes.
        target: as in `capture`.
        dynamic: as in torch.compile.
        batches: further arguments to call the step with after `args`, of other batch sizes, to see what recompiles.
        fullgraph, capture_scalars: how you compile the step; findings of that way are added to those of the way that
            sees most (breaks allowed, scalars captured).

    Raises:
        StepError: the step raised.
        TypeError, ValueError: as `capture`.
    """
    ways = [(False, True)] + [(fullgraph, capture_scalars)] * ((fullgraph, capture_scalars) != (False, True))
    traces = []
    for whole, scalars in ways:
        settings = {"capture_scalar_outputs": scalars, "capture_dynamic_output_shape_ops": scalars}
        traces.append(
            trace(
                fn, args, kwargs, target=target, dynamic=dynamic, fullgraph=whole, settings=settings, more=batches,
                repeat=CALLS if whole is False else 1,
            )
        )  # fmt: skip
        check_ran(traces[-1])
    findings: list[Finding] = [finding for graphs in traces for rule in RULES for finding in rule(graphs)]
    return _report(traces[0], findings)


def check_ran(graphs: Graphs) -> None:
    """Tell an error of the step's own from one that says why it cannot be compiled."""
    error = graphs.stopped
    if error is None or len(graphs.aot) < len(graphs.dynamo):
        return
    if isinstance(error, TorchRuntimeError) and not any(each.rule != "graph-break" for each in hazards.stopped(graphs)):
        got = re.search(r"got (\w+\(.*\))", str(error))
        raise StepError(f"the step raised {got[1] if got else hazards.first_sentence(str(error))}") from error
    if not isinstance(error, TorchDynamoException):
        raise StepError(f"the step raised {type(error).__name__}: {hazards.first_sentence(str(error))}") from error


def _report(graphs: Graphs, findings: list[Finding]) -> Report:
    undecided = []
    if graphs.stopped is not None:
        undecided.append(f"what follows an error of torch's while tracing: {_text(graphs.stopped)}")
    if not graphs.dynamo:
        undecided.append("everything inside the graph: torch captured none")
    if graphs.fallbacks:
        undecided.append("what is cloned: the analysis of a kernel fell back")
    if graphs.target != "cpu":
        undecided.append(UNDECIDED)
    return Report(
        target=graphs.target,
        findings=merge(findings),
        graphs=len(graphs.dynamo),
        nodes=sum(1 for _ in counts.nodes(graphs.dynamo)),
        launches=graphs.launches,
        cloned_bytes=graphs.copied_bytes,
        cloned=state.cloned(graphs),
        is_whole=graphs.is_whole,
        undecided=tuple(undecided),
        graph_texts=tuple((tier, render(graphs, tier)) for tier in ("dynamo", "aot") if getattr(graphs, tier)),
    )


def _text(error: BaseException) -> str:
    return hazards.first_sentence(str(error)) or type(error).__name__
