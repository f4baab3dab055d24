"""Figures for docs/benchmarks.md from a results.json: one idea each, said in the title, 800 pixels wide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compiled_kv.bench.claims import number
from compiled_kv.bench.plots_axes import TICKS, bars, label_beside, make_axes, set_log, set_style, short, tokens

OURS, INCREMENTAL, OTHERS, HOST = "#0b6e4f", "#2a8fbd", "#8a9097", "#c44e52"
LINES = {
    "ours": ("ours, full rebuild", OURS),
    "incremental": ("ours, only what changed", INCREMENTAL),
    "serial": ("one program a request", "#c44e52"),
    "grid": ("static grid, 4,096 tokens a program", "#dd8452"),
    "fused": ("static grid, 128 columns a program", "#8172b3"),
    "looped": ("one program a row, looping", "#937860"),
    "gather-compiled": ("gather under torch.compile", "#4c72b0"),
}
FLOOR = {"loads": ("floor: dependent loads", "#555555")}


def plots(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write every figure that the results have data for; returns their paths."""
    set_style()
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for draw in (_ratios, _designs, _bounds, _schedule, _host, _steps):
        figure = draw(results)
        if figure is not None:
            path = folder / f"{draw.__name__.strip('_')}.svg"
            figure.savefig(path, metadata={"Date": None})
            drawn.append(path)
    return drawn


def _ratios(results: dict[str, Any]) -> Any:
    """Ours over the best published design, every cell, sorted."""
    cells = sorted(results.get("cells", []), key=lambda cell: cell["ratios"]["rebuild"]["median"])
    if not cells:
        return None
    medians = [cell["ratios"]["rebuild"]["median"] for cell in cells]
    level = sum(median <= 1 for median in medians)
    figure, axes = make_axes(
        f"The rebuild is at least as fast as the best published design in {level} of {len(cells)} cells;\n"
        f"the worst takes {medians[-1]:.2f} times as long"
    )
    labels = []
    for name, label, color in (("rebuild", "full rebuild", OURS), ("incremental", "only what\nchanged", INCREMENTAL)):
        ratios = [cell["ratios"][name] for cell in cells]
        at = [ratio["median"] for ratio in ratios]
        # A median cannot lie outside its interval, but rounding may put it there.
        errors = [[max(r["median"] - r["low"], 0) for r in ratios], [max(r["high"] - r["median"], 0) for r in ratios]]
        axes.errorbar(range(len(cells)), at, yerr=errors, fmt="o", ms=3, lw=0.8, color=color)
        labels.append((at[-1], label, color))
    axes.axhline(1, color="black", lw=1)
    labels.append((1.0, "best published\ndesign = 1", "black"))
    ends = [
        cell["ratios"][name][end] for cell in cells for name in ("rebuild", "incremental") for end in ("low", "high")
    ]
    axes.set_ylim(min(0.5, *ends) / 1.2, max(2, *ends) * 1.2)
    axes.set_xlim(-1, len(cells))
    set_log(axes.yaxis, TICKS)
    label_beside(axes, len(cells), labels, 0.11)
    axes.set_ylabel("time over that of the best published\ndesign (95 % interval; lower is better)")
    axes.set_xlabel("cells of the benchmark, sorted by the full rebuild")
    return figure


def _designs(results: dict[str, Any]) -> Any:
    """Each design's time over that of the fastest in the cell: how much it can lose, and how often."""
    names = [name for name in LINES if name != "incremental"]
    cells = [cell for cell in results.get("cells", []) if {"serial", "grid", "fused", "looped"} <= cell["times"].keys()]
    if not cells:
        return None
    lost: dict[str, list[float]] = {}
    for name in names:
        here = [{n: cell["times"][n]["median"] for n in names if n in cell["times"]} for cell in cells]
        lost[name] = sorted(times[name] / min(times.values()) for times in here if name in times)
    least = min(found[-1] for name, found in lost.items() if name != "ours" and found)
    figure, axes = make_axes(
        f"Each published design has a cell in which it takes {number(least)} times as long as the fastest\n"
        f"or more; ours takes {lost['ours'][-1]:.2f} times at most"
    )
    for row, name in enumerate(names):
        if found := lost[name]:
            color = LINES[name][1]
            # One path for all ticks: a mark for each would make the file three times as large.
            ticks = [point for x in found for point in ((x, row - 0.18), (x, row + 0.18), (x, float("nan")))]
            axes.plot(*zip(*ticks), lw=1, color=color, alpha=0.6)
            axes.plot(found[-1], row, "o", ms=6, color=color)
            axes.annotate(f"worst {number(found[-1])}", (found[-1], row), (8, 0), textcoords="offset points",
                          va="center", fontsize=10, color=color, annotation_clip=False)  # fmt: skip
    axes.set_yticks(range(len(names)), [LINES[name][0] for name in names])
    axes.invert_yaxis()
    axes.set_xlim(1, max(found[-1] for found in lost.values() if found) * 2.5)
    set_log(axes.xaxis, [1, 2, 5, 10, 100, 1000, 10_000])
    axes.set_xlabel(f"time over that of the fastest of these in a cell ({len(cells)} cells, a tick each)")
    return figure


