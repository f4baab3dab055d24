"""Run a step on the device and note what it does: waits, kernels, recompiles, CUDA graphs.

Each part is tried by itself, and what it raises is noted in its stead. What may spoil the CUDA context (a capture that
fails) comes last; `apart` runs the whole in a process of its own.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch

from compiled_kv.auditor.device import Cuda, Run
from compiled_kv.auditor.measured import Measured, Wait
from compiled_kv.tracing.events import recompiles
from compiled_kv.tracing.reals import Reals

CALLS = 3  # a number that dynamo makes dynamic on the second call stays so on the third
MANY = 64
REDUCED_CALLS = 5  # CUDA graph trees warm up, record, and replay from the third call on
_GENERATED = ("<eval_with_key>", "torchinductor")
_TORCH = str(Path(torch.__file__).parent)

T = TypeVar("T")


def measure(
    step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *,
    batches: Sequence[Sequence[Any]] = (), dynamic: bool | None = None, capture_scalars: bool = True,
    cuda: Cuda | None = None,
) -> Measured:  # fmt: skip
    """Run `step` on the CUDA device, eagerly and compiled, a dozen times or so.

    Args:
        step, args, kwargs: as in `audit`. Tensors that are on the device already are used as they are, so what the
            step writes stays written; others are copied there.
        batches: further arguments, to see what compiles again.
        dynamic: as in torch.compile.
        capture_scalars: compile as the audit traces, scalars and data-dependent shapes captured; where torch cannot,
            it is done without, and said.
        cuda: the device's calls; a test puts others in their place.

    Raises:
        ValueError: a tensor has no data (it is on the meta device).
        TypeError: an argument cannot be copied to the device.
    """
    cuda = cuda or Cuda()
    device = cuda.name()  # now: a context that the step spoils may not even tell its name
    reals = Reals(cuda.device)
    given = [reals.arguments(tuple(each)) for each in (args, *batches)]
    named, moved = reals.arguments(dict(kwargs or {})), reals.callable(step)
    failures: dict[str, str] = {}
    found = _measured(cuda, moved, given, named, dynamic, capture_scalars, failures)
    if capture_scalars and "compiled" in failures and "eager" not in failures:
        failures = {"compiled with scalars captured": failures["compiled"]}
        found = _measured(cuda, moved, given, named, dynamic, False, failures)
    return Measured(device, _versions(), failures=failures, **found)


def _measured(
    cuda: Cuda, step: Callable[..., Any], given: list[Any], named: dict[str, Any], dynamic: bool | None,
    capture_scalars: bool, failures: dict[str, str],
) -> dict[str, Any]:  # fmt: skip
    settings = {"capture_scalar_outputs": capture_scalars, "capture_dynamic_output_shape_ops": capture_scalars}
    torch._dynamo.reset()
    with torch.no_grad(), torch._dynamo.config.patch(settings):
        return _parts(cuda, step, given, named, dynamic, failures)


def _parts(
    cuda: Cuda, step: Callable[..., Any], given: list[Any], named: dict[str, Any], dynamic: bool | None,
    failures: dict[str, str],
) -> dict[str, Any]:  # fmt: skip
    compiled, reduced = cuda.compile(step, dynamic=dynamic), cuda.compile(step, dynamic=dynamic, mode="reduce-overhead")

    def call() -> Any:
        return compiled(*given[0], **named)

    def attempt(part: str, run: Callable[[], T]) -> T | None:
        try:
            result = run()
            cuda.synchronize()
        except Exception as error:
            failures[part] = said(error)
            return None
        return result

    def once() -> Any:
        return step(*given[0], **named)

    found: dict[str, Any] = {"eager_waits": attempt("eager", lambda: waits(cuda, once))}
    found["graphs"] = attempt("compiled", lambda: graphs_compiled(call))
    found["recompiles"] = attempt("recompiles", lambda: compiled_again(compiled, given, named))
    found["waits"] = attempt("waits", lambda: waits(cuda, call))
    found["waits_raised"] = attempt("waits", lambda: raised_by_waiting(cuda, call))
    events = attempt("profiler", lambda: cuda.profile(call))
    if events is not None:
        found["kernels"], found["memory"] = counted(events)
    with torch._dynamo.config.patch(recompile_limit=MANY):  # what was compiled so far counts for the next ones too
        found["replayed"], found["skips"] = attempt(
            "reduce-overhead", lambda: graphs_replayed(cuda, lambda: reduced(*given[0], **named))
        ) or (None, None)
        found["captured"], found["not_captured"] = captured(cuda, call)
    return found


def waits(cuda: Cuda, run: Run) -> tuple[Wait, ...]:
    """What the sync debug mode warns of in the second of two calls (the first may build what is kept)."""
    run()
    cuda.synchronize()
    seen: list[Wait] = []

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            seen.append(Wait(*user_frame()))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        cuda.sync_debug_mode("warn")
        try:
            run()
        finally:
            cuda.sync_debug_mode("default")
    return tuple(seen)


def user_frame() -> tuple[str, int]:
    """File and line of the step's code that is running; "" and 0 in code that a compiler wrote."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if any(text in name for text in _GENERATED) or name.startswith(_cache()):
            return "", 0
        if not name.startswith((_TORCH, __file__)) and Path(name).name != "warnings.py":
            return name, frame.f_lineno
        frame = frame.f_back
    return "", 0


