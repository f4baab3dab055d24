"""Bad input is refused in the public function, before any write, by one sentence: argument, rule and what came."""

# ruff: noqa: E501  (a row a line, for the sentences are what is to be read)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import compiled_kv as ckv
from compiled_kv import reference
from tests.cases import CASES, batch
from tests.conftest import INTERPRETED
from tests.harness import POISON, Form, arguments, around, outputs, packed, poisoned

PAGE_TABLE = Form("page_table", in_place=True, tail="keep")
SWA = Form("swa_page_table", mapped="token", in_place=True)
FLASHMLA = Form("flashmla_kv_indices", start=True, in_place=True)
SLOTS = Form("slot_mapping", in_place=True, ragged=True, padded="vector")
BLOCKS = Form("slot_mapping", in_place=True, paged=True)
TRANSLATE = Form("translate_slots", in_place=True)
SEQLENS = Form("seqlens", in_place=True, ragged=True, padded="scalar")
DECODE = Form("decode_metadata", in_place=True, mapped="token", given=True, padded="vector", status=True)
RAGGED = Form("decode_metadata", in_place=True, ragged=True, mapped="page")
FUNCTIONAL = {form: Form(**{**form.__dict__, "in_place": False, "tail": "clear"}) for form in (PAGE_TABLE, SWA, DECODE)}

Change = dict[str, Any]
wide = torch.int64


def as_type(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype)


def longer(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor[:1]])


def on_meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def without(*fields: str) -> Callable[[Any], Any]:
    return lambda out: out._replace(**dict.fromkeys(fields))


def with_field(**fields: Tensor) -> Callable[[Any], Any]:
    return lambda out: out._replace(**fields)


def table(rows: int = 3, columns: int = 9, dtype: torch.dtype = torch.int32) -> Tensor:
    return poisoned((rows, columns), dtype, "cpu")


