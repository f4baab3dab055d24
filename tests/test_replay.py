"""A captured step stays right under every scenario, refuses what a capture cannot follow, and `check_replay` names
mistakes."""

from __future__ import annotations

import re
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from compiled_kv import reference
from compiled_kv.batches import DecodeBatch
from compiled_kv.buffers import DecodeBuffers
from compiled_kv.layout import KVLayout
from compiled_kv.replay.check import check_replay, metadata_step
from compiled_kv.replay.graphs import DecodeGraphs
from compiled_kv.replay.player import Each, ReplayFault, Step, powers_of_two
from compiled_kv.replay.pools import make_pools
from compiled_kv.replay.scenarios import MODES, Event, Scenario, parse_events, serving, shorter, story, trace, walk
from compiled_kv.replay.scheduler import Scheduler, play
from tests.cases import DEVICES, needs_cuda, pool_of_pages
from tests.conftest import INTERPRETED
from tests.planted_faults import FAULTS, Masked, mask_of

pytest_plugins = ["pytester"]
devices = pytest.mark.parametrize("device", DEVICES)
traces = pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be traced")
gpu = [pytest.mark.gpu, needs_cuda]
WINDOWS = {"full": {}, "token-map": {"window": 40}, "page-map": {"window": 9, "page_map": True}}
LENGTHS = [(374, 44), (396, 109), (879, 55), (91, 16), (2000, 300), (7, 1), (1020, 129)]


def scenarios(mode: str, window: str, page_size: int) -> list[Scenario]:
    given = serving(mode, page_size=page_size, max_context_len=256, **WINDOWS[window])
    if INTERPRETED:
        return [story(given), walk(given, 4, seed=page_size)]
    return [story(given), walk(given, 100, seed=page_size), trace(given, LENGTHS, 100)]


@devices
@pytest.mark.parametrize("page_size", [1, 16, 48])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("mode", MODES)
def test_every_byte_is_as_it_should_be(mode: str, window: str, page_size: int, device: str) -> None:
    """Kind 21, the acceptance story, among others."""
    for scenario in scenarios(mode, window, page_size):
        report = check_replay(scenario=scenario, device=device, backend=None)
        assert report.steps == scenario.steps


@traces
def test_every_byte_of_a_compiled_step() -> None:
    def decode_step(buffers: DecodeBuffers, batch_size: int) -> tuple[Tensor, Tensor]:
        meta = buffers.metadata(batch_size)
        keys = meta.page_table.clamp(min=0).sum(1) * meta.cache_seqlens
        return keys, meta.slot_mapping + buffers.token_ids[: len(meta.slot_mapping)]

    given = serving("verify", page_size=4, max_context_len=64, max_batch_size=5, window=9)
    report = check_replay(decode_step, walk(given, 120, seed=3), batch_sizes=[3, 5])
    assert (report.steps, report.buckets) == (120, (3, 5))
    assert report.preemptions > 0


@traces
def test_many_kinds_of_buffers_go_through_one_compiled_step_in_a_process() -> None:
    """More than torch's limit of 8 for one function."""
    for size in range(2, 11):
        given = serving(page_size=size, max_context_len=32, max_batch_size=2)
        assert check_replay(scenario=story(given), batch_sizes=[2], backend="eager", steps=1).steps == 1


def test_scenarios_do_what_they_are_for() -> None:
    """Joins, row reuse, preemption, shared prefixes, rollback: all of them happen in a walk of this length."""
    given, before, shared, taken_back = serving("verify", window=40), {}, 0, 0
    for scheduler, planned in play(given, list(walk(given, 300, seed=1).events)):
        shared += any(count > 1 for count in scheduler.pages.holders[1:])
        for row, generation, state in zip(planned.batch.rows, planned.batch.generations, planned.rows):
            pages = before.get((row, generation), state.pages)
            taken_back += any(a != b for a, b in zip(pages, state.pages))
            before[row, generation] = state.pages
    assert scheduler.joined > 30 and scheduler.preemptions > 3
    assert shared > 3 and taken_back > 3 and max(scheduler.generations) > 5


@pytest.mark.parametrize("mode", MODES)
def test_a_trace_fills_the_batch_and_evicts(mode: str) -> None:
    scenario = trace(serving(mode, max_context_len=2048, window=40), LENGTHS * 20, 400)
    steps = list(play(scenario.serving, list(scenario.events)))
    scheduler, _ = steps[-1]
    assert scheduler.preemptions > 5 and scheduler.joined > 20
    assert sum(len(planned.rows) for _, planned in steps) > 3 * len(steps)


def test_story_has_its_occupancy() -> None:
    given = serving()
    assert [len(p.rows) for _, p in play(given, list(story(given).events))] == [8, 7, 7, 7, 5, 1, 8, 8]
    crossed = [p.rows[i] for _, p in play(given, list(story(given).events)) for i in (0, 5) if len(p.rows) == 7]
    assert {state.cache_seqlen for state in crossed} >= {16, 17}


def test_scheduler_hands_out_what_was_given_back_last() -> None:
    scheduler = Scheduler(serving())
    scheduler.join(40)
    first = scheduler.running[0]
    scheduler.finish(0)
    scheduler.join(40)
    second = scheduler.running[0]
    assert (first.row, sorted(first.pages)) == (second.row, sorted(second.pages))
    assert first.pages != second.pages
    assert scheduler.generations[first.row] == 2


def test_a_shared_page_is_copied_before_it_is_written() -> None:
    scheduler = Scheduler(serving())
    scheduler.join(20)
    scheduler.fork(0)
    first, second = scheduler.running
    assert first.pages == second.pages
    before = scheduler.generations[:]
    scheduler.step(0)
    assert first.pages[0] == second.pages[0] and first.pages[1] != second.pages[1]
    assert scheduler.generations[first.row] == before[first.row] + 1
    assert scheduler.generations[second.row] == before[second.row]


