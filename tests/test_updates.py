"""`update_metadata` writes what changed and nothing else, in any sequence of calls, as the oracle in Python ints
does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compiled_kv.layout import KVLayout
from compiled_kv.metadata_parts import DecodeMetadata
from compiled_kv.tracing.graphs import capture
from compiled_kv.updates import clear_held, new_held, update_metadata
from tests.cases import CASES, DEVICES, LAYOUT, batch, needs_cuda, pool_of_pages
from tests.conftest import INTERPRETED
from tests.harness import Batch, bit_names
from tests.strategies import Choices, batch_of, layout_of
from tests.update_oracle import Tables

CAPACITY, SPARE = 11, 2
EXAMPLES = int(os.environ.get("COMPILED_KV_EXAMPLES", "200")) // 20 if INTERPRETED else 200
ON_A_DEVICE = 12  # of a sequence of calls, nearly each of which compiles a form of the kernel
COMPILED_EXAMPLES = 200 if "COMPILED_KV_EXAMPLES" in os.environ else 40
traces = pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be traced")
devices = pytest.mark.parametrize("device", DEVICES)
Call = dict[str, Any]


class Rig:
    """The same persistent tensors twice: the operator's on a device, the oracle's in Python."""

    def __init__(self, layout: KVLayout, device: str, num_tokens: int | None, mapped: bool) -> None:
        width = layout.max_num_pages + SPARE
        self.oracle = Tables(layout, CAPACITY, num_tokens, mapped, width)
        self.held = new_held(layout, CAPACITY, device)
        self.status = torch.zeros(1, dtype=torch.int32, device=device)
        self.out = DecodeMetadata(*(None if t is None else t.clone().to(device) for t in self.oracle.fields))  # type: ignore[arg-type]
        self.layout, self.device, self.bits = layout, device, 0

    def step(self, call: Call, update: Callable[..., DecodeMetadata] = update_metadata) -> None:
        on_device = {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in call.items()}
        views = update(**on_device, held=self.held, out=self.out, status=self.status)
        self.bits |= self.oracle.update(call)
        for name, found, view, wanted in zip(self.out._fields, self.out, views, self.oracle.fields, strict=True):
            if found is not None:
                assert found.tolist() == wanted.tolist(), name
                assert view.tolist() == found[: len(view)].tolist(), name
                assert view.untyped_storage().data_ptr() == found.untyped_storage().data_ptr(), name
        records = [set(map(tuple, row)) for row in self.held.tolist()]
        assert records == [{record} for record in self.oracle.held]
        assert bit_names(int(self.status)) == bit_names(self.bits)


def call_of(batch: Batch, generations: Tensor, mode: dict[str, Any]) -> Call:
    """A call in one of the modes that a sequence keeps."""
    call: Call = {"req_to_token": batch.req_to_token, "req_pool_indices": batch.rows, "seq_lens": batch.seq_lens}
    call |= {"generations": generations, "layout": batch.layout, "seq_len_delta": batch.delta}
    call |= {"pad_seqlen": batch.pad_seqlen, "q_len": batch.q_lens if mode["ragged"] else batch.q_len}
    call |= {"num_reqs": torch.tensor([batch.num_reqs])} if mode["padded"] else {}
    call |= {"full_to_swa": batch.token_map} if mode["mapped"] == "token" else {}
    call |= {"page_map": batch.page_map} if mode["mapped"] == "page" else {}
    if mode["given"]:
        return call | {"slots": batch.slots, "num_tokens": max(len(batch.slots), batch.num_tokens)}
    return call | ({"num_tokens": batch.num_tokens} if mode["ragged"] else {})


def sequence_of(
    data: bytes, layout: KVLayout | None = None, mode: dict[str, Any] | None = None, least: int = 0
) -> list[Call]:
    """Calls on one set of tables: now the batch before grown or shrunk a little, now an unrelated one."""
    choices = Choices(data)
    layout = layout or layout_of(choices)
    drawn = {"mapped": choices.of(["", "token", "page"])}
    drawn |= {name: choices.of([False, True]) for name in ("ragged", "padded", "given")}
    batch, calls = batch_of(choices, layout, least), []
    for _ in range(2 + choices.of(range(5))):
        generations = choices.many([0, 0, 0, 1], len(batch.rows))
        calls.append(call_of(batch, generations, mode or drawn))
        if choices.of([True, True, False]):
            grown = batch.seq_lens.clamp(-9, 99) + choices.many([1, 0, 2, layout.page_size, -1], len(batch.rows))
            batch = replace(batch, seq_lens=grown, num_reqs=choices.of([batch.num_reqs, 1, 3, 9]))
        else:
            batch = replace(batch_of(choices, layout, least), token_map=batch.token_map)
    return calls


def follow(calls: list[Call], device: str, update: Callable[..., DecodeMetadata] = update_metadata) -> None:
    first = calls[0]
    rig = Rig(first["layout"], device, 40, "full_to_swa" in first or "page_map" in first)
    if first["layout"] is not None and "num_tokens" not in first and isinstance(first["q_len"], Tensor):
        rig.out = rig.out._replace(slot_mapping=None, swa_slot_mapping=None)
    for call in calls:
        rig.step(call, update)


@devices
def test_any_sequence_equals_the_oracle(device: str) -> None:
    @settings(max_examples=EXAMPLES if device == "cpu" else ON_A_DEVICE)
    @given(st.binary(min_size=420, max_size=420).map(sequence_of))
    def equals_the_oracle(calls: list[Call]) -> None:
        follow(calls, device)

    equals_the_oracle()


MODES = {
    "decode": {"mapped": "token", "ragged": False, "padded": True, "given": False},
    "ragged": {"mapped": "page", "ragged": True, "padded": True, "given": False},
}


@traces
@devices
@pytest.mark.parametrize("mode", MODES)
def test_any_sequence_compiled_equals_the_oracle(mode: str, device: str) -> None:
    """One dynamic graph for every batch of two rows and more."""
    compiled = torch.compile(update_metadata, fullgraph=True, dynamic=True)

    @settings(max_examples=COMPILED_EXAMPLES)
    @given(st.binary(min_size=420, max_size=420))
    def equals_the_oracle(data: bytes) -> None:
        follow(sequence_of(data, LAYOUT, MODES[mode], least=2), device, compiled)

    with torch._dynamo.config.patch(recompile_limit=4):
        follow([call_of(CASES["distinct-sizes"], torch.zeros(3, dtype=torch.int64), MODES[mode])], device, compiled)
        equals_the_oracle()


POOL, _ = pool_of_pages(4, 5, 4)
PAGES = (POOL[:, ::4] // 4).tolist()
SMALL = KVLayout(page_size=4, max_context_len=20)


def steps(*batches: tuple[int, int, int]) -> Iterator[Call]:
    """One-row calls: (pool row, generation, length)."""
    for row, generation, length in batches:
        given = {"req_pool_indices": [row], "seq_lens": [length], "generations": [generation]}
        yield {"req_to_token": POOL, "layout": SMALL, **{name: torch.tensor(values) for name, values in given.items()}}


@devices
@pytest.mark.parametrize(
    ("before", "after", "row", "poisoned"),
    [
        ((1, 7, 6), (1, 7, 8), [-5, -5, 0, 0, 0], "nothing is written within a page"),
        ((1, 7, 8), (1, 7, 9), [-5, -5, PAGES[1][2], 0, 0], "one column at a page's edge"),
        ((1, 7, 9), (1, 7, 10), [-5, -5, PAGES[1][2], 0, 0], "once more what the last step's own token began"),
        ((1, 7, 10), (1, 7, 11), [-5, -5, -5, 0, 0], "and then no more"),
        ((1, 7, 8), (1, 8, 9), [*PAGES[1][:3], 0, 0], "everything for another generation"),
        ((1, 7, 8), (2, 7, 9), [*PAGES[2][:3], 0, 0], "everything for another row"),
        ((1, 7, 17), (1, 7, 5), [*PAGES[1][:2], 0, 0, 0], "everything, and a clean tail, where it shrank"),
        ((1, 7, 17), (9, 7, 5), [0, 0, 0, 0, 0], "clean all over for a row outside the pool"),
        ((1, 7, 17), (1, 7, 0), [0, 0, 0, 0, 0], "clean all over for length 0"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)  # fmt: skip
def test_only_what_changed_is_written(before: Any, after: Any, row: list[int], poisoned: str, device: str) -> None:
    """Columns that the first call filled are poisoned behind its back: what keeps the poison was not written."""
    rig = Rig(SMALL, device, 1, mapped=False)
    first, second = (
        {k: v.to(device) if isinstance(v, Tensor) else v for k, v in c.items()} for c in steps(before, after)
    )
    update_metadata(**first, held=rig.held, out=rig.out)
    live = SMALL.num_pages(before[2])
    rig.out.page_table[0, :live] = -5
    update_metadata(**second, held=rig.held, out=rig.out)
    assert rig.out.page_table[0].tolist() == [*row, 0, 0]


@devices
def test_pages_of_drafts_are_written_in_every_step(device: str) -> None:
    """Drafts rejected, their page given back and another taken: same row, same generation, same length."""
    rig, pool = Rig(SMALL, device, 4, mapped=False), POOL.clone()
    (call,) = steps((1, 7, 7))
    call |= {"req_to_token": pool, "seq_len_delta": 3, "q_len": 3}
    rig.step(call)
    pool[1, 8:12] = torch.arange(4) + 4 * 99
    rig.step(call)
    assert rig.out.page_table[0, :4].tolist() == [*PAGES[1][:2], 99, 0]


@devices
@pytest.mark.parametrize("lengths", [(5, 5), (6, 5), (5, 6), (9, 9), (9, 8)])
def test_a_decode_step_taken_back_may_get_another_page(lengths: tuple[int, int], device: str) -> None:
    """Same row, same generation; the page of the first step's own token went back to the pool."""
    rig, pool = Rig(SMALL, device, 4, mapped=False), POOL.clone()
    first, second = (call | {"req_to_token": pool} for call in steps(*((1, 7, length) for length in lengths)))
    rig.step(first)
    column = (lengths[0] - 1) // 4
    pool[1, 4 * column : 4 * column + 4] = torch.arange(4) + 4 * 99
    rig.step(second)
    fresh = [*PAGES[1][:column], 99, *PAGES[1][column + 1 :]]
    live = SMALL.num_pages(lengths[1])
    assert rig.out.page_table[0, :5].tolist() == [*fresh[:live], *[0] * (5 - live)]


