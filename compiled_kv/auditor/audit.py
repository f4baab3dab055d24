"""Trace a step as torch.compile would, and name what stands between it and one graph that a GPU can replay."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError

from compiled_kv.auditor import breaks, hazards, state
from compiled_kv.auditor.comparison import UNDECIDED
from compiled_kv.auditor.errors import where
from compiled_kv.auditor.findings import Finding, Report, merge
from compiled_kv.tracing import counts
from compiled_kv.tracing.graphs import Graphs, trace
from compiled_kv.tracing.rendering import render

RULES: tuple[Callable[[Graphs], Any], ...] = (
    breaks.graph_break,
    breaks.stopped,
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
ANYWHERE = (breaks.graph_break, breaks.stopped, hazards.host_read)  # rules that hold on any device
SEES_MOST, GOES_FURTHER = (False, True), (False, False)  # (fullgraph, scalars captured)
CALLS = 3  # the first, and two more: a number that dynamo makes dynamic on the second call stays so on the third
LONGEST = 160  # of a sentence of torch's, some of which list every tensor there is
STAYS = (
    ": a plain tensor that a step closes over or names as a global stays on the CPU; hand it over as an argument, or "
    "keep it in a module"
)


class StepError(Exception):
    """The step itself raised; its own exception is the cause."""


def audit(
    fn: Callable[..., Any], *args: Any, target: str = "cuda:sm_90", dynamic: bool | None = None,
    batches: Sequence[Sequence[Any]] = (), batch_sizes: Sequence[int] = (), fullgraph: bool = False,
    capture_scalars: bool = True, **kwargs: Any,
) -> Report:  # fmt: skip
    """Audit one decode step for a device, on a machine that need not have one.

    Args:
        fn, args, kwargs: as in `capture`; nothing is run or allocated, and nothing of the caller's changes.
        target: as in `capture`.
        dynamic: as in torch.compile: None for what a first call does, and for what it learns from later ones.
        batches: further arguments to call the step with after `args`, of other batch sizes, to see what recompiles.
        batch_sizes: the sizes of `args` and of each of `batches`, for the report to name.
        fullgraph, capture_scalars: how you compile the step; findings of that way are added to those of the way that
            sees most (breaks allowed, scalars captured). Where an error of torch's ends that one early, findings of
            a trace that captures no scalars are added, which goes on behind each value that is read; where that ends
            early too, those of traces for the CPU and for the sizes given.

    Raises:
        StepError: the step raised.
        TypeError, ValueError: as `capture`.
        ValueError: another number of sizes than of batches.
    """
    if batch_sizes and len(batch_sizes) != 1 + len(batches):
        raise ValueError(f"batch_sizes must name the sizes of {1 + len(batches)} batches, got {len(batch_sizes)}")

    def traced(whole: bool, scalars: bool, where: str = target, sizes: bool | None = dynamic) -> Graphs:
        settings = {"capture_scalar_outputs": scalars, "capture_dynamic_output_shape_ops": scalars}
        return trace(
            fn, args, kwargs, target=where, dynamic=sizes, fullgraph=whole, settings=settings, more=batches,
            repeat=1 if whole else CALLS, batch_sizes=batch_sizes,
        )  # fmt: skip

    asked = (fullgraph, capture_scalars)
    traces = {way: traced(*way) for way in dict.fromkeys([SEES_MOST, asked])}
    if traces[SEES_MOST].stopped is not None and GOES_FURTHER not in traces:
        traces[GOES_FURTHER] = traced(*GOES_FURTHER)
    check_ran([graphs for (whole, _), graphs in traces.items() if not whole])
    findings: list[Finding] = [finding for graphs in traces.values() for rule in RULES for finding in rule(graphs)]
    if GOES_FURTHER in traces and traces[GOES_FURTHER].stopped is not None:
        findings += [finding for rule in ANYWHERE for finding in rule(traced(*GOES_FURTHER, "cpu"))]
        if dynamic is not False:
            findings += [finding for rule in RULES for finding in rule(traced(*SEES_MOST, sizes=False))]
    return _report(traces[SEES_MOST], findings, batch_sizes)


def check_ran(traces: Sequence[Graphs]) -> None:
    """Tell an error of the step's own from one that says why it cannot be compiled: the former comes in every way.

    Raises:
        StepError: the step raised.
    """
    raised = [_of_the_step(graphs) for graphs in traces]
    error = traces[0].stopped
    if None not in raised and error is not None:
        advice = STAYS if "found at least two devices" in str(raised[0]) else ""
        raise StepError(f"the step raised {raised[0]}{where(error)}{advice}") from error


def _of_the_step(graphs: Graphs) -> str | None:
    error = graphs.stopped
    if error is None or len(graphs.aot) < len(graphs.dynamo) or graphs.eager_reads:
        return None  # behind a value that was read, the trace goes on with a made-up one, which may be at fault
    if breaks.needs_device(error) or isinstance(error, breaks.UNDECIDED_VALUES):
        return None
    if isinstance(error, TorchRuntimeError) and not any(each.rule != "graph-break" for each in breaks.stopped(graphs)):
        got = re.search(r"got (\w+\(.*\))", str(error))
        return got[1] if got else _said(_behind(error))
    return None if isinstance(error, TorchDynamoException) else _said(error)


def _behind(error: BaseException) -> BaseException:
    """What torch's operator raised, which dynamo chains behind errors of its own."""
    while isinstance(error, TorchDynamoException) and (chained := error.__cause__ or error.__context__):
        error = chained
    return error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {breaks.first_sentence(str(error)).rstrip('!')}".removesuffix(": ")


def _report(graphs: Graphs, findings: list[Finding], batch_sizes: Sequence[int]) -> Report:
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
        batch_sizes=tuple(batch_sizes),
    )


def _text(error: BaseException) -> str:
    said = breaks.first_sentence(str(error)) or type(error).__name__
    return said if len(said) <= LONGEST else f"{said[:LONGEST]} ..."
