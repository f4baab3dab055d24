"""`python -m compiled_kv.bench`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import click
    import torch
except ModuleNotFoundError as error:
    print(f"the benchmark needs {error.name}: pip install 'compiled_kv[bench]'", file=sys.stderr)
    sys.exit(2)

from compiled_kv.bench import extras
from compiled_kv.bench.cells import QUICK, Cell, default_cells, full_cells
from compiled_kv.bench.claims import claims
from compiled_kv.bench.report import VERDICT, write
from compiled_kv.bench.results import machine, noted, opened, reported
from compiled_kv.bench.run import run_cell
from compiled_kv.bench.warm import warm_caches

# What takes a known time comes first, so that a run cut short by --seconds lacks nothing but cells.
SECTIONS = ("schedule", "agreement", "host", "cpu", "starts", "cells")


@click.command()
@click.option("--quick", is_flag=True, help="Two small cells, on any machine.")
@click.option("--full", is_flag=True, help="Every cell.")
@click.option("--out", type=click.Path(path_type=Path), help="Where results go: build/bench, or build/quick.")
@click.option("--seconds", type=float, help="Start nothing further after this long; run again for the rest.")
@click.option("--cells", type=int, default=150, show_default=True, help="Cells of a default run.")
@click.option("--only", "only", multiple=True, type=click.Choice(SECTIONS), help="These sections alone, anew.")
@click.option("--match", default="", help="Only cells whose name contains this.")
@click.option("--rounds", type=int, default=25, show_default=True, help="Samples of each contender.")
@click.option("--trace", type=click.Path(path_type=Path, exists=True), help="CSV of requests for the trace cells.")
@click.option("--plots", type=click.Path(path_type=Path), help="Draw figures into this folder.")
@click.option("--report", is_flag=True, help="Run nothing: write tables and figures from what --out holds.")
@click.option("--anew", is_flag=True, help="Drop what --out holds; without this it is not run again.")
def main(
    quick: bool, full: bool, out: Path | None, seconds: float | None, cells: int, only: tuple[str, ...], match: str,
    rounds: int, trace: Path | None, plots: Path | None, report: bool, anew: bool,
) -> None:  # fmt: skip
    """Time the operators beside the published designs; what --out holds is not run again."""
    out = out or Path("build/quick" if quick else "build/bench")
    if report:
        show(reported(out), out, plots)
    device = torch.device("cuda" if torch.cuda.is_available() and not quick else "cpu")
    if device.type == "cpu" and not quick:
        raise click.UsageError("timings need a CUDA device; --quick runs a corner on any machine")
    if quick:
        chosen, rounds = QUICK, 3
    else:
        chosen = full_cells() if full else default_cells(cells)
    clock, results = extras.stopwatch(), opened(out, machine(device), anew or quick)
    names = {cell["name"] for cell in results.get("cells", [])}
    left = [cell for cell in chosen if match in cell.name and cell.name not in names]
    wanted = only or (("cells",) if full else ("cells", "cpu") if quick else SECTIONS)
    missing = [each for each in SECTIONS if each in only or each == "cells" or each not in results]
    sections = [each for each in missing if each in wanted]
    if device.type == "cuda":
        torch._inductor.config.compile_threads = 1  # no pool of processes beside what is timed
        failed = warm_caches(left if "cells" in sections else [], sections)
        click.echo(f"{clock()} s: compiled" + (f"; failed: {', '.join(failed)}" if failed else ""))
    for section in sections:
        if seconds is not None and clock() > seconds:
            click.echo(f"{clock()} s: {section} is left for another run")
            continue
        with noted(results, section):
            if section == "cells":
                run_cells(results, left, device, rounds, trace, seconds, clock, out)
            else:
                results[section] = run_section(section, device, rounds)
        click.echo(f"{clock()} s: {section} done")
        write(results, out)
    show(results, out, plots)


def show(results: dict[str, Any], folder: Path, plots: Path | None) -> None:
    """Tables, figures, and the claims on the terminal; ends the process, with status 1 where something failed."""
    write(results, folder)
    for each in claims(results) if results["machine"]["device"] != "CPU" else ():
        bound = f" (bound {each.bound}: {VERDICT[each.is_met]})" if each.bound else ""
        click.echo(f"{each.what}: {each.measured}{bound}{f', {each.where}' if each.where else ''}")
    if plots:
        from compiled_kv.bench.plots import plots as draw

        for path in draw(results, plots):
            click.echo(path)
    sys.exit(1 if results.get("failed") else 0)


def run_cells(
    results: dict[str, Any], left: list[Cell], device: torch.device, rounds: int, trace: Path | None,
    seconds: float | None, clock: Callable[[], float], out: Path,
) -> None:  # fmt: skip
    done = results.setdefault("cells", [])
    for number, cell in enumerate(left):
        if seconds is not None and clock() > seconds:
            click.echo(f"{clock()} s: {len(left) - number} cells left for another run")
            break
        with noted(results, cell.name):
            done.append(run_cell(cell, device, rounds, trace))
            ratio = done[-1]["ratios"]["rebuild"]
            click.echo(f"{clock()} s: {cell.name}: {ratio['median']:.3f} of {done[-1]['best']}")
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if number % 10 == 9:
            write(results, out)


def run_section(section: str, device: torch.device, rounds: int) -> Any:
    match section:
        case "schedule":
            return extras.schedule(device, rounds)
        case "agreement":
            return extras.agreement(device)
        case "host":
            return extras.host(device, rounds)
        case "cpu":
            return extras.cpu(rounds)
        case "starts":
            return extras.starts()
    raise AssertionError(section)


if __name__ == "__main__":
    main()
