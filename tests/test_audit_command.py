"""`compiled-kv audit`, the page it writes, and the pytest plugin in a project of a user's own."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

click_testing = pytest.importorskip("click.testing")

from compiled_kv.auditor import audit  # noqa: E402
from compiled_kv.auditor.command import command  # noqa: E402
from tests import audit_entry  # noqa: E402

pytest_plugins = ["pytester"]


def run(*arguments: str) -> tuple[int, str]:
    result = click_testing.CliRunner().invoke(command, list(arguments))
    return result.exit_code, result.output


def test_clean_step_exits_0() -> None:
    status, text = run("tests.audit_entry:whole")
    assert status == 0 and "ok: one graph holds the step" in text


def test_findings_exit_1_and_name_the_line() -> None:
    status, text = run("tests.audit_entry:reading")
    assert status == 1
    assert "host-read" in text and "int(lens.max())" in text and "audit_entry.py:14" in text


def test_fail_on_decides_what_counts() -> None:
    assert run("tests.audit_entry:whole", "--batch-sizes", "4,5", "--fail-on", "warning")[0] == 1  # it compiles again
    assert run("tests.audit_entry:whole", "--batch-sizes", "4,5", "--fail-on", "error")[0] == 0
    assert run("tests.audit_entry:whole", "--batch-sizes", "4,5,16,33", "--dynamic")[0] == 0


def test_python_and_the_command_line_find_the_same_of_many_sizes() -> None:
    """Nine sizes would hit dynamo's limit, were each compiled for itself."""
    sizes = range(4, 13)
    told = json.loads(run("tests.audit_entry:whole", "--batch-sizes", ",".join(map(str, sizes)), "--json")[1])
    step, arguments = audit_entry.whole(4)
    batches = [audit_entry.whole(size)[1] for size in sizes[1:]]
    report = audit(step, *arguments, batches=batches, batch_sizes=sizes)
    assert [(each["rule"], each["severity"]) for each in told["findings"]] == [("recompile", "warning")]
    assert told["findings"] == json.loads(report.to_json())["findings"]


