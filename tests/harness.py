"""One call of any operator, and its comparison with the oracle.

A `Batch` holds everything that any operator may be given for one step, as Python numbers and int64 tensors.
A `Form` says which operator, which of its optional arguments, and in what dtypes and strides. `check` makes the
call that the two describe and compares it with the oracle byte for byte, memory around the outputs included.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import compiled_kv as ckv
from compiled_kv import reference
from compiled_kv.layout import KVLayout

POISON = {torch.int32: 0x7EADBEEF, torch.int64: 0x7EADBEEF7EADBEEF}
TABLES = ("page_table", "swa_page_table", "flashmla_kv_indices", "decode_metadata")
OPERATORS = (
    "page_table",
    "swa_page_table",
    "flashmla_kv_indices",
    "slot_mapping",
    "translate_slots",
    "seqlens",
    "decode_metadata",
)


@dataclass(frozen=True)
class Batch:
    """What one step may hand to an operator: `B` entries over a pool of `R` rows, `T` tokens."""

    layout: KVLayout
    req_to_token: Tensor  # [R, C]
    block_table: Tensor  # [R, W]
    rows: Tensor  # [B]
    seq_lens: Tensor  # [B]
    q_lens: Tensor  # [B]
    kv_start: Tensor  # [B]
    positions: Tensor  # [T], T >= B
    cu_seqlens_q: Tensor  # [B + 1]
    slots: Tensor  # [n]
    token_map: Tensor  # [N]
    page_map: Tensor  # [NP]
    num_reqs: int = 2
    num_tokens: int = 6
    q_len: int = 2
    delta: int = 2
    pad_seqlen: int = 3


@dataclass(frozen=True)
class Form:
    """How an operator is called. `wide` has a bit for each argument in the order of the signature: int64 or int32."""

    operator: str
    in_place: bool = False
    tail: str = "clear"
    wide: int = 0
    strided: bool = False
    padded: str = ""  # "scalar" or "vector": num_reqs is given, 0-d or [1]
    ragged: bool = False  # q_len a tensor; in slot_mapping, cu_seqlens_q given
    mapped: str = ""  # "token" or "page"
    given: bool = False  # slots given
    bounded: bool = True  # num_tokens given, where there is a choice
    start: bool = False  # kv_start given
    paged: bool = False  # from a block_table
    clamped: bool = True  # seqlens gets the layout
    status: bool = False

    def __str__(self) -> str:
        words = ["out" if self.in_place else "", self.tail if self.tail == "keep" else "", f"i{self.wide:x}"]
        words += [self.padded and f"num-reqs-{self.padded}", self.mapped and f"{self.mapped}-map"]
        flags = ("strided", "ragged", "given", "start", "paged", "status")
        words += [flag for flag in flags if getattr(self, flag)]
        words += ["unbounded"] if not self.bounded else []
        words += ["unclamped"] if not self.clamped else []
        return "-".join([self.operator, *filter(None, words)])


def arguments(form: Form, batch: Batch, device: str) -> dict[str, Any]:
    """The keyword arguments of this call, without `out` and `status`."""
    given = _tensors_and_numbers(form, batch)
    order = inspect.signature(getattr(reference, form.operator)).parameters
    inputs = {name: given[name] for name in order if name in given}
    bits = iter(range(len(inputs)))
    return {
        name: _input(value, form, next(bits), device) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }


def _tensors_and_numbers(form: Form, batch: Batch) -> dict[str, Any]:
    pool = {"req_to_token": batch.req_to_token, "req_pool_indices": batch.rows}
    tail = {"layout": batch.layout, "tail": form.tail}
    mapped = {"full_to_swa": batch.token_map} if form.mapped == "token" else {}
    mapped |= {"page_map": batch.page_map} if form.mapped == "page" else {}
    q_len = {"q_len": batch.q_lens if form.ragged else batch.q_len}
    padded = {"num_reqs": torch.tensor(batch.num_reqs)} if form.padded == "scalar" else {}
    padded |= {"num_reqs": torch.tensor([batch.num_reqs])} if form.padded == "vector" else {}
    match form.operator:
        case "page_table":
            return pool | tail | {"cache_seqlens": batch.seq_lens}
        case "swa_page_table":
            return pool | tail | mapped | q_len | {"cache_seqlens": batch.seq_lens}
        case "flashmla_kv_indices":
            start = {"kv_start": batch.kv_start} if form.start else {}
            return pool | tail | start | {"kv_lens": batch.seq_lens}
        case "slot_mapping":
            page_size = batch.layout.page_size
            paged = {"req_to_token": None, "block_table": batch.block_table, "page_size": page_size}
            tokens = {"positions": batch.positions if form.ragged else batch.positions[: len(batch.rows)]}
            tokens |= {"cu_seqlens_q": batch.cu_seqlens_q} if form.ragged else {}
            return pool | (paged if form.paged else {}) | tokens | padded
        case "translate_slots":
            return {"slots": batch.slots, "full_to_swa": batch.token_map}
        case "seqlens":
            lengths = {"seq_lens": batch.seq_lens, "delta": batch.delta, "pad_seqlen": batch.pad_seqlen}
            return lengths | q_len | padded | ({"layout": batch.layout} if form.clamped else {})
        case "decode_metadata":
            lengths = {"seq_lens": batch.seq_lens, "seq_len_delta": batch.delta}
            lengths |= {"pad_seqlen": batch.pad_seqlen}
            tokens = {"slots": batch.slots} if form.given else {}
            if form.bounded and (form.given or form.ragged):
                tokens["num_tokens"] = max(batch.num_tokens, len(batch.slots) if form.given else 0)
            return pool | tail | mapped | q_len | padded | lengths | tokens
    raise AssertionError(form.operator)


def _input(values: Tensor, form: Form, bit: int, device: str) -> Tensor:
    dtype = torch.int64 if form.wide >> bit & 1 else torch.int32
    tensor = values.clamp(torch.iinfo(dtype).min, torch.iinfo(dtype).max).to(dtype)
    if form.strided and tensor.ndim > 0:
        poisoned = torch.full([2 * size + 3 for size in tensor.shape], POISON[dtype], dtype=dtype)
        place = poisoned[tuple(slice(1, 1 + 2 * size, 2) for size in tensor.shape)]
        tensor = place.copy_(tensor)
    return tensor.to(device) if device == "cpu" or not form.strided else _moved(tensor, device)


def _moved(view: Tensor, device: str) -> Tensor:
    """`view` on another device with its own strides and offset, which `to` would not keep."""
    storage = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())
    return storage.to(device).as_strided(view.shape, view.stride(), view.storage_offset())


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """An output inside a larger poisoned buffer, at an offset; a table's rows lie further apart than they are wide."""
    whole = torch.full([size + 5 for size in shape], POISON[dtype], dtype=dtype, device=device)
    return whole[tuple(slice(2, 2 + size) for size in shape)]


