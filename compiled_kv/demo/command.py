"""`compiled-kv demo`: serve a trace through compiled decode steps and compare every token with `generate()`."""

from __future__ import annotations

from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..models import NAMES, architecture
from .report import show
from .serving import Result, serve
from .trace import Lengths, TraceError, read_trace, synthetic_trace
from .workload import Workload, make_requests, plan


class TraceFailure(click.ClickException):
    """A trace that cannot be used: one line, exit status 2."""

    exit_code = 2


@click.command()
@click.option(
    "--model", type=click.Choice([*NAMES, "all"]), default="llama", show_default=True, help="Architecture to serve."
)
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option(
    "--trace", type=click.Path(path_type=Path), help="CSV: TIMESTAMP,ContextTokens,GeneratedTokens. Default: synthetic."
)
@click.option("--requests", type=click.IntRange(min=1), default=32, show_default=True, help="Requests to serve.")
@click.option(
    "--scale",
    type=click.FloatRange(min=0, min_open=True),
    default=0.05,
    show_default=True,
    help="Factor on every length.",
)
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Rows of a step.")
@click.option(
    "--chunk", type=click.IntRange(min=2), default=16, show_default=True, help="Prompt tokens of a row in one step."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of weights, prompts and the synthetic trace.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Of torch's CPU kernels.")
@click.option("--backend", default="inductor", show_default=True, help="Of torch.compile.")
def demo(model: str, device: str, trace: Path | None, requests: int, scale: float, batch: int, chunk: int, seed: int,
         threads: int, backend: str) -> None:  # fmt: skip
    """Serve requests through one compiled graph a step, and compare every token with transformers' generate().

    Exit status 1 if a token differs or a step was not compiled whole, 2 for a trace that cannot be used.
    """
    torch.set_num_threads(threads)  # a second thread has nothing to win in models this small
    lengths = [row.scaled(scale) for row in load(trace, requests, seed)]
    names = NAMES if model == "all" else (model,)
    workloads = {name: workload(name, lengths, batch, chunk, seed) for name in names}
    console = Console()
    results = follow(console, workloads, seed=seed, device=device, backend=backend)
    show(results, console)
    if not all(result.ok for result in results):
        raise SystemExit(1)


def load(trace: Path | None, requests: int, seed: int) -> list[Lengths]:
    """The first `requests` of the trace file, or as many synthetic ones."""
    if trace is None:
        return synthetic_trace(requests, seed)
    try:
        return read_trace(trace)[:requests]
    except TraceError as error:
        raise TraceFailure(str(error)) from None
    except OSError as error:
        raise TraceFailure(f"{trace}: {error.strerror}") from None


def workload(name: str, lengths: list[Lengths], batch: int, chunk: int, seed: int) -> Workload:
    """What the model of this name is to serve."""
    arch = architecture(name)
    return plan(make_requests(lengths, arch, seed), arch, batch=batch, chunk=chunk)


def follow(console: Console, workloads: dict[str, Workload], *, seed: int, device: str, backend: str) -> list[Result]:
    """Serve one workload after the other behind a progress bar that counts tokens, ours and the reference's."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    total = 2 * sum(request.new_tokens for workload in workloads.values() for request in workload.requests)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        return [
            serve(
                name, workload, seed=seed, device=device, backend=backend,
                progress=lambda what, count: bar.update(task, description=what, advance=count),
            )
            for name, workload in workloads.items()
        ]  # fmt: skip