@devices
def test_window_leaves_null_pages_behind(device: str) -> None:
    layout = replace(SMALL, window=5)
    rig = Rig(layout, device, 1, mapped=True)
    token_map = torch.arange(400)
    for length, visible in [(9, [1, 2]), (12, [1, 2]), (13, [2, 3]), (17, [3, 4])]:
        (call,) = steps((1, 7, length))
        rig.step(call | {"layout": layout, "full_to_swa": token_map})
        expected = [PAGES[1][column] if column in visible else 0 for column in range(5)]
        assert rig.out.swa_page_table[0, :5].tolist() == expected
        token_map[PAGES[1][visible[0]] * 4 - 4 : PAGES[1][visible[0]] * 4] = -1


def test_a_record_full_of_rubbish_stays_within_the_row() -> None:
    rig = Rig(SMALL, "cpu", 1, mapped=False)
    rig.out.page_table.fill_(-5)
    rig.held.copy_(torch.tensor([1, 7, -(2**31), 2**31 - 1, 2**31 - 1]))
    (call,) = steps((1, 7, 9))
    update_metadata(**call, held=rig.held[:1], out=rig.out)
    assert rig.out.page_table[0].tolist() == [*PAGES[1][:3], 0, 0, 0, 0]
    assert (rig.out.page_table[1:] == -5).all()


