"""The planted corpus: every hazard found with its rule and line, however compiled; clean steps without a finding."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the corpus launches kernels")

from compiled_kv.auditor import Report, audit
from tests.audit_corpus import clean, hazards, library, serving
from tests.audit_corpus.arguments import arguments

MARK = re.compile(r"# HAZARD (.+)$")
WAYS = {  # fullgraph, capture_scalars
    "default": (False, True),
    "scalars-off": (False, False),
    "fullgraph": (True, True),
    "fullgraph-scalars-off": (True, False),
}
OTHERS = [way for way in WAYS if way != "default"]
EVERYTHING = "COMPILED_KV_EXAMPLES" in os.environ


def in_turn(names: Iterable[str], ways: list[list[str]]) -> list[Any]:
    """Each step in the ways of its turn; `make test-all` takes it in all of them."""
    everyone = sorted({way for turn in ways for way in turn}, key=list(WAYS).index)
    turns = [(name, everyone if EVERYTHING else ways[i % len(ways)]) for i, name in enumerate(names)]
    return [pytest.param(name, WAYS[way], id=f"{name}-{way}") for name, turn in turns for way in turn]


def planted(step: Any) -> set[tuple[str, str, int]]:
    """(rule, file, line) of every mark in a step, and in the code of the library and modules that it calls."""
    lines, first = inspect.getsourcelines(step)
    marks = {(rule, step.__code__.co_filename, first + i) for i, line in enumerate(lines) for rule in rules(line)}
    return marks or {
        mark for name in step.__code__.co_names + tuple(inspect.signature(step).parameters) for mark in behind(name)
    }


def behind(name: str) -> set[tuple[str, str, int]]:
    code = {
        "longest": library.longest,
        "drop_padding": library.drop_padding,
        "compiled_alone": library.compiled_alone,
        "router": library.Router,
        "scaled": hazards.Scaled,
        "rows_of": serving.rows_of,
        "Scored": serving.Scored.forward,
    }
    if name not in code:
        return set()
    lines, first = inspect.getsourcelines(inspect.unwrap(code[name]))
    file = inspect.getsourcefile(inspect.unwrap(code[name])) or ""
    return {(rule, file, first + i) for i, line in enumerate(lines) for rule in rules(line)}


def rules(line: str) -> list[str]:
    match = MARK.search(line)
    return match[1].split() if match else []


def found(report: Report) -> set[tuple[str, str, int]]:
    return {(each.rule, each.file, each.line) for each in report.findings}


@pytest.mark.parametrize("name, way", in_turn(hazards.HAZARDS, [["default", other] for other in OTHERS]))
def test_hazard_is_found_with_its_rule_and_line(name: str, way: tuple[bool, bool]) -> None:
    step = hazards.HAZARDS[name]
    marks = planted(step)
    assert marks
    report = audit(step, *arguments(step), fullgraph=way[0], capture_scalars=way[1])
    assert marks <= found(report), f"planted {marks - found(report)}\n{report}"
    if name not in ("item", "float_of", "closure", "bound_method"):  # torch turns these back into tensors
        assert not report.ok


@pytest.mark.parametrize("name, way", in_turn(clean.CLEAN, [["default"], ["fullgraph-scalars-off"]]))
def test_clean_step_has_no_finding(name: str, way: tuple[bool, bool]) -> None:
    step = clean.CLEAN[name]
    report = audit(step, *arguments(step), fullgraph=way[0], capture_scalars=way[1])
    assert report.findings == () and report.ok, str(report)


@pytest.mark.parametrize(
    "name",
    ["frozen_length", "frozen_scale", "frozen_axis", "frozen_loop", "aliased_arguments", "cpu_lengths", "behind_column",
     "range_of_int", "range_behind_read", "while_number", "slices_of_list", "python_table"],
)  # fmt: skip
def test_hazard_is_found_with_sizes_free(name: str) -> None:
    step = hazards.HAZARDS[name]
    report = audit(step, *arguments(step), dynamic=True)
    assert planted(step) <= found(report) and not report.ok, str(report)
    extra = {each.rule for each in report.findings} - {rule for rule, _, _ in planted(step)}
    assert extra <= {"graph-break"}, str(report)


def test_a_branch_on_a_size_is_no_read() -> None:
    def step(x: Any) -> Any:
        return torch.cond(x.shape[0] > 3, lambda t: t + 1, lambda t: t - 1, (x,))

    assert audit(step, torch.zeros(4, 8), target="cuda:sm_90").ok


def test_bytes_cloned_are_given_by_argument() -> None:
    step = hazards.HAZARDS["added_in_place"]
    report = audit(step, *arguments(step))
    # Rows [4, 8] of float32 are added in a copy and written back.
    assert report.cloned == {"pool": 4 * 8 * 4} and report.evidence()["bytes cloned"] == "128: pool 128"
    step = hazards.HAZARDS["carved_workspace"]
    assert set(audit(step, *arguments(step)).cloned) == {"workspace"}
    step = clean.CLEAN["arithmetic"]
    assert audit(step, *arguments(step)).cloned == {}


def test_an_error_behind_a_made_up_value_is_not_the_steps_own() -> None:
    def split(x: Any, lens: Any) -> Any:
        n = lens.max()
        return x.split([n, 8 - n], 1)[0].nonzero()

    report = audit(split, *arguments(hazards.HAZARDS["int_of"]))
    assert "host-read" in {each.rule for each in report.findings} and not report.ok
    assert any(text.startswith("what follows an error of torch's") for text in report.undecided)


def test_a_tensor_with_a_format_of_its_own_is_a_read_and_no_error() -> None:
    """A fake tensor refuses `:.2f`, which a real one of a single number takes."""

    def told(x: Any) -> Any:
        print(f"{x.sum():.2f}")
        return x + 1

    assert "host-read" in {each.rule for each in audit(told, *arguments(hazards.HAZARDS["int_of"])[:1]).findings}


def test_docs_count_the_corpus() -> None:
    text = (Path(__file__).parent.parent / "docs" / "audit_corpus.md").read_text(encoding="utf-8")
    assert f"holds {len(hazards.HAZARDS)} steps with planted hazards and {len(clean.CLEAN)} clean ones" in text
    rows = re.findall(r"^\| [\w, -]+ \| (\d+) \| (\d+) \| \d+ \| \d+ \|$", text, re.MULTILINE)
    assert sum(int(steps) for steps, _ in rows) == len(hazards.HAZARDS) and all(a == b for a, b in rows)


def test_corpus_is_large_enough() -> None:
    marks = {mark for step in hazards.HAZARDS.values() for mark in planted(step)}
    assert len(hazards.HAZARDS) >= 45 and len(clean.CLEAN) >= 25
    assert len({rule for rule, _, _ in marks}) >= 11
    assert Path(hazards.__file__).exists()
