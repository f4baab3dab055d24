"""A scenario played through capture and replay, and everything compared after each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from compiled_kv.buffers import DecodeBuffers
from compiled_kv.replay.caches import changed, copies, marked, written_outside
from compiled_kv.replay.frozen import Places
from compiled_kv.replay.graphs import DecodeGraphs
from compiled_kv.replay.names import Difference
from compiled_kv.replay.pools import apply, contents, make_pools
from compiled_kv.replay.reference import Expected
from compiled_kv.replay.reference_buffers import ReferenceBuffers, added_to
from compiled_kv.replay.scenarios import Event, Scenario
from compiled_kv.replay.scheduler import Scheduler, play
from compiled_kv.replay.serving import Planned, Serving
from compiled_kv.replay.watch import Different, DispatchReads, FunctionReads, naming, watched

Step = Callable[..., Any]
NOT_ASKED = (
    "the step never calls buffers.metadata(batch_size), so that nothing writes the tables, lengths and slots of the "
    "batch that was loaded"
)
UNWRITTEN = "was written in no step: is it a copy of the step's own, as flatten makes of memory with gaps?"


@dataclass(frozen=True)
class Each:
    """An argument that is made anew for each step, as a caller might who has not heard what a capture freezes."""

    make: Callable[[], Any]


class ReplayFault(AssertionError):
    """A captured step went wrong: `fault` is what by name, `scenario` the shortest found that shows it."""

    def __init__(self, difference: Difference, step: int, scenario: Scenario) -> None:
        self.fault, self.sentence, self.step, self.scenario = *difference, step, scenario
        where = f"in step {step} of {scenario.name}" if step else "before the first step"
        shown = (
            f"\nthe shortest scenario found that shows it, {len(scenario.events)} events:\n{scenario}" if step else ""
        )
        super().__init__(f"{self.fault} {where}: {self.sentence}{shown}")


@dataclass(frozen=True)
class ReplayReport:
    """What was played and compared without a difference."""

    scenario: str
    steps: int
    requests: int
    preemptions: int
    buckets: tuple[int, ...]
    values: int

    def __str__(self) -> str:
        return (
            f"{self.scenario}: {self.steps} steps, {self.requests} requests, {self.preemptions} preemptions, buckets "
            f"{list(self.buckets)}: {self.values} values compared, no difference"
        )


class Player:
    """Plays scenarios, each through buffers and graphs of its own."""

    def __init__(
        self, step: Step, eager: Step, device: torch.device, batch_sizes: Sequence[int] | None, args: tuple[Any, ...],
        kwargs: dict[str, Any], buffers: Callable[..., DecodeBuffers], graphs: Callable[..., DecodeGraphs],
        outputs_every: int, caches: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        self.step, self.eager, self.device, self.batch_sizes = step, eager, device, batch_sizes
        self.args, self.kwargs, self.make_buffers, self.make_graphs = args, kwargs, buffers, graphs
        self.outputs_every, self.caches, self.held = outputs_every, caches, copies(caches)

    def fails(self, scenario: Scenario, fault: str) -> bool:
        """Whether `scenario` shows this fault; one that cannot be played to its end does not."""
        try:
            found = self.failure(scenario)
        except Exception:
            return False
        return found is not None and found.fault == fault

    def failure(self, scenario: Scenario) -> ReplayFault | None:
        try:
            self.play(scenario)
        except ReplayFault as fault:
            return fault
        return None

    def play(self, scenario: Scenario) -> ReplayReport:
        """Every step of `scenario`.

        Raises:
            ReplayFault: on the first difference, the scenario as it was played.
            ValueError: a cache was written in no step.
        """
        given, unwritten = scenario.serving, set(range(len(self.caches)))
        pools = make_pools(given, self.device)
        buffers = self.make_buffers(
            given.layout, pools["req_to_token"], max_batch_size=given.max_batch_size, q_len=given.queries,
            ragged=given.mode == "extend", seq_len_delta=given.delta, full_to_swa=pools.get("full_to_swa"),
            page_map=pools.get("page_map"),
        )  # fmt: skip
        number, added = 0, added_to(buffers)
        with naming(lambda difference: ReplayFault(difference, number, scenario)):
            expected = Expected(given, buffers.held.shape[1])
            self._look_for_reads(Expected(given, expected.parts), buffers, added)
            sizes = self.batch_sizes or powers_of_two(given.max_batch_size)
            graphs = self.make_graphs(self.step, buffers, sizes, *self._arguments(), backend=None)
            scheduler, values, places = Scheduler(given), 0, Places(buffers)
            for scheduler, planned in play(given, list(scenario.events)):
                number += 1
                apply(scheduler.take_writes(), pools)
                if len(planned.rows) > graphs.batch_sizes[-1]:
                    raise ValueError(f"batch_sizes must hold {len(planned.rows)} requests, got {graphs.batch_sizes}")
                expected.step(planned, next(size for size in graphs.batch_sizes if size >= len(planned.rows)))
                args, kwargs = self._arguments()
                before = copies(self.caches)
                with watched(self.device, number):
                    outputs = graphs(planned.batch, *args, **kwargs)
                places.check()
                found, slots = contents(buffers), changed(self.caches, before)
                if difference := expected.compare(found) or written_outside(slots, expected):
                    raise Different(difference)
                unwritten -= {index for index, written in enumerate(slots) if written}
                records = buffers.held[:, 0]  # one for each row, however many programs keep one
                values += sum(t.numel() for t in (buffers.inputs, *buffers.out(), records) if t is not None)
                if self.outputs_every and number % self.outputs_every == 0:
                    reference = ReferenceBuffers(expected, buffers, added)
                    self._compare_outputs(outputs, reference, expected, args, kwargs)
        if unwritten and scheduler.joined:
            raise ValueError(f"caches[{min(unwritten)}] {UNWRITTEN}")
        return ReplayReport(
            scenario.name, number, scheduler.joined, scheduler.preemptions, tuple(graphs.batch_sizes), values
        )

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def now(value: Any) -> Any:
            return value.make() if isinstance(value, Each) else value

        return tuple(map(now, self.args)), {name: now(value) for name, value in self.kwargs.items()}

    def _look_for_reads(self, expected: Expected, buffers: DecodeBuffers, added: Mapping[str, Tensor]) -> None:
        """One eager run with no live row, in which nothing may be read back or cached, and the metadata must be asked
        for. Behind it the caches hold what they held at first."""
        size = expected.serving.max_batch_size
        expected.step(planned_nobody(expected.serving), size)
        args, kwargs = self._arguments()
        reference = ReferenceBuffers(expected, buffers, added)
        with marked(self.caches, self.held) as before:
            with torch.no_grad(), FunctionReads(), DispatchReads():
                self.eager(reference, size, *args, **kwargs)
            if difference := written_outside(changed(self.caches, before), expected):
                raise Different(difference)
        if not reference.is_asked:
            raise Different(Difference("metadata not asked for", NOT_ASKED))

    def _compare_outputs(
        self,
        outputs: Any,
        reference: ReferenceBuffers,
        expected: Expected,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        with torch.no_grad():
            wanted = self.eager(reference, expected.bucket, *args, **kwargs)
        pairs = zip(pytree.tree_flatten_with_path(outputs)[0], pytree.tree_leaves(wanted), strict=True)
        for (path, found), value in pairs:
            if isinstance(found, Tensor):
                try:
                    torch.testing.assert_close(found, value, equal_nan=True)
                except AssertionError as error:
                    said = "; ".join(line.rstrip("!") for line in str(error).splitlines() if line)
                    where = f"output{pytree.keystr(path)} differs from an eager run: {said}"
                    raise Different(Difference("wrong output", where)) from None


def planned_nobody(given: Serving) -> Planned:
    """A step without a request."""
    return next(planned for _, planned in play(given, [Event("step")]))


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4 ... and `most` itself."""
    return sorted({min(1 << i, most) for i in range(most.bit_length() + 1)})