def around(view: Tensor) -> Tensor:
    """The whole buffer that an output lies in, on the CPU."""
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(view.untyped_storage()).cpu()


def assert_untouched(given: Iterable[Any]) -> None:
    """Each output among the arguments, which lies inside a larger buffer, holds its poison, and so does the buffer."""
    for tensor in given:
        if isinstance(tensor, Tensor) and around(tensor).numel() > tensor.numel():
            assert {*around(tensor).tolist()} == {POISON[tensor.dtype]}


def is_clean_around(out: Tensor) -> bool:
    """Whether the memory around a poisoned output is as it was."""
    whole = around(out).clone()
    whole.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(whole[0])
    return bool((whole == whole[0]).all())


def outputs(form: Form, call: dict[str, Any], device: str) -> list[Tensor | None]:
    """Poisoned outputs for this call, None where it has none; tables get columns beyond the layout's."""
    given = {"req_pool_indices": torch.empty(0), **call}
    batch = len(given.get("seq_lens", given["req_pool_indices"]))
    width = call["layout"].max_num_pages + 2 if call.get("layout") else 0
    table = poisoned((batch, width), torch.int32, device)
    match form.operator:
        case "page_table" | "flashmla_kv_indices":
            return [table]
        case "swa_page_table":
            return [table, poisoned((batch, width), torch.int32, device)]
        case "slot_mapping":
            return [poisoned((len(call["positions"]),), torch.int64, device)]
        case "translate_slots":
            return [poisoned((len(call["slots"]),), torch.int64, device)]
    sums: list[Tensor | None] = [poisoned((n,), torch.int32, device) for n in (batch, batch + 1, batch + 1)]
    if form.operator == "seqlens":
        return sums
    tokens = _num_tokens(call, batch)
    slots = [None if tokens is None else poisoned((tokens,), torch.int64, device) for _ in range(2)]
    if not form.mapped:
        return [*sums, table, None, slots[0], None]
    return [*sums, table, poisoned((batch, width), torch.int32, device), *slots]


