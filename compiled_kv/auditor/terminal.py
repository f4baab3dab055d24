"""A report as a picture on a terminal."""

from __future__ import annotations

import linecache

from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from compiled_kv.auditor.findings import Finding, Report

COLOURS = {"error": "red", "warning": "yellow", "note": "blue"}
CONTEXT = 1


def show(report: Report, console: Console | None = None) -> None:
    """Print the evidence, each finding with its lines of code, and the verdict."""
    console = console or Console()
    console.print(_evidence(report))
    for finding in report.findings:
        console.print(_finding(finding))
    style = "bold green" if report.ok else "bold red"
    console.print(Text(report.verdict(), style=style))


def _evidence(report: Report) -> Table:
    table = Table.grid(padding=(0, 2)) if report.measured is None else Table(box=SIMPLE, pad_edge=False)
    table.add_column(style="bold")
    table.add_column("static", overflow="fold")
    if report.measured is not None:
        table.add_column("measured", overflow="fold")
    for row in report.beside():
        table.add_row(*map(Text, row[: len(table.columns)]))
    for text in report.undecided:
        table.add_row("undecided", Text(text, style="dim"))
    return table


def _finding(finding: Finding) -> Panel:
    colour = COLOURS[finding.severity]
    lines: list[RenderableType] = [Text(finding.message)]
    if finding.source:
        lines.append(_code(finding))
    if finding.measured:
        lines.append(Text(f"measured: {finding.measured}", style="cyan"))
    lines.append(Text(finding.remedy, style="green"))
    title = f"[bold {colour}]{finding.severity}[/]  {finding.rule}"
    return Panel(
        Group(*lines),
        title=title,
        title_align="left",
        subtitle=finding.place,
        subtitle_align="left",
        border_style=colour,
    )


def _code(finding: Finding) -> Syntax:
    first = max(finding.line - CONTEXT, 1)
    shown = [line.rstrip() for line in linecache.getlines(finding.file)[first - 1 : finding.line + CONTEXT]]
    return Syntax(
        "\n".join(shown),
        "python",
        line_numbers=True,
        start_line=first,
        highlight_lines={finding.line},
        theme="ansi_dark",
    )