def _bounds(results: dict[str, Any]) -> Any:
    """Time against the context bound, the live lengths being the same."""
    key = {"batch": 512, "length": 1024, "page_size": 64, "swa": "off", "lengths": "uniform"}
    cells = [cell for cell in results.get("cells", []) if all(cell[name] == value for name, value in key.items())]
    cells.sort(key=lambda cell: cell["context"])
    if len(cells) < 2:
        return None
    grown = {n: cells[-1]["times"][n]["median"] / cells[0]["times"][n]["median"] for n in ("ours", "grid", "fused")
             if n in cells[0]["times"]}  # fmt: skip
    figure, axes = make_axes(
        f"A context bound of {tokens(cells[-1]['context'])} in place of {tokens(cells[0]['context'])}: ours takes "
        f"{grown['ours']:.2f} times as long"
        + (f",\na static grid {number(grown['grid'])} times (512 requests of 1 K tokens)" if "grid" in grown else "")
    )
    labels = []
    for name, (label, color) in (LINES | FLOOR).items():
        points = [(c["context"], c["times"][name]["median"]) for c in cells if name in c["times"]]
        if points:
            is_ours = label.startswith("ours")
            axes.plot(
                *zip(*points), "-" if is_ours else "--", color=color, lw=2.5 if is_ours else 1.4, marker="o", ms=4
            )
            labels.append((points[-1][1], f"{label}: {number(points[-1][1])}", color))
    axes.set_xscale("log", base=2)
    set_log(axes.yaxis, TICKS)
    axes.set_xticks([cell["context"] for cell in cells], [tokens(cell["context"]) for cell in cells])
    label_beside(axes, cells[-1]["context"], labels, 0.055)
    axes.set_xlabel("context bound, tokens")
    axes.set_ylabel("microseconds a call, in a CUDA graph")
    return figure


def _schedule(results: dict[str, Any]) -> Any:
    rows = [row for row in results.get("schedule", []) if row["length"] == 8192]
    if not rows:
        return None
    names = [f"{label}, batch {row['batch']}" for row in rows for label in ("ours", "one thread, as published")]
    times = [row["times"][name] for row in rows for name in ("ours", "one thread")]
    ratio = times[-1]["median"] / times[-2]["median"]
    title = (
        f"The split-KV schedule, made in parallel, takes {short(times[-2]['median'])} us at batch "
        f"{rows[-1]['batch']};\none thread takes {number(ratio)} times as long (8 K tokens a request, 132 parts)"
    )
    unit = "microseconds a call, in a CUDA graph (line: quartiles)"
    return bars(title, names, times, unit, [OURS, OTHERS] * len(rows))


def _host(results: dict[str, Any]) -> Any:
    times = results.get("host")
    if not times:
        return None
    replay, gather = (times[name]["median"] for name in ("replay of a captured graph", "gather, eager"))
    colors = [HOST if "gather" in name or "read" in name else OURS for name in times]
    title = (
        f"A captured step costs the host {number(replay)} us, "
        f"a gather of the same tables {number(gather)} us\n(green: ours, red: without it)"
    )
    unit = "microseconds on the host for a step's metadata (line: quartiles)"
    return bars(title, list(times), list(times.values()), unit, colors)


WAY_LABELS = {"host read": ("host read", HOST), "device, eager": ("device, eager", OTHERS),
              "in the captured step": ("captured", OURS)}  # fmt: skip


def _steps(results: dict[str, Any]) -> Any:
    """Each way's time a token over that of frozen metadata."""
    steps = results.get("steps")
    if not steps:
        return None
    first = steps[0]
    less = 1 - first["ratios"]["in the captured step/host read"]["median"]
    over = first["ratios"]["in the captured step/frozen"]["median"] - 1
    figure, axes = make_axes(
        f"{first['name']}: captured, it takes {less:.0%} less time a token than with a host read,\n"
        f"and {abs(over):.1%} {'more' if over > 0 else 'less'} than with metadata that costs nothing",
        height=0.42 * len(steps) + 1.9,
    )
    most = 1.0
    for row, step in enumerate(steps):
        bound = step["times"]["frozen"]["median"]
        for place, (way, (label, color)) in enumerate(WAY_LABELS.items()):
            at = step["times"][way]["median"] / bound
            most = max(most, at)
            axes.plot(at, row, "o", ms=9, color=color)
            if row == 0:
                # To the right of its mark, so that none crosses the line at 1.
                axes.annotate(label, (at, row), (-5, (10, 24, 10)[place]), textcoords="offset points", ha="left",
                              color=color, fontsize=10, annotation_clip=False)  # fmt: skip
    axes.axvline(1, color="black", lw=1)
    axes.set_yticks(range(len(steps)), [f"{s['name']} ({number(s['times']['frozen']['median'])} us)" for s in steps])
    axes.set_ylim(len(steps) - 0.5, -1.3)
    axes.set_xlim(min(0.98, axes.get_xlim()[0]), most + 0.05)
    axes.set_xlabel("time a token over that with frozen metadata (in brackets)")
    return figure