# id: form, changes to its arguments (a value, or a function of the good one; ... leaves it out), error, sentence
BAD: dict[str, tuple[Form, Change, type[Exception], str]] = {
    "float-lengths": (PAGE_TABLE, {"cache_seqlens": as_type(torch.float32)}, TypeError, "cache_seqlens must be int32 or int64, got float32"),
    "bool-rows": (PAGE_TABLE, {"req_pool_indices": as_type(torch.bool)}, TypeError, "req_pool_indices must be int32 or int64, got bool"),
    "int16-pool": (PAGE_TABLE, {"req_to_token": as_type(torch.int16)}, TypeError, "req_to_token must be int32 or int64, got int16"),
    "list-for-a-tensor": (PAGE_TABLE, {"cache_seqlens": [1, 2, 3]}, TypeError, "cache_seqlens must be a tensor, got list"),
    "sparse-lengths": (PAGE_TABLE, {"cache_seqlens": lambda t: t.to_sparse()}, TypeError, "cache_seqlens must be a dense tensor, got layout torch.sparse_coo"),
    "a-page-size-for-a-layout": (PAGE_TABLE, {"layout": 4}, TypeError, "layout must be a KVLayout, got int"),
    "sums-with-a-page-size-for-a-layout": (SEQLENS, {"layout": 4}, TypeError, "layout must be a KVLayout, got int"),
    "flat-pool": (PAGE_TABLE, {"req_to_token": torch.flatten}, ValueError, "req_to_token must be [R, C], got [160]"),
    "rows-of-rank-two": (PAGE_TABLE, {"req_pool_indices": lambda t: t[None]}, ValueError, "req_pool_indices must be [B], got [1, 3]"),
    "a-length-too-many": (PAGE_TABLE, {"cache_seqlens": longer}, ValueError, "cache_seqlens must be [B] with B=3, got [4]"),
    "scalar-length": (PAGE_TABLE, {"cache_seqlens": lambda t: t[0]}, ValueError, "cache_seqlens must be [B] with B=3, got []"),
    "lengths-elsewhere": (PAGE_TABLE, {"cache_seqlens": on_meta}, ValueError, "cache_seqlens must be on cpu, as req_to_token is, got meta"),
    "pool-narrower-than-the-layout": (PAGE_TABLE, {"req_to_token": lambda t: t[:, :27]}, ValueError, "req_to_token must have at least 28 columns for this layout, got 27"),
    "out-narrower-than-the-layout": (PAGE_TABLE, {"out": table(3, 6)}, ValueError, "out must have at least 7 columns for this layout, got 6"),
    "out-of-int64": (PAGE_TABLE, {"out": table(dtype=wide)}, TypeError, "out must be int32, got int64"),
    "out-with-a-row-too-many": (PAGE_TABLE, {"out": table(4)}, ValueError, "out must be [B, P] with B=3, got [4, 9]"),
    "indices-with-a-row-too-few": (FLASHMLA, {"out": table(2)}, ValueError, "out must have at least the 3 rows of the batch, got 2"),
    "out-elsewhere": (PAGE_TABLE, {"out": on_meta}, ValueError, "out must be on cpu, as req_to_token is, got meta"),
    "out-of-strided-columns": (PAGE_TABLE, {"out": table(3, 20)[:, ::2]}, ValueError, "out must have unit column stride, got strides [25, 2]"),
    "out-transposed": (PAGE_TABLE, {"out": table(9, 3).T}, ValueError, "out must have unit column stride, got strides [1, 8]"),
    "out-of-one-row-repeated": (PAGE_TABLE, {"out": table(1)[0].expand(3, 9)}, ValueError, "out must have rows that do not overlap, got strides [0, 1]"),
    "out-of-overlapping-rows": (PAGE_TABLE, {"out": table(3).as_strided((3, 9), (4, 1))}, ValueError, "out must have rows that do not overlap, got strides [4, 1]"),
    "unknown-tail": (PAGE_TABLE, {"tail": "kept"}, ValueError, "tail must be 'clear' or 'keep', got 'kept'"),
    "keep-without-out": (FUNCTIONAL[PAGE_TABLE], {"tail": "keep"}, ValueError, "tail='keep' needs out"),
    "swa-keep-without-out": (FUNCTIONAL[SWA], {"tail": "keep"}, ValueError, "tail='keep' needs out"),
    "both-maps": (SWA, {"page_map": torch.zeros(4, dtype=wide)}, ValueError, "exactly one of full_to_swa and page_map must be given, got both"),
    "no-map": (SWA, {"full_to_swa": None}, ValueError, "exactly one of full_to_swa and page_map must be given, got neither"),
    "float-map": (SWA, {"full_to_swa": as_type(torch.float64)}, TypeError, "full_to_swa must be int32 or int64, got float64"),
    "map-of-rank-two": (SWA, {"full_to_swa": lambda t: t[None]}, ValueError, "full_to_swa must be [N], got [1, 168]"),
    "negative-q-len": (SWA, {"q_len": -1}, ValueError, "q_len must be at least 0, got -1"),
    "float-q-len": (SWA, {"q_len": 1.0}, TypeError, "q_len must be an int, got float"),
    "bool-q-len": (SWA, {"q_len": True}, TypeError, "q_len must be an int, got bool"),
    "one-out-for-two": (SWA, {"out": table()}, TypeError, "out must be (page_table, swa_page_table), got Tensor"),
    "three-outs-for-two": (SWA, {"out": (table(), table(), table())}, ValueError, "out must be (page_table, swa_page_table), got 3 entries"),
    "swa-out-of-int64": (SWA, {"out": (table(), table(dtype=wide))}, TypeError, "swa_page_table must be int32, got int64"),
    "swa-out-of-another-width": (SWA, {"out": (table(), table(columns=8))}, ValueError, "swa_page_table must be [B, P] with B=3, P=9, got [3, 8]"),
    "a-start-too-many": (FLASHMLA, {"kv_start": longer}, ValueError, "kv_start must be [B] with B=3, got [4]"),
    "float-start": (FLASHMLA, {"kv_start": as_type(torch.float32)}, TypeError, "kv_start must be int32 or int64, got float32"),
    "flashmla-float-lengths": (FLASHMLA, {"kv_lens": as_type(torch.float32)}, TypeError, "kv_lens must be int32 or int64, got float32"),
    "both-pools": (BLOCKS, {"req_to_token": torch.zeros(5, 28, dtype=wide)}, ValueError, "exactly one of req_to_token and block_table must be given, got both"),
    "no-pool": (SLOTS, {"req_to_token": None}, ValueError, "exactly one of req_to_token and block_table must be given, got neither"),
    "blocks-without-page-size": (BLOCKS, {"page_size": None}, ValueError, "page_size goes with block_table, got page_size=None"),
    "page-size-without-blocks": (SLOTS, {"page_size": 4}, ValueError, "page_size goes with block_table, got page_size=4"),
    "page-size-zero": (BLOCKS, {"page_size": 0}, ValueError, "page_size must be at least 1, got 0"),
    "page-size-negative": (BLOCKS, {"page_size": -4}, ValueError, "page_size must be at least 1, got -4"),
    "float-page-size": (BLOCKS, {"page_size": 4.0}, TypeError, "page_size must be an int, got float"),
    "float-positions": (SLOTS, {"positions": as_type(torch.float32)}, TypeError, "positions must be int32 or int64, got float32"),
    "positions-of-another-batch": (BLOCKS, {"positions": longer}, ValueError, "positions must be [B] with B=3, got [4]"),
    "prefix-sums-of-another-batch": (SLOTS, {"cu_seqlens_q": longer}, ValueError, "cu_seqlens_q must be [B+1] with B+1=4, got [5]"),
    "num-reqs-an-int": (SLOTS, {"num_reqs": 3}, TypeError, "num_reqs must be a tensor, got int"),
    "num-reqs-of-two": (SLOTS, {"num_reqs": torch.tensor([1, 2])}, ValueError, "num_reqs must be 0-d or [1], got [2]"),
    "num-reqs-of-rank-two": (SLOTS, {"num_reqs": torch.tensor([[1]])}, ValueError, "num_reqs must be 0-d or [1], got [1, 1]"),
    "float-num-reqs": (SLOTS, {"num_reqs": torch.tensor(1.0)}, TypeError, "num_reqs must be int32 or int64, got float32"),
    "num-reqs-elsewhere": (SLOTS, {"num_reqs": on_meta}, ValueError, "num_reqs must be on cpu, as req_to_token is, got meta"),
    "slots-out-of-int32": (SLOTS, {"out": poisoned((8,), torch.int32, "cpu")}, TypeError, "out must be int64, got int32"),
    "slots-out-too-long": (SLOTS, {"out": poisoned((9,), wide, "cpu")}, ValueError, "out must be [T] with T=8, got [9]"),
    "translate-float": (TRANSLATE, {"slots": as_type(torch.float32)}, TypeError, "slots must be int32 or int64, got float32"),
    "translate-out-of-int32": (TRANSLATE, {"out": poisoned((6,), torch.int32, "cpu")}, TypeError, "out must be int64, got int32"),
    "translate-strided-out": (TRANSLATE, {"out": poisoned((12,), wide, "cpu")[::2]}, ValueError, "out must have unit column stride, got strides [2]"),
    "negative-delta": (SEQLENS, {"delta": -1}, ValueError, "delta must be at least 0, got -1"),
    "negative-pad": (SEQLENS, {"pad_seqlen": -1}, ValueError, "pad_seqlen must be at least 0, got -1"),
    "pad-beyond-the-layout": (SEQLENS, {"pad_seqlen": 29}, ValueError, "pad_seqlen must be at most 28, got 29"),
    "float-q-lens": (SEQLENS, {"q_len": as_type(torch.float32)}, TypeError, "q_len must be int32 or int64, got float32"),
    "q-lens-of-another-batch": (SEQLENS, {"q_len": longer}, ValueError, "q_len must be [B] with B=3, got [4]"),
    "sums-out-of-int64": (SEQLENS, {"out": lambda out: (poisoned((3,), wide, "cpu"), *out[1:])}, TypeError, "cache_seqlens must be int32, got int64"),
    "sums-out-without-the-zero": (SEQLENS, {"out": lambda out: (out[0], out[1], out[2][:3])}, ValueError, "cu_seqlens_k must be [B+1] with B+1=4, got [3]"),
    "sums-out-a-list": (SEQLENS, {"out": list}, TypeError, "out must be (cache_seqlens, cu_seqlens_q, cu_seqlens_k), got list"),
    "decode-float-lengths": (DECODE, {"seq_lens": as_type(torch.float32)}, TypeError, "seq_lens must be int32 or int64, got float32"),
    "decode-bool-lengths": (DECODE, {"seq_lens": as_type(torch.bool)}, TypeError, "seq_lens must be int32 or int64, got bool"),
    "decode-lengths-elsewhere": (DECODE, {"seq_lens": on_meta}, ValueError, "seq_lens must be on cpu, as req_to_token is, got meta"),
    "decode-narrow-pool": (DECODE, {"req_to_token": lambda t: t[:, :27]}, ValueError, "req_to_token must have at least 28 columns for this layout, got 27"),
    "decode-both-maps": (DECODE, {"page_map": torch.zeros(4, dtype=wide)}, ValueError, "at most one of full_to_swa and page_map may be given, got both"),
    "decode-negative-delta": (DECODE, {"seq_len_delta": -1}, ValueError, "seq_len_delta must be at least 0, got -1"),
    "decode-pad-beyond-the-layout": (DECODE, {"pad_seqlen": 29}, ValueError, "pad_seqlen must be at most 28, got 29"),
    "decode-num-reqs-an-int": (DECODE, {"num_reqs": 3}, TypeError, "num_reqs must be a tensor, got int"),
    "decode-keep-without-out": (FUNCTIONAL[DECODE], {"tail": "keep"}, ValueError, "tail='keep' needs out"),
    "decode-unknown-tail": (DECODE, {"tail": None}, ValueError, "tail must be 'clear' or 'keep', got None"),
    "more-tokens-than-an-int32": (DECODE, {"q_len": lambda _: torch.ones(3, dtype=wide), "num_tokens": 2**31}, ValueError, "num_tokens must be at most 2147483647, got 2147483648"),
    "status-of-int64": (DECODE, {"status": torch.zeros(1, dtype=wide)}, TypeError, "status must be int32, got int64"),
    "status-of-two": (DECODE, {"status": torch.zeros(2, dtype=torch.int32)}, ValueError, "status must be 0-d or [1], got [2]"),
    "float-slots": (DECODE, {"slots": as_type(torch.float32)}, TypeError, "slots must be int32 or int64, got float32"),
    "fewer-tokens-than-slots": (DECODE, {"num_tokens": 5}, ValueError, "num_tokens must be at least the 6 entries of slots, got 5"),
    "num-tokens-with-an-int-q-len": (DECODE, {"slots": ..., "num_tokens": 6}, ValueError, "num_tokens goes with slots or a tensor q_len: an int q_len has B * q_len tokens, got 6"),
    "negative-num-tokens": (RAGGED, {"num_tokens": -1}, ValueError, "num_tokens must be at least 0, got -1"),
    "float-num-tokens": (RAGGED, {"num_tokens": 6.0}, TypeError, "num_tokens must be an int, got float"),
    "num-tokens-missing": (RAGGED, {"num_tokens": ...}, ValueError, "out.slot_mapping must be None for this call, got a tensor"),
    "out-a-tuple": (DECODE, {"out": tuple}, TypeError, "out must be a DecodeMetadata, got tuple"),
    "out-without-slots": (DECODE, {"out": without("slot_mapping")}, ValueError, "out.slot_mapping must be a tensor for this call, got None"),
    "out-without-swa-slots": (DECODE, {"out": without("swa_slot_mapping")}, ValueError, "out.swa_slot_mapping must be a tensor for this call, got None"),
    "out-without-swa-table": (DECODE, {"out": without("swa_page_table")}, ValueError, "out.swa_page_table must be a tensor for this call, got None"),
    "out-without-lengths": (DECODE, {"out": without("cache_seqlens")}, ValueError, "out.cache_seqlens must be a tensor for this call, got None"),
    "out-with-swa-but-no-map": (DECODE, {"full_to_swa": None}, ValueError, "out.swa_page_table must be None for this call, got a tensor"),
    "decode-out-of-int64": (DECODE, {"out": with_field(page_table=table(dtype=wide))}, TypeError, "out.page_table must be int32, got int64"),
    "decode-narrow-out": (DECODE, {"out": with_field(swa_page_table=table(3, 6))}, ValueError, "out.swa_page_table must be [B, P] with B=3, P=9, got [3, 6]"),
    "decode-slots-out-of-int32": (DECODE, {"out": with_field(slot_mapping=poisoned((6,), torch.int32, "cpu"))}, TypeError, "out.slot_mapping must be int64, got int32"),
    "decode-slots-out-too-short": (DECODE, {"out": with_field(slot_mapping=poisoned((5,), wide, "cpu"))}, ValueError, "out.slot_mapping must be [T] with T=6, got [5]"),
    "decode-sums-out-too-short": (DECODE, {"out": with_field(cu_seqlens_q=poisoned((3,), torch.int32, "cpu"))}, ValueError, "out.cu_seqlens_q must be [B+1] with B+1=4, got [3]"),
}  # fmt: skip


