"""Captured graphs, kept as text files that people read and tests compare.

    assert_graph(capture(step, *args, target="cuda:sm_90"), "graphs/aot/step.txt")
    assert_graph({"static": one, "dynamic": other}, "graphs/dynamo/step.txt")    several graphs, one file
    assert_graph({"static": [on_cuda, on_cpu]}, "graphs/dynamo/step.txt")        shown once where they are the same

A file in a folder named `dynamo` or `aot` shows that tier, any other both. EXPECTTEST_ACCEPT=1 writes it instead.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from compiled_kv.tracing.graphs import Graphs
from compiled_kv.tracing.rendering import body, summary

_TIERS = ("dynamo", "aot")
_SIZES = {False: "static", True: "dynamic", None: "as first called"}


def assert_graph(
    graphs: Graphs | Mapping[str, Graphs | Sequence[Graphs]], path: str | Path, *, detail: str = "full"
) -> None:
    """Compare captured graphs with the golden file at `path`.

    Args:
        graphs: what `capture` returned, or several by title; a list holds the same step on several targets.
        path: the golden; its folder's name picks the tier.
        detail: "full", "own" (kernel launches and operators that are not torch's own) or "counts" (how often each
            operator occurs).

    Raises:
        AssertionError: they differ, or there is no such file; it holds a unified diff and how to accept the new text.
    """
    __tracebackhide__ = True  # pytest then shows the diff under the test's own line
    path = Path(path)
    new = golden(graphs, path.parent.name, detail)
    if os.environ.get("EXPECTTEST_ACCEPT"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(new, encoding="utf-8")
        return
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    if old == new:
        return
    changes = difflib.unified_diff(old.splitlines(), new.splitlines(), str(path), "captured now", lineterm="")
    what = f"the captured graph differs from {path}" if path.exists() else f"{path} does not exist yet"
    how = "To accept the captured graph, run the test again with EXPECTTEST_ACCEPT=1."
    raise AssertionError("\n".join([what, *changes, "", how]))


def golden(graphs: Graphs | Mapping[str, Graphs | Sequence[Graphs]], tier: str, detail: str = "full") -> str:
    """The text of a golden: `tier` "dynamo" or "aot", or both where it is neither."""
    if isinstance(graphs, Graphs):
        graphs = {_SIZES[graphs.dynamic]: graphs}
    tiers = [tier] if tier in _TIERS else _TIERS
    parts = []
    for title, entry in graphs.items():
        same = [entry] if isinstance(entry, Graphs) else entry
        for each in tiers:
            name = title if len(tiers) == 1 else f"{title}, {each}"
            parts += [f"== {name}\n{text}" for text in _grouped(same, each, detail)]
    return "\n\n".join(parts) + "\n"


def _grouped(graphs: Sequence[Graphs], tier: str, detail: str) -> list[str]:
    """A text for each different graph, with a line of counts for each target that it was captured for."""
    width = max(len(graph.target) for graph in graphs)
    lines: dict[str, list[str]] = {}
    for graph in graphs:
        lines.setdefault(body(graph, tier, detail), []).append(f"{graph.target:{width}}  {summary(graph)}")
    return ["\n".join([text, *counts]) for text, counts in lines.items()]
