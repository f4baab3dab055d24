"""`python -m compiled_kv.bench`."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import click
    import torch
except ModuleNotFoundError as error:
    sys.exit(f"the benchmark needs {error.name}: pip install 'compiled_kv[bench]'")

from compiled_kv.bench import extras
from compiled_kv.bench.cells import QUICK, Cell, default_cells, full_cells
from compiled_kv.bench.report import claims, write
from compiled_kv.bench.run import run_cell
from compiled_kv.bench.warm import warm_caches

SECTIONS = ("schedule", "host", "cells", "cpu", "starts")


@click.command()
@click.option("--quick", is_flag=True, help="Two small cells, on any machine.")
@click.option("--full", is_flag=True, help="Every cell; what --out already holds is not run again.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/bench"), help="Where results go.")
@click.option("--seconds", type=float, help="Start no further cell after this long.")
@click.option("--cells", type=int, default=150, show_default=True, help="Cells of a default run.")
@click.option("--only", "only", multiple=True, type=click.Choice(SECTIONS), help="These sections alone.")
@click.option("--match", default="", help="Only cells whose name contains this.")
@click.option("--rounds", type=int, default=25, show_default=True, help="Samples of each contender.")
@click.option("--trace", type=click.Path(path_type=Path, exists=True), help="CSV of requests for the trace cells.")
@click.option("--plots", type=click.Path(path_type=Path), help="Draw figures into this folder.")
@click.option("--report", is_flag=True, help="Run nothing: write tables and figures from what --out holds.")
def main(
    quick: bool, full: bool, out: Path, seconds: float | None, cells: int, only: tuple[str, ...], match: str,
    rounds: int, trace: Path | None, plots: Path | None, report: bool,
) -> None:  # fmt: skip
    """Time the operators beside the published designs."""
    device = torch.device("cuda" if torch.cuda.is_available() and not quick else "cpu")
    if device.type == "cpu" and not (quick or report):
        raise click.UsageError("timings need a CUDA device; --quick runs a corner on any machine")
    if quick:
        chosen, rounds = QUICK, 3
    else:
        chosen = full_cells() if full else default_cells(cells)
    chosen = [cell for cell in chosen if match in cell.name]
    clock = extras.stopwatch()
    known = out / "results.json"
    results: dict[str, Any] = json.loads(known.read_text()) if (full or report) and known.exists() else {}
    if not report:
        results["machine"] = machine(device)
        results.pop("failed", None)
    if not report:
        wanted = only or (("cells",) if full else ("cells", "cpu") if quick else SECTIONS)
        for section in (each for each in SECTIONS if each in wanted):
            with noted(results, section):
                if section == "cells":
                    run_cells(results, chosen, device, rounds, trace, seconds, clock, out)
                else:
                    results[section] = run_section(section, device, rounds)
            click.echo(f"{clock()} s: {section} done")
            write(results, out)
        results["machine"]["seconds"] = clock()
    write(results, out)
    for claim, bound, found in claims(results):
        if found and device.type == "cuda":
            click.echo(f"{claim}: {found}" + (f" (bound {bound})" if bound else ""))
    if plots:
        from compiled_kv.bench.plots import plots as draw

        for path in draw(results, plots):
            click.echo(path)
    sys.exit(1 if results.get("failed") else 0)


def run_cells(
    results: dict[str, Any], chosen: list[Cell], device: torch.device, rounds: int, trace: Path | None,
    seconds: float | None, clock: Callable[[], float], out: Path,
) -> None:  # fmt: skip
    done = results.setdefault("cells", [])
    names = {cell["name"] for cell in done}
    left = [cell for cell in chosen if cell.name not in names]
    if device.type == "cuda":
        warm_caches(left)
        click.echo(f"{clock()} s: compiled")
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


@contextmanager
def noted(results: dict[str, Any], what: str) -> Iterator[None]:
    """Let the run go on after an error, which is kept, shown, and makes the exit status 1."""
    try:
        yield
    except Exception as error:
        results.setdefault("failed", {})[what] = traceback.format_exc()[-3000:]
        click.echo(f"{what} FAILED: {type(error).__name__}: {str(error)[:500]}", err=True)


def run_section(section: str, device: torch.device, rounds: int) -> Any:
    match section:
        case "schedule":
            return extras.schedule(device, rounds)
        case "host":
            return extras.host(device, rounds)
        case "cpu":
            return extras.cpu(rounds)
        case "starts":
            return extras.starts()
    raise AssertionError(section)


def machine(device: torch.device) -> dict[str, Any]:
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    from compiled_kv.launch import triton

    return {"device": named, "torch": torch.__version__, "triton": getattr(triton, "__version__", "absent")}


if __name__ == "__main__":
    main()