def bad_call(form: Form, changes: Change) -> tuple[dict[str, Any], list[Tensor | None]]:
    """Arguments with the changes made, and the outputs that must stay unwritten."""
    call = arguments(form, batch(num_tokens=6), "cpu")
    fields: list[Tensor | None] = []
    if form.in_place:
        fields = outputs(form, call, "cpu")
        call["out"] = packed(form, fields, ckv.DecodeMetadata)
    if form.status:
        call["status"] = torch.zeros(1, dtype=torch.int32)
    for name, change in changes.items():
        if change is ...:
            del call[name]
        else:
            call[name] = change(call[name]) if callable(change) else change
    return call, fields


@pytest.mark.parametrize("form, changes, error, sentence", BAD.values(), ids=BAD)
def test_refused_before_anything_is_written(form: Form, changes: Change, error: type[Exception], sentence: str) -> None:
    call, fields = bad_call(form, changes)
    with pytest.raises(error) as raised:
        getattr(ckv, form.operator)(**call)
    assert sentence in str(raised.value)
    replaced = list(call["out"]) if isinstance(call.get("out"), tuple) else [call.get("out")]
    for out in [*fields, *replaced]:
        if isinstance(out, Tensor) and out.device.type == "cpu":
            assert bool((around(out) == POISON.get(out.dtype, 0)).all()), "an output was written"


