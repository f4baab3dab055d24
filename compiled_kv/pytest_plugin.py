"""Fixtures for the tests of your own decode step; pytest finds them where compiled_kv is installed.

def test_step_compiles_whole(audit):
    report = audit(decode_step, ids, cache, target="cuda:sm_90")
    assert report.ok, report

def test_graph_is_as_accepted(assert_graph):
    assert_graph(decode_step, ids, cache, golden="step.txt")     beside the test; EXPECTTEST_ACCEPT=1 writes it
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def audit() -> Callable[..., Any]:
    """`compiled_kv.auditor.audit`."""
    from compiled_kv.auditor import audit

    return audit


@pytest.fixture
def assert_graph(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Capture a step and compare its graph with a golden file beside the test."""
    from compiled_kv.goldens import assert_graph
    from compiled_kv.tracing.graphs import capture

    def check(
        step: Callable[..., Any], *args: Any, golden: str, target: str | None = "cuda:sm_90",
        dynamic: bool | None = False, detail: str = "own", **kwargs: Any,
    ) -> None:  # fmt: skip
        graphs = capture(step, *args, target=target, dynamic=dynamic, **kwargs)
        assert_graph(graphs, Path(request.path).parent / golden, detail=detail)

    return check
