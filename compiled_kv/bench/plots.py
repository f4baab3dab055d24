"""Figures for docs/benchmarks.md, one idea each, from a results.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compiled_kv.bench.report import number

OURS, INCREMENTAL, OTHERS = "#0b6e4f", "#37a3a5", "#9aa0a6"
LINES = {
    "ours": ("ours, full rebuild", OURS, "-", 2.5),
    "incremental": ("ours, only what changed", INCREMENTAL, "-", 2.5),
    "serial": ("one program a request, 4,096 tokens a step", "#c44e52", "--", 1.4),
    "grid": ("static grid, 4,096 tokens a program", "#dd8452", "--", 1.4),
    "fused": ("fused, 128 columns a program", "#8172b3", "--", 1.4),
    "looped": ("one program a row, looping", "#937860", "--", 1.4),
    "gather-compiled": ("torch.compile of a gather", "#4c72b0", ":", 1.4),
    "loads": ("floor: dependent loads", "#555555", ":", 1.2),
}


def plots(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write every figure that the results have data for; returns their paths."""
    import matplotlib

    matplotlib.use("svg")
    # Fixed ids and no date: the same results give the same files.
    matplotlib.rcParams.update({"svg.hashsalt": "compiled_kv", "font.size": 10, "axes.spines.top": False,
                                "axes.spines.right": False})  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for draw in (_ratios, _bounds, _schedule, _host, _steps):
        figure = draw(results)
        if figure is not None:
            path = folder / f"{draw.__name__.strip('_')}.svg"
            figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
            drawn.append(path)
    return drawn


def _axes(title: str, width: float = 8, height: float = 4.5) -> tuple[Any, Any]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height))
    axes.set_title(title, loc="left", fontweight="bold")
    return figure, axes


def _log_scale(axes: Any) -> None:
    axes.set_yscale("log")
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which(lambda value, _: f"{value:g}")


def _ratios(results: dict[str, Any]) -> Any:
    """Ours over the best published design, every cell, sorted."""
    cells = sorted(results.get("cells", []), key=lambda cell: cell["ratios"]["rebuild"]["median"])
    if not cells:
        return None
    figure, axes = _axes(f"Time of ours over that of the best published design, {len(cells)} cells")
    for name, label, color in (("rebuild", "full rebuild", OURS), ("incremental", "only what changed", INCREMENTAL)):
        ratios = [cell["ratios"][name] for cell in cells]
        at = [ratio["median"] for ratio in ratios]
        # A median cannot lie outside its interval, but rounding may put it there.
        errors = [[max(r["median"] - r["low"], 0) for r in ratios], [max(r["high"] - r["median"], 0) for r in ratios]]
        axes.errorbar(range(len(cells)), at, yerr=errors, fmt="o", ms=3, lw=0.8, color=color, label=label)
    axes.axhline(1, color="black", lw=1, label="the best of the others in that cell")
    _log_scale(axes)
    axes.set_ylabel("ratio, 95 % interval (below 1: ours is faster)")
    axes.set_xlabel("cells, sorted by the full rebuild")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _bounds(results: dict[str, Any]) -> Any:
    """Time against the context bound, the live lengths being the same."""
    key = {"batch": 512, "length": 1024, "page_size": 64, "swa": "off", "lengths": "uniform"}
    cells = [cell for cell in results.get("cells", []) if all(cell[name] == value for name, value in key.items())]
    cells.sort(key=lambda cell: cell["context"])
    if len(cells) < 2:
        return None
    figure, axes = _axes("512 requests of 1 K tokens: what the context bound costs")
    for name, (label, color, style, width) in LINES.items():
        points = [(c["context"], c["times"][name]["median"]) for c in cells if name in c["times"]]
        if points:
            axes.plot(*zip(*points), style, color=color, lw=width, marker="o", ms=4, label=label)
    axes.set_xscale("log", base=2)
    _log_scale(axes)
    axes.set_xticks([cell["context"] for cell in cells], [f"{cell['context'] >> 10} K" for cell in cells])
    axes.set_xlabel("context bound, tokens")
    axes.set_ylabel("microseconds a call, in a CUDA graph")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _bars(title: str, names: list[str], times: list[dict[str, Any]], unit: str, ours: set[str]) -> Any:
    figure, axes = _axes(title, height=0.45 * len(names) + 1.2)
    values = [each["median"] for each in times]
    errors = [[t["median"] - t["quartiles"][0] for t in times], [t["quartiles"][1] - t["median"] for t in times]]
    colors = [OURS if name in ours else OTHERS for name in names]
    axes.barh(range(len(names)), values, xerr=errors, color=colors)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    for at, value in enumerate(values):
        axes.text(value + errors[1][at], at, f"  {number(value)}", va="center")
    axes.set_xlabel(unit)
    return figure


def _schedule(results: dict[str, Any]) -> Any:
    rows = [row for row in results.get("schedule", []) if row["length"] == 8192]
    if not rows:
        return None
    names = [f"{name}, batch {row['batch']}" for row in rows for name in ("ours", "one thread")]
    times = [row["times"][name] for row in rows for name in ("ours", "one thread")]
    ours = {name for name in names if name.startswith("ours")}
    return _bars("Split-KV schedule, 132 parts: all at once, or one thread", names, times, "microseconds", ours)


def _host(results: dict[str, Any]) -> Any:
    times = results.get("host")
    if not times:
        return None
    ours = {name for name in times if "gather" not in name and "read" not in name}
    return _bars("Time on the host, one step's metadata", list(times), list(times.values()), "microseconds", ours)


def _steps(results: dict[str, Any]) -> Any:
    steps = results.get("steps")
    if not steps:
        return None
    rows = [(f"{step['name']}: {name}", each) for step in steps for name, each in step["times"].items()]
    names, times = [name for name, _ in rows], [each for _, each in rows]
    ours = {name for name in names if "in the captured step" in name}
    return _bars("A decode step of Llama", names, times, "microseconds an output token", ours)
