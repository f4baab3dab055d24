"""Faults that people reported of code that does this job, each with a small input and the right answer.

A compile for every width and the graphs of every batch size are in `test_variants`; empty sizes one by one are among
the named batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, nop
from torch import Tensor

import compiled_kv as ckv
from compiled_kv import DecodeMetadata, KVLayout, reference
from tests.cases import CASES, DEVICES, batch
from tests.conftest import INTERPRETED
from tests.harness import OPERATORS, POISON, TABLES, Form, arguments, check

devices = pytest.mark.parametrize("device", DEVICES)
compiles = pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be traced")
MODES = ["eager", pytest.param("aot_eager", marks=compiles), pytest.param("inductor", marks=compiles)]
modes = pytest.mark.parametrize("mode", MODES)


def in_mode(function: Callable[..., Any], mode: str) -> Callable[..., Any]:
    return function if mode == "eager" else torch.compile(function, fullgraph=True, backend=mode)


def int32(*values: Any, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def int64(*values: Any, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def poison(shape: int | tuple[int, ...], dtype: torch.dtype = torch.int32, device: str = "cpu") -> Tensor:
    return torch.full(shape if isinstance(shape, tuple) else (shape,), POISON[dtype], dtype=dtype, device=device)


def new_out(rows: int, columns: int, tokens: int, device: str, swa: bool = True) -> DecodeMetadata:
    return DecodeMetadata(
        poison(rows, device=device),
        poison(rows + 1, device=device),
        poison(rows + 1, device=device),
        poison((rows, columns), device=device),
        poison((rows, columns), device=device) if swa else None,
        poison(tokens, torch.int64, device),
        poison(tokens, torch.int64, device) if swa else None,
    )


def plain(fields: Any) -> list[Any]:
    return [None if field is None else field.tolist() for field in fields]


STALE_MAP = [0] + [-1] * 100 + [slot - 100 for slot in range(101, 141)]


@devices
@modes
def test_fewer_rows_in_the_same_buffers_leave_nothing_stale(mode: str, device: str) -> None:
    """sglang #24743: six live rows of eight, then three; every buffer is rewritten to its end by the call itself."""
    layout, out = KVLayout(page_size=4, max_context_len=32), new_out(8, 8, 8, device)
    pool = torch.arange(101, 141, device=device).repeat(8, 1)
    step = in_mode(ckv.decode_metadata, mode)

    def decode(live: int, slots: list[int]) -> None:
        rest = {
            "layout": layout,
            "full_to_swa": int64(*STALE_MAP, device=device),
            "num_reqs": int32(live, device=device),
        }
        rows, lengths = torch.arange(8, device=device), torch.full((8,), 9 + live, device=device)
        step(pool, rows, lengths, slots=int64(*slots, device=device), out=out, **rest)

    decode(6, [111, 112, 113, 114, 115, 116, 7, 7])
    decode(3, [121, 122, 123, 114, 115, 116, 7, 7])
    pages = [25, 26, 27] + [0] * 5  # slots 101, 105, 109 of the pool
    swa_pages = [0, 1, 2] + [0] * 5  # slots 1, 5, 9
    assert plain(out) == [
        [12] * 3 + [0] * 5,
        [0, 1, 2, 3, 3, 3, 3, 3, 3],
        [0, 12, 24, 36, 36, 36, 36, 36, 36],
        [pages] * 3 + [[0] * 8] * 5,
        [swa_pages] * 3 + [[0] * 8] * 5,
        [121, 122, 123] + [-1] * 5,
        [21, 22, 23] + [-1] * 5,
    ]


@devices
def test_translated_slots_are_rewritten_to_the_end(device: str) -> None:
    out, table = poison(8, torch.int64, device), int64(*STALE_MAP, device=device)
    ckv.translate_slots(int64(111, 112, 113, 114, 115, 116, -1, -1, device=device), table, out=out)
    ckv.translate_slots(int64(121, 122, 123, -1, -1, -1, -1, -1, device=device), table, out=out)
    assert out.tolist() == [21, 22, 23] + [-1] * 5


