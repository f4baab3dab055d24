"""Captured graphs, kept as text files that people read and tests compare.

    assert_graph(capture(step, *args, target="cuda:sm_90"), "graphs/aot/step.txt")
    assert_graph({"static": one, "dynamic": other}, "graphs/dynamo/step.txt")    several graphs, one file

A file in a folder named `dynamo` or `aot` shows that tier, any other both. EXPECTTEST_ACCEPT=1 writes it instead.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path

from compiled_kv.rendering import render
from compiled_kv.tracing import Graphs

_TIERS = ("dynamo", "aot")


def assert_graph(graphs: Graphs | Mapping[str, Graphs], path: str | Path) -> None:
    """Compare captured graphs with the golden file at `path`.

    Args:
        graphs: what `capture` returned, or several of them by title.
        path: the golden; its folder's name picks the tier.

    Raises:
        AssertionError: they differ, or there is no such file; it holds a unified diff and how to accept the new text.
    """
    path = Path(path)
    new = golden(graphs, path.parent.name)
    if os.environ.get("EXPECTTEST_ACCEPT"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(new, encoding="utf-8")
        return
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    if old == new:
        return
    changes = difflib.unified_diff(old.splitlines(), new.splitlines(), str(path), "captured now", lineterm="")
    missing = "" if path.exists() else f"{path} does not exist yet\n"
    how = "To accept the captured graph, run the test again with EXPECTTEST_ACCEPT=1."
    raise AssertionError("\n".join([f"{missing}the captured graph differs from {path}", *changes, "", how]))


def golden(graphs: Graphs | Mapping[str, Graphs], tier: str) -> str:
    """The text of a golden: `tier` "dynamo" or "aot", or both where it is neither."""
    named = {title(graphs): graphs} if isinstance(graphs, Graphs) else graphs
    tiers = [tier] if tier in _TIERS else _TIERS
    return "\n\n".join(
        f"== {name if len(tiers) == 1 else f'{name}, {each}'}\n{render(graph, each)}"
        for name, graph in named.items() for each in tiers
    ) + "\n"  # fmt: skip


def title(graphs: Graphs) -> str:
    """`cuda:sm_90, dynamic`."""
    sizes = {False: "static", True: "dynamic", None: "as first called"}[graphs.dynamic]
    return f"{graphs.target}, {sizes}"