def test_clear_held_forgets() -> None:
    held = torch.full((2, 3, 5), 9)
    assert clear_held(held).tolist() == new_held(SMALL, 2, "cpu")[:, :1].expand(2, 3, 5).tolist()


WRONG: list[tuple[str, Call, type[Exception], str]] = [
    ("float-generations", {"generations": torch.zeros(3)}, TypeError,
     "generations must be int32 or int64, got float32"),
    ("short-generations", {"generations": torch.zeros(2, dtype=torch.int64)}, ValueError,
     "generations must be [B] with B=3"),
    ("narrow-record", {"held": torch.zeros(11, 2, 4, dtype=torch.int64)}, ValueError,
     "held must be contiguous [M, parts, 5]"),
    ("int32-record", {"held": torch.zeros(11, 2, 5, dtype=torch.int32)}, TypeError, "held must be int64, got int32"),
    ("small-record", {"held": torch.zeros(2, 2, 5, dtype=torch.int64)}, ValueError, "held must have at least 3 rows"),
    ("many-parts", {"held": torch.zeros(512, 257, 5, dtype=torch.int64)}, ValueError,
     "held must be made by new_held, which makes fewer parts, got [512, 257, 5]"),
    ("small-table", {"page_table": torch.zeros(2, 7, dtype=torch.int32)}, ValueError,
     "out.page_table must have at least 3 rows"),
    ("narrow-table", {"page_table": torch.zeros(11, 4, dtype=torch.int32)}, ValueError,
     "out.page_table must have at least 7 columns"),
    ("int64-table", {"page_table": torch.zeros(11, 7, dtype=torch.int64)}, TypeError,
     "out.page_table must be int32, got int64"),
    ("short-sums", {"cu_seqlens_k": torch.zeros(3, dtype=torch.int32)}, ValueError,
     "out.cu_seqlens_k must have at least 4 entries"),
    ("no-slots", {"slot_mapping": None}, ValueError, "out.slot_mapping must be a tensor for this call, got None"),
    ("swa-without-map", {"swa_page_table": torch.zeros(11, 7, dtype=torch.int32)}, ValueError,
     "out.swa_page_table must be None"),
    ("few-slots", {"slot_mapping": torch.zeros(2, dtype=torch.int64)}, ValueError,
     "out.slot_mapping must have at least 6 entries"),
    ("pair-for-out", {"out": (1, 2)}, TypeError, "out must be a DecodeMetadata, got tuple"),
    ("bad-delta", {"seq_len_delta": -1}, ValueError, "seq_len_delta must be at least 0, got -1"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_bad_input_is_refused_by_name_before_any_write(change: Call, error: type[Exception], message: str) -> None:
    rig = Rig(LAYOUT, "cpu", 40, mapped=False)
    call = {
        **call_of(
            batch(), torch.zeros(3, dtype=torch.int64), {"mapped": "", "ragged": False, "padded": False, "given": False}
        )
    }
    call |= {"held": rig.held, "out": rig.out}
    fields = {name: value for name, value in change.items() if name in DecodeMetadata._fields}
    call |= {"out": rig.out._replace(**fields)} if fields else change
    with pytest.raises(error) as caught:
        update_metadata(**call)
    assert message in str(caught.value)
    assert (rig.out.cache_seqlens == -77).all() and (rig.out.page_table == 0).all()


def test_overlapping_outputs_are_refused() -> None:
    rig = Rig(SMALL, "cpu", 1, mapped=False)
    (call,) = steps((1, 7, 9))
    with pytest.raises(ValueError, match="must not overlap"):
        update_metadata(**call, held=rig.held, out=rig.out._replace(cu_seqlens_k=rig.out.cu_seqlens_q))


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_status_inside_an_input_is_refused(is_compiled: bool) -> None:
    """While tracing, two views of one memory are two objects: the operator's own body sees them."""
    if is_compiled and INTERPRETED:
        pytest.skip("an interpreted kernel cannot be traced")
    rig = Rig(SMALL, "cpu", 1, mapped=False)
    (call,) = steps((1, 7, 9))
    lengths = call["seq_lens"] = call["seq_lens"].int()
    update = torch.compile(update_metadata, fullgraph=True) if is_compiled else update_metadata
    with pytest.raises(Exception, match="status must not overlap seq_lens"):
        update(**call | {"status": lengths[:1]}, held=rig.held, out=rig.out)
    assert rig.out.cache_seqlens.eq(-77).all()


def test_the_package_registers_the_operator() -> None:
    """A program that was exported with it is loaded by a process that knows no more than the package's name."""
    code = "import torch, compiled_kv; torch.ops.compiled_kv.update_metadata.default"
    subprocess.run([sys.executable, "-c", code], check=True)


@traces
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_graph_holds_one_launch_and_no_copy(mode: str, dynamic: bool) -> None:
    pytest.importorskip("triton")
    rig = Rig(LAYOUT, "cpu", 40, mapped=True)
    call = call_of(batch(num_reqs=2), torch.zeros(3, dtype=torch.int64), MODES[mode])
    graphs = capture(update_metadata, **call, held=rig.held, out=rig.out, target="cuda:sm_90", dynamic=dynamic)
    assert graphs.is_whole
    assert graphs.launches == {"update_metadata_kernel": 1}
    assert graphs.copies == [] and graphs.host_reads == []


@traces
@devices
@pytest.mark.parametrize("mode", MODES)
def test_opcheck(mode: str, device: str) -> None:
    rig = Rig(LAYOUT, device, 40, mapped=True)
    call = call_of(batch(num_reqs=2), torch.zeros(3, dtype=torch.int64), MODES[mode])
    given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in call.items()}
    q_len = given["q_len"]
    tensors = [given.get(name) for name in ("req_to_token", "req_pool_indices", "seq_lens", "generations")]
    tensors += [q_len if isinstance(q_len, Tensor) else None, None, given.get("full_to_swa"), given.get("page_map")]
    tensors += [given["num_reqs"], rig.status, rig.held, *rig.out]
    numbers = (LAYOUT.page_size, LAYOUT.max_seqlen_k, given["seq_len_delta"], 0 if mode == "ragged" else q_len, 3, 6, 6)
    torch.library.opcheck(torch.ops.compiled_kv.update_metadata, (*tensors, *numbers))


@pytest.mark.skipif(INTERPRETED, reason="this process is the interpreted one")
@pytest.mark.parametrize(
    "chosen",
    [
        ["tests/test_updates.py", "tests/test_update_turns.py"],
        ["tests/test_replay.py", "-k", "every_byte and verify and page-map and 16"],
    ],
    ids=["updates", "replay"],
)
def test_the_same_interpreted(chosen: list[str]) -> None:
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *chosen],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:]


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_rows_beyond_two_to_the_31_elements(dtype: torch.dtype) -> None:
    """Kind 11: a row stride of 2^20 and request row 2048, and a slot beyond 2^31."""
    layout = KVLayout(page_size=64, max_context_len=1 << 20)
    pool = torch.zeros(2049, 1 << 20, dtype=dtype, device="cuda")
    slot = 2147483653 if dtype == torch.int64 else 2147483647
    pool[2048, (1 << 20) - 64 :] = slot
    rig = Rig(layout, "cuda", 1, mapped=False)
    call = {"req_pool_indices": [2048], "seq_lens": [1 << 20], "generations": [3]}
    update_metadata(
        pool, **{name: torch.tensor(values, device="cuda") for name, values in call.items()},
        layout=layout, held=rig.held, out=rig.out,
    )  # fmt: skip
    assert rig.out.page_table[0, (1 << 14) - 1].item() == slot // 64
    assert rig.out.slot_mapping is not None and rig.out.slot_mapping.tolist() == [slot]
