"""Run a step on the device and note what it does: waits, kernels, recompiles, CUDA graphs.

Each part is tried by itself, and what it raises is noted in its stead. What may spoil the CUDA context (a capture that
fails) comes last; `apart` runs the whole in a process of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from compiled_kv.auditor.audit import CALLS
from compiled_kv.auditor.device import Cuda, Run
from compiled_kv.auditor.errors import said
from compiled_kv.auditor.measured import Measured
from compiled_kv.auditor.skips import skips_logged
from compiled_kv.auditor.waits import raised_by_waiting, waits
from compiled_kv.tracing.events import recompiles
from compiled_kv.tracing.reals import Reals

MANY = 64
REDUCED_CALLS = 5  # CUDA graph trees warm up, record, and replay from the third call on

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
        dynamic: as in `audit`.
        capture_scalars: compile as the audit traces, scalars and data-dependent shapes captured; where torch cannot,
            it is done without, and said.
        cuda: the device's calls; a test puts others in their place.

    Raises:
        ValueError: a tensor has no data (it is on the meta device).
        TypeError: an argument cannot be copied to the device.
        RuntimeError: there is no CUDA device.
    """
    if cuda is None and not torch.cuda.is_available():
        raise RuntimeError("measure needs a CUDA device, and there is none: audit needs none")
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


def _versions() -> str:
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = "absent"
    return f"torch {torch.__version__}, triton {triton}"
