"""Every step of the corpus as `compiled-kv audit tests.audit_corpus.entries:NAME` takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.audit_corpus.arguments import arguments
from tests.audit_corpus.clean import CLEAN
from tests.audit_corpus.hazards import HAZARDS


def __getattr__(name: str) -> Callable[[], tuple[Any, tuple[Any, ...]]]:
    step = HAZARDS.get(name) or CLEAN.get(name)
    if step is None:
        raise AttributeError(name)
    return lambda: (step, arguments(step))
