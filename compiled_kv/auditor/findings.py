"""What an audit says: findings, the evidence they rest on, and what could not be decided."""

from __future__ import annotations

import json
import linecache
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from compiled_kv.auditor.measured import Measured

WAITING = ("host-read", "data-dependent-shape", "host-to-device-copy")
SEVERITIES = ("note", "warning", "error")


@dataclass(frozen=True)
class Finding:
    """One hazard at one line of the step's code.

    `severity` is "error" (the step is not whole, or waits for the host), "warning" (it costs time or breaks under
    CUDA graphs) or "note" (nothing to mend today). `measured` is what a device showed of it, "" where none was asked.
    """

    rule: str
    severity: str
    file: str
    line: int
    message: str
    remedy: str
    measured: str = ""

    @property
    def place(self) -> str:
        """`FILE:LINE`, or the step as a whole where no line can be named."""
        return f"{self.file}:{self.line}" if self.file else "the step"

    @property
    def source(self) -> str:
        """The line of code, without its indent."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        seen = [f"measured: {self.measured}"] if self.measured else []
        lines = [self.source, self.message, *seen, self.remedy]
        return "\n    ".join([f"{self.place}: {self.severity}: {self.rule}", *filter(None, lines)])


@dataclass(frozen=True, repr=False)
class Report:
    """The verdict on one step. `ok` is true on evidence alone: whole graphs, and no finding above a note.

    `cloned` has the bytes that are cloned by argument; what belongs to none is under "the step's own tensors".
    `measured` is what a device showed, None where the step was not run; `not_measured` says why.
    `batch_sizes` are those that it was called with, where they were given.
    """

    target: str
    findings: tuple[Finding, ...]
    graphs: int
    nodes: int
    launches: dict[str, int] | None
    cloned_bytes: int | None
    is_whole: bool
    undecided: tuple[str, ...]
    graph_texts: tuple[tuple[str, str], ...] = ()
    cloned: dict[str, int] = field(default_factory=dict)
    measured: Measured | None = None
    not_measured: str = "not asked for"
    batch_sizes: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        return self.is_whole and not self.at_least("warning")

    def at_least(self, severity: str) -> list[Finding]:
        """The findings of that severity and above."""
        return [each for each in self.findings if SEVERITIES.index(each.severity) >= SEVERITIES.index(severity)]

    def evidence(self) -> dict[str, str]:
        """What was captured, in words."""
        launches = "unknown" if self.launches is None else ", ".join(_times(*pair) for pair in self.launches.items())
        cloned = ", ".join(f"{name} {size:,}" for name, size in self.cloned.items())
        total = "unknown" if self.cloned_bytes is None else f"{self.cloned_bytes:,}"
        return {
            "target": self.target,
            **({"batch sizes": ", ".join(map(str, self.batch_sizes))} if self.batch_sizes else {}),
            "graphs": f"{self.graphs}, {self.nodes} nodes" + ("" if self.is_whole else ", not whole"),
            "kernel launches": launches or "none",
            "bytes cloned": f"{total}: {cloned}" if cloned else total,
        }

    def beside(self) -> list[tuple[str, str, str]]:
        """(what, static, measured) in words; the last is "" throughout where the step was not run."""
        static = self.evidence()
        if self.measured is None:
            return [*((name, text, "") for name, text in static.items()), ("measured", f"not: {self.not_measured}", "")]
        seen = self.measured.rows()
        counted = Counter(each.rule for each in self.findings)
        lines = sum(counted[rule] for rule in WAITING)
        static |= {"host waits": f"{_plural(lines, 'line')}", "recompiles": str(counted["recompile"])}
        order = dict.fromkeys([*static, *seen])
        return [(name, static.get(name, ""), seen.get(name, "")) for name in order]

    def to_json(self) -> str:
        """The whole report; `ok` included."""
        findings = [{**asdict(each), "source": each.source} for each in self.findings]
        rows = [dict(zip(("what", "static", "measured"), row)) for row in self.beside()]
        return json.dumps({"ok": self.ok, **asdict(self), "findings": findings, "beside": rows}, indent=2)

    def __repr__(self) -> str:
        return f"Report({self.verdict()})"

    def __str__(self) -> str:
        lines = [_row(*row) for row in self.beside()]
        lines += [f"{'undecided':16} {each}" for each in self.undecided]
        lines += [f"\n{each}" for each in self.findings]
        return "\n".join([*lines, "", self.verdict()])

    def _reads_scalars(self) -> bool:
        return any(each.rule == "host-read" for each in self.findings)

    def verdict(self) -> str:
        """One line: ok, or how many findings of which severity."""
        if self.ok:
            where = " with scalars captured, as under fullgraph=True" if self._reads_scalars() else ""
            return f"ok{where}: one graph holds the step, and nothing in it waits for the host"
        counted = Counter(each.severity for each in self.findings)
        found = ", ".join(
            _plural(counted[severity], severity) for severity in reversed(SEVERITIES) if counted[severity]
        )
        return f"not ok: {found or 'the evidence is incomplete'}"


def merge(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Each rule once a line, the gravest; in the order of the code, gravest first within a line."""
    kept: dict[Any, Finding] = {}
    for each in findings:
        key = each.rule, each.file, each.line
        if key not in kept or SEVERITIES.index(kept[key].severity) < SEVERITIES.index(each.severity):
            kept[key] = each
    return tuple(sorted(kept.values(), key=lambda each: (-SEVERITIES.index(each.severity), each.file, each.line)))


def _row(name: str, static: str, measured: str) -> str:
    return f"{name:16} {static}" + (f"  |  measured: {measured}" if measured else "")


def _times(name: str, count: int) -> str:
    return name if count == 1 else f"{name} x{count}"


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
