"""`compiled-kv audit MODULE:FUNCTION`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from compiled_kv.auditor.apart import measure_apart, obstacle
from compiled_kv.auditor.audit import StepError, audit
from compiled_kv.auditor.comparison import with_measured
from compiled_kv.auditor.entry import EntryError, examples, load
from compiled_kv.auditor.findings import SEVERITIES, Report
from compiled_kv.misused import Misused


def sizes(_: click.Context, __: click.Parameter, text: str | None) -> list[int]:
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"must be numbers from 1 on with commas between, got {text!r}")
    return [int(part) for part in parts]


def writable(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise click.BadParameter(f"must be a file in a directory that exists, got {str(path)!r}")
    return path


@click.command("audit")
@click.argument("entry", metavar="MODULE:FUNCTION")
@click.option("--target", default="cuda:sm_90", show_default=True, help="cpu, cuda, cuda:sm_NN or hip:gfxNNN")
@click.option("--dynamic/--static", default=None, help="torch.compile's dynamic; neither: what a first call does")
@click.option("--batch-sizes", callback=sizes, help="call FUNCTION(size) and the step for each, e.g. 2,4,8")
@click.option("--fullgraph", is_flag=True, help="compile the step with fullgraph=True too")
@click.option(
    "--capture-scalars/--no-capture-scalars", default=True, show_default=True,
    help="torch's capture_scalar_outputs; without: what plain torch.compile makes of the step is judged too",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="print the report as JSON")
@click.option("--html", type=click.Path(path_type=Path), callback=writable, help="write the report as one page")
@click.option("--no-measure", is_flag=True, help="leave the step unrun where the target's device is here")
@click.option("--fail-on", type=click.Choice(SEVERITIES), default="warning", show_default=True)
def command(
    entry: str, target: str, dynamic: bool | None, batch_sizes: list[int], fullgraph: bool,
    capture_scalars: bool, as_json: bool, html: Path | None, no_measure: bool, fail_on: str,
) -> None:  # fmt: skip
    """Audit the step that FUNCTION returns, as (step, arguments): does it compile whole, and what keeps it from that?

    Exit status: 0 clean, 1 findings, 2 bad input.
    """
    try:
        first, *others = examples(load(entry), batch_sizes)
        report = audit(
            first.step, *first.args, target=target, dynamic=dynamic, fullgraph=fullgraph,
            capture_scalars=capture_scalars, batches=[each.args for each in others], batch_sizes=batch_sizes,
            **first.kwargs,
        )  # fmt: skip
        if not no_measure:
            report = _beside_the_device(report, entry, batch_sizes, dynamic, capture_scalars)
    except (EntryError, StepError, TypeError, ValueError) as error:
        raise Misused(str(error)) from None
    if html:
        from compiled_kv.auditor.page import page

        try:
            html.write_text(page(report), encoding="utf-8")
        except OSError as error:
            raise Misused(f"{html}: {error.strerror}") from None
    _print(report, as_json)
    raise SystemExit(1 if report.at_least(fail_on) or not report.is_whole else 0)


def _beside_the_device(
    report: Report, entry: str, batch_sizes: list[int], dynamic: bool | None, capture_scalars: bool
) -> Report:
    """The report with what the step did on the device, or why it was not run there."""
    why = obstacle(report.target)
    measured = measure_apart(entry, batch_sizes, dynamic, capture_scalars) if why is None else why
    if isinstance(measured, str):
        return replace(report, not_measured=measured)
    return with_measured(report, measured)


def _print(report: Report, as_json: bool) -> None:
    if as_json:
        click.echo(report.to_json())
        return
    try:
        from compiled_kv.auditor.terminal import show
    except ImportError:
        click.echo(str(report))
    else:
        show(report)
