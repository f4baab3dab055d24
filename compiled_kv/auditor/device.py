"""The calls of torch.cuda that a measurement makes, in one place, so that a test can put others there."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

Run = Callable[[], Any]


class Cuda:
    """The first CUDA device of this machine."""

    device = torch.device("cuda", 0)

    def name(self) -> str:
        """`NVIDIA H200 (sm_90)`."""
        major, minor = torch.cuda.get_device_capability(0)
        return f"{torch.cuda.get_device_name(0)} (sm_{major}{minor})"

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def sync_debug_mode(self, mode: str) -> None:
        torch.cuda.set_sync_debug_mode(mode)

    def compile(self, step: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return torch.compile(step, **options)

    def profile(self, run: Run) -> list[dict[str, Any]]:
        """The events of one call, as in a Chrome trace."""
        from torch.profiler import ProfilerActivity, profile

        for _ in range(2):  # the first one starts the tracing library, and may miss what it should record
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
                run()
                torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            events: list[dict[str, Any]] = json.loads(path.read_text(errors="replace"), strict=False)["traceEvents"]
        return events

    def capture(self, run: Run) -> None:
        """Capture one call in a CUDA graph and replay it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        torch.cuda.synchronize()

    @contextmanager
    def replays(self) -> Iterator[list[int]]:
        """Counts replays of CUDA graphs, whoever asks for them, in the one number of the list."""
        seen, plain = [0], torch.cuda.CUDAGraph.replay

        def replay(graph: torch.cuda.CUDAGraph) -> None:
            seen[0] += 1
            plain(graph)

        torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign, assignment]
        try:
            yield seen
        finally:
            torch.cuda.CUDAGraph.replay = plain  # type: ignore[method-assign]
