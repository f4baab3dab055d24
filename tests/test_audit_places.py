"""At which line a finding stands where torch names another or none: code in no file, Python's library, formatting."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_kv import host
from compiled_kv.auditor import Report, StepError, audit
from compiled_kv.auditor.page import page
from tests.audit_corpus import hazards
from tests.audit_corpus.arguments import arguments

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


class Reading(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.args[0].max().item()  # handler


class Largest(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return str(record.args[0].max().item())  # formatter


def logger(handler: logging.Handler, formatter: logging.Formatter | None = None) -> logging.Logger:
    made = logging.Logger("of a step")
    made.addHandler(handler)
    handler.setFormatter(formatter)
    return made


plain, reading = logger(logging.StreamHandler(io.StringIO())), logger(Reading())
formatting = logger(logging.StreamHandler(io.StringIO()), Largest())


def logs_a_value(x: Any) -> Any:
    plain.info("%s", x.max())  # logs a value
    return x + 1


def logs_to_a_handler(x: Any) -> Any:
    reading.info("%s", x)  # logs to a handler
    return x + 1


def logs_to_a_formatter(x: Any) -> Any:
    formatting.info("%s", x)  # logs to a formatter
    return x + 1


def logs_nothing(x: Any) -> Any:
    logging.debug("%s", x.max())  # logs nothing
    return x + 1


def line(mark: str) -> int:
    return 1 + [text.endswith(f"  # {mark}") for text in Path(__file__).read_text().splitlines()].index(True)


@pytest.mark.parametrize("scalars", [True, False], ids=["scalars", "scalars-off"])
@pytest.mark.parametrize(
    ("step", "read", "logs"),
    [
        (logs_a_value, "logs a value", "logs a value"),
        (logs_to_a_handler, "handler", "logs to a handler"),
        (logs_to_a_formatter, "formatter", "logs to a formatter"),
        (logs_nothing, "", "logs nothing"),
    ],
)
def test_what_logging_does_is_told_at_the_line_that_logs(step: Any, read: str, logs: str, scalars: bool) -> None:
    """And never inside Python's library, some of which dynamo compiles for itself; a read in a handler of one's own is
    at the line of that."""
    report = audit(step, torch.zeros(4, 8), capture_scalars=scalars)
    places = {(each.rule, each.file, each.line) for each in report.findings}
    expected = {("graph-break", __file__, line(logs))} | {("host-read", __file__, line(read)) for _ in read[:1]}
    assert places - {("recompile", __file__, line(logs))} == expected
    assert len(report.findings) == len(places)


def formats_and_prints(x: Any) -> Any:
    y = x + 1
    text = f"{x.sum():.2f}"  # formats and prints
    print(text, end="\r")
    return y


def formats_an_item(x: Any) -> Any:
    y = x + 1
    print(f"{x.sum().item():.2f}", end="\r")  # formats an item
    return y


def formats_by_method(x: Any) -> Any:
    y = x + 1
    print("{:.2f}".format(x.sum()), end="\r")  # noqa: UP032  # formats by method
    return y


def formats_by_percent(x: Any) -> Any:
    y = x + 1
    print("%d" % x.sum(), end="\r")  # noqa: UP031  # formats by percent
    return y


def formats_by_function(x: Any) -> Any:
    y = x + 1
    print(format(x.sum(), ".2f"), end="\r")  # formats by function
    return y


def formats_behind_a_break(x: Any) -> Any:
    print(end="")
    y = x + 1
    print(f"{y.sum():.2f}", end="\r")  # formats behind a break
    return y


def returns_what_it_formats(x: Any) -> Any:
    y = x + 1
    return y, f"sum {x}"  # returns what it formats


def text_of(x: Any) -> str:
    largest = x.max()
    return f"{largest:.1f}"  # formats in a helper


def formats_in_a_helper(x: Any) -> Any:
    return x + 1, text_of(x)


def formats_in_a_list(x: Any) -> Any:
    y = x + 1
    return y, "{}".format([x.sum(), 3])  # noqa: UP032  # formats in a list


@pytest.mark.parametrize("scalars", [True, False], ids=["scalars", "scalars-off"])
@pytest.mark.parametrize(
    "step",
    [
        formats_and_prints, formats_an_item, formats_by_method, formats_by_percent, formats_by_function,
        formats_behind_a_break, returns_what_it_formats, formats_in_a_helper, formats_in_a_list,
    ],
)  # fmt: skip
def test_a_number_that_is_formatted_is_told_where_that_is(step: Any, scalars: bool) -> None:
    report = audit(step, torch.zeros(4, 8), capture_scalars=scalars)
    reads = [each.place for each in report.findings if each.rule == "host-read"]
    assert reads == [f"{__file__}:{line(step.__name__.replace('_', ' '))}"]


def test_formatting_what_the_host_has_is_no_read() -> None:
    def step(x: Any, lens: Any) -> Any:
        y = x + 1
        return y, f"{x.shape[0]} {lens}"

    assert "host-read" not in {each.rule for each in audit(step, torch.zeros(4, 8), host(torch.zeros(4))).findings}


class Named:
    def __str__(self) -> str:
        return "named"


NAMED = Named()


def formats_a_shape_and_a_number(x: Any) -> Any:
    y = x + 1
    texts = f"{x.shape}", "{}".format(x.shape), f"{NAMED}"  # noqa: UP032
    return y, texts, f"{y.sum():.2f}"  # formats a shape and a number


@pytest.mark.parametrize("dynamic", [None, True])
def test_only_the_number_is_told_where_more_is_formatted(dynamic: bool | None) -> None:
    report = audit(formats_a_shape_and_a_number, torch.zeros(4, 8), dynamic=dynamic)
    reads = [each.place for each in report.findings if each.rule == "host-read"]
    assert reads == [f"{__file__}:{line('formats a shape and a number')}"]


def test_a_recompile_of_another_kind_is_told_with_its_own_sizes() -> None:
    def step(x: Any) -> Any:
        return x + 1

    others = [[torch.zeros(4, 4)], [torch.zeros(8, 4, dtype=torch.float16)]]
    report = audit(step, torch.zeros(2, 4), batches=others, batch_sizes=[2, 4, 8])
    (message,) = (each.message for each in report.findings if each.rule == "recompile")
    first, second = message.split("; ")
    assert "between batch sizes 2 and 4: tensor 'x' size mismatch" in first
    assert "between batch sizes 4 and 8: tensor 'x' dtype mismatch" in second


def test_a_value_that_torch_asks_for_while_compiling_is_told_at_no_line_of_who_traces() -> None:
    step = hazards.HAZARDS["behind_pad"]
    report = audit(step, *arguments(step))
    assert {each.file for each in report.findings} == {hazards.__file__}
