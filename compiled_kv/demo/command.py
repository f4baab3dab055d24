"""`compiled-kv demo`: serve a trace through compiled decode steps and compare every token with `generate()`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from compiled_kv.request_traces import COLUMNS, Lengths, TraceError, read_trace, synthetic_trace

from ..models import NAMES, architecture
from .report import show
from .serving import Result, serve
from .workload import Workload, make_requests, plan


class Unusable(click.ClickException):
    """A trace or a device that cannot be used: one line, exit status 2."""

    exit_code = 2


def option(*names: str, text: str, **settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(*names, help=text, show_default="default" in settings, **settings)


COUNT = click.IntRange(min=1)
BACKENDS = ["inductor", "aot_eager", "eager"]


@click.command()
@option("--model", type=click.Choice([*NAMES, "all"]), default="llama", text="Architecture to serve.")
@option("--device", default="cpu", text="cpu or cuda.")
@option("--trace", type=click.Path(path_type=Path), text=f"CSV: {','.join(COLUMNS)}. Without: a synthetic trace.")
@option("--requests", type=COUNT, default=32, text="Requests to serve.")
@option("--scale", type=click.FloatRange(min=0, min_open=True), default=0.05, text="Factor on every length.")
@option("--batch", type=COUNT, default=8, text="Rows of a step.")
@option("--chunk", type=COUNT, default=16, text="Prompt tokens that a row may put into one step.")
@option("--pool", type=click.FloatRange(min=0), default=0.9, text="Pages, as a share of what a full batch needs.")
@option("--draft-tokens", type=click.IntRange(min=0), default=0, text="Tokens a verify step reads; 0: no drafts.")
@option("--seed", type=int, default=0, text="Of weights, prompts and the synthetic trace.")
@option("--threads", type=COUNT, default=1, text="Of torch's CPU kernels.")
@option("--backend", type=click.Choice(BACKENDS), default="inductor", text="Of torch.compile.")
def demo(
    model: str, device: str, trace: Path | None, requests: int, scale: float, batch: int, chunk: int, pool: float,
    draft_tokens: int, seed: int, threads: int, backend: str,
) -> None:  # fmt: skip
    """Serve requests through one compiled graph a step, and compare every token with transformers' generate().

    Exit status 1 if a token differs or a step was not compiled whole, 2 for a trace or device that cannot be used.
    """
    check_device(device)
    torch.set_num_threads(threads)  # a second thread has nothing to win in models this small
    lengths = [row.scaled(scale) for row in load(trace, requests, seed)]
    names = NAMES if model == "all" else (model,)
    workloads = {}
    for name in names:
        arch = architecture(name)
        asked = make_requests(lengths, arch, seed)
        workloads[name] = plan(asked, arch, batch=batch, chunk=chunk, draft_tokens=draft_tokens, pool=pool)
    console = Console()
    results = follow(console, workloads, seed=seed, device=device, backend=backend)
    show(results, console)
    if not all(result.ok for result in results):
        raise SystemExit(1)


def check_device(device: str) -> None:
    """Refuse a device that torch does not know or cannot reach."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise Unusable(f"device {device} cannot be used: {str(error).splitlines()[0]}") from None


def load(trace: Path | None, requests: int, seed: int) -> list[Lengths]:
    """The first `requests` of the trace file, or as many synthetic ones."""
    if trace is None:
        return synthetic_trace(requests, seed)
    try:
        return read_trace(trace)[:requests]
    except TraceError as error:
        raise Unusable(str(error)) from None
    except OSError as error:
        raise Unusable(f"{trace}: {error.strerror}") from None


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