@devices
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_named(fault: str, device: str) -> None:
    planted = FAULTS[fault]
    if device not in planted.runs_on:
        pytest.skip(f"this mistake shows on {', '.join(planted.runs_on)} only")
    if INTERPRETED and planted.name == "cold compile":
        pytest.skip("nothing compiles here")
    attempts = 20 if INTERPRETED or device == "cuda" else 300
    with pytest.raises(ReplayFault) as caught:
        check_replay(planted.step, planted.scenario, device=device, backend=None, buffers=planted.buffers,
                     graphs=planted.graphs, args=planted.args, attempts=attempts)  # fmt: skip
    assert caught.value.fault == planted.name
    assert str(caught.value).startswith(planted.name)


def test_a_step_that_never_asks_for_its_metadata_is_told_so() -> None:
    for step in (lambda buffers, size: buffers.seq_lens[:size] + 1, lambda buffers, size: buffers.out().cache_seqlens):
        with pytest.raises(ReplayFault, match=r"before the first step: the step never calls buffers\.metadata"):
            check_replay(step, backend=None)


def test_there_are_more_than_fifteen_faults_with_a_dozen_names() -> None:
    assert len(FAULTS) >= 15
    assert len({fault.name for fault in FAULTS.values()}) >= 12


@devices
def test_what_a_subclass_registers_may_be_read_and_is_as_it_was_made_in_the_eager_run(device: str) -> None:
    """A step that writes it whole is right; one that goes on from the step before is not."""

    def whole(buffers: Any, batch_size: int) -> Tensor:
        wanted = mask_of(buffers, buffers.metadata(batch_size).cache_seqlens)
        return buffers.mask[:batch_size].copy_(wanted)

    assert check_replay(whole, walk(serving(), 20), device=device, backend=None, buffers=Masked).steps == 20
    with pytest.raises(AttributeError, match=r"a checked step cannot read buffers\.held"):
        check_replay(lambda b, n: (b.metadata(n), b.held), device=device, backend=None, buffers=Masked)


class Caching:
    """Writes token ids into a cache of `serving()`'s 154 pages of 16 slots, where `place` says; -1 is its last slot."""

    def __init__(self, device: str, place: Any) -> None:
        self.cache, self.place = torch.zeros(2464, 2, device=device), place

    def __call__(self, buffers: Any, batch_size: int) -> Tensor:
        slots = buffers.metadata(batch_size).slot_mapping
        tokens = buffers.token_ids[:batch_size, None].expand(batch_size, 2)
        self.cache.index_copy_(0, self.place(slots), tokens.float() + 1)
        return slots


PLACES: dict[str, tuple[Any, str | None]] = {
    "null-slot": (lambda slots: slots.clamp(min=0), None),
    "null-page": (lambda slots: torch.where(slots < 0, 15, slots), None),
    "last-slot": (lambda slots: slots % 2464, r"before the first step: caches\[0\]\[2463\] .*: 0 of 8 rows are live$"),
    "next-page": (lambda slots: slots.clamp(min=0) + 16, r"before the first step: caches\[0\]\[16\] "),
    "next-slot": (lambda slots: slots + 1, r"in step 1 of one: caches\[0\]\[22\] .*: 1 of 1 rows are live"),
}


@devices
@pytest.mark.parametrize(("place", "fault"), PLACES.values(), ids=PLACES)
def test_a_cache_changes_where_live_rows_have_their_tokens_and_in_the_null_page(
    place: Any, fault: str | None, device: str
) -> None:
    """One request of 5 computed tokens in page 1: its next token has slot 16 + 5."""
    step, one = Caching(device, place), Scenario("one", serving(), parse_events("join 5\nstep 0"))
    if fault is None:
        for scenario in (one, story(serving())):
            assert check_replay(step, scenario, device=device, backend=None, caches=[step.cache]).steps > 0
        return
    with pytest.raises(ReplayFault, match=f"^write outside the slots {fault}") as caught:
        check_replay(step, one, device=device, backend=None, caches=[step.cache], attempts=0)
    assert caught.value.fault == "write outside the slots"


def test_a_write_of_what_was_there_is_seen() -> None:
    """As of padding's token 0, whose embedding is 0 where it is the padding's."""
    cache = torch.zeros(2464, 2)

    def step(buffers, batch_size):
        slots = buffers.metadata(batch_size).slot_mapping
        cache[slots % 2464] = (slots >= 0)[:, None].float()
        return slots

    for _ in range(2):  # and again where a run has left it
        with pytest.raises(ReplayFault, match=r"^write outside the slots before the first step: caches\[0\]\[2463\] "):
            check_replay(step, backend=None, caches=[cache])


def test_a_cache_holds_what_it_held_where_nobody_wrote() -> None:
    step = Caching("cpu", lambda slots: slots.clamp(min=0))
    step.cache[:] = float("nan")
    one = Scenario("one", serving(), parse_events("join 5\nstep 0"))
    check_replay(step, one, backend=None, caches=[step.cache])
    assert step.cache.isfinite().any(1).nonzero()[:, 0].tolist() == [0, 21]


def test_a_cache_that_the_step_never_writes_is_refused() -> None:
    step = Caching("cpu", lambda slots: slots.clamp(min=0))
    with pytest.raises(ValueError, match=r"^caches\[1\] was written in no step: is it a copy "):
        check_replay(step, backend=None, caches=[step.cache, step.cache.clone()])