def _num_tokens(call: dict[str, Any], batch: int) -> int | None:
    if "num_tokens" in call:
        return call["num_tokens"]
    if "slots" in call:
        return len(call["slots"])
    return batch * call["q_len"] if isinstance(call["q_len"], int) else None


def packed(form: Form, fields: list[Tensor | None], metadata: Callable[..., Any]) -> Any:
    """`out` as the public function takes it."""
    if form.operator == "decode_metadata":
        return metadata(*fields)
    return fields[0] if len(fields) == 1 else tuple(fields)


def unpacked(result: Any) -> list[Tensor | None]:
    return [result] if isinstance(result, Tensor) else list(result)


def check(form: Form, batch: Batch, device: str = "cpu", call: Callable[..., Any] | None = None) -> None:
    """Call the operator (or `call`, a compiled one) and demand what the oracle says, exactly."""
    function = call or getattr(ckv, form.operator)
    given, expected_given = arguments(form, batch, device), arguments(form, batch, "cpu")
    if form.in_place:
        found, expected = outputs(form, given, device), outputs(form, given, "cpu")
        given["out"] = packed(form, found, ckv.DecodeMetadata)
        expected_given["out"] = packed(form, expected, reference.Metadata)
    if form.status:
        given["status"] = torch.tensor([256], dtype=torch.int32, device=device)
    result = function(**given)
    wanted = getattr(reference, form.operator)(**expected_given)
    if form.operator == "decode_metadata":
        wanted, bits = wanted
        if form.status:
            assert bit_names(int(given["status"])) == bit_names(256 | bits)
    for name, a, b in zip(names(form), unpacked(result), unpacked(wanted), strict=True):
        same(name, a, b)
    if form.in_place:
        for name, a, b, mine in zip(names(form), found, expected, unpacked(result), strict=True):
            assert a is mine, f"{name} came back as another object"
            if a is not None and b is not None:
                assert torch.equal(around(a), around(b)), f"{name}: memory around the output was written"


def same(name: str, found: Tensor | None, expected: Tensor | None) -> None:
    assert (found is None) == (expected is None), name
    if found is not None and expected is not None:
        assert found.dtype == expected.dtype, name
        assert found.tolist() == expected.tolist(), name


def names(form: Form) -> Iterator[str]:
    fields = {"decode_metadata": reference.Metadata._fields, "seqlens": reference.Metadata._fields[:3]}
    fields["swa_page_table"] = ("page_table", "swa_page_table")
    return iter(fields.get(form.operator, (form.operator,)))


def bit_names(bits: int) -> list[str]:
    known = {value: name for name, value in vars(reference).items() if name.isupper() and name != "INT32_MAX"}
    return [known.get(1 << i, f"bit {i}") for i in range(32) if bits >> i & 1]