def test_batch_sizes_are_named_in_every_form_of_the_report(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    text = run("tests.audit_entry:whole", "--batch-sizes", "4,5,6", "--html", str(page))[1]
    assert re.search(r"^batch sizes +4, 5, 6 *$", text, re.MULTILINE)
    assert "<tr><td><b>batch sizes</b><td>4, 5, 6<td>" in page.read_text()
    told = json.loads(run("tests.audit_entry:whole", "--batch-sizes", "4,5,6", "--json")[1])
    assert told["batch_sizes"] == [4, 5, 6]
    assert {"what": "batch sizes", "static": "4, 5, 6", "measured": ""} in told["beside"]
    assert "batch sizes" not in run("tests.audit_entry:whole")[1]


@pytest.mark.parametrize(
    ("entry", "arguments", "severity", "said"),
    [
        ("whole", ["4,5,6"], "warning", "compiles again, between batch sizes 4 and 5: tensor"),
        ("whole", ["4,5,6", "--static"], "warning", "compiles again, between batch sizes 4 and 5, 5 and 6: tensor"),
        # The eighth graph is that of 12.
        (
            "whole",
            ["5,6,7,8,9,10,11,12,13", "--static"],
            "error",
            "now eager, between batch sizes 12 and 13: torch._dynamo hit config.recompile_limit (8)",
        ),
        ("toggled", ["4"], "warning", "compiles again, at batch size 4: "),
    ],
    ids=["sizes-free-from-the-second-on", "static", "limit", "one-size"],
)
def test_what_compiles_again_is_told_with_the_sizes_between_which_it_does(
    entry: str, arguments: list[str], severity: str, said: str
) -> None:
    told = json.loads(run(f"tests.audit_entry:{entry}", "--json", "--batch-sizes", *arguments)[1])
    (found,) = (each for each in told["findings"] if each["rule"] == "recompile")
    assert found["severity"] == severity and said in found["message"]


def test_sizes_that_do_not_fit_the_batches_are_refused() -> None:
    step, arguments = audit_entry.whole(4)
    with pytest.raises(ValueError, match="batch_sizes must name the sizes of 2 batches, got 3"):
        audit(step, *arguments, batches=[audit_entry.whole(5)[1]], batch_sizes=[4, 5, 6])


def test_a_read_that_scalar_capture_hides_is_found_without_it() -> None:
    with_capture = run("tests.audit_entry:scaled")
    assert with_capture[0] == 0 and "ok with scalars captured" in " ".join(with_capture[1].split())
    status, text = run("tests.audit_entry:scaled", "--no-capture-scalars")
    assert status == 1 and "host-read" in text and "not ok: 1 error" in text


def test_json_holds_the_report() -> None:
    report = json.loads(run("tests.audit_entry:reading", "--json")[1])
    assert report["ok"] is False and report["graphs"] == 1
    assert [each["rule"] for each in report["findings"]] == ["host-read"]


def test_page_is_self_contained_and_shows_the_line(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    run("tests.audit_entry:reading", "--html", str(page))
    text = page.read_text()
    assert "<mark>   14  " in text and "host-read" in text and "_local_scalar_dense" in text
    assert "http" not in text and "<script" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tests.audit_entry"], "the step must be given as MODULE:FUNCTION, got 'tests.audit_entry'"),
        (["tests.absent:step"], "cannot import tests.absent: ModuleNotFoundError"),
        (["tests/absent.py:step"], "cannot import tests/absent.py: there is no such file"),
        (["tests.audit_entry:absent"], "tests.audit_entry has no function absent"),
        (["tests.audit_entry:no_pair"], "the function must return (step, arguments)"),
        (["tests.audit_entry:no_callable"], "got (int, tuple)"),
        (["tests.audit_entry:unmade"], "unmade raised KeyError: 'no weights'"),
        (["tests.audit_entry:instance"], "Linear raised TypeError: Linear.forward() missing 1 required positional"),
        (["tests.audit_entry:leaving"], "leaving raised SystemExit: 3"),
        (["tests.audit_entry:raising"], "the step raised OverflowError: the step's own error"),
        (["tests.audit_entry:exiting"], "the step raised SystemExit: 3"),
        (
            ["tests.audit_entry:short"],
            "the step raised TypeError: _product() missing 1 required positional argument: 'y'\n",
        ),
        (["tests.audit_entry:mismatched"], "the step raised RuntimeError('a and b must have same reduction dim"),
        (
            ["tests.audit_entry:whole", "--target", "tpu"],
            "target must be cpu, cuda, cuda:sm_NN or hip:gfxNNN, got 'tpu'",
        ),
        (["tests.audit_entry:whole", "--target", "cuda:sm_999"], "got 'cuda:sm_999'; NN and NNN are of sm_70, sm_75"),
        (["tests.audit_entry:fixed_size", "--batch-sizes", "1,2"], "--batch-sizes needs a fixed_size(batch_size)"),
        (
            ["tests.audit_entry:whole", "--batch-sizes", "1,x"],
            "must be numbers from 1 on with commas between, got '1,x'",
        ),
    ],
    ids=lambda value: value[0].rpartition(":")[2] + "".join(value[1:]) if isinstance(value, list) else "",
)
def test_bad_input_is_one_message_and_exits_2(arguments: list[str], message: str) -> None:
    with torchs_log() as spilt:
        status, text = run(*arguments)
    assert status == 2
    assert message in text and "Traceback" not in text
    assert spilt == []


@pytest.mark.parametrize(
    ("entry", "said", "line"),
    [
        ("raising", "OverflowError: the step's own error", 59),
        ("exiting", "SystemExit: 3", 66),
        ("mismatched", "got [2, 3] X [2, 3].')", 76),
        ("apart", "on the same device, but found at least two devices, cuda:0 and cpu", 87),
    ],
)
def test_a_step_that_raises_is_told_with_its_line(entry: str, said: str, line: int) -> None:
    """What torch's operator says, where dynamo's own error only names its kind."""
    status, text = run(f"tests.audit_entry:{entry}")
    advice = (
        ": a plain tensor that a step closes over or names as a global stays on the CPU" if entry == "apart" else "\n"
    )
    assert status == 2 and f"{said}, at {audit_entry.__file__}:{line}{advice}" in text


