"""At which line a finding stands where torch's word for it is none of the step's: code in no file."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from compiled_kv.auditor import Report, StepError, audit
from compiled_kv.auditor.page import page

TYPED = """\
import torch

def reading(x):
    y = x + 1
    return y * int(x.max())

def breaking(x):
    y = x + 1
    print(end="")
    return y * int(x.max())

def sliced(x, n):
    return x + 1, x[: x.shape[0] - n]

def raising(x):
    return x.view(7)
"""
NUMBERS: dict[str, tuple[int, ...]] = {"sliced": (3,)}


def typed(name: str, file: str) -> Any:
    """A step that was handed to Python as text, as by `python -c` (`<string>`) or on standard input."""
    names: dict[str, Any] = {}
    exec(compile(TYPED, file, "exec"), names)
    return names[name]


def found(report: Report) -> set[tuple[str, str]]:
    return {(each.rule, each.place) for each in report.findings}


@pytest.mark.parametrize("file", ["<string>", "<stdin>", "<console>", "<python-input-0>"])
@pytest.mark.parametrize("scalars", [True, False], ids=["scalars", "scalars-off"])
@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("reading", {("host-read", 5)}),
        ("breaking", {("graph-break", 9), ("host-read", 10)}),
        ("sliced", {("frozen-argument", 13)}),
    ],
)
def test_a_step_in_no_file_is_told_by_its_lines(
    name: str, planted: set[tuple[str, int]], scalars: bool, file: str
) -> None:
    report = audit(typed(name, file), torch.zeros(4, 8), *NUMBERS.get(name, ()), capture_scalars=scalars)
    assert found(report) == {(rule, f"{file}:{line}") for rule, line in planted}


def test_a_step_in_no_file_that_raises_is_told_by_its_line() -> None:
    with pytest.raises(StepError, match=r"is invalid for input of size 4\"\), at <string>:16$"):
        audit(typed("raising", "<string>"), torch.zeros(4))


def test_what_compiles_again_in_no_file_is_told_by_its_line() -> None:
    report = audit(typed("reading", "<string>"), torch.zeros(4, 8), batches=[[torch.zeros(5, 8)]])
    assert found(report) == {("host-read", "<string>:5"), ("recompile", "<string>:3")}


def test_no_form_of_a_report_leaves_room_for_code_that_is_not_there() -> None:
    from rich.console import Console

    from compiled_kv.auditor.terminal import show

    report = audit(typed("reading", "<string>"), torch.zeros(4, 8))
    (finding,) = report.findings
    assert finding.source == "" and str(finding).splitlines()[0] == "<string>:5: error: host-read"
    assert [line.strip() for line in str(finding).splitlines()[1:]] == [finding.message, finding.remedy]
    section = page(report).partition("<section")[2].partition("</section>")[0]
    assert "&lt;string&gt;:5</div><div>" in section and "<pre>" not in section
    written = io.StringIO()
    show(report, Console(file=written, width=200))
    panel = written.getvalue().partition("╭")[2].partition("╰")
    assert len(panel[0].splitlines()) == 3 and panel[2].startswith("─ <string>:5 ─")
