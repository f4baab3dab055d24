"""`compiled-kv replay`: play scenarios through a captured step and compare every byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click
import torch

from compiled_kv.auditor.entry import EntryError, load
from compiled_kv.auditor.errors import said, where
from compiled_kv.misused import Misused
from compiled_kv.replay.check import EmptyScenario, check_replay, metadata_step
from compiled_kv.replay.player import ReplayFault, ReplayReport, Step, powers_of_two
from compiled_kv.replay.scenarios import MODES, Scenario, parse_events, serving, story, trace, walk
from compiled_kv.replay.serving import Serving
from compiled_kv.request_traces import TraceError, read_trace, synthetic_trace

KINDS = ("story", "walk", "trace")


def usable(_: click.Context, __: click.Parameter, name: str) -> str:
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise click.BadParameter(f"must be cpu or cuda, got {name!r}")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise click.BadParameter(f"{name} cannot be used: {str(error).splitlines()[0]}") from None
    return name


@click.command("replay")
@click.argument("step", metavar="[MODULE:FUNCTION]", required=False)
@click.option("--scenario", type=click.Choice([*KINDS, "all"]), default="all", show_default=True)
@click.option(
    "--mode", type=click.Choice([*MODES, "all"]), default="all", show_default=True, help="What a step computes."
)
@click.option("--steps", type=click.IntRange(min=1), default=300, show_default=True, help="Of a walk and of a trace.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the walk and of the synthetic trace.")
@click.option("--trace", "file", type=click.Path(path_type=Path), help="CSV: TIMESTAMP,ContextTokens,GeneratedTokens.")
@click.option("--events", type=click.Path(path_type=Path), help="Play a printed scenario in place of these.")
@click.option("--device", default="cpu", show_default=True, callback=usable, help="cpu or cuda.")
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Rows of the largest batch.")
@click.option("--page-size", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--context", type=click.IntRange(min=8), default=512, show_default=True, help="Longest context.")
@click.option("--window", type=click.IntRange(min=1), help="Sliding window; none without.")
@click.option("--eager", is_flag=True, help="Leave the step uncompiled on the CPU, which is faster.")
def command(
    step: str | None, scenario: str, mode: str, steps: int, seed: int, file: Path | None, events: Path | None,
    device: str, batch: int, page_size: int, context: int, window: int | None, eager: bool,
) -> None:  # fmt: skip
    """Replay the decode step MODULE:FUNCTION, called as step(buffers, batch_size), under scenarios that change its
    batch.

    Without it, a step that is nothing but its metadata. The last line of each mode says whether it passed. Exit
    status: 0 all did, 1 a fault, 2 bad input, or a step that raised.
    """
    decode_step = load_step(step) if step else metadata_step
    first = "capturing, then " if device != "cpu" else "" if eager else "compiling, then "
    check = partial(check_replay, decode_step, device=device, backend=None if eager else "inductor")
    statuses = []
    for each in MODES if mode == "all" else (mode,):
        given = serving(each, page_size=page_size, max_context_len=context, max_batch_size=batch, window=window)
        played = [read_events(events, given)] if events else make(scenario, given, steps, seed, file)
        statuses.append(play_mode(each, played, check, step, f"{first}playing"))
    if any(statuses):
        raise SystemExit(1 if 1 in statuses else 2)


def play_mode(
    mode: str, scenarios: Sequence[Scenario], check: Callable[[Scenario], ReplayReport], step: str | None, work: str
) -> int:
    """Play the scenarios until one goes wrong, and say in a line how the mode went.

    Returns:
        The exit status: 0 no difference, 1 a fault, 2 the step raised.
    """
    reports: list[ReplayReport] = []
    verdict, status = "passed", 0
    try:
        for scenario in scenarios:
            with at_work(f"{mode}: {scenario.name}: {work}"):
                reports.append(check(scenario))
            click.echo(f"{mode}: {reports[-1]}")
    except ReplayFault as fault:
        click.ClickException(f"{mode}: {fault}").show()
        verdict, status = f"failed, {fault.fault} in {fault.scenario.name}", 1
    except EmptyScenario as error:
        Misused(f"{mode}: {error}").show()
        verdict, status = f"refused, nothing to play in {scenarios[len(reports)].name}", 2
    except (Exception, SystemExit) as error:
        if step is None:
            raise
        told = f"raised {said(error)}{where(error)} (--mode plays only what the step serves)"
        Misused(f"{mode}: {step}, called as step(buffers, batch_size), {told}").show()
        verdict, status = f"refused, the step raised {type(error).__name__} in {scenarios[len(reports)].name}", 2
    played, buckets = sum(report.steps for report in reports), powers_of_two(scenarios[0].serving.max_batch_size)
    click.echo(f"{mode}: {len(reports)} of {len(scenarios)} scenarios, {played} steps, buckets {buckets}: {verdict}")
    return status


@contextmanager
def at_work(what: str) -> Iterator[None]:
    """Say on stderr what takes so long: on a terminal in a line that goes away."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        shown = False
    else:
        shown = (console := Console(stderr=True)).is_terminal
    if shown:
        with console.status(Text(what)):
            yield
    else:
        click.echo(what, err=True)
        yield


def load_step(name: str) -> Step:
    """The function that MODULE:FUNCTION names; MODULE may be a path that ends in .py."""
    try:
        return load(name)
    except EntryError as error:
        raise Misused(str(error)) from None


def make(kind: str, given: Serving, steps: int, seed: int, file: Path | None) -> list[Scenario]:
    """The scenarios asked for."""
    made = []
    for each in KINDS if kind == "all" else (kind,):
        if each == "trace":
            try:
                lengths = read_trace(file) if file else synthetic_trace(200, seed)
            except TraceError as error:
                raise Misused(str(error)) from None
            except OSError as error:
                raise Misused(f"{file}: {error.strerror}") from None
            made.append(trace(given, [(row.context, row.generated) for row in lengths], steps))
        else:
            made.append(story(given) if each == "story" else walk(given, steps, seed))
    return made


def read_events(path: Path, given: Serving) -> Scenario:
    """A scenario from a file of one event a line."""
    try:
        return Scenario(path.name, given, parse_events(path.read_text()))
    except OSError as error:
        raise Misused(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise Misused(f"{path}: {error}") from None
