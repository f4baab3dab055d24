"""Decode steps of real architectures over a paged cache. Needs the `models` extra (transformers).

    arch = architecture("llama")
    model = arch.build(seed=0)                          # a small transformers model with random weights
    step = arch.paged(model, layout, max_reqs=8, num_pages=64)

Each architecture is one small file beside `step.py`; docs/models.md walks through adding one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compiled_kv.models.step import Architecture

NAMES = ("llama", "qwen3", "gemma3", "deepseek_v3")


def architecture(name: str) -> Architecture:
    """The architecture of this name, one of `NAMES`.

    Raises:
        ValueError: there is none of this name.
        ImportError: transformers is not installed.
    """
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(NAMES)}, got {name!r}")
    found: Architecture = import_module(f".{name}", __name__).ARCHITECTURE
    return found
