"""A report as one self-contained page: findings beside their lines of code, the evidence, and the graphs."""

from __future__ import annotations

import linecache
from html import escape

from compiled_kv.auditor.findings import Finding, Report

CONTEXT = 3
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c2128 }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse } th { text-align: left } td { padding: .15rem 1.5rem .15rem 0; vertical-align: top }
pre { background: #f6f8fa; padding: .7rem; overflow-x: auto; font: 13px/1.45 ui-monospace, monospace; margin: .5rem 0 }
.ok { color: #1a7f37 } .error { color: #cf222e } .warning { color: #9a6700 } .note { color: #0969da }
section { border-left: 4px solid currentColor; padding-left: 1rem; margin: 1.2rem 0 } section > * { color: #1c2128 }
mark { background: #fff1b8; display: block } .place { color: #656d76; font-size: .85rem } summary { cursor: pointer }
"""


def page(report: Report) -> str:
    """HTML that needs no other file."""
    verdict = "ok" if report.ok else "error"
    rows = [*report.beside(), *(("undecided", text, "") for text in report.undecided)]
    head = "<tr><th><th>static<th>measured" if report.measured else ""
    table = head + "".join(f"<tr><td><b>{escape(what)}</b><td>{escape(a)}<td>{escape(b)}" for what, a, b in rows)
    findings = "".join(map(_section, report.findings))
    graphs = "".join(
        f"<details><summary>{tier}</summary><pre>{escape(text)}</pre></details>" for tier, text in report.graph_texts
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Audit</title><style>{STYLE}</style>'
        f'<h1 class="{verdict}">{escape(report.verdict())}</h1><table>{table}</table>'
        f"<h2>Findings</h2>{findings or 'none'}<h2>Graphs</h2>{graphs or 'none was captured'}</html>\n"
    )


def _section(finding: Finding) -> str:
    return (
        f'<section class="{finding.severity}"><b class="{finding.severity}">{finding.severity}</b> '
        f"<b>{escape(finding.rule)}</b> {escape(finding.message)}"
        f'<div class="place">{escape(finding.place)}</div>{_code(finding)}{_measured(finding)}'
        f"<div>{escape(finding.remedy)}</div></section>"
    )


def _measured(finding: Finding) -> str:
    return f"<div><b>measured</b> {escape(finding.measured)}</div>" if finding.measured else ""


def _code(finding: Finding) -> str:
    if not finding.source:
        return ""  # of code that stands in no file there is none to show
    lines = linecache.getlines(finding.file)
    first = max(finding.line - 1 - CONTEXT, 0)
    shown = enumerate(lines[first : finding.line + CONTEXT], first + 1)
    texts = ((number, escape(f"{number:5}  {line.rstrip()}")) for number, line in shown)
    code = "\n".join(f"<mark>{text}</mark>" if number == finding.line else text for number, text in texts)
    return f"<pre>{code}</pre>"