def _cache() -> str:
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or "torchinductor"


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


def graphs_compiled(call: Run) -> int:
    """Graphs that the first call compiles."""
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    call()
    return stats["unique_graphs"] - before


def compiled_again(compiled: Callable[..., Any], given: Sequence[Any], named: Mapping[str, Any]) -> tuple[str, ...]:
    """The guards that fail when the step is called again, and then with other batches."""
    for args in [given[0]] * (CALLS - 1) + list(given[1:]):
        compiled(*args, **named)
    return tuple(each.reason for each in recompiles())


def graphs_replayed(cuda: Cuda, run: Run) -> tuple[int, tuple[str, ...]]:
    """CUDA graphs replayed in a call under mode="reduce-overhead", and why Inductor skipped others."""
    counters = torch._dynamo.utils.counters["inductor"]
    before = counters["cudagraph_skips"]
    with skips_logged() as reasons, cuda.replays() as replays:
        for _ in range(REDUCED_CALLS):
            torch.compiler.cudagraph_mark_step_begin()
            replays[0] = 0
            run()
    unnamed = counters["cudagraph_skips"] - before - len(reasons)
    return replays[0], (*dict.fromkeys(reasons), *["torch names no reason"] * (unnamed > 0))


@contextmanager
def skips_logged() -> Iterator[list[str]]:
    """Inductor's own words on CUDA graphs that it skips, which it logs."""
    import torch._inductor.compile_fx
    import torch._inductor.cudagraph_trees
    import torch._inductor.cudagraph_utils  # noqa: F401

    reasons: list[str] = []
    handler = _Skips(reasons)
    loggers = [
        logging.getLogger(name)
        for name in list(logging.root.manager.loggerDict)
        if name.startswith("torch._inductor") and name.endswith(("__cudagraphs", "__perf_hints"))
    ]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    try:
        yield reasons
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


class _Skips(logging.Handler):
    def __init__(self, reasons: list[str]):
        super().__init__()
        self.reasons = reasons

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "skipping cudagraph" in text.lower():
            reason = text.strip().splitlines()[0].removeprefix("skipping cudagraphs due to ")
            self.reasons.append(reason.partition(" Found from")[0].rstrip(". ")[:200])


def captured(cuda: Cuda, call: Run) -> tuple[bool | None, str]:
    """Whether a call can be captured by hand, and what that raised."""
    try:
        call()
        cuda.synchronize()
    except Exception as error:
        return None, said(error)
    try:
        cuda.capture(call)
    except Exception as error:
        return False, said(error)
    return True, ""


def counted(events: Sequence[Mapping[str, Any]]) -> tuple[dict[str, int], dict[str, int]]:
    """Kernels, and copies and fills, by name, of the events of a Chrome trace."""
    names = {kind: Counter(str(each.get("name")) for each in events if each.get("cat") in kind) for kind in _KINDS}
    kernels, memory = (dict(sorted(names[kind].items())) for kind in _KINDS)
    return kernels, memory


_KINDS = (("kernel",), ("gpu_memcpy", "gpu_memset"))


def said(error: BaseException) -> str:
    """The name and first line of an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}".removesuffix(": ")


def _versions() -> str:
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = "absent"
    return f"torch {torch.__version__}, triton {triton}"
