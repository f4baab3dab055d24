"""Proof that a captured step stays right: play a scenario through capture and replay, compare every byte with Python
ints.

check_replay(decode_step, walk(serving("verify", window=64), steps=500))
-> ReplayFault: stale tail in step 7 of walk, seed 0: page_table[2, 1] holds 9, expected 0: row 2 has 1 live columns
   the shortest scenario found that shows it, 5 events:
   join 17
   step 1
   ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from compiled_kv.buffers import DecodeBuffers
from compiled_kv.checks import check_int
from compiled_kv.replay.caches import check_caches
from compiled_kv.replay.graphs import DecodeGraphs
from compiled_kv.replay.player import Player, ReplayFault, ReplayReport, Step
from compiled_kv.replay.scenarios import Scenario, serving, shorter, story
from compiled_kv.replay.steps import check_callable, compiled, uncompiled


def metadata_step(buffers: DecodeBuffers, batch_size: int) -> Any:
    """A step that is nothing but its metadata."""
    return buffers.metadata(batch_size)


class EmptyScenario(ValueError):
    """There was no step, or none had a request, so nothing of the decode step was looked at."""


def check_replay(
    decode_step: Step = metadata_step, scenario: Scenario | None = None, *, steps: int | None = None,
    device: str | torch.device = "cpu", batch_sizes: Sequence[int] | None = None, args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None, backend: str | None = "inductor",
    buffers: Callable[..., DecodeBuffers] = DecodeBuffers, graphs: Callable[..., DecodeGraphs] = DecodeGraphs,
    caches: Sequence[Tensor] = (), outputs_every: int = 1, attempts: int = 300,
) -> ReplayReport:  # fmt: skip
    """Play `scenario` through `DecodeGraphs` and compare every buffer, and what the step returns, after every step.

    Buffers are compared with Python ints from the scheduler's own lists, outputs with an eager run of the step on
    those. A host read, an allocation (CUDA), a tensor that moves and a compilation after warm-up are faults too.

    Args:
        decode_step: as for `DecodeGraphs`.
        scenario: from `scenarios`; the acceptance story by default.
        steps: play this many only.
        device: "cpu", where the step is compiled by `backend`, or a CUDA device, where it is captured.
        batch_sizes: the buckets; powers of two up to the scenario's largest batch by default.
        args, kwargs: what else the step takes; an `Each` is asked for its value before each step.
        buffers, graphs: what to make them with. Tensors that a subclass registers are the step's own: the eager run
            has copies of them, as they were made.
        caches: tensors [slots, ...] that the step writes keys and values into: only slots of live rows' tokens, in the
            full pool or in the sliding one, and the null page may change.
        outputs_every: compare outputs in every so many steps; 0 for never.
        attempts: scenarios tried to find a shorter one that fails; 0 leaves it as it is.

    Raises:
        ReplayFault: with the fault by name and the shortest scenario found that shows it.
        ValueError: a number is out of bounds, a step has more requests than the largest bucket, or there is no step, or
            none has any; a cache has no room for a pool, or no step writes it.
        TypeError: `decode_step` cannot be called, `scenario` is none, or a cache is no tensor.
    """
    check_callable(decode_step)
    scenario = story(serving()) if scenario is None else scenario
    if not isinstance(scenario, Scenario):
        raise TypeError(f"scenario must be a Scenario, got {type(scenario).__name__}")
    if steps is not None:
        check_int("steps", steps, 0)
        scenario = scenario.first(steps)
    check_caches(caches, scenario.serving)
    eager = uncompiled(decode_step)
    on_cpu = torch.device(device).type == "cpu"
    step = compiled(decode_step, backend) if on_cpu and backend is not None else decode_step
    player = Player(
        step, eager, torch.device(device), batch_sizes, tuple(args), dict(kwargs or {}), buffers, graphs, outputs_every,
        caches,
    )  # fmt: skip
    try:
        report = player.play(scenario)
        if steps != 0:
            refuse_empty(scenario, report)
        return report
    except ReplayFault as fault:
        if not attempts or fault.step == 0:
            raise
        found = fault
    played = scenario.first(found.step)
    events = shorter(played.events, lambda events: player.fails(replace(played, events=events), found.fault), attempts)
    raise player.failure(replace(played, events=events)) or found


def refuse_empty(scenario: Scenario, report: ReplayReport) -> None:
    """Refuse a scenario that was played and proved nothing."""
    if report.steps == 0:
        raise EmptyScenario(
            f"scenario must have a step, got {len(scenario.events)} events without one: {scenario.name}"
        )
    if report.requests == 0:
        raise EmptyScenario(f"scenario must have a request, got {report.steps} steps without one: {scenario.name}")
