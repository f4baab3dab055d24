"""What a trace says of a step, held against what the step did on a real device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from compiled_kv.auditor.findings import WAITING, Finding, Report, merge
from compiled_kv.auditor.measured import Measured, count, known

UNDECIDED = "whether a CUDA graph is captured and what it costs: that takes the device itself"
UNCAPTURABLE = (*WAITING, "unsafe-under-capture", "cpu-tensor", "graph-break")
SKIPPING = (*UNCAPTURABLE, "mutated-input", "output-fed-back", "aliased-mutation", "hidden-copy", "recompile")


def with_measured(report: Report, measured: Measured) -> Report:
    """The report with what was measured beside each finding, and what only the device showed as findings."""
    findings = [replace(each, measured=beside(each, measured)) for each in report.findings]
    findings += contradictions(report.findings, measured)
    undecided = [text for text in report.undecided if text != UNDECIDED or measured.captured is None]
    return replace(report, findings=merge(findings), measured=measured, undecided=tuple(undecided))


def beside(finding: Finding, measured: Measured) -> str:
    """What the device showed of one static finding; "" where no measurement bears on its rule."""
    if finding.rule in WAITING:
        here = sum((each.file, each.line) == (finding.file, finding.line) for each in measured.eager_waits or ())
        return f"waited here {_times(here)} in an eager step; a compiled one waited {_often(measured.waits)}"
    if finding.rule == "graph-break":
        return f"graphs compiled: {known(measured.graphs)}"
    if finding.rule == "recompile":
        return f"guards that failed in later calls: {count(measured.recompiles)}"
    if finding.rule in ("mutated-input", "output-fed-back"):
        return f'mode="reduce-overhead": {measured.reduced()}'
    if finding.rule in UNCAPTURABLE:
        return f'{measured.by_hand()}; mode="reduce-overhead": {measured.reduced()}'
    return ""


def contradictions(findings: Sequence[Finding], measured: Measured) -> Iterator[Finding]:
    """What the device did that no static finding speaks of."""
    said = {each.rule for each in findings if each.severity != "note"}
    place = next(((each.file, each.line) for each in measured.eager_waits or () if each.file), ("", 0))
    if raised := measured.failures.get("eager"):
        yield _seen("measured-error", "error", f"the step raised on the device: {raised}")
        return
    if not said & set(UNCAPTURABLE):
        if measured.waited:
            often = _often(measured.waits) if measured.waits else "at least once"
            yield _seen("measured-wait", "error", f"the compiled step waited for the device {often}", place)
        if measured.captured is False:
            yield _seen("measured-capture", "error", f"a compiled call was not captured: {measured.not_captured}")
    if not said & set(SKIPPING):
        if raised := measured.failures.get("reduce-overhead"):
            yield _seen("measured-capture", "error", f'mode="reduce-overhead" raised {raised}')
        if measured.skips:
            yield _seen("measured-capture", "warning", f"CUDA graphs were skipped: {'; '.join(measured.skips)}")
    if measured.recompiles and "recompile" not in said:
        yield _seen("measured-recompile", "warning", f"a later call compiled again: {'; '.join(measured.recompiles)}")


def _seen(rule: str, severity: str, message: str, place: tuple[str, int] = ("", 0)) -> Finding:
    remedy = "the trace shows nothing of it: compare its graph with the line, and report a trace that is wrong"
    return Finding(rule, severity, *place, message, remedy)


def _often(waits: Sequence[object] | None) -> str:
    return "unknown" if waits is None else _times(len(waits))


def _times(times: int) -> str:
    return {0: "not once", 1: "once"}.get(times, f"{times} times")
