"""What dynamo itself says of the steps of the corpus, for docs/audit_corpus.md: `python -m tests.audit_others`.

Default settings, fake `cuda` tensors: whether `explain()` counts a graph break (graphs beyond the first), and whether
`fullgraph=True` raises.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from compiled_kv.auditor import audit
from compiled_kv.tracing.graphs import trace
from tests.audit_corpus.arguments import arguments
from tests.audit_corpus.clean import CLEAN
from tests.audit_corpus.hazards import HAZARDS
from tests.test_audit_corpus import planted

TARGET = "cuda:sm_90"


def row_of(step: Any) -> str:
    """The rule of the first mark; host reads with other rules behind them stand apart."""
    marks = sorted(planted(step), key=lambda mark: (mark[2], mark[0]))
    rule = marks[0][0]
    return f"{rule} and other rules" if rule == "host-read" and len({each for each, _, _ in marks}) > 1 else rule


def said(step: Any) -> tuple[bool, bool, bool]:
    """Whether the auditor, `explain()` and `fullgraph=True` say anything of a step."""
    given = arguments(step)
    plain = trace(step, given, {}, target=TARGET, dynamic=False)
    whole = trace(step, given, {}, target=TARGET, dynamic=False, fullgraph=True)
    found = planted(step) <= {(each.rule, each.file, each.line) for each in audit(step, *given).findings}
    return found, len(plain.dynamo) > 1, whole.stopped is not None


def main() -> None:
    counted: dict[str, Counter[str]] = {}
    for step in HAZARDS.values():
        row = counted.setdefault(row_of(step), Counter())
        row.update(["steps", *(name for name, says in zip("afw", said(step), strict=True) if says)])
    for name, row in counted.items():
        print(f"| {name} | {row['steps']} | {row['a']} | {row['f']} | {row['w']} |")
    print(f"{len(HAZARDS)} hazards, {len(CLEAN)} clean")


if __name__ == "__main__":
    main()
