"""Results as JSON, as Markdown, and judged against what is claimed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MISS = 1.03


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def claims(results: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(claim, bound, what was measured)."""
    cells = results.get("cells", [])
    rebuilt = [cell["ratios"]["rebuild"] for cell in cells]
    misses = sum(each["median"] > MISS for each in rebuilt)
    rows = [
        ("full rebuild over the best published design, worst cell", "1.00", _most(each["median"] for each in rebuilt)),
        (f"cells above {MISS}", "0", f"{misses} of {len(cells)}"),
        ("the same, geometric mean", "", number(geometric_mean(each["median"] for each in rebuilt))),
        ("best published design over the incremental update, geometric mean", "at least 3",
         number(1 / geometric_mean(cell["ratios"]["incremental"]["median"] for cell in cells)) if cells else ""),
    ]  # fmt: skip
    cleared = [c["ratios"]["ours-clear/fill"]["median"] for c in cells if "ours-clear/fill" in c["ratios"]]
    rows.append(("clearing form over a fill of its tables, worst cell", "1.15", _most(cleared)))
    for name, form in (("ours", "kept tails"), ("incremental", "incremental")):
        rows.append((f"context bound 1 M over 8 K, {form}, worst", "1.1", _most(bound_ratios(cells, name))))
    rows.append(("share of copy bandwidth, page size 1, 64 x 128 K", "0.75", bandwidth_share(cells)))
    wide = [each for each in results.get("schedule", []) if each["batch"] == 512]
    rows.append(("schedule at batch 512, 132 parts, us", "5", _most(each["times"]["ours"]["median"] for each in wide)))
    return rows


def bound_ratios(cells: list[dict[str, Any]], name: str) -> list[float]:
    """Time under the widest context bound over that under the narrowest, at the same live lengths."""
    found: dict[tuple[Any, ...], dict[int, float]] = {}
    for cell in cells:
        key = tuple(cell[axis] for axis in ("batch", "length", "page_size", "swa", "lengths"))
        found.setdefault(key, {})[cell["context"]] = cell["times"][name]["median"]
    return [times[1 << 20] / times[1 << 13] for times in found.values() if {1 << 13, 1 << 20} <= times.keys()]


def bandwidth_share(cells: list[dict[str, Any]]) -> str:
    wanted = {"batch": 64, "length": 1 << 17, "page_size": 1, "swa": "off", "lengths": "uniform"}
    found = [cell for cell in cells if all(cell[axis] == value for axis, value in wanted.items())]
    shares = [c["times"]["copy"]["median"] / c["times"]["ours"]["median"] for c in found if "copy" in c["times"]]
    return number(min(shares)) if shares else ""


def markdown(results: dict[str, Any]) -> str:
    parts = [f"# Benchmark\n\n{_machine(results)}"]
    if results["machine"]["device"] != "CPU":
        parts += [_claims(results), _misses(results)]
    parts += [_failed(results), _cells(results)]
    parts += [_schedule(results), _pairs("Host time, microseconds a call", results.get("host"))]
    parts += [_cpu(results), _seconds(results), _steps(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _machine(results: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in results["machine"].items())


def _claims(results: dict[str, Any]) -> str:
    rows = "\n".join(f"| {claim} | {bound} | {found} |" for claim, bound, found in claims(results) if found)
    return f"## Claims\n\n| what | bound | measured |\n|---|---|---|\n{rows}"


def _misses(results: dict[str, Any]) -> str:
    missed = [cell for cell in results.get("cells", []) if cell["ratios"]["rebuild"]["median"] > MISS]
    lines = [f"- `{c['name']}`: {_interval(c['ratios']['rebuild'])} of `{c['best']}`" for c in missed]
    return "## Misses\n\n" + ("\n".join(lines) or "None.") if results.get("cells") else ""


def _failed(results: dict[str, Any]) -> str:
    lines = [f"- `{what}`: {text.strip().splitlines()[-1][:300]}" for what, text in results.get("failed", {}).items()]
    return "## Failed\n\n" + "\n".join(lines) if lines else ""


def _cells(results: dict[str, Any]) -> str:
    cells = results.get("cells", [])
    if not cells:
        return ""
    names = list(dict.fromkeys(name for cell in cells for name in cell["times"]))
    labels = {name: next(c["times"][name]["label"] for c in cells if name in c["times"]) for name in names}
    legend = "\n".join(f"- `{name}`: {label}" for name, label in labels.items())
    head = "| cell | " + " | ".join(names) + " | ours / best [95 %] |"
    lines = [head, "|---" * (len(names) + 2) + "|"]
    for cell in cells:
        times = [number(cell["times"][name]["median"]) if name in cell["times"] else "" for name in names]
        lines.append(f"| {cell['name']} | {' | '.join(times)} | {_interval(cell['ratios']['rebuild'])} |")
    return f"## Cells, median microseconds a call\n\n{legend}\n\n" + "\n".join(lines)


def _schedule(results: dict[str, Any]) -> str:
    rows = {f"batch {r['batch']}, length {r['length']}": r["times"] for r in results.get("schedule", [])}
    return _table("Split-KV schedule, microseconds", rows)


def _cpu(results: dict[str, Any]) -> str:
    return _table("CPU path, microseconds", {cell["name"]: cell["times"] for cell in results.get("cpu", [])})


def _steps(results: dict[str, Any]) -> str:
    rows = {step["name"]: step["times"] for step in results.get("steps", [])}
    return _table("Decode steps, microseconds an output token", rows)


def _table(title: str, rows: dict[str, dict[str, Any]]) -> str:
    if not rows:
        return ""
    names = list(dict.fromkeys(name for times in rows.values() for name in times))
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for row, times in rows.items():
        cells = [_spread(times[name]) if name in times else "" for name in names]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return f"## {title}\n\n" + "\n".join(lines)


def _pairs(title: str, times: dict[str, Any] | None) -> str:
    lines = "\n".join(f"| {name} | {_spread(each)} |" for name, each in (times or {}).items())
    return f"## {title}\n\n| call | median [quartiles] |\n|---|---|\n{lines}" if times else ""


def _seconds(results: dict[str, Any]) -> str:
    lines = "\n".join(f"| {name} | {value:.2f} |" for name, value in results.get("starts", {}).items())
    return f"## Imports and first calls, seconds\n\n| what | seconds |\n|---|---|\n{lines}" if lines else ""


def number(value: float) -> str:
    """Three digits, and never an exponent."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _most(values: Iterable[float]) -> str:
    found = list(values)
    return number(max(found)) if found else ""


def _spread(times: dict[str, Any]) -> str:
    low, high = times["quartiles"]
    return f"{number(times['median'])} [{number(low)}, {number(high)}]"


def _interval(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def write(results: dict[str, Any], folder: Path) -> None:
    """`results.json` and `results.md`; the JSON is replaced whole, so that an interrupted run leaves a good one."""
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / "results.json.new"
    fresh.write_text(json.dumps(results, indent=1))
    fresh.replace(folder / "results.json")
    (folder / "results.md").write_text(markdown(results))
