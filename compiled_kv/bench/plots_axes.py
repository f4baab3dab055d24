"""What the figures share: a title that says the idea, logarithmic axes with numbers, labels kept apart, and bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from compiled_kv.bench.claims import number


def set_style() -> None:
    """Plain axes, drawn by a back end that needs no screen."""
    import matplotlib

    matplotlib.use("svg")
    # Fixed ids and no date: the same results give the same files.
    matplotlib.rcParams.update({
        "svg.hashsalt": "compiled_kv", "font.size": 11, "axes.spines.top": False, "axes.spines.right": False,
        "axes.titlesize": 12, "figure.constrained_layout.use": True,
    })  # fmt: skip


def make_axes(title: str, height: float = 4.5) -> tuple[Any, Any]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, height))
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=12)
    return figure, axes


def set_log(axis: Any, ticks: Sequence[float]) -> None:
    """A logarithmic axis with these numbers on it."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = axis.get_view_interval()
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(FixedLocator([tick for tick in ticks if low * 0.7 <= tick <= high * 1.4]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


TICKS = [digit * 10.0**power for power in range(-3, 6) for digit in (1, 2, 5)]


def label_beside(axes: Any, at: float, labels: list[tuple[float, str, str]], gap: float) -> None:
    """Text at the right of a logarithmic plot, kept apart by this share of its height."""
    low, high = (math.log(y) for y in axes.get_ylim())
    reached = -math.inf
    for y, text, color in sorted(labels):
        reached = max(math.log(y), reached + gap * (high - low))
        axes.annotate(text, (at, math.exp(reached)), (6, 0), textcoords="offset points", color=color, va="center",
                      fontsize=10, annotation_clip=False)  # fmt: skip


def short(value: float) -> str:
    """Three digits as `number` has them, and two behind the point where there is one before it: 5.00."""
    return f"{value:.2f}" if 1 <= value < 10 else number(value)


def tokens(count: int) -> str:
    """A context bound as it is spoken of."""
    return f"{count >> 20} M" if count % (1 << 20) == 0 else f"{count >> 10} K"


def bars(title: str, names: list[str], times: list[dict[str, Any]], unit: str, colors: list[str]) -> Any:
    figure, axes = make_axes(title, height=0.4 * len(names) + 1.6)
    values = [each["median"] for each in times]
    errors = [[t["median"] - t["quartiles"][0] for t in times], [t["quartiles"][1] - t["median"] for t in times]]
    axes.barh(range(len(names)), values, xerr=errors, color=colors)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    for at, value in enumerate(values):
        axes.text(value + errors[1][at], at, f"  {short(value)}", va="center")
    axes.set_xlim(0, max(values) * 1.12)
    axes.set_xlabel(unit)
    return figure
