"""What is claimed of the operators' speed, what bounds it, and what a run measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from compiled_kv.bench.timing import interval_of_median

MISS = 1.03
CAPTURED = "in the captured step"
FORMS = {
    "ours": "kept tails",
    "incremental": "incremental",
    "incremental-untouched": "incremental, slots that nobody touched before",
}
Ratio = dict[str, float]  # median, low, high


class Claim(NamedTuple):
    """One line: `is_met` is None for what is shown beside the claims, or was not measured."""

    what: str
    bound: str
    measured: str
    where: str = ""
    is_met: bool | None = None


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def claims(results: dict[str, Any]) -> list[Claim]:
    """Every claim that the results have data for."""
    cells = results.get("cells", [])
    found = [*_rebuild(cells), *_clear(cells), *_incremental(cells), *_bounds(cells), *_bandwidth(cells)]
    return found + _schedule(results) + _steps(results.get("steps", []))


def _rebuild(cells: list[dict[str, Any]]) -> list[Claim]:
    if not cells:
        return []
    worst, ratios = _worst(cells, "rebuild"), [cell["ratios"]["rebuild"] for cell in cells]
    above, surely = misses(cells), sum(each["low"] > 1 for each in ratios)
    return [
        _upper("full rebuild over the best published design, worst cell", 1.0, worst["ratios"]["rebuild"],
               f"{worst['name']}, {worst['best']}"),
        Claim(f"the same, cells above {MISS}", "0", f"{len(above)} of {len(cells)}", "", not above),
        Claim("the same, cells whose whole 95 % interval is above 1", "", f"{surely} of {len(cells)}"),
        Claim("the same, geometric mean", "", number(geometric_mean(each["median"] for each in ratios))),
        *_known(cells),
    ]  # fmt: skip


def _known(cells: list[dict[str, Any]]) -> list[Claim]:
    """How far the rebuild is from a gather of the same entries for which the host knew everything."""
    name = "ours/gather-known"
    cells = [cell for cell in cells if name in cell["ratios"]]
    if not cells:
        return []
    worst, mean = _worst(cells, name), geometric_mean(cell["ratios"][name]["median"] for cell in cells)
    what = "full rebuild over a gather of the same entries, all lengths and addresses known to the host"
    return [
        Claim(f"{what}, worst cell", "", interval(worst["ratios"][name]), worst["name"]),
        Claim("the same, geometric mean", "", number(mean)),
    ]


def misses(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cells in which the rebuild takes more than 1.03 times the best published design, the worst first."""
    above = [cell for cell in cells if cell["ratios"]["rebuild"]["median"] > MISS]
    return sorted(above, key=lambda cell: -cell["ratios"]["rebuild"]["median"])


def _clear(cells: list[dict[str, Any]]) -> list[Claim]:
    floors = ("ours-clear/copy-tables", "ours-clear/loads", "ours-clear/gather-known")
    cells = [cell for cell in cells if set(floors) <= cell["ratios"].keys()]
    if not cells:
        return []
    name = floors[0]
    worst, above = _worst(cells, name), sum(cell["ratios"][name]["median"] > 1.15 for cell in cells)

    def over_slowest(cell: dict[str, Any]) -> Ratio:
        return min((cell["ratios"][each] for each in floors), key=lambda ratio: ratio["median"])

    held = max(cells, key=lambda cell: over_slowest(cell)["median"])
    still = sum(over_slowest(cell)["median"] > 1.15 for cell in cells)
    return [
        _upper("clearing form over a copy of as many bytes as its tables have, worst cell", 1.15,
               worst["ratios"][name], worst["name"]),
        Claim("the same, cells above 1.15", "0", f"{above} of {len(cells)}", "", above == 0),
        Claim("clearing form over the slowest of its floors (that copy, dependent loads, the known gather), worst cell",
              "", interval(over_slowest(held)), held["name"]),
        Claim("the same, cells above 1.15", "", f"{still} of {len(cells)}"),
    ]  # fmt: skip


def _incremental(cells: list[dict[str, Any]]) -> list[Claim]:
    if not cells:
        return []
    mean, untouched = (
        1 / geometric_mean(cell["ratios"][form]["median"] for cell in cells)
        for form in ("incremental", "incremental-untouched")
    )
    what = "best published design over the incremental update, geometric mean"
    return [
        Claim(what, "at least 3", number(mean), "", mean >= 3),
        Claim("the same, slots that nobody touched before", "", number(untouched)),
    ]


def _bounds(cells: list[dict[str, Any]]) -> list[Claim]:
    found = []
    for name, form in FORMS.items():
        if ratios := bound_ratios(cells, name):
            cell, ratio = max(ratios, key=lambda each: each[1]["median"])
            what = f"context bound 1 M over 8 K, {form}, worst of {len(ratios)}"
            is_claimed = name != "incremental-untouched"
            found.append(_upper(what, 1.1, ratio, cell) if is_claimed else Claim(what, "", interval(ratio), cell))
    return found


