"""The graphs of any callable, on a real device or for CUDA without one.

    graphs = capture(decode_step, ids, block_table, seq_lens, target="cuda:sm_90")
    graphs.dynamo       one GraphModule: operators as the caller wrote them (more than one: the step broke)
    graphs.aot          the same after functionalization, kernel launches visible
    graphs.launches     {"decode_metadata_kernel": 1}
    print(graphs)       both tiers as text

Nothing runs: every tensor is a fake one. The caller's tensors, modules and objects stay as they were.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compiled_kv.tracing import counts
from compiled_kv.tracing.eager_reads import EagerRead, formatting_recorded, recording_mode
from compiled_kv.tracing.events import Frozen, GraphBreak, Limit, Recompile, call_step, graph_breaks
from compiled_kv.tracing.fakes import Fakes, host
from compiled_kv.tracing.lines import lines_of_no_file_kept
from compiled_kv.tracing.reads import HostRead, host_reads
from compiled_kv.tracing.recording import Recorder, compiler
from compiled_kv.tracing.targets import Target

__all__ = ["Graphs", "capture", "host"]


@dataclass(frozen=True)
class Graphs:
    """Graphs of one callable at two tiers, and what they hold; a count is None where there was nothing to count in."""

    target: str
    dynamic: bool | None
    dynamo: tuple[fx.GraphModule, ...]
    aot: tuple[fx.GraphModule, ...]
    settled: tuple[fx.GraphModule, ...]
    graph_breaks: tuple[GraphBreak, ...] = ()
    eager_reads: tuple[EagerRead, ...] = ()
    fallbacks: tuple[str, ...] = ()
    stopped: BaseException | None = None
    recompiles: tuple[Recompile, ...] = ()
    limits: tuple[Limit, ...] = ()
    frozen: tuple[Frozen, ...] = ()
    fed_back: tuple[fx.Node, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether one graph, seen at both tiers, holds the whole callable."""
        return len(self.dynamo) == len(self.aot) == 1 and not (self.graph_breaks or self.stopped or self.fallbacks)

    @property
    def launches(self) -> dict[str, int] | None:
        """Triton launches by kernel name."""
        return dict(Counter(launch.kernel for launch in counts.launches(self.aot))) if self._lowered else None

    @property
    def copies(self) -> list[counts.Copy] | None:
        """Copies left after Inductor reused what it could."""
        return counts.copies(self.settled) if len(self.settled) == len(self.dynamo) > 0 else None

    @property
    def copied_bytes(self) -> int | None:
        """Bytes of those copies; None where they, or a size among them, are unknown."""
        sizes = None if self.copies is None else [copy.bytes for copy in self.copies]
        return None if sizes is None or None in sizes else sum(size or 0 for size in sizes)

    @property
    def host_reads(self) -> list[HostRead | EagerRead] | None:
        """What makes the host wait for the device, inside the graphs and between them."""
        return [*host_reads(self.aot), *self.eager_reads] if self._lowered else None

    @property
    def _lowered(self) -> bool:
        return len(self.aot) == len(self.dynamo) > 0

    def __str__(self) -> str:
        from compiled_kv.tracing.rendering import render

        return "\n\n".join(f"{tier}\n{render(self, tier)}" for tier in ("dynamo", "aot"))


def capture(
    fn: Callable[..., Any], *args: Any, target: str | None = None, dynamic: bool | None = False, **kwargs: Any
) -> Graphs:
    """Trace `fn(*args, **kwargs)` as torch.compile would, without running it.

    Args:
        fn: any callable: a function, a bound method, a module.
        args, kwargs: its arguments; tensors in nested tuples, dicts, dataclasses, caches and modules are re-created on
            the target. What truly lives on the CPU is wrapped in `host(tensor)`.
        target: "cuda:sm_90", "hip:gfx942", "cuda" or "cpu"; None keeps every tensor on its own device.
        dynamic: as in torch.compile: False for the sizes given, True for any sizes, None for what a first call does.

    Raises:
        ValueError: the target is unknown.
        TypeError: an argument cannot be re-created on the target.
        Exception: what `fn` itself raises.
    """
    graphs = trace(fn, args, kwargs, target=target, dynamic=dynamic)
    if graphs.stopped:
        raise graphs.stopped
    return graphs


