"""The auditor finds nothing in the steps that the pages on integrations show."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
from torch import nn

import compiled_kv as ckv
from tests.test_docs import PROGRAM, ROOT

# Each page's own audit lines are recorded, so that its steps are those that the page runs.
AUDITED = {"index": 1, "sglang": 2, "vllm": 1, "flashinfer_flashmla": 1, "tensorrt_llm": 1}


@pytest.mark.parametrize("page", AUDITED)
def test_audit_finds_nothing_in_the_steps_of(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    audit, reports = ckv.audit, []

    def recorded(step: Any, *args: Any, **options: Any) -> Any:
        report = audit(step, *args, **options)
        if isinstance(step, nn.Module) or step.__name__ != "before":
            reports.append(report)
        return report

    monkeypatch.setattr(ckv, "audit", recorded)
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for program, _ in PROGRAM.findall((ROOT / "docs" / "integrations" / f"{page}.md").read_text()):
            exec(compile(program, page, "exec"), names)
    assert len(reports) == AUDITED[page]
    for report in reports:
        assert report.ok and report.findings == (), str(report)
        assert "cuda:sm_90" in str(report)
