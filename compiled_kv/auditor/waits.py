"""Where a step makes the host wait for the device, as torch's sync debug mode sees it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from compiled_kv.auditor.device import Cuda, Run
from compiled_kv.auditor.errors import said
from compiled_kv.auditor.measured import Wait
from compiled_kv.tracing.events import call_step, running

_GENERATED = ("<eval_with_key>", "torchinductor")
_OWN = str(Path(__file__).parent)


def waits(cuda: Cuda, run: Run) -> tuple[Wait, ...]:
    """What the sync debug mode warns of in the second of two calls (the first may build what is kept)."""
    run()
    cuda.synchronize()
    seen: list[Wait] = []

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            seen.append(Wait(*_place()))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        cuda.sync_debug_mode("warn")
        try:
            call_step(run)
        finally:
            cuda.sync_debug_mode("default")
    return tuple(seen)


def _place() -> tuple[str, int]:
    """File and line of the step's code that is running; "" and 0 in code that a compiler wrote."""
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return running(_OWN, (*_GENERATED, os.path.abspath(cache)) if cache else _GENERATED) or ("", 0)


def raised_by_waiting(cuda: Cuda, run: Run) -> str:
    """What the sync debug mode raises, which sees waits that no warning reaches Python for; "" for nothing."""
    cuda.sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        return said(error)
    finally:
        cuda.sync_debug_mode("default")
    return ""