def bound_ratios(cells: list[dict[str, Any]], name: str) -> list[tuple[str, Ratio]]:
    """Time under the widest context bound over that under the narrowest, at the same live lengths.

    They are timed apart, so the interval is made of the ends of both medians' intervals: wider than 95 %.
    """
    found: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for cell in cells:
        key = tuple(cell[axis] for axis in ("batch", "length", "page_size", "swa", "lengths"))
        found.setdefault(key, {})[cell["context"]] = cell
    ratios = []
    for same in found.values():
        if {1 << 13, 1 << 20} <= same.keys():
            wide, narrow = (same[context]["times"][name] for context in (1 << 20, 1 << 13))
            (low, high), (least, most) = (interval_of_median(each["samples"]) for each in (wide, narrow))
            median = wide["median"] / narrow["median"]
            ratios.append((same[1 << 20]["name"], {"median": median, "low": low / most, "high": high / least}))
    return ratios


def _bandwidth(cells: list[dict[str, Any]]) -> list[Claim]:
    wanted = {"batch": 64, "length": 1 << 17, "page_size": 1, "swa": "off", "lengths": "uniform"}
    here = [cell for cell in cells if all(cell[axis] == value for axis, value in wanted.items())]
    here = [cell for cell in here if "ours/copy" in cell["ratios"]]
    if not here:
        return []
    worst = _worst(here, "ours/copy")
    ratio = worst["ratios"]["ours/copy"]
    share = {"median": 1 / ratio["median"], "low": 1 / ratio["high"], "high": 1 / ratio["low"]}
    what = "share of copy bandwidth, page size 1, 64 requests of 128 K"
    return [Claim(what, "at least 0.75", interval(share), worst["name"], share["median"] >= 0.75)]


def _schedule(results: dict[str, Any]) -> list[Claim]:
    found = []
    if agreed := results.get("agreement"):
        equal = agreed["batches"] - agreed["different"]
        what = "schedules equal to a plain port of the algorithm, random batches"
        found.append(Claim(what, "10000 of 10000", f"{equal} of {agreed['batches']}", "", equal >= 10_000))
    if wide := [each for each in results.get("schedule", []) if each["batch"] == 512]:
        worst = max(wide, key=lambda each: each["times"]["ours"]["median"])
        low, high = interval_of_median(worst["times"]["ours"]["samples"])
        time = {"median": worst["times"]["ours"]["median"], "low": low, "high": high}
        found.append(_upper("schedule at batch 512, 132 parts, us", 5, time, f"length {worst['length']}"))
    return found


def _steps(steps: list[dict[str, Any]]) -> list[Claim]:
    found = []
    for model, batches, is_claimed in (("1B", (1, 8), True), ("1B", (64,), False), ("8B", (1, 8, 64), False)):
        for speculative in (False, True):
            here = [s for s in steps if (s["model"], s["speculative"]) == (model, speculative)]
            here = [step for step in here if step["batch"] in batches]
            if not here:
                continue
            kind = f"{model}, batch {_and(each['batch'] for each in here)}, {'speculative' if speculative else 'plain'}"
            slow, over = (_worst(here, f"{CAPTURED}/{other}") for other in ("host read", "frozen"))
            ratio = slow["ratios"][f"{CAPTURED}/host read"]
            less = {"median": 1 - ratio["median"], "low": 1 - ratio["high"], "high": 1 - ratio["low"]}
            met = less["median"] >= 0.15 if is_claimed else None
            what = f"captured step takes less a token than the host-read loop, {kind}, least"
            found.append(Claim(what, "at least 0.15" if is_claimed else "", interval(less), slow["name"], met))
            ratio = over["ratios"][f"{CAPTURED}/frozen"]
            met = ratio["median"] <= 1.02 if is_claimed else None
            what = f"captured step over frozen metadata, {kind}, worst"
            found.append(Claim(what, "1.02" if is_claimed else "", interval(ratio), over["name"], met))
    return found


def _worst(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    key: Callable[[dict[str, Any]], float] = lambda entry: entry["ratios"][name]["median"]  # noqa: E731
    return max(entries, key=key)


def _upper(what: str, bound: float, ratio: Ratio, where: str) -> Claim:
    return Claim(what, f"{bound:.2f}", interval(ratio), where, ratio["median"] <= bound)


def _and(values: Iterable[int]) -> str:
    return ", ".join(str(value) for value in values)


def number(value: float) -> str:
    """Three digits, and never an exponent."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def interval(ratio: Ratio) -> str:
    return f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
