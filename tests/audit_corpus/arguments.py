"""Example arguments for the corpus, by parameter name."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from compiled_kv.tracing.graphs import host
from tests.audit_corpus.library import Router


class Engine:
    """State that a serving loop keeps between steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.last = torch.zeros(4, 8)
        self.kept = {"y": torch.zeros(4, 8)}
        self.parts: list[float] = []
        self.factor = 1.0


class Limits:
    """Host numbers that never change."""

    width = 5


def example(name: str, batch: int = 4) -> Any:
    from tests.audit_corpus.clean import Cache
    from tests.audit_corpus.hazards import Scaled

    pool = torch.zeros(64, 8)
    return {
        "x": lambda: torch.zeros(batch, 8),
        "mask": lambda: torch.ones(batch, 8, dtype=torch.bool),
        "ids": lambda: torch.zeros(batch, dtype=torch.int64),
        "slots": lambda: torch.zeros(batch, dtype=torch.int64),
        "lens": lambda: torch.ones(batch, dtype=torch.int32),
        "workspace": lambda: torch.zeros(16, dtype=torch.int32),
        "pool": lambda: pool,
        "pool_view": lambda: pool[:8],
        "cpu_scalar": lambda: host(torch.ones(())),
        "cpu_lens": lambda: host(torch.ones(batch, dtype=torch.int64)),
        "max_seqlen": lambda: 5,
        "scale": lambda: 0.25,
        "axis": lambda: 1,
        "count": lambda: 2,
        "scaled": Scaled,
        "router": Router,
        "engine": Engine,
        "cache": Cache,
        "limits": Limits,
    }[name]()


def arguments(step: Any, batch: int = 4) -> tuple[Any, ...]:
    """One tuple of examples; a pool and its view are views of one storage."""
    names = list(inspect.signature(step).parameters)
    made = {name: example(name, batch) for name in names}
    if "pool_view" in made:
        made["pool_view"] = made["pool"][:8]
    return tuple(made[name] for name in names)