@pytest.mark.parametrize("function", ["other_for_eight", "closed_for", "bound_for_eight", "bound_by_turns"])
def test_another_step_for_another_size_is_refused(function: str) -> None:
    """Of several steps the first alone would be looked at."""
    status, text = run(f"tests.audit_entry:{function}", "--batch-sizes", "4,8")
    assert status == 2
    assert f"--batch-sizes needs one step for all sizes, and {function}(8) returned another than {function}(4)" in text
    assert run(f"tests.audit_entry:{function}", "--batch-sizes", "4")[0] == 0


@pytest.mark.parametrize("function", ["made_anew", "unbound"])
def test_a_step_made_anew_for_each_size_is_one_step(function: str) -> None:
    """Also where it closes over a name that nothing is bound to yet."""
    assert run(f"tests.audit_entry:{function}", "--batch-sizes", "4,8", "--dynamic")[0] == 0


def test_a_batch_size_among_the_arguments_is_found_at_the_step_s_line_and_none_where_it_is_closed_over() -> None:
    status, text = run("tests.audit_entry:sized", "--json")
    (finding,) = json.loads(text)["findings"]
    assert (status, finding["rule"], finding["line"]) == (1, "frozen-argument", 95)
    assert finding["file"] == audit_entry.__file__ and "lambda buffers: step(buffers, 8)" in finding["remedy"]
    status, text = run("tests.audit_entry:closed", "--json")
    assert status == 0 and json.loads(text)["findings"] == []


def test_a_file_with_the_name_of_another_module_is_not_mistaken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "json.py").write_text("def loads(): ...\n")
    status, text = run(f"{tmp_path}/json.py:loads")
    assert status == 2 and f"cannot import {tmp_path}/json.py: json is another module's name, of " in text


@contextmanager
def torchs_log() -> Iterator[list[str]]:
    """What torch's loggers that print would have printed."""
    spilt: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: spilt.append(record.getMessage())  # type: ignore[method-assign]
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch"]
    loggers = [logger for logger in map(logging.getLogger, names) if logger.handlers]
    assert loggers
    for logger in loggers:
        logger.addHandler(handler)
    yield spilt
    for logger in loggers:
        logger.removeHandler(handler)


MODEL = """
import torch
from torch import nn

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids, lens):
        hidden = self.embed(ids)
        {line}
        return self.head(hidden * keep[:, None])
"""
TEST = """
import torch
from model import Decoder

def test_step_compiles_whole(audit):
    report = audit(Decoder(), torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.int64))
    assert report.ok, str(report)
"""


@pytest.mark.parametrize(
    ("line", "passes"),
    [("keep = lens < int(lens.max())", False), ("keep = lens < lens.max()", True)],
    ids=["planted", "mended"],
)
def test_plugin_in_a_project_of_its_own(pytester: pytest.Pytester, line: str, passes: bool) -> None:
    pytester.makepyfile(model=MODEL.format(line=line), test_model=TEST)
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=int(passes), failed=int(not passes))
    if not passes:
        result.stdout.fnmatch_lines(["*model.py:11: error: host-read*", f"*{line}*"])


def test_plugin_compares_a_golden(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    test = TEST.replace("(audit)", "(assert_graph)").replace("report = audit(", "assert_graph(")
    test = test.replace(", torch.ones(4, dtype=torch.int64))", ", torch.ones(4, dtype=torch.int64), golden='step.txt')")
    test = test.replace("    assert report.ok, str(report)\n", "")
    pytester.makepyfile(model=MODEL.format(line="keep = lens < lens.max()"), test_model=test)
    monkeypatch.delenv("EXPECTTEST_ACCEPT", raising=False)
    pytester.runpytest_inprocess().assert_outcomes(failed=1)
    monkeypatch.setenv("EXPECTTEST_ACCEPT", "1")
    pytester.runpytest_inprocess().assert_outcomes(passed=1)
    monkeypatch.delenv("EXPECTTEST_ACCEPT")
    pytester.runpytest_inprocess().assert_outcomes(passed=1)
