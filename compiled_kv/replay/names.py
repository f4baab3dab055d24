"""The name of a difference: what kind of mistake leaves such values in a buffer.

page_table[2, 1] holds 9, expected 0: row 2 has 1 live columns      -> stale tail
cache_seqlens holds [3, 0], expected [3, 7]                         -> int64 read as int32
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from compiled_kv.replay.reference import Expected

TABLES = ("page_table", "swa_page_table")
SLOTS = ("slot_mapping", "swa_slot_mapping")


class Difference(NamedTuple):
    """A fault by name, and where it was seen."""

    fault: str
    sentence: str


def name_difference(expected: Expected, name: str, found: Any, wanted: Any) -> Difference:
    """What went wrong where buffer `name` differs, by the look of it."""
    if name == "inputs":
        return _name_input(expected, found, wanted)
    if name in TABLES:
        i = _first(found, wanted)
        return _name_page(expected, name, i, _first(found[i], wanted[i]), found, wanted)
    i = _first(found, wanted)
    where = f"{name}[{i}] holds {found[i]}, expected {wanted[i]}"
    if name == "status":
        return Difference("status bit", where)
    if name == "held":
        return Difference("wrong record", where)
    live = len(expected.rows)
    if name in SLOTS:
        tokens, kind = sum(row.queries for row in expected.rows), "wrong slot"
        inside = expected.bucket * expected.serving.queries
    else:
        kind = "wrong length" if name == "cache_seqlens" else "wrong prefix sum"
        tokens, inside = live + (name != "cache_seqlens"), expected.bucket + (name != "cache_seqlens")
    if i >= inside:
        return Difference("write outside the bucket", where)
    if i >= tokens:
        return Difference("forgotten padding row", f"{where}: {live} of {expected.bucket} rows are live")
    if name == "cache_seqlens" and _is_int64_read_as_int32(
        found, expected.values["inputs"]["seq_lens"], expected.serving.delta, live
    ):
        return Difference("int64 read as int32", f"{name} holds {found[:live]}, every other word of {wanted[:live]}")
    if found[i] == expected.before[name][i] != wanted[i]:
        return Difference("frozen value", f"{where}: what it held in the step before")
    return Difference(kind, where)


def _name_input(expected: Expected, found: dict[str, list[int]], wanted: dict[str, list[int]]) -> Difference:
    name = next(name for name in wanted if found[name] != wanted[name])
    i = _first(found[name], wanted[name])
    where = f"input {name}[{i}] holds {found[name][i]}, loaded was {wanted[name][i]}"
    if name == "num_reqs" and found[name][i] > wanted[name][i]:
        return Difference("forgotten padding row", f"{where}: rows count as live that are padding")
    if name == "generations":
        return Difference("wrong generation", where)
    if name != "num_reqs" and i >= len(expected.rows) * (expected.serving.queries if name == "token_ids" else 1):
        return Difference("forgotten padding row", where)
    return Difference("late input", f"{where}: overwritten before the device had read it, or loaded as something else")


def _name_page(expected: Expected, name: str, i: int, p: int, found: Any, wanted: Any) -> Difference:
    value, where = found[i][p], f"{name}[{i}, {p}] holds {found[i][p]}, expected {wanted[i][p]}"
    if i >= expected.bucket:
        return Difference("write outside the bucket", where)
    if i >= len(expected.rows):
        return Difference("forgotten padding row", f"{where}: {len(expected.rows)} of {expected.bucket} rows are live")
    row = expected.rows[i]
    if p >= expected.live_columns(row):
        return Difference("stale tail", f"{where}: row {i} has {expected.live_columns(row)} live columns")
    if name == "swa_page_table" and p < expected.first_column(row):
        return Difference("window not followed", f"{where}: the window begins in column {expected.first_column(row)}")
    if value == 0 and name == "swa_page_table":
        return Difference("window not followed", f"{where}: column {p} is inside the window")
    if value == expected.before[name][i][p]:
        same = i < len(expected.rows_before) and expected.rows_before[i].request == row.request
        if same:
            return Difference(
                "stale page", f"{where}: request {row.request} has another page there since the step before"
            )
        return Difference(
            "stale request", f"{where}: a page of the request that was in row {i} before request {row.request}"
        )
    return Difference("wrong page", where)


def _first(found: list[Any], wanted: list[Any]) -> int:
    return next(i for i, (a, b) in enumerate(zip(found, wanted)) if a != b)


def _is_int64_read_as_int32(found: list[int], seq_lens: list[int], delta: int, live: int) -> bool:
    words = [word for length in seq_lens for word in (length, 0)]
    return live > 1 and found[:live] == [word + delta for word in words[:live]]
