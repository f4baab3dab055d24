"""Audits of transformers' decode steps and of ours for a GPU that is not there, by hand: docs/audit_corpus.md."""

from __future__ import annotations

import os
import resource

import pytest

pytest.importorskip("transformers")

from compiled_kv.auditor import audit
from compiled_kv.models import NAMES
from tests import paged_steps
from tests.transformers_steps import example, step

# The cache that grows: its tensors are results of the call before, and their new size compiles again.
GROWING = {
    ("output-fed-back", "key"),
    ("output-fed-back", "value"),
    ("recompile", "def step"),
}
WANTED: dict[tuple[str, str], set[tuple[str, str]]] = {
    ("llama", "static"): set(),
    ("qwen3", "static"): set(),
    ("deepseek_v3", "static"): set(),
    # The sliding-window layers count their tokens in a Python int, a new one every step.
    ("gemma3", "static"): {("recompile", "q_offset")},
    ("llama", "dynamic"): GROWING,
    ("gemma3", "dynamic"): GROWING,
    ("qwen3", "dynamic"): GROWING,
    ("deepseek_v3", "dynamic"): GROWING,
}
EVERYTHING = "COMPILED_KV_EXAMPLES" in os.environ


@pytest.mark.parametrize(("name", "cache"), WANTED, ids=["-".join(each) for each in WANTED])
def test_findings_are_those_seen_by_hand(name: str, cache: str) -> None:
    if cache == "dynamic" and name != "llama" and not EVERYTHING:
        pytest.skip("make test-all runs it")
    report = audit(step, *example(name, cache))
    wanted = WANTED[name, cache]
    found = {
        (each.rule, text)
        for each in report.findings
        for text in ("key", "value", "def step", "q_offset")
        if text in each.source
    }
    assert len(report.findings) == len(wanted) and wanted <= found, report
    assert report.is_whole and report.ok == (not wanted)


@pytest.mark.skipif(not EVERYTHING, reason="make test-all runs it")
def test_llama_70b_fits_a_small_machine() -> None:
    report = audit(step, *example("llama_70b", "static"))
    assert report.ok, str(report)
    assert report.nodes > 5000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20  # KiB


OURS = [(name, mode) for name in NAMES for mode in paged_steps.STEPS]
ALWAYS = [("llama", "decode"), ("gemma3", "verify"), ("deepseek_v3", "extend")]


@pytest.mark.parametrize(("name", "mode"), OURS, ids=["-".join(each) for each in OURS])
def test_our_own_steps_have_no_finding_and_one_launch(name: str, mode: str) -> None:
    if (name, mode) not in ALWAYS and not EVERYTHING:
        pytest.skip("make test-all runs it")
    report = audit(paged_steps.STEPS[mode][0], *paged_steps.example(name, mode))
    assert report.findings == () and report.ok, str(report)
    assert report.launches == {"decode_metadata_kernel": 1}
    assert set(report.cloned) == {"the step's own tensors"}  # no argument, buffer or pool is cloned
