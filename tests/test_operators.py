"""Every operator equals the oracle exactly: eagerly, compiled, over named cases and over drawn calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import compiled_kv as ckv
from tests import strategies
from tests.cases import ALL_CASES, CASES, DEVICES, FORMS, LAYOUT, SMALL_CASES
from tests.conftest import EXAMPLES, INTERPRETED, take_last_program_first, take_small_sizes
from tests.harness import OPERATORS, Batch, Form, check

COMPILED_EXAMPLES = 1000
EAGER_ON_A_DEVICE = 200  # nearly every call has dtypes of its own, and so a kernel of its own to compile
SMALL = 2  # a graph may be specialized on sizes 0 and 1

compiles = pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be traced")
devices = pytest.mark.parametrize("device", DEVICES)
operators = pytest.mark.parametrize("operator", OPERATORS)


FULL_BLOCKS = ("plain", "wide-batch")
SMALL_SIZES = {
    "BLOCK": 4, "FEW": 2, "CHUNK": 4, "SCAN": 8, "TOKENS": 4, "ROW_TOKENS": 4, "LONG": 4, "HELPERS": 3, "SHARED": 2,
    "LEAST": 1, "PROGRAMS": 12, "FINE_PROGRAMS": 16, "FINE_MAPPED_PROGRAMS": 20, "GROUP": 4, "LANES": 2, "WIDE": 2,
    "TURNS": 1, "UPDATERS": 12, "UPDATE_CHUNK": 4, "UPDATE_SCAN": 8,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels take four columns, rows or tokens a turn, by several programs a row: each loop goes round."""
    if not INTERPRETED or "full_blocks" in request.node.name:
        return
    take_small_sizes(monkeypatch, SMALL_SIZES)
    if "in-place" in request.node.name:
        take_small_sizes(monkeypatch, {"FINE_WARPS": 2})  # otherwise twice the columns where pages are small
        take_last_program_first(monkeypatch)


def forms_of(operator: str) -> list[Form]:
    return [form for form in FORMS if form.operator == operator]


@devices
@operators
@pytest.mark.parametrize("case", ALL_CASES)
def test_named_batch(operator: str, case: str, device: str) -> None:
    for form in forms_of(operator):
        check(form, ALL_CASES[case], device)


@pytest.mark.skipif(not INTERPRETED, reason="elsewhere every batch meets full blocks")
@operators
@pytest.mark.parametrize("case", FULL_BLOCKS)
def test_named_batch_in_full_blocks(operator: str, case: str) -> None:
    for form in forms_of(operator):
        check(form, ALL_CASES[case])


@devices
@operators
@pytest.mark.parametrize("in_place", [False, True], ids=["functional", "in-place"])
def test_any_call(operator: str, in_place: bool, device: str) -> None:
    @settings(max_examples=EXAMPLES if device == "cpu" else EAGER_ON_A_DEVICE)
    @given(strategies.calls(operator, in_place))
    def equals_the_oracle(call: tuple[Form, Batch]) -> None:
        check(*call, device)

    equals_the_oracle()


def compiled(form: Form) -> Callable[..., Any]:
    return torch.compile(getattr(ckv, form.operator), fullgraph=True, dynamic=True)


def examples_of(form: Form) -> int:
    """The share of this form in the examples of its operator, functional and in place each."""
    return -(-COMPILED_EXAMPLES // sum(other.in_place == form.in_place for other in forms_of(form.operator)))


@compiles
@devices
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_any_call_compiled(form: Form, device: str) -> None:
    """One dynamic graph for sizes from two upwards; what else varies, varies at run time."""
    call = compiled(form)

    @settings(max_examples=examples_of(form))
    @given(strategies.batches(LAYOUT, SMALL))
    def equals_the_oracle(batch: Batch) -> None:
        check(form, batch, device, call)

    with torch._dynamo.config.patch(recompile_limit=4):
        check(form, CASES["distinct-sizes"], device, call)
        equals_the_oracle()
        for batch in filter(served, CASES.values()):
            check(form, batch, device, call)


def served(batch: Batch) -> bool:
    return batch.layout == LAYOUT and min(batch.q_len, batch.delta, batch.num_tokens, batch.pad_seqlen) >= SMALL


@compiles
@devices
@operators
def test_small_sizes_compiled(operator: str, device: str) -> None:
    """A graph compiled for other sizes first, then met with none and one."""
    form = forms_of(operator)[0]
    call = compiled(form)
    for batch in (CASES["plain"], SMALL_CASES["empty-batch-and-no-tokens"], SMALL_CASES["one-token"]):
        check(form, batch, device, call)


@devices
def test_queries_of_a_batch_beyond_32_bits_are_too_many(device: str) -> None:
    """Four rows of 2^30 queries are 2^32, which 32 bits would take for none."""
    pool, rows = torch.arange(8, device=device).expand(4, 8), torch.arange(4, device=device)
    status = torch.zeros(1, dtype=torch.int32, device=device)
    found = ckv.decode_metadata(
        pool, rows, rows, layout=ckv.KVLayout(4, 8), q_len=2**30, slots=torch.tensor([5, 6], device=device),
        status=status,
    )  # fmt: skip
    assert found.slot_mapping is not None and found.slot_mapping.tolist() == [5, 6]
    assert int(status) == ckv.Status.SUM_OVERFLOW | ckv.Status.TOO_MANY_TOKENS


@devices
def test_a_slot_whose_page_does_not_fit_is_not_translated(device: str) -> None:
    """A map of 2^33 slots, one repeated by a stride of 0, knows the slot; as a page of one token it is none."""
    pool = torch.tensor([[7, 2**31, 2**31 - 1]], device=device)
    token_map, rows = torch.tensor([5], device=device).expand(2**33), torch.tensor([0], device=device)
    status = torch.zeros(1, dtype=torch.int32, device=device)
    layout, lengths = ckv.KVLayout(page_size=1, max_context_len=3), torch.tensor([3], device=device)
    found = ckv.decode_metadata(pool, rows, lengths, layout=layout, full_to_swa=token_map, status=status)
    tables = ckv.swa_page_table(pool, rows, lengths, token_map, layout=layout)
    for table, swa_table in ((found.page_table, found.swa_page_table), tables):
        assert swa_table is not None
        assert (table.tolist(), swa_table.tolist()) == ([[7, -1, 2**31 - 1]], [[5, -1, 5]])
    assert int(status) == ckv.Status.BAD_SLOT


@devices
def test_keys_whose_lengths_overflow_saturate(device: str) -> None:
    """Two rows of 2^31 - 1 tokens over a pool of one slot, repeated by a stride of 0."""
    cap = 2**31 - 1
    pool = torch.full((1, 1), 5, dtype=torch.int64, device=device).expand(2, cap)
    status = torch.zeros(1, dtype=torch.int32, device=device)
    rows, lengths = torch.tensor([0, 1, 1], device=device), torch.tensor([cap, 3, cap], device=device)
    layout = ckv.KVLayout(page_size=2**30, max_context_len=cap)
    found = ckv.decode_metadata(pool, rows, lengths, layout=layout, status=status)
    assert found.cu_seqlens_k.tolist() == [0, cap, cap, cap]
    assert found.page_table.tolist() == [[0, 0], [0, 0], [0, 0]]
    assert found.slot_mapping is not None and found.slot_mapping.tolist() == [5, 5, 5]
    assert int(status) == ckv.Status.SUM_OVERFLOW
