"""`python -m compiled_kv.bench.step`: time per output token of decode loops of Llama, metadata made in four ways."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from compiled_kv.bench.extras import stopwatch
from compiled_kv.bench.report import write
from compiled_kv.bench.results import machine, noted, opened
from compiled_kv.bench.step_loop import WAYS, Loop, Piece
from compiled_kv.bench.timing import paired_ratio, summary

HOST, EAGER, CAPTURED, FROZEN = WAYS
AHEAD = 3  # steps that the host can queue at once
SLEEP_CYCLES = 60_000_000  # some 30 ms, in which it does
PROFILED = 4  # steps of a timeline
Case = tuple[str, int, bool]


def run(loop: Loop, rounds: int) -> dict[str, Any]:
    """Microseconds an output token in each way, in turn, and paired ratios.

    Raises:
        AssertionError: the three true ways end with different tokens or lengths.
    """
    ways = loop.ways()
    samples: dict[str, list[float]] = {name: [] for name in ways}
    ends: dict[str, list[int]] = {}
    if loop.rows.is_cuda:
        for step in ways.values():
            _steps(loop, step, 8)
    for _ in range(rounds):
        for name, step in ways.items():
            elapsed = _steps(loop, step, loop.steps)
            samples[name].append(elapsed * 1e6 / loop.steps / loop.tokens_a_step)
            ends[name] = [*loop.tokens.flatten().tolist(), *loop.seq_lens.tolist()]
    true = [ends[name] for name in WAYS if name != FROZEN]
    if any(each != true[0] for each in true):
        raise AssertionError(f"the ways differ in their tokens: {ends}")
    times = {name: summary(each) for name, each in samples.items()}
    if loop.rows.is_cuda:
        for name, step in ways.items():
            queued = queued_ahead(loop, name, step) / loop.tokens_a_step
            times[name]["waits"] = max(1 - queued / times[name]["median"], 0.0)
    pairs = ((CAPTURED, HOST), (CAPTURED, EAGER), (CAPTURED, FROZEN))
    return {"times": times, "ratios": {f"{a}/{b}": paired_ratio(samples[a], samples[b]) for a, b in pairs}}


def _steps(loop: Loop, step: Piece, count: int) -> float:
    """Seconds for a run of steps. All ways begin alike, with metadata made once: what runs before a step was seen to
    change its time by a twentieth."""
    loop.freeze(count)
    _settle(loop)
    begin = time.perf_counter()
    for _ in range(count):
        step()
    _settle(loop)
    return time.perf_counter() - begin


def _settle(loop: Loop) -> None:
    if loop.rows.is_cuda:
        torch.cuda.synchronize()


def queued_ahead(loop: Loop, name: str, step: Piece) -> float:
    """Microseconds a step on the device where it never waits for the host: all is queued before the first one starts.

    The host read's loop is given the longest length, for it could not be queued otherwise.
    """
    call: Piece = partial(step, loop.length) if name == HOST else step
    samples = []
    for _ in range(5):
        loop.freeze(AHEAD)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        begin.record()
        for _ in range(AHEAD):
            call()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / AHEAD)
    return sorted(samples)[2]


def idle(loop: Loop, step: Piece) -> float | None:
    """Share of the profiler's timeline in which the device ran nothing; None where the profiler sees no device."""
    loop.freeze(PROFILED)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if str(e.device_type).endswith("CUDA")]
    return idle_share([(e.time_range.start, e.time_range.end) for e in events])


def idle_share(spans: list[tuple[float, float]]) -> float | None:
    """Share of the time from the first start to the last end that no span covers."""
    if not spans:
        return None
    spans = sorted(spans)
    busy, reached = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(end - max(begin, reached), 0)
        reached = max(reached, end)
    return 1 - busy / max(reached - spans[0][0], 1e-9)


def title(case: Case) -> str:
    model, batch, speculative = case
    return f"{model}, batch {batch}, {'speculative' if speculative else 'plain'}"


def said(name: str, found: dict[str, Any]) -> str:
    """One case in a line: medians, and what they say with their 95 % intervals."""
    medians = ", ".join(f"{way} {each['median']:.0f}" for way, each in found["times"].items())
    less, over = found["ratios"][f"{CAPTURED}/{HOST}"], found["ratios"][f"{CAPTURED}/{FROZEN}"]
    waits = ", ".join(f"{each['waits']:.0%}" for each in found["times"].values() if "waits" in each)
    return (
        f"{name}: {medians} us a token; captured takes {1 - less['median']:.1%} "
        f"[{1 - less['high']:.1%}, {1 - less['low']:.1%}] less than the host read, {over['median'] - 1:+.1%} "
        f"[{over['low'] - 1:+.1%}, {over['high'] - 1:+.1%}] against frozen"
        + (f"; waits for the host {waits}" if waits else "")
    )


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/bench"), help="results.json to add to.")
@click.option("--model", "models", multiple=True, type=click.Choice(["1B", "8B", "tiny"]), default=["1B", "8B"])
@click.option("--batch", "batches", multiple=True, type=int, default=[1, 8, 64], show_default=True)
@click.option("--length", default=2048, show_default=True, help="Tokens of each request at the start.")
@click.option("--steps", default=64, show_default=True)
@click.option("--rounds", default=11, show_default=True)
@click.option("--seconds", type=float, help="Start nothing further after this long; run again for the rest.")
@click.option("--anew", is_flag=True, help="Drop what --out holds.")
@click.option("--profile/--no-profile", default=True, help="Idle time from the profiler, when all is timed.")
def main(
    out: Path, models: tuple[str, ...], batches: tuple[int, ...], length: int, steps: int, rounds: int,
    seconds: float | None, anew: bool, profile: bool,
) -> None:  # fmt: skip
    """Time per output token of decode loops of Llama stacks with random weights; what --out holds is not run again."""
    device, clock = torch.device("cuda" if torch.cuda.is_available() else "cpu"), stopwatch()
    results = opened(out, machine(device), anew)
    done = {each["name"]: each for each in results.setdefault("steps", [])}
    cases: list[Case] = [(model, batch, s) for model in models for batch in batches for s in (False, True)]

    def each(what: str, wanted: list[Case], act: Callable[[Case, Loop], None]) -> None:
        for number, case in enumerate(wanted):
            if seconds is not None and clock() > seconds:
                click.echo(f"{clock()} s: {len(wanted) - number} cases left for another run ({what})")
                return
            with noted(results, f"{title(case)}, {what}"), torch.no_grad():
                torch.manual_seed(0)
                act(case, Loop(case[0], case[1], length, steps, case[2], device))
            write(results, out)

    def timed(case: Case, loop: Loop) -> None:
        found = {"name": title(case), "model": case[0], "batch": case[1], "speculative": case[2], **run(loop, rounds)}
        results["steps"].append(found)
        done[found["name"]] = found
        click.echo(f"{clock()} s: {said(found['name'], found)}")

    def profiled(case: Case, loop: Loop) -> None:
        for name, step in loop.ways().items():
            done[title(case)]["times"][name]["idle"] = idle(loop, step)

    each("times", [case for case in cases if title(case) not in done], timed)
    if profile and device.type == "cuda":
        # Last, for a profiler once attached may slow down what is timed afterwards.
        seen = [case for case in cases if title(case) in done]
        each("idle time", [case for case in seen if "idle" not in done[title(case)]["times"][HOST]], profiled)
    click.echo(f"{clock()} s: done")
    sys.exit(1 if results.get("failed") else 0)


if __name__ == "__main__":
    main()