@pytest.mark.parametrize(
    ("caches", "message"),
    [
        (
            [torch.zeros(154, 16)],
            r"caches\[0\] must have in its first dimension the 2464 slots of 154 pages, got 154: "
            "flatten one in pages",
        ),
        ((each for each in ()), "caches must be a list of tensors, got generator"),
        ([[0]], r"caches\[0\] must be a tensor, got list"),
        ([torch.tensor(0)], r"caches\[0\] must have a first dimension of slots, got a tensor without any"),
        (torch.zeros(2464, 2), "caches must be a list of tensors, got Tensor"),
    ],
    ids=["in pages", "generator", "list", "0-d", "alone"],
)
def test_what_is_no_cache_is_refused_by_name(caches: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{message}$"):
        check_replay(caches=caches, backend=None)


class Growing:
    """A cache that is taken anew in a step, for more room, say."""

    def __init__(self) -> None:
        self.keys, self.calls = torch.zeros(64, 1), 0

    def __call__(self, buffers: DecodeBuffers, batch_size: int, keys: Tensor | None = None) -> Tensor:
        self.calls += 1
        if self.calls == 12:
            self.keys = self.keys.clone()
        return buffers.metadata(batch_size).cache_seqlens


def test_a_cache_that_moves_is_seen_where_it_is_looked_up_as_an_argument() -> None:
    assert check_replay(Growing(), backend=None).steps == 8
    growing = Growing()
    with pytest.raises(ReplayFault, match=r"moved pointer .* argument keys moved from 0x\w+ float32 \[64, 1\] to 0x"):
        check_replay(growing, backend=None, attempts=0, args=(Each(lambda: growing.keys),))


class ColdAfter:
    """Calls a function compiled by torch.compile for the first time in a later call than this."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, buffers: DecodeBuffers, batch_size: int) -> Tensor:
        self.left -= 1
        table = buffers.metadata(batch_size).page_table
        return torch.compile(torch.neg, backend="eager")(table) if self.left < 0 else -table


@traces
@pytest.mark.parametrize(
    ("calls", "where"),
    [(5, "before the first step: ColdAfter"), (13, "in step 3 of story: the step")],
    ids=["warming-up", "served"],
)
def test_a_cold_compile_on_the_cpu_speaks_of_no_capture_that_was(calls: int, where: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(ReplayFault) as caught:
        check_replay(ColdAfter(calls), backend=None, attempts=0)
    said = str(caught.value).splitlines()[0]
    assert said.startswith(
        f"cold compile {where} met a function compiled by torch.compile for the first time after warming up, when a "
        "captured step could compile nothing: it must take the same path each time"
    )
    assert "under capture" not in said


def test_failing_scenario_is_cut_to_the_shortest() -> None:
    planted = FAULTS["tail-kept"]
    with pytest.raises(ReplayFault) as caught:
        check_replay(scenario=walk(serving(), 100, seed=2), backend=None, buffers=planted.buffers)
    fault = caught.value
    assert len(fault.scenario.events) <= 8
    assert parse_events(str(fault.scenario)) == fault.scenario.events
    with pytest.raises(ReplayFault, match="stale tail"):
        check_replay(scenario=fault.scenario, backend=None, buffers=planted.buffers, attempts=0)


def test_a_shorter_scenario_that_cannot_be_played_hides_no_fault() -> None:
    """Without its `finish` there would be more requests than the largest bucket holds."""
    events = parse_events("join 40\njoin 40\nfinish 1\njoin 3\nstep 1\nfinish 0\nstep 2")
    planted = FAULTS["tail-kept"]
    with pytest.raises(ReplayFault) as caught:
        check_replay(
            scenario=Scenario("two", serving(), events), batch_sizes=[2], backend=None, buffers=planted.buffers
        )
    assert caught.value.fault == planted.name
    assert len(caught.value.scenario.events) < len(events)


def test_no_steps_are_no_steps() -> None:
    assert check_replay(scenario=walk(serving(), 9), steps=0, backend=None).steps == 0
    with pytest.raises(ValueError, match="steps must be at least 0, got -1"):
        check_replay(steps=-1, backend=None)


def test_shorter_finds_the_two_events_that_matter() -> None:
    events = [Event("join", i) for i in range(40)]
    kept = shorter(events, lambda e: {17, 31} <= {event.a for event in e}, attempts=500)
    assert kept == (Event("join", 17), Event("join", 31))


@pytest.mark.parametrize("text", ["jump 3", "join x", "join 1 2 3"])
def test_a_line_that_is_no_event_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="line 2 must be one of join, finish"):
        parse_events(f"step 1\n{text}")


BATCH = DecodeBatch(rows=[3, 1], seq_lens=[9, 5], generations=[1, 4])


def graphs(step: Step = metadata_step, device: str = "cpu", sizes: Any = (2, 4), **given: Any) -> DecodeGraphs:
    pools = make_pools(serving(), torch.device(device))
    pools["req_to_token"].copy_(torch.arange(pools["req_to_token"].numel()).view_as(pools["req_to_token"]))
    buffers = DecodeBuffers(serving().layout, pools["req_to_token"], max_batch_size=4)
    return DecodeGraphs(step, buffers, sizes, backend=None, **given)


def scaled(buffers: DecodeBuffers, batch_size: int, scale: float, options: dict[str, Any]) -> Tensor:
    return buffers.metadata(batch_size).cache_seqlens * scale + options["bias"]


def test_what_is_no_step_and_no_batch_is_refused_by_name() -> None:
    for refused in (lambda: graphs(step=3), lambda: check_replay(3)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"decode_step must be a function of \(buffers, batch_size\), got int"):
            refused()
    for batch, message in [
        (([3], [9], [1]), "batch must be a DecodeBatch, got tuple"),
        (DecodeBatch(None, [9], [1]), "batch.rows must have one entry for each row, got None"),  # type: ignore[arg-type]
        (DecodeBatch(3, [9], [1]), "batch.rows must be a list, a tuple, or an array or tensor with a dimension, got"),  # type: ignore[arg-type]
        (DecodeBatch(torch.tensor(3), [9], [1]), "batch.rows must be a list, a tuple, or an array or tensor with a"),
    ]:
        with pytest.raises(TypeError, match=message):
            graphs()(batch)  # type: ignore[arg-type]


def test_a_scenario_without_a_request_proves_nothing() -> None:
    with pytest.raises(ValueError, match=r"^scenario must have a request, got 2 steps without one: idle$"):
        check_replay(scenario=Scenario("idle", serving(), (Event("step"), Event("step"))), backend=None)


@pytest.mark.parametrize("events", [(), (Event("join", 9),)], ids=len)
def test_a_scenario_without_a_step_proves_nothing(events: tuple[Event, ...]) -> None:
    with pytest.raises(ValueError, match=f"^scenario must have a step, got {len(events)} events without one: idle$"):
        check_replay(scenario=Scenario("idle", serving(), events), backend=None)


def test_buckets_come_in_a_list() -> None:
    with pytest.raises(TypeError, match=r"^batch_sizes must be a list of ints, got int$"):
        graphs(sizes=4)


@pytest.mark.parametrize("given", [[1], [], "story"])
def test_what_is_no_scenario_is_refused_by_name(given: Any) -> None:
    with pytest.raises(TypeError, match=f"^scenario must be a Scenario, got {type(given).__name__}$"):
        check_replay(scenario=given, backend=None)


def test_an_input_that_differs_from_the_scheduler_says_both_ways_it_can_come_about() -> None:
    """A load that takes one length for another never had its copy overwritten."""
    with pytest.raises(ReplayFault, match=r"late input .* before the device had read it, or loaded as something"):
        check_replay(backend=None, attempts=0, buffers=FAULTS["staging-overwritten"].buffers)


def test_a_wrong_output_says_how_much_of_it_is_wrong() -> None:
    calls = []

    def counting(buffers: DecodeBuffers, batch_size: int) -> Tensor:
        calls.append(None)
        return buffers.metadata(batch_size).cache_seqlens * 0 + len(calls)

    with pytest.raises(ReplayFault, match=r"wrong output .* not equal; Mismatched elements: \d+ / \d+ \(100\.0%\)"):
        check_replay(counting, backend=None, attempts=0)


@devices
def test_a_batch_is_padded_to_its_bucket(device: str) -> None:
    step = graphs(device=device)
    assert step(BATCH).cache_seqlens.tolist() == [9, 5]
    three = DecodeBatch([3, 1, 0], [9, 5, 2], [1, 4, 0])
    assert step(three).cache_seqlens.tolist() == [9, 5, 2, 0]
    assert step(DecodeBatch([], [], [])).cache_seqlens.tolist() == [0, 0]
    assert step.replay(0).cache_seqlens.tolist() == [0, 0]
    assert (step.served, step.captured) == (4, 2 if device == "cuda" else 0)


@devices
@pytest.mark.parametrize("tensors", [False, True], ids=["ints", "tensors"])
def test_a_replay_of_fewer_requests_than_were_loaded_is_refused(tensors: bool, device: str) -> None:
    """Nobody would be left out of a bucket: `num_reqs` on the device says who is live. A larger bucket only pads."""
    step = graphs(device=device)
    fields = [3, 1, 0], [9, 5, 2], [1, 4, 0]
    batch = DecodeBatch(*(torch.tensor(field, device=device) if tensors else field for field in fields))
    step.buffers.load(batch)
    assert step.replay(3).cache_seqlens.tolist() == step.replay(4).cache_seqlens.tolist() == [9, 5, 2, 0]
    for size in (0, 1, 2):
        with pytest.raises(ValueError, match=f"size must be at least the 3 requests that were loaded, got {size}: to"):
            step.replay(size)
    step(DecodeBatch([3], [9], [1]))
    assert step.replay(1).cache_seqlens.tolist() == [9, 0]
    step.buffers.reset()
    assert step.replay(0).cache_seqlens.tolist() == [0, 0]


@devices
def test_a_row_added_on_the_device_is_replayed_by_a_larger_size(device: str) -> None:
    step = graphs(device=device)
    step.buffers.load(DecodeBatch([3, 1], [9, 5], [1, 4]))
    for tensor, value in ((step.buffers.num_reqs, 3), (step.buffers.seq_lens[2:3], 7)):
        tensor.fill_(value)
    assert step.replay(3).cache_seqlens.tolist() == [9, 5, 7, 0]
    step.buffers.num_reqs.fill_(1)
    assert step.replay(2).cache_seqlens.tolist() == [9, 0]


@devices
def test_arguments_are_held_to_their_capture(device: str) -> None:
    bias = torch.zeros(1, device=device)
    step = graphs(scaled, device, args=(2.0, {"bias": bias, "name": "x"}))
    assert step(BATCH).tolist() == step(BATCH, 2.0, {"bias": bias, "name": "x"}).tolist() == [18.0, 10.0]
    bias.fill_(1)
    assert step(BATCH).tolist() == [19.0, 11.0]
    for args, message in [
        ((3.0, {"bias": bias, "name": "x"}), r"argument scale changed from 2.0 to 3.0"),
        ((2, {"bias": bias, "name": "x"}), r"argument scale changed from 2.0 to 2"),
        ((2.0, {"bias": bias, "name": "y"}), r"argument options\['name'\] changed from 'x' to 'y'"),
        ((2.0, {"bias": bias.clone(), "name": "x"}), r"argument options\['bias'\] moved from 0x"),
        ((2.0, {"bias": bias.view(torch.int32), "name": "x"}), r"changed from float32 \[1\] of strides \[1\] to int32"),
        ((2.0, {"bias": bias}), r"argument options\['name'\] must be passed as it was at capture: missing"),
        ((2.0, {"bias": bias, "name": "x"}, 1), r"argument args\[2\] must be passed as it was at capture: added"),
    ]:
        before = step.buffers.inputs.clone()
        with pytest.raises(ValueError, match=message):
            step(DecodeBatch([0], [1], [0]), *args)
        assert torch.equal(step.buffers.inputs, before), "a refused call loaded its batch"


def test_what_graphs_are_made_of_is_refused_by_name() -> None:
    step = graphs(metadata_step, "cpu")
    with pytest.raises(TypeError, match="buffers must be DecodeBuffers, got Tensor"):
        DecodeGraphs(metadata_step, torch.zeros(1), [1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"null_pages\[0\] must be a tensor, got list"):
        DecodeGraphs(metadata_step, step.buffers, [1], null_pages=[[0]])  # type: ignore[list-item]


def plus(buffers: DecodeBuffers, batch_size: int, given: Any) -> Tensor:
    return given + buffers.metadata(batch_size).cache_seqlens[:1]


@devices
def test_a_longest_length_captured_as_1024_is_refused_as_3000(device: str) -> None:
    """Kind 12: same shapes, another Python int."""
    step = graphs(plus, device, args=(1024,))
    assert step(BATCH, 1024).tolist() == [1033]
    with pytest.raises(ValueError, match="argument given changed from 1024 to 3000: a captured graph holds the value"):
        step(BATCH, 3000)


def test_an_array_written_into_is_refused() -> None:
    """It is the captured object still, but the graph holds the numbers that stood in it."""
    scales = np.array([2.0, float("nan")])
    step = graphs(lambda b, size, given: b.metadata(size).cache_seqlens * given[0].item(), args=(scales,))
    assert step(BATCH, scales).tolist() == step(BATCH, scales.copy()).tolist() == [18.0, 10.0]
    scales[0] = 3
    with pytest.raises(ValueError, match=r"argument given changed from array\(\[ 2., nan\]\) to array\(\[ 3., nan\]\)"):
        step(BATCH, scales)
    with pytest.raises(ValueError, match="argument given changed from"):
        step(BATCH, np.array([[2.0, float("nan")]]))


@devices
def test_lengths_made_anew_outside_the_graph_are_refused(device: str) -> None:
    """Kind 14: `cache_seqlens = seq_lens + 1` in each step."""
    seq_lens = torch.tensor([9], dtype=torch.int32, device=device)
    step = graphs(plus, device, args=(seq_lens + 1,))
    with pytest.raises(
        ValueError, match=r"argument given moved from 0x\w+ int32 \[1\] to 0x\w+ int32 \[1\]: a captured"
    ):
        step(BATCH, seq_lens + 1)


@devices
def test_an_output_fed_back_is_refused(device: str) -> None:
    """Kind 20."""
    step = graphs(plus, device, args=(torch.zeros(1, dtype=torch.int32, device=device),))
    with pytest.raises(ValueError, match="argument given is an output of these graphs, in their memory pool"):
        step(BATCH, step(BATCH))


class Scale(float):
    """A number that is equal to nothing else."""

    def __eq__(self, other: object) -> Any:
        return torch.tensor([True, False])

    __hash__ = float.__hash__


def test_an_argument_that_compares_like_no_number_is_held_to_the_object() -> None:
    scale, nan = Scale(2.0), float("nan")
    for value, other in ((scale, Scale(2.0)), (nan, float("nan"))):
        step = graphs(scaled, args=(value, {"bias": torch.zeros(1)}))
        step(BATCH, value, step.args[1])
        with pytest.raises(ValueError, match="argument scale changed from"):
            step(BATCH, other, step.args[1])


@traces
def test_a_function_compiled_for_the_first_time_after_warming_up_is_named() -> None:
    """Kind 17: warming up did not come by it."""
    calls: list[int] = []

    def late(buffers: DecodeBuffers, batch_size: int) -> Tensor:
        calls.append(batch_size)
        lengths = buffers.metadata(batch_size).cache_seqlens
        return torch.compile(torch.neg, backend="eager")(lengths) if len(calls) > 2 else -lengths

    with pytest.raises(RuntimeError, match=r"late met a function compiled by torch.compile for the first time after"):
        graphs(late)
    assert calls == [4, 2, 4]


@devices
def test_a_buffer_that_moved_is_refused_by_name(device: str) -> None:
    step = graphs(device=device)
    step.buffers.page_table = step.buffers.page_table.clone()
    with pytest.raises(ValueError, match=r"buffers.page_table moved from 0x\w+ to 0x\w+: a captured graph reads"):
        step(BATCH)


@devices
def test_sizes_are_checked(device: str) -> None:
    step = graphs(device=device, sizes=[3])
    with pytest.raises(ValueError, match=r"batch.rows must hold at most 3 requests, the largest bucket, got 4"):
        step(DecodeBatch([0, 1, 2, 3], [1] * 4, [0] * 4))
    with pytest.raises(ValueError, match="size must be at most 3, got 4"):
        step.replay(4)
    for sizes, message in [
        ([], "at least one size, got none"),
        ([0], r"batch_sizes\[0\] must be at least 1"),
        ([5], "at most 4, got 5"),
    ]:
        with pytest.raises(ValueError, match=message):
            graphs(device=device, sizes=sizes)


@devices
def test_warming_up_leaves_no_trace(device: str) -> None:
    """Kind 16: no slot but -1 while nobody is live, the null page as it was, buffers as new."""
    pool = torch.zeros(64, device=device)
    seen: list[Tensor] = []

    def writing(buffers: DecodeBuffers, batch_size: int) -> Tensor:
        slots = buffers.metadata(batch_size).slot_mapping
        seen.append(slots.clone())
        pool.index_fill_(0, slots.clamp(min=0), 7.0)
        return slots

    step = graphs(writing, device, null_pages=[pool[:16]])
    assert (pool == 0).all()
    if device == "cpu":
        assert {slot for slots in seen for slot in slots.tolist()} == {-1}
    assert all((t == 0).all() for t in (*step.buffers.out(), step.buffers.inputs) if t is not None)


@devices
def test_padding_rows_read_nothing_of_the_request_left_in_them(device: str) -> None:
    """Kind 16: captured 4, live 2, indices 4 and 4 left over in the rows beyond."""
    step = graphs(device=device, sizes=[4])
    step(DecodeBatch([5, 3, 4, 4], [9, 20, 33, 33], [0, 0, 0, 0]))
    meta = step(DecodeBatch([5, 3], [10, 21], [0, 0]))
    assert meta.page_table[2:].tolist() == [[0] * meta.page_table.shape[1]] * 2
    assert meta.slot_mapping[2:].tolist() == [-1, -1] and meta.cache_seqlens[2:].tolist() == [0, 0]


def test_a_stage_of_its_own_is_refused_in_a_checked_step() -> None:
    with pytest.raises(ValueError, match="q_len must be the buffers' own in a checked step, got 2"):
        check_replay(lambda buffers, size: buffers.metadata(size, q_len=2), backend=None)


def test_a_checked_step_reads_the_buffers_settings() -> None:
    """They are what a step's own shapes are made of; naming their value is no stage of its own."""

    def step(buffers: Any, size: int) -> Tensor:
        assert not buffers.ragged and not buffers.given_slots and buffers.max_num_tokens >= size * buffers.q_len
        return buffers.metadata(size, buffers.seq_len_delta, q_len=buffers.q_len).cache_seqlens

    assert check_replay(step, walk(serving(mode="verify"), 20), backend=None).steps == 20


def test_a_read_in_code_that_was_typed_is_placed_there() -> None:
    code = "def typed(buffers, size):\n    return buffers.metadata(size).cache_seqlens.sum().item()\n"
    names: dict[str, Any] = {}
    exec(compile(code, "<ipython-input-3-abc>", "exec"), names)
    with pytest.raises(ReplayFault, match=r"at <ipython-input-3-abc>:2"):
        check_replay(names["typed"], walk(serving(), 5), backend=None)


def cut_by_value(buffers: DecodeBuffers, batch_size: int) -> Tensor:
    meta = buffers.metadata(batch_size)
    return meta.slot_mapping[: int(meta.cu_seqlens_q[-1])]


def branching_by_value(buffers: DecodeBuffers, batch_size: int) -> Tensor:
    lengths = buffers.metadata(batch_size).cache_seqlens
    return lengths if lengths.max().item() > 100 else lengths + 1


@traces
@pytest.mark.parametrize(("step", "read"), [(cut_by_value, "__int__"), (branching_by_value, "item")])
@pytest.mark.parametrize("ready", [False, True], ids=["eager", "compiled"])
def test_a_host_read_that_no_compiler_takes_is_named_by_its_line(step: Step, read: str, ready: bool) -> None:
    given = torch.compile(step, fullgraph=True, dynamic=True, backend="inductor") if ready else step
    pools = make_pools(serving(), torch.device("cpu"))
    buffers = DecodeBuffers(serving().layout, pools["req_to_token"], max_batch_size=4)
    line = step.__code__.co_firstlineno + 2
    with pytest.raises(RuntimeError) as caught:
        DecodeGraphs(given, buffers, [2])
    said = f"{step.__name__} cannot be captured: the step calls Tensor.{read} at {__file__}:{line}, and no graph can"
    assert str(caught.value).startswith(said)
    assert "compiled-kv audit" in str(caught.value)


def test_a_host_read_inside_pythons_own_library_is_named_by_the_line_that_called_it() -> None:
    def with_a_mean(buffers: DecodeBuffers, batch_size: int) -> Tensor:
        lengths = buffers.metadata(batch_size).cache_seqlens
        return lengths - statistics.fmean(lengths)

    line = with_a_mean.__code__.co_firstlineno + 2
    with pytest.raises(ReplayFault, match=rf"host read before the first step: .* at {re.escape(__file__)}:{line}$"):
        check_replay(with_a_mean, story(serving()), backend=None)


@traces
def test_what_a_compiler_says_of_a_step_without_a_host_read_is_passed_on() -> None:
    def failing(buffers: DecodeBuffers, batch_size: int) -> Tensor:
        torch._dynamo.graph_break()
        return buffers.metadata(batch_size).cache_seqlens

    pools = make_pools(serving(), torch.device("cpu"))
    buffers = DecodeBuffers(serving().layout, pools["req_to_token"], max_batch_size=4)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        DecodeGraphs(failing, buffers, [2])


STAGED = KVLayout(page_size=4, max_context_len=24, max_draft_tokens=3, window=6)


def staged(buffers: DecodeBuffers, batch_size: int) -> list[list[Tensor]]:
    """Draft steps, verify, and draft-extend of as many tokens as the device says."""
    accepted = buffers.seq_lens[:batch_size] % 3 + 1
    found = [[t.clone() for t in buffers.metadata(batch_size, k, q_len=1)] for k in (1, 2, 3)]
    found.append([t.clone() for t in buffers.metadata(batch_size)])
    after = buffers.metadata(batch_size, 0, q_len=accepted, seq_lens=buffers.seq_lens[:batch_size] + accepted)
    return [*found, list(after)]


@devices
def test_stages_in_one_graph_are_each_as_if_it_were_alone(device: str) -> None:
    pool, _ = pool_of_pages(6, 7, 4)
    token_map = torch.arange(4 * 50) % 90
    buffers = DecodeBuffers(
        STAGED, pool.to(device), max_batch_size=4, q_len=3, seq_len_delta=3, full_to_swa=token_map.to(device)
    )
    step = DecodeGraphs(staged, buffers, [2, 4], backend=None)
    for rows, seq_lens in [
        ([3, 1], [9, 5]),
        ([3, 1, 4], [11, 6, 2]),
        ([4], [3]),
        ([], []),
        ([2, 4, 0, 3], [24, 4, 7, 13]),
    ]:
        size = 4 if len(rows) > 2 else 2
        padding = [0] * (size - len(rows))
        accepted = [length % 3 + 1 for length in seq_lens]
        stages = [(seq_lens, {"seq_len_delta": k, "q_len": 1}) for k in (1, 2, 3)]
        stages.append((seq_lens, {"seq_len_delta": 3, "q_len": 3}))
        after = [length + count for length, count in zip(seq_lens, accepted)]
        stages.append((after, {"q_len": torch.tensor([*accepted, *padding]), "num_tokens": 3 * size}))
        outputs = step(DecodeBatch(rows, seq_lens, [1] * len(rows)))
        for found, (lengths, given) in zip(outputs, stages, strict=True):
            wanted, _ = reference.decode_metadata(
                pool, torch.tensor([*rows, *padding]), torch.tensor([*lengths, *padding]), layout=STAGED,
                num_reqs=torch.tensor(len(rows)), full_to_swa=token_map, **given,
            )  # fmt: skip
            assert [t.tolist() for t in found] == [t.tolist() for t in wanted], (rows, given)


def test_powers_of_two_end_with_the_largest() -> None:
    assert [powers_of_two(n) for n in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]


STEPS_FILE = """
def good(buffers, batch_size):
    return buffers.metadata(batch_size).cache_seqlens * 2

def reads(buffers, batch_size):
    meta = buffers.metadata(batch_size)
    return meta.cache_seqlens.max().item()

calls = []

def counts_drafts(buffers, batch_size):
    calls.append(None)
    lengths = buffers.metadata(batch_size).cache_seqlens
    return lengths + len(calls) if buffers.q_len == 4 else lengths

def decodes(buffers, batch_size):
    if buffers.q_len > 1:
        raise NotImplementedError("one token a row")
    return buffers.metadata(batch_size).cache_seqlens

def lacks_a_size(buffers):
    return buffers.metadata(1)

def says_nothing(buffers, batch_size):
    raise ValueError

def leaves(buffers, batch_size):
    raise SystemExit(0)

def reads_drafts(buffers, batch_size):
    return reads(buffers, batch_size) if buffers.q_len == 4 else decodes(buffers, batch_size)
"""


@pytest.mark.parametrize(
    ("arguments", "status", "shown"),
    [
        (["steps:good", "--scenario", "story"], 0, "extend: story: 8 steps, 15 requests"),
        (
            ["--scenario", "walk", "--steps", "20", "--mode", "verify", "--window", "40"],
            0,
            "verify: walk, seed 0: 20 steps",
        ),
        (["steps:reads", "--mode", "decode"], 1, "host read before the first step: the step calls Tensor.item at"),
        (["--events", "short.txt", "--mode", "decode"], 0, "decode: short.txt: 1 steps, 1 requests"),
        (["--scenario", "walk", "--steps", "1", "--mode", "decode"], 0, "decode: walk, seed 0: 1 steps, 1 requests"),
        (["--events", "idle.txt"], 2, "decode: scenario must have a request, got 2 steps without one: idle.txt"),
        (
            ["steps:reads_drafts", "--events", "idle.txt"],
            1,
            "decode: 0 of 1 scenarios, 0 steps, buckets [1, 2, 4, 8]: refused, n",
        ),
        (
            ["steps:leaves", "--scenario", "story", "--mode", "decode"],
            2,
            "refused, the step raised SystemExit in story",
        ),
        (["--events", "joins.txt"], 2, "decode: scenario must have a step, got 1 events without one: joins.txt"),
        (["--events", "steps.py"], 2, "steps.py: line 2 must be one of join, finish"),
        (["--events", "none.txt"], 2, "none.txt: No such file"),
        (["--trace", "none.csv"], 2, "none.csv: No such file"),
        (["steps.py:good", "--scenario", "story", "--mode", "decode"], 0, "decode: story: 8 steps, 15 requests"),
        (["steps:none"], 2, "Error: steps has no function none"),
        (["steps:__name__"], 2, "Error: steps has no function __name__"),
        (["broken:step"], 2, "Error: cannot import broken: SyntaxError: "),
    ],
    ids=lambda value: value[0].replace(":", "-") if isinstance(value, list) else "",
)
def test_command(
    arguments: list[str], status: int, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text("def step(:\n")
    (tmp_path / "short.txt").write_text("join 20\nstep 0\n")
    (tmp_path / "idle.txt").write_text("step 0\nstep 0\n")
    (tmp_path / "joins.txt").write_text("join 20\n")
    ran = replay(arguments, tmp_path, monkeypatch)
    assert ran.exit_code == status, ran.output
    assert shown in ran.output


def replay(arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command, run in `folder` beside the steps."""
    testing = pytest.importorskip("click.testing")
    from compiled_kv.replay.command import command

    (folder / "steps.py").write_text(STEPS_FILE)
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "steps", raising=False)
    monkeypatch.setattr(sys, "path", sys.path[:])
    return testing.CliRunner().invoke(command, [*arguments, "--eager"])


WHOLE = "3 of 3 scenarios, 10 steps, buckets [1, 2]: passed"  # 8 of the story, one of the walk, one of the trace
RAISED = "0 of 3 scenarios, 0 steps, buckets [1, 2]: refused, the step raised NotImplementedError in story"


@pytest.mark.parametrize(
    ("step", "status", "modes"),
    [
        ("good", 0, {"decode": WHOLE, "verify": WHOLE, "extend": WHOLE}),
        (
            "counts_drafts",
            1,
            {
                "decode": WHOLE,
                "verify": "0 of 3 scenarios, 0 steps, buckets [1, 2]: failed, wrong output in story",
                "extend": WHOLE,
            },
        ),
        ("decodes", 2, {"decode": WHOLE, "verify": RAISED, "extend": RAISED}),
    ],
    ids=["all", "all-but-one", "one"],
)
def test_command_says_of_each_mode_whether_it_passed(
    step: str, status: int, modes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = replay([f"steps:{step}", "--steps", "1", "--batch", "2"], tmp_path, monkeypatch)
    assert ran.exit_code == status, ran.output
    said = [line for line in ran.stdout.splitlines() if " of 3 scenarios" in line]
    assert said == [f"{mode}: {verdict}" for mode, verdict in modes.items()]


def test_command_goes_on_behind_a_fault_which_weighs_more_than_a_mode_that_the_step_does_not_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = replay(["steps:reads_drafts", "--scenario", "story"], tmp_path, monkeypatch)
    assert ran.exit_code == 1
    errors = [line for line in ran.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 2
    assert errors[0].startswith("Error: verify: host read before the first step: the step calls Tensor.item at")
    line = STEPS_FILE[: STEPS_FILE.index('"one token a row"')].count("\n") + 1
    assert errors[1] == (
        "Error: extend: steps:reads_drafts, called as step(buffers, batch_size), raised NotImplementedError: one token "
        f"a row, at {tmp_path / 'steps.py'}:{line} (--mode plays only what the step serves)"
    )


@pytest.mark.parametrize(
    ("step", "raised"),
    [
        ("lacks_a_size", "TypeError: lacks_a_size() takes 1 positional argument but 2 were given"),
        ("says_nothing", "ValueError, at {file}:{line}"),
    ],
)
def test_command_places_an_error_in_the_step_alone(
    step: str, raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = replay([f"steps:{step}", "--mode", "decode"], tmp_path, monkeypatch)
    line = STEPS_FILE[: STEPS_FILE.index("raise ValueError")].count("\n") + 1
    where = raised.format(file=tmp_path / "steps.py", line=line)
    assert f"batch_size), raised {where} (--mode plays only what the step serves)\n" in ran.stderr


@pytest.mark.parametrize("terminal", [False, True], ids=["plain", "terminal"])
def test_command_says_what_takes_so_long_beside_its_output(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    from compiled_kv.replay.command import command

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1" if terminal else "")
    command(["--scenario", "story", "--mode", "decode", "--eager"], standalone_mode=False)
    out, err = capsys.readouterr()
    scenario, mode = out.splitlines()
    assert scenario.startswith("decode: story: 8 steps, 15 requests")
    assert mode == "decode: 1 of 1 scenarios, 8 steps, buckets [1, 2, 4, 8]: passed"
    if terminal:
        assert "decode: story: playing" in err and err.endswith("\r\x1b[1A\x1b[2K")
    else:
        assert err == "decode: story: playing\n"


STEP = """
import torch

def decode_step(buffers, batch_size):
    meta = buffers.metadata(batch_size)
    {line}
    return keys
"""
TEST = """
from compiled_kv.replay.scenarios import serving
from step import decode_step

def test_step_stays_right_when_captured(check_replay):
    story, walk = check_replay(decode_step, serving=serving("verify", window=64), steps=30, backend=None, attempts=40)
    assert (story.steps, walk.steps) == (8, 30)
"""


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("keys = meta.cache_seqlens * 2", None),
        ("keys = meta.cache_seqlens[: int(meta.cu_seqlens_q[-1]) + 1]", "host read before the first step*step.py:5"),
        ("meta.page_table[:, -1] = 7; keys = meta.slot_mapping", "stale tail in step 1 of story*holds 7, expected 0*"),
    ],
    ids=["right", "reading", "overwriting"],
)
def test_fixture_in_a_project_of_its_own(pytester: pytest.Pytester, line: str, fault: str | None) -> None:
    pytester.makepyfile(step=STEP.format(line=line), test_step=TEST)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=int(fault is None), failed=int(fault is not None))
    if fault is not None:
        result.stdout.fnmatch_lines([f"*ReplayFault: {fault}"])


@pytest.mark.gpu
@needs_cuda
def test_a_kernel_first_met_under_capture_is_named() -> None:
    """Kind 17."""
    import triton
    import triton.language as tl

    @triton.jit
    def never_seen(ptr):
        tl.store(ptr, 1)

    def late(buffers: DecodeBuffers, batch_size: int) -> Tensor:
        meta = buffers.metadata(batch_size)
        if torch.cuda.is_current_stream_capturing():
            never_seen[(1,)](meta.cache_seqlens)
        return meta.cache_seqlens

    with pytest.raises(RuntimeError, match=r"met kernel .*never_seen.* for the first time under capture"):
        graphs(late, "cuda")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("mode", MODES)
def test_reduce_overhead_captures_a_step_and_is_right(mode: str) -> None:
    """Buffers of a module are captured, though they are mutated; counted, and over the story."""
    from torch._dynamo.utils import counters
    from torch._inductor.cudagraph_trees import get_manager

    counters.clear()
    given = serving(mode, window=40)
    compiled = torch.compile(metadata_step, mode="reduce-overhead", fullgraph=True)

    class Caller:
        """Calls the step as a user would, without DecodeGraphs."""

        def __init__(self, step: Step, buffers: DecodeBuffers, sizes: list[int], *_: Any, **__: Any) -> None:
            self.buffers, self.batch_sizes = buffers, sizes
            for size in sizes * 3:
                compiled(buffers, size)
            buffers.reset()

        def __call__(self, batch: DecodeBatch) -> Any:
            size = next(size for size in self.batch_sizes if size >= self.buffers.load(batch))
            compiled(self.buffers, size)

    check_replay(scenario=story(given), device="cuda", backend=None, graphs=Caller, outputs_every=0, attempts=0)  # type: ignore[arg-type]
    assert counters["inductor"]["cudagraph_skips"] == 0
    manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    assert manager is not None and manager.new_graph_id().id > 0


@pytest.mark.gpu
@needs_cuda
@traces
def test_a_compiled_step_is_captured() -> None:
    step = torch.compile(metadata_step, fullgraph=True, dynamic=True)
    report = check_replay(step, walk(serving("verify", window=40), 200, seed=4), device="cuda")
    assert report.steps == 200
