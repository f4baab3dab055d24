"""`compiled-kv demo`: serve a trace through compiled decode steps and compare every token with `generate()`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from compiled_kv.cli import missing
from compiled_kv.demo.progress import follow
from compiled_kv.demo.report import show
from compiled_kv.demo.serving import serve
from compiled_kv.demo.workload import make_requests, plan
from compiled_kv.misused import Misused
from compiled_kv.models import NAMES, architecture
from compiled_kv.request_traces import COLUMNS, Lengths, TraceError, read_trace, synthetic_trace


def option(*names: str, text: str, **settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(*names, help=text, show_default="default" in settings, **settings)


# Of what a step's buffers are sized by; more would be a slip of the pen.
COUNT = click.IntRange(1, 4096)
BACKENDS = ["inductor", "aot_eager", "eager"]


@click.command()
@option("--model", type=click.Choice([*NAMES, "all"]), default="llama", text="Architecture to serve.")
@option("--device", default="cpu", text="cpu or cuda.")
@option("--trace", type=click.Path(path_type=Path), text=f"CSV: {','.join(COLUMNS)}. Without: a synthetic trace.")
@option("--requests", type=click.IntRange(min=1), default=32, text="Requests to serve.")
@option("--scale", type=float, default=0.05, text="Factor on every length.")
@option("--batch", type=COUNT, default=8, text="Rows of a step.")
@option("--chunk", type=COUNT, default=16, text="Prompt tokens that a row may put into one step.")
@option("--pool", type=float, default=0.9, text="Pages, as a share of what a full batch needs.")
@option(
    "--draft-tokens", type=click.IntRange(0, 64), default=0,
    text="Tokens a verify step reads: the last one and its drafts; 0: no drafts.",
)  # fmt: skip
@option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, text="Of weights, prompts and the synthetic trace.")
@option("--threads", type=COUNT, default=1, text="Of torch's CPU kernels.")
@option("--backend", type=click.Choice(BACKENDS), default="inductor", text="Of torch.compile.")
def demo(
    model: str, device: str, trace: Path | None, requests: int, scale: float, batch: int, chunk: int, pool: float,
    draft_tokens: int, seed: int, threads: int, backend: str,
) -> None:  # fmt: skip
    """Serve requests through one compiled graph a step, and compare every token with transformers' generate().

    Exit status 1 if a token differs or a step was not compiled whole, 2 for an argument that cannot be used.
    """
    check_extra()
    check_device(device)
    check_number("--scale", scale, 1e-9, 1e9)
    check_number("--pool", pool, 0, 16)
    if draft_tokens == 1:
        raise Misused("--draft-tokens must be 0, or 2 and more: the last token and its drafts, got 1")
    torch.set_num_threads(threads)  # a second thread has nothing to win in models this small
    lengths = [row.scaled(scale) for row in load(trace, requests, seed)]
    names = NAMES if model == "all" else (model,)
    check_lengths(lengths, names, scale)
    workloads = {}
    for name in names:
        arch = architecture(name)
        asked = make_requests(lengths, arch, seed)
        workloads[name] = plan(asked, arch, batch=batch, chunk=chunk, draft_tokens=draft_tokens, pool=pool)
    console = Console()
    if not console.is_terminal:
        console.width = 120  # a file has no edge at which to break the table
    tokens = sum(request.new_tokens for request in workloads[names[0]].requests)
    with follow(console, tokens, 2 * len(names)) as progress:
        results = [
            serve(name, workload, seed=seed, device=device, backend=backend, progress=progress)
            for name, workload in workloads.items()
        ]
    show(results, console)
    if not all(result.ok for result in results):
        raise SystemExit(1)


def check_extra() -> None:
    """Refuse to begin without what the models are built with."""
    if find_spec("transformers") is None:
        raise Misused(missing("demo", "transformers"))


def check_device(device: str) -> None:
    """Refuse a device that torch does not know or cannot reach, or that holds no values."""
    try:
        kind = torch.empty(0, device=device).device.type
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise Misused(f"device {device} cannot be used: {str(error).splitlines()[0]}") from None
    if kind not in ("cpu", "cuda"):
        raise Misused(f"device {device} cannot be used: it must be cpu or cuda")


def check_number(name: str, value: float, least: float, most: float) -> None:
    """Refuse what lies outside the bounds, and what is no number."""
    if not least <= value <= most:
        raise Misused(f"{name} must be a number from {least:g} to {most:g}, got {value:g}")


def check_lengths(lengths: Sequence[Lengths], names: Sequence[str], scale: float) -> None:
    """Refuse a request that is longer than a model's positions; a prompt may get an opening before it."""
    for name in names:
        arch = architecture(name)
        most = arch.config.max_position_embeddings - 2 * arch.page_size
        for number, row in enumerate(lengths, 1):
            if sum(row) > most:
                raise Misused(f"--scale {scale:g} makes request {number} longer than the {most} tokens of {name}")


def load(trace: Path | None, requests: int, seed: int) -> list[Lengths]:
    """The first `requests` of the trace file, or as many synthetic ones. A file with fewer serves all, unless asked for
    more by number."""
    if trace is None:
        return synthetic_trace(requests, seed)
    try:
        rows = read_trace(trace)
    except TraceError as error:
        raise Misused(str(error)) from None
    except OSError as error:
        raise Misused(f"{trace}: {error.strerror}") from None
    asked = click.get_current_context().get_parameter_source("requests")
    if len(rows) < requests and asked is not click.core.ParameterSource.DEFAULT:
        raise Misused(f"--requests must be at most the {len(rows)} rows of {trace}, got {requests}")
    return rows[:requests]
