"""Results as JSON, as Markdown, and judged against what is claimed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compiled_kv.bench.claims import claims, interval, misses, number

VERDICT = {True: "met", False: "MISSED", None: ""}


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
    rows = "\n".join(
        f"| {each.what} | {each.bound} | {each.measured} | {each.where} | {VERDICT[each.is_met]} |"
        for each in claims(results)
    )
    head = "| what | bound | measured [95 % interval] | where | |\n|---|---|---|---|---|"
    return f"## Claims\n\n{head}\n{rows}" if rows else ""


def _misses(results: dict[str, Any]) -> str:
    cells = results.get("cells", [])
    rows = [
        f"| {c['name']} | {number(c['times']['ours']['median'])} | {number(c['times'][c['best']]['median'])} "
        f"| {c['best']} | {interval(c['ratios']['rebuild'])} |"
        for c in misses(cells)
    ]
    head = "| cell | ours, us | best, us | best | ours / best [95 %] |\n|---|---|---|---|---|"
    title = f"## Misses: {len(rows)} of {len(cells)} cells above 1.03"
    return title + ("\n\n" + "\n".join([head, *rows]) if rows else "") if cells else ""


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
        lines.append(f"| {cell['name']} | {' | '.join(times)} | {interval(cell['ratios']['rebuild'])} |")
    return f"## Cells, median microseconds a call\n\n{legend}\n\n" + "\n".join(lines)


def _schedule(results: dict[str, Any]) -> str:
    rows = {f"batch {r['batch']}, length {r['length']}": r["times"] for r in results.get("schedule", [])}
    return _table("Split-KV schedule, microseconds", rows)


def _cpu(results: dict[str, Any]) -> str:
    cells = results.get("cpu", [])
    threads = cells[0]["threads"] if cells else 0
    title = f"CPU path on {threads} thread{'s' if threads != 1 else ''}, microseconds"
    return _table(title, {cell["name"]: cell["times"] for cell in cells})


def _steps(results: dict[str, Any]) -> str:
    rows = {step["name"]: step["times"] for step in results.get("steps", [])}
    shares = "\n\n".join(
        _shares(title, key, rows)
        for key, title in (
            ("waits", "Share of the time in which the device waits for the host"),
            (
                "idle",
                "Share of the profiler's timeline in which nothing runs, gaps in a graph included",
            ),
        )
    )
    return _table("Decode steps, microseconds an output token", rows) + ("\n\n" + shares if rows else "")


def _shares(title: str, key: str, rows: dict[str, dict[str, Any]]) -> str:
    rows = {name: times for name, times in rows.items() if all(each.get(key) is not None for each in times.values())}
    if not rows:
        return ""
    names = list(next(iter(rows.values())))
    lines = [f"| {row} | " + " | ".join(f"{times[n][key]:.1%}" for n in names) + " |" for row, times in rows.items()]
    return "\n".join([f"{title}:", "", "| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|", *lines])


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


def _spread(times: dict[str, Any]) -> str:
    low, high = times["quartiles"]
    return f"{number(times['median'])} [{number(low)}, {number(high)}]"


def write(results: dict[str, Any], folder: Path) -> None:
    """`results.json` and `results.md`; the JSON is replaced whole, so that an interrupted run leaves a good one."""
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / "results.json.new"
    fresh.write_text(json.dumps(results, indent=1))
    fresh.replace(folder / "results.json")
    (folder / "results.md").write_text(markdown(results))