LAYOUTS = {
    "page-size-zero": ({"page_size": 0, "max_context_len": 8}, ValueError, "page_size must be at least 1, got 0"),
    "page-size-negative": ({"page_size": -4, "max_context_len": 8}, ValueError, "page_size must be at least 1, got -4"),
    "page-size-float": ({"page_size": 4.0, "max_context_len": 8}, TypeError, "page_size must be an int, got float"),
    "window-zero": ({"page_size": 4, "max_context_len": 8, "window": 0}, ValueError, "window must be at least 1, got 0"),
    "context-negative": ({"page_size": 4, "max_context_len": -1}, ValueError, "max_context_len must be at least 0, got -1"),
    "window-beyond-int32": ({"page_size": 4, "max_context_len": 8, "window": 2**31}, ValueError, "window must fit in int32, got 2147483648"),
    "page-size-beyond-int32": ({"page_size": 2**63, "max_context_len": 8}, ValueError, "page_size must fit in int32, got 9223372036854775808"),
    "context-beyond-int32": ({"page_size": 4, "max_context_len": 2**31}, ValueError, "must fit in int32, got 2147483648"),
}  # fmt: skip


@pytest.mark.parametrize("fields, error, sentence", LAYOUTS.values(), ids=LAYOUTS)
def test_layout_refuses(fields: Change, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error) as raised:
        ckv.KVLayout(**fields)
    assert sentence in str(raised.value)