@devices
@modes
def test_a_table_one_column_short_is_clamped_and_reported(mode: str, device: str) -> None:
    """nano-vllm #190: page 256, context 4096, length 4097: 17 pages into 16 columns; then a length of 300."""
    layout, status = KVLayout(256, 4096), int32(0, device=device)
    around = poison((3, 20), device=device)
    out = new_out(1, 16, 1, device, swa=False)._replace(page_table=around[1:2, 2:18])
    pool = torch.arange(256, 256 + 4352, device=device)[None]
    step = in_mode(ckv.decode_metadata, mode)
    step(pool, int64(0, device=device), int64(4097, device=device), layout=layout, out=out, status=status)
    expected = poison((3, 20))
    expected[1, 2:18] = torch.arange(1, 17)
    assert torch.equal(around.cpu(), expected)
    assert out.cache_seqlens.tolist() == [4096] and int(status) == ckv.Status.TOO_LONG
    step(pool, int64(0, device=device), int64(300, device=device), layout=layout, out=out, status=status)
    expected[1, 2:18] = int32(1, 2, *[0] * 14)
    assert torch.equal(around.cpu(), expected)


WORKSPACES: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "one-after-the-other": lambda w: (w[:8], w[8:17], w[17:26], w[26:74].view(8, 6)),
    "with-gaps": lambda w: (w[3:11], w[13:22], w[30:39], w[40:120].view(8, 10)[:, 2:8]),
    "beside-a-table-of-their-own-pitch": lambda w: (w[200:208], w[209:218], w[219:228], w[0:128].view(8, 16)[:, 5:11]),
    "backwards": lambda w: (w[90:98], w[80:89], w[70:79], w[8:56].view(8, 6)),
}  # fmt: skip


@devices
@modes
@pytest.mark.parametrize("carve", WORKSPACES.values(), ids=WORKSPACES)
def test_outputs_carved_from_one_workspace(
    carve: Callable[[Tensor], tuple[Tensor, ...]], mode: str, device: str
) -> None:
    """pytorch #192219, #192510: five of eight rows live, outputs views of one buffer; compiled equals eager."""
    layout = KVLayout(page_size=4, max_context_len=24)
    arguments = {
        "req_to_token": torch.arange(4, 4 + 5 * 24).reshape(5, 24),
        "req_pool_indices": int64(4, 2, 0, 9, 1, 3, 3, 3),
        "seq_lens": int64(24, 1, 0, 5, 13, 7, 7, 7),
        "num_reqs": int64(5),
    }
    workspace, expected = poison(256, device=device), poison(256)
    slots = {"slot_mapping": poison(8, torch.int64, device)}
    out = DecodeMetadata(*carve(workspace), None, slots["slot_mapping"], None)
    wanted = DecodeMetadata(*carve(expected), None, poison(8, torch.int64), None)
    on_device = {name: tensor.to(device) for name, tensor in arguments.items()}
    in_mode(ckv.decode_metadata, mode)(**on_device, layout=layout, pad_seqlen=2, out=out, tail="keep")
    reference.decode_metadata(**arguments, layout=layout, pad_seqlen=2, out=wanted, tail="keep")
    assert torch.equal(workspace.cpu(), expected)
    assert plain(out) == plain(wanted)


@devices
@modes
def test_minus_one_never_becomes_the_last_slot(mode: str, device: str) -> None:
    """vllm #43810, sglang #36885: slots 3, -1, 35, -1 in 5 pages of 16."""
    blocks, table = torch.arange(5, device=device)[None], torch.arange(80, device=device) + 1000
    slots, rows = int64(3, -1, 35, -1, device=device), int64(0, 0, 0, 0, device=device)
    through_pages = in_mode(ckv.slot_mapping, mode)(None, rows, slots, block_table=blocks, page_size=16)
    assert through_pages.tolist() == [3, -1, 35, -1]
    through_map = in_mode(ckv.translate_slots, mode)(slots, table)
    assert through_map.tolist() == [1003, -1, 1035, -1]
    pool, layout = torch.arange(80, device=device)[None], KVLayout(16, 80)
    found = in_mode(ckv.decode_metadata, mode)(
        pool, rows, slots.clamp(min=0), layout=layout, slots=slots, page_map=torch.arange(5, device=device) + 7
    )
    assert found.slot_mapping.tolist() == [3, -1, 35, -1]
    assert found.swa_slot_mapping.tolist() == [3 + 7 * 16, -1, 35 + 7 * 16, -1]