def trace(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, target: str | None,
    dynamic: bool | None, fullgraph: bool = False, settings: Mapping[str, Any] | None = None,
    more: Sequence[Sequence[Any]] = (), repeat: int = 1, batch_sizes: Sequence[int] = (),
) -> Graphs:  # fmt: skip
    """`capture` with torch.compile's `fullgraph` and dynamo's settings; an error of `fn` ends up in `stopped`.

    The step is called `repeat` times with its arguments, then once with each of `more`, to see what makes it compile
    again; the graphs are those of the first call. `batch_sizes` are the sizes of `args` and of each of `more`.
    """
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise RuntimeError("capture cannot trace interpreted kernels: use a process where TRITON_INTERPRET is not set")
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {type(fn).__name__}")
    where = None if target is None else Target.parse(target)
    recorder, reads = Recorder(fn), list[EagerRead]()
    mode = recording_mode(reads, where.device if where else None)
    fakes = Fakes(mode, where.device if where else None)
    args, kwargs = fakes.arguments(tuple(args)), fakes.arguments(dict(kwargs))
    step = fakes.callable(fn)
    others = [(fakes.arguments(tuple(each)), kwargs) for each in more]
    seen = where or _target_of(fakes)
    stopped, first = None, None

    def so_far() -> tuple[int, list[GraphBreak], int]:
        return len(recorder.dynamo), graph_breaks(recorder.breaks), len(recorder.frozen)

    around = (compiler(settings or {}), seen.active(), recorder.listening(), recorder.behind_nested_compilers())
    with ExitStack() as stack:
        for each in (*around, lines_of_no_file_kept(), formatting_recorded(reads), mode, torch.no_grad()):
            stack.enter_context(each)
        try:
            compiled = torch._dynamo.optimize(
                recorder.backend, nopython=fullgraph, dynamic=dynamic, guard_export_fn=recorder.guards,
                guard_fail_fn=recorder.guard_failed,
            )(step)  # fmt: skip
            for (given, named), between in zip([(args, kwargs)] * repeat + others, _sizes_between(batch_sizes, repeat)):
                with recorder.call(between):
                    call_step(compiled, given, named)
                first = first or so_far()
        except (Exception, SystemExit) as error:
            stopped = error
        count, breaks, frozen = first or so_far()
    return Graphs(
        target=seen.name,
        dynamic=dynamic,
        dynamo=tuple(recorder.dynamo[:count]),
        aot=tuple(recorder.aot[:count]),
        settled=tuple(recorder.settled[:count]),
        graph_breaks=tuple(breaks),
        eager_reads=tuple(reads),
        fallbacks=tuple(dict.fromkeys(recorder.fallbacks)),
        stopped=stopped or recorder.failure,
        recompiles=tuple(recorder.recompiles),
        limits=tuple(recorder.limits),
        frozen=tuple(recorder.frozen[:frozen]),
        fed_back=tuple(dict.fromkeys(recorder.fed_back)),
    )


def _sizes_between(batch_sizes: Sequence[int], repeat: int) -> Iterator[tuple[int, ...]]:
    """The batch sizes of the call before and of each call; nothing where none are given."""
    called = [*batch_sizes[:1]] * repeat + [*batch_sizes[1:]]
    yield from zip([*called[:1], *called], called) if called else itertools.repeat(())


def _target_of(fakes: Fakes) -> Target:
    kinds = {tensor.device.type for tensor in fakes.tensors()}
    return Target.parse("cuda" if "cuda" in kinds else "cpu")