IN_A_GRAPH = (
    "float-lengths",
    "out-of-int64",
    "unknown-tail",
    "both-maps",
    "swa-out-of-another-width",
    "page-size-zero",
    "translate-out-of-int32",
    "negative-delta",
    "out-without-slots",
    "fewer-tokens-than-slots",
)


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be traced")
@pytest.mark.parametrize("name", IN_A_GRAPH)
def test_the_sentence_reaches_the_user_of_fullgraph(name: str) -> None:
    form, changes, _, sentence = BAD[name]
    call, fields = bad_call(form, changes)
    compiled = torch.compile(getattr(ckv, form.operator), fullgraph=True, backend="eager")
    with pytest.raises(Exception) as raised:
        compiled(**call)
    assert sentence in str(raised.value)
    assert all(out is None or bool((around(out) == POISON[out.dtype]).all()) for out in fields)


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be traced")
def test_a_graph_that_may_break_raises_the_error_itself() -> None:
    call, _ = bad_call(PAGE_TABLE, {"cache_seqlens": as_type(torch.float32)})
    with pytest.raises(TypeError, match="cache_seqlens must be int32 or int64, got float32"):
        torch.compile(ckv.page_table, backend="eager")(**call)


def test_every_operator_accepts_what_the_table_starts_from() -> None:
    """The good call behind each bad one is good, so that the change is what was refused."""
    for form in {form for form, *_ in BAD.values()}:
        call, _ = bad_call(form, {})
        getattr(ckv, form.operator)(**call)


def test_nothing_is_cast_when_dtypes_are_right() -> None:
    """[3, 7] as int64 must not be read as 3, 0, 7, 0."""
    call = arguments(Form("seqlens", wide=0xFFFF), CASES["plain"], "cpu")
    found, expected = ckv.seqlens(**call), reference.seqlens(**call)
    assert [t.tolist() for t in found] == [t.tolist() for t in expected]