def lengths_around(page: int) -> list[int]:
    return [0, 1, page - 1, page, page + 1, 64 * page, 64 * page + 1, 5000]


@devices
@pytest.mark.parametrize("tail", ["clear", "keep"])
@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128, 256])
def test_pages_are_counted_in_pages(page_size: int, tail: str, device: str) -> None:
    """sglang #11985: page 32, length 5000: 157 pages, where a loop sized for pages of 64 fills 128."""
    lengths = lengths_around(page_size)
    layout = KVLayout(page_size, max(lengths))
    pool = torch.arange(layout.max_seqlen_k, device=device)[None]
    around = poison((len(lengths), layout.max_num_pages + 9), device=device)
    out = around[:, 3:-4]
    rows = torch.zeros(len(lengths), dtype=torch.int32, device=device)
    ckv.flashmla_kv_indices(pool, rows, int64(*lengths, device=device), layout=layout, out=out, tail=tail)
    rest = 0 if tail == "clear" else POISON[torch.int32]
    for length, row in zip(lengths, out.tolist(), strict=True):
        pages = -(-length // page_size)
        assert row == list(range(pages)) + [rest] * (len(row) - pages)
    assert bool((around[:, :3] == POISON[torch.int32]).all()) and bool((around[:, -4:] == POISON[torch.int32]).all())


@devices
@modes
def test_a_slot_beyond_32_bits_is_computed_in_64(mode: str, device: str) -> None:
    """sglang #34027, vllm #50427: block 33554432 of 64 tokens, position 5, in a table of int32."""
    blocks, rows, positions = int32([33554432], device=device), int32(0, device=device), int32(5, device=device)
    found = in_mode(ckv.slot_mapping, mode)(None, rows, positions, block_table=blocks, page_size=64)
    assert found.tolist() == [2147483653]
    through_map = in_mode(ckv.decode_metadata, mode)(
        int32([5], device=device), rows, rows + 1, layout=KVLayout(64, 1), page_map=int32(33554432, device=device)
    )
    assert through_map.swa_slot_mapping.tolist() == [2147483653]


def test_an_offset_of_two_to_the_31_reaches_its_row(tmp_path: Path) -> None:
    """A row stride of 1,048,576 with request row 2048; the file behind the pool is sparse."""
    stride, row = 1_048_576, 2048
    path = tmp_path / "pool"
    with path.open("wb") as file:
        file.truncate(4 * (stride * row + 64))
    whole = torch.from_file(str(path), shared=True, size=stride * row + 64, dtype=torch.int32)
    pool = whole.as_strided((row + 1, 64), (stride, 1))
    pool[row] = torch.arange(640, 704)
    layout = KVLayout(page_size=16, max_context_len=64)
    found = ckv.decode_metadata(pool, int32(row, row), int32(64, 17), layout=layout)
    assert found.page_table.tolist() == [[40, 41, 42, 43], [40, 41, 0, 0]]
    assert found.slot_mapping is not None and found.slot_mapping.tolist() == [703, 656]
    assert ckv.page_table(pool, int32(row), int32(64), layout=layout).tolist() == [[40, 41, 42, 43]]
    assert ckv.slot_mapping(pool, int32(row), int32(63)).tolist() == [703]


@devices
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("wide", [1 << bit for bit in range(12)], ids=lambda wide: f"i64-{wide:#05x}")
def test_int64_is_never_read_as_int32(operator: str, wide: int, device: str) -> None:
    """sglang #14654: one input at a time is int64, the others int32, and the other way round."""
    optional = {"start": True, "ragged": True, "mapped": "token", "given": True, "padded": "vector"}
    check(Form(operator, wide=wide, **optional), CASES["distinct-sizes"], device)
    check(Form(operator, wide=~wide, **optional), CASES["distinct-sizes"], device)


@devices
def test_int64_lengths_by_hand(device: str) -> None:
    for lengths in (int32(3, 7, device=device), int64(3, 7, device=device)):
        found = ckv.seqlens(lengths)
        assert plain(found) == [[3, 7], [0, 1, 2], [0, 3, 10]]
        assert {tensor.dtype for tensor in found} == {torch.int32}


@devices
@modes
def test_padding_rows_with_old_indices_read_nothing(mode: str, device: str) -> None:
    """sglang #26292, vllm #57156: captured 4, live 2, rows 7, 9, 4, 4 left over; request 4 is poisoned."""
    layout = KVLayout(page_size=4, max_context_len=16)
    pool = torch.arange(4, 4 + 160, device=device).reshape(10, 16)
    pool[4] = 999_999
    status = int32(0, device=device)
    found = in_mode(ckv.decode_metadata, mode)(
        pool, int64(7, 9, 4, 4, device=device), int64(16, 1, 2**40, -5, device=device), layout=layout,
        full_to_swa=torch.arange(164, device=device), num_reqs=int64(2, device=device), pad_seqlen=1, status=status,
    )  # fmt: skip
    tables = [[29, 30, 31, 32], [37, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    slots = [131, 148, -1, -1]  # padding writes nowhere: -1, not the null slot 0
    lengths = [[16, 1, 1, 1], [0, 1, 2, 2, 2], [0, 16, 17, 17, 17]]
    assert plain(found) == [*lengths, tables, tables, slots, slots]
    assert int(status) == 0


def fields_of(operator: str) -> dict[str, Tensor]:
    """Good outputs of an operator for the batch `distinct-sizes`, by name."""
    tables = {"page_table": poison((3, 7)), "swa_page_table": poison((3, 7))}
    sums = {"cache_seqlens": poison(3), "cu_seqlens_q": poison(4), "cu_seqlens_k": poison(4)}
    tokens = {"slot_mapping": poison(17, torch.int64), "swa_slot_mapping": poison(17, torch.int64)}
    match operator:
        case "page_table" | "flashmla_kv_indices":
            return {"page_table": poison((3, 7))}
        case "slot_mapping":
            return {"slot_mapping": poison(3, torch.int64)}
        case "translate_slots":
            return {"slot_mapping": poison(14, torch.int64)}
        case "swa_page_table":
            return tables
        case "seqlens":
            return sums
    return {**sums, **tables, **tokens}


def call_of(operator: str) -> dict[str, Any]:
    return arguments(Form(operator, mapped="token", given=True), CASES["distinct-sizes"], "cpu")


def call_into(operator: str, fields: dict[str, Tensor], mode: str = "eager", **changes: Any) -> Any:
    whole = DecodeMetadata(**fields) if operator == "decode_metadata" else tuple(fields.values())
    out = whole if len(whole) > 1 else whole[0]
    return in_mode(getattr(ckv, operator), mode)(**{**call_of(operator), **changes}, out=out)


SAME_TENSOR = {
    "two-tables": ("swa_page_table", "page_table", "swa_page_table"),
    "two-prefix-sums": ("seqlens", "cu_seqlens_q", "cu_seqlens_k"),
    "two-tables-of-metadata": ("decode_metadata", "page_table", "swa_page_table"),
    "two-slot-mappings": ("decode_metadata", "slot_mapping", "swa_slot_mapping"),
    "two-prefix-sums-of-metadata": ("decode_metadata", "cu_seqlens_q", "cu_seqlens_k"),
}


@modes
@pytest.mark.parametrize("operator, one, other", SAME_TENSOR.values(), ids=SAME_TENSOR)
def test_the_same_tensor_twice_is_refused(operator: str, one: str, other: str, mode: str) -> None:
    """pytorch #196657."""
    fields = fields_of(operator)
    fields[other] = fields[one]
    with pytest.raises(Exception) as raised:
        call_into(operator, fields, mode)
    assert "must not overlap" in str(raised.value) and one in str(raised.value) and other in str(raised.value)
    assert bool((fields[one] == POISON[fields[one].dtype]).all()), "written before it was refused"


def overlapping_tables() -> tuple[Tensor, Tensor]:
    whole = poison(60)
    return whole[:21].view(3, 7), whole[20:41].view(3, 7)


def interleaved_and_overlapping() -> tuple[Tensor, Tensor]:
    whole = poison((3, 13))
    return whole[:, :7], whole[:, 6:]


def of_different_pitch() -> tuple[Tensor, Tensor]:
    whole = poison(60)
    return whole.view(3, 20)[:, :7], whole[8:29].view(3, 7)


OVERLAPS = {
    "by-one-element": overlapping_tables,
    "by-one-column": interleaved_and_overlapping,
    "of-different-pitch": of_different_pitch,
}


@modes
@pytest.mark.parametrize("operator", ["swa_page_table", "decode_metadata"])
@pytest.mark.parametrize("views", OVERLAPS.values(), ids=OVERLAPS)
def test_overlapping_views_are_refused(views: Callable[[], tuple[Tensor, Tensor]], operator: str, mode: str) -> None:
    """Eagerly by address; while tracing by storage and offsets."""
    one, other = views()
    fields = {**fields_of(operator), "page_table": one, "swa_page_table": other}
    with pytest.raises(Exception, match="must not overlap"):
        call_into(operator, fields, mode)
    assert bool((one == POISON[torch.int32]).all()) and bool((other == POISON[torch.int32]).all())


def test_two_storages_over_one_memory_are_refused() -> None:
    """As two arrays shared with NumPy or DLPack are; a trace cannot know."""
    one = poison((3, 7))
    other = torch.from_numpy(one.numpy())
    assert one.untyped_storage()._cdata != other.untyped_storage()._cdata
    fields = {**fields_of("swa_page_table"), "page_table": one, "swa_page_table": other}
    with pytest.raises(ValueError, match=r"must not overlap (swa_)?page_table"):
        call_into("swa_page_table", fields, "eager")
    assert bool((one == POISON[torch.int32]).all())


def test_a_column_of_a_packed_table_beside_an_output_is_no_overlap() -> None:
    pool, packed = torch.arange(80).reshape(5, 16), torch.zeros(3, 6, dtype=torch.int32)
    packed[:, 0], packed[:, 1] = torch.tensor([2, 0, 1]), torch.tensor([5, 1, 16])
    layout, status = ckv.KVLayout(page_size=8, max_context_len=16), packed[0, 5:6]
    out = ckv.page_table(pool, packed[:, 0], packed[:, 1], layout=layout, out=packed[:, 2:4])
    assert out.tolist() == [[4, 0], [0, 0], [2, 3]]
    ckv.decode_metadata(pool, packed[:, 0], packed[:, 1], layout=layout, status=status)
    for rows in (packed[:, 2], packed[:, 3], packed[0, :3], packed[1, 3:]):
        with pytest.raises(ValueError, match="out must not overlap req_pool_indices"):
            ckv.page_table(pool, rows, packed[:, 1], layout=layout, out=out)


def test_an_in_place_call_traces_under_aot_autograd_alone() -> None:
    pool, out = torch.arange(80).reshape(5, 16), torch.zeros(3, 4, dtype=torch.int32)

    def step(pool: Tensor, rows: Tensor, lengths: Tensor, out: Tensor) -> Tensor:
        return ckv.page_table(pool, rows, lengths, layout=ckv.KVLayout(4, 16), out=out) + 1

    traced = aot_function(step, fw_compiler=nop)
    assert traced(pool, torch.arange(3), torch.full((3,), 7), out).tolist() == [
        [1, 2, 1, 1],
        [5, 6, 1, 1],
        [9, 10, 1, 1],
    ]


# operator -> an input, and the output that it overlaps by one element
INTO_INPUTS = {
    "page_table": ("cache_seqlens", "page_table"),
    "swa_page_table": ("cache_seqlens", "swa_page_table"),
    "flashmla_kv_indices": ("kv_lens", "page_table"),
    "slot_mapping": ("positions", "slot_mapping"),
    "translate_slots": ("slots", "slot_mapping"),
    "seqlens": ("seq_lens", "cu_seqlens_q"),
    "decode_metadata": ("slots", "swa_slot_mapping"),
}


@modes
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_view_of_an_input_is_refused_as_output(operator: str, mode: str) -> None:
    given, output = INTO_INPUTS[operator]
    fields = fields_of(operator)
    size, shape = fields[output].numel(), fields[output].shape
    whole = torch.full((size + 20,), 5, dtype=fields[output].dtype)
    fields[output] = whole[:size].view(shape)
    call = call_of(operator)
    call[given] = whole[size - 1 : size - 1 + len(call[given])]
    # A graph's operator may serve two public functions, so that there the sentence names its own argument.
    with pytest.raises(Exception, match=f"must not overlap {given if mode == 'eager' else ''}"):
        call_into(operator, fields, mode, **call)
    assert bool((whole == 5).all())


@modes
def test_tables_side_by_side_in_a_wider_one_are_not_an_overlap(mode: str) -> None:
    whole = poison((3, 20))
    fields = {"page_table": whole[:, 1:8], "swa_page_table": whole[:, 9:16]}
    call_into("swa_page_table", fields, mode)
    wanted = call_into("swa_page_table", fields_of("swa_page_table"))
    assert [tensor.tolist() for tensor in fields.values()] == [tensor.tolist() for tensor in wanted]
    gaps = whole[:, [0, 8, 16, 17, 18, 19]]
    assert bool((gaps == POISON[torch.int32]).all())


INPUTS = {
    "lengths": ("seqlens", "cache_seqlens", "seq_lens"),
    "lengths-of-metadata": ("decode_metadata", "cache_seqlens", "seq_lens"),
    "rows": ("decode_metadata", "cache_seqlens", "req_pool_indices"),
}


@modes
@pytest.mark.parametrize("operator, output, given", INPUTS.values(), ids=INPUTS)
def test_an_output_that_is_an_input_is_refused(operator: str, output: str, given: str, mode: str) -> None:
    fields = fields_of(operator)
    fields[output] = int32(1, 2, 3)
    with pytest.raises(Exception) as raised:
        call_into(operator, fields, mode, **{given: fields[output]})
    assert f"{output} must not overlap {given}" in str(raised.value)
    assert fields[output].tolist() == [1, 2, 3]


@modes
@pytest.mark.parametrize("in_place", [False, True], ids=["functional", "out"])
def test_status_inside_an_input_is_refused(in_place: bool, mode: str) -> None:
    lengths = int32(9, 9, 9)
    call = {**call_of("decode_metadata"), "seq_lens": lengths, "status": lengths[:1]}
    if in_place:
        call["out"] = DecodeMetadata(**fields_of("decode_metadata"))
    with pytest.raises(Exception, match="status must not overlap seq_lens"):
        in_mode(ckv.decode_metadata, mode)(**call)
    assert lengths.tolist() == [9, 9, 9]


@modes
@pytest.mark.parametrize("given", ["cu_seqlens_q", "num_reqs"])
def test_a_slot_mapping_over_an_input_s_end_is_refused(given: str, mode: str) -> None:
    whole = int64(0, 1, 2, 3, 4, 5)
    call = {**call_of("slot_mapping"), "cu_seqlens_q": int64(0, 1, 2, 3), "num_reqs": int64(3)}
    call[given] = whole[: len(call[given])]
    tokens = len(call["positions"])
    with pytest.raises(Exception, match=f"out must not overlap {given}"):
        in_mode(ckv.slot_mapping, mode)(**call, out=whole[len(call[given]) - 1 :][:tokens])
    assert whole.tolist() == [0, 1, 2, 3, 4, 5]


EMPTY = {
    "no-rows": (batch(rows=[], seq_lens=[], q_lens=[], kv_start=[], cu_seqlens_q=[0]), [0], [0], []),
    "all-padding": (batch(num_reqs=0, pad_seqlen=0), [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0]),
}


@devices
@modes
@pytest.mark.parametrize("step, cu_q, cu_k, lengths", EMPTY.values(), ids=EMPTY)
def test_nothing_live_is_no_error(
    step: Any, cu_q: list[int], cu_k: list[int], lengths: list[int], mode: str, device: str
) -> None:
    """sglang #35454: no rows, or padding alone: prefix sums of zeros, null pages, no slots."""
    form = Form("decode_metadata", padded="scalar", mapped="page")
    found = in_mode(ckv.decode_metadata, mode)(**arguments(form, step, device))
    rows, tokens = len(lengths), 2 * len(lengths)
    assert plain(found) == [lengths, cu_q, cu_k, [[0] * 7] * rows, [[0] * 7] * rows, [-1] * tokens, [-1] * tokens]


def test_tables_of_the_harness_are_the_operators_with_a_tail() -> None:
    """A table operator without `tail` in its signature would silently go untested there."""
    assert {name for name in OPERATORS if "tail" in inspect.signature(getattr(ckv, name)).parameters} == set(TABLES)
