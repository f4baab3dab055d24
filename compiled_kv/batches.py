"""One step's batch as the engine knows it, and what the host can see to be wrong in it.

DecodeBatch(rows=[3, 1], seq_lens=[70, 5], generations=[0, 2], token_ids=[11, 12])
rows=[3, 9] of a pool of 8 -> ValueError: batch.rows[1] must be at most 7, got 9
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from compiled_kv.checks import INTS, Sizes, check_int

if TYPE_CHECKING:
    from compiled_kv.loading import LoadedInputs

Ints = Sequence[int] | Tensor


class DecodeBatch(NamedTuple):
    """One step's batch of n requests: Python ints, or int tensors that are on the device already (all, or none)."""

    rows: Ints
    """[n] the pool row of each request; one may stand here twice, and is read twice."""
    seq_lens: Ints
    """[n] committed tokens, as `decode_metadata` counts them; a query ahead of the first token has slot -1."""
    generations: Ints
    """[n] a number that the pool row never had before, whenever the pages of its committed tokens change: those that a
    step had ahead of its own queries."""
    q_lens: Ints | None = None
    """[n] queries of each request; with `ragged` buffers alone."""
    slots: Ints | None = None
    """[t] where each token is written; with `given_slots` alone."""
    token_ids: Ints | None = None
    """[t] token of each query, row after row; where `q_len` is fixed one a row will do, for a step that drafts the
    others itself. None leaves those on the device alone."""


def check_batch(buffers: LoadedInputs, batch: DecodeBatch) -> None:
    """Refuse what the host can see to be wrong in a batch of Python ints."""
    refuse_batch(batch)
    given = {name: values for name, values in batch._asdict().items() if values is not None}
    for name, values in given.items():
        if isinstance(values, Tensor):
            raise TypeError(f"batch.{name} must hold Python ints, as batch.rows does, got a tensor")
    _check_lengths(buffers, given)
    _check_range("rows", given["rows"], buffers.req_to_token.shape[0] - 1)
    _check_range("seq_lens", given["seq_lens"])
    delta = buffers.seq_len_delta
    try:
        buffers.layout.check(length + delta for length in given["seq_lens"])
    except ValueError as error:
        raise ValueError(f"batch.seq_lens plus seq_len_delta={delta}: {error}") from None
    if buffers.ragged:
        _check_range("q_lens", given["q_lens"], buffers.q_len)
    _check_queries(buffers, given)


def check_ints(batch: DecodeBatch) -> None:
    """Refuse an entry that is no 64-bit int."""
    for name, values in batch._asdict().items():
        for index, value in enumerate(() if values is None else values):
            check_int(f"batch.{name}[{index}]", _own(value), -(2**63), 2**63 - 1)


def check_tensors(buffers: LoadedInputs, given: dict[str, Any]) -> None:
    """Refuse tensors of a wrong kind, shape or device."""
    sizes = Sizes()
    sizes.device, sizes.device_of = buffers.inputs.device, "the buffers"
    for name, values in given.items():
        sizes.check(
            f"batch.{name}", values, INTS, "n" if name in ("rows", "seq_lens", "generations", "q_lens") else "t"
        )
    _check_lengths(buffers, given)
    _check_queries(buffers, given)


def is_ordered(kind: type) -> bool:
    """Whether what is of this kind has an order of its own; a set and a dict of rows have none."""
    return hasattr(kind, "__getitem__") and not issubclass(kind, dict)


def refuse_batch(batch: Any) -> None:
    """Refuse what is no batch, or one without entries where there must be some."""
    if not isinstance(batch, DecodeBatch):
        raise TypeError(f"batch must be a DecodeBatch, got {type(batch).__name__}")
    for name, values in batch._asdict().items():
        if values is None and name in ("rows", "seq_lens", "generations"):
            raise TypeError(f"batch.{name} must have one entry for each row, got None")
        ordered = is_ordered(type(values)) and hasattr(values, "__len__")
        if values is not None and not (ordered and getattr(values, "ndim", 1) != 0):
            kind = type(values).__name__
            raise TypeError(f"batch.{name} must be a list, a tuple, or an array or tensor with a dimension, got {kind}")


def _check_lengths(buffers: LoadedInputs, given: dict[str, Any]) -> None:
    size = len(given["rows"])
    if size > buffers.max_batch_size:
        raise ValueError(f"batch.rows must hold at most max_batch_size={buffers.max_batch_size} requests, got {size}")
    for name, wanted in (("q_lens", buffers.ragged), ("slots", buffers.given_slots)):
        if (name in given) != wanted:
            came = "got none" if wanted else "got some"
            raise ValueError(f"batch.{name} must be {'given' if wanted else 'None'} for these buffers, {came}")
    for name, values in given.items():
        per_row = name in ("seq_lens", "generations", "q_lens")
        if per_row and len(values) != size:
            raise ValueError(f"batch.{name} must have one entry for each of the {size} rows, got {len(values)}")


def _check_queries(buffers: LoadedInputs, given: dict[str, Any]) -> None:
    """Refuse more slots or tokens than queries, and tokens that are neither one a query nor, of a fixed `q_len`, one a
    row."""
    size, queries = len(given["rows"]), _queries(buffers, given)
    most = size * buffers.q_len if queries is None else queries
    for name in ("slots", "token_ids"):
        if name in given and len(given[name]) > most:
            raise ValueError(f"batch.{name} must have at most {most} entries, got {len(given[name])}")
    if queries is not None and "token_ids" in given:
        rule, counts = f"one entry for each of the {queries} queries", [queries]
        if not buffers.ragged and size < queries:
            rule, counts = f"{rule}, or for each of the {size} rows", [queries, size]
        if len(given["token_ids"]) not in counts:
            raise ValueError(f"batch.token_ids must have {rule}, got {len(given['token_ids'])}")


def _queries(buffers: LoadedInputs, given: dict[str, Any]) -> int | None:
    """Queries of a batch; None where the device alone knows."""
    if not buffers.ragged:
        return len(given["rows"]) * buffers.q_len
    return None if isinstance(given["q_lens"], Tensor) else sum(given["q_lens"])


def _check_range(name: str, values: Sequence[int], most: int | None = None) -> None:
    for index, value in enumerate(values):
        check_int(f"batch.{name}[{index}]", _own(value), 0, most)


def _own(value: Any) -> Any:
    """An int of another library as Python's own; anything else as it is."""
    return value if type(value) is bool or not isinstance(value, Integral) else int(value)
