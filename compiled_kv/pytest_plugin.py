"""Fixtures for the tests of your own decode step; pytest finds them where compiled_kv is installed.

def test_step_compiles_whole(audit):
    report = audit(decode_step, ids, cache, target="cuda:sm_90")
    assert report.ok, report

def test_graph_is_as_accepted(assert_graph):
    assert_graph(decode_step, ids, cache, golden="step.txt")     beside the test; EXPECTTEST_ACCEPT=1 writes it

def test_step_stays_right_when_captured(check_replay):
    check_replay(decode_step, serving=serving("verify", window=64), steps=500)
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


@pytest.fixture
def check_replay() -> Callable[..., list[Any]]:
    """`compiled_kv.check_replay` over the scenarios given, or over the acceptance story and a seeded random walk."""
    from compiled_kv.replay.check import check_replay
    from compiled_kv.replay.scenarios import serving as defaults
    from compiled_kv.replay.scenarios import story, walk

    def check(
        step: Callable[..., Any], *scenarios: Any, serving: Any = None, steps: int = 100, seed: int = 0, **given: Any
    ) -> list[Any]:
        """A report each; `serving`, `steps` and `seed` are for the built-in ones, `given` is for every check."""
        served = serving or defaults()
        return [check_replay(step, each, **given) for each in scenarios or (story(served), walk(served, steps, seed))]

    return check
