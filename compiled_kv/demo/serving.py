"""One model served and checked: the loop's tokens beside the reference's, and what the compiled steps showed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from compiled_kv.demo.baseline import generate, without_tf32
from compiled_kv.demo.decoding import PlainDecoder
from compiled_kv.demo.evidence import Compiled, ServedStep, graph_breaks
from compiled_kv.demo.loop import Loop
from compiled_kv.demo.speculative import SpeculativeDecoder
from compiled_kv.demo.workload import Workload
from compiled_kv.models import architecture
from compiled_kv.models.allocator import Allocator
from compiled_kv.models.step import PagedCausalLM

Progress = Callable[[str, int], None]


@dataclass
class Result:
    """What happened; `ok` is what the demo's exit status says."""

    model: str
    workload: Workload
    steps: list[ServedStep]
    graph_breaks: int
    seconds: float
    preemptions: int
    shared_pages: int
    pages_taken: int
    swa_pages_taken: int
    status: int
    served: list[list[int]]
    drafts_accepted: int
    drafts_verified: int
    expected: list[list[int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.served))

    @property
    def equal(self) -> int:
        """Tokens that are the reference's."""
        return sum(a == b for got, want in zip(self.served, self.expected) for a, b in zip(got, want))

    @property
    def parts(self) -> list[Compiled]:
        """The compiled functions of all steps."""
        return [part for step in self.steps for part in step.parts]

    @property
    def whole(self) -> bool:
        """Every part of a step is one graph, with one metadata launch and no host read, and served every batch."""
        return not (self.graph_breaks or any(step.strays for step in self.steps)) and all(
            part.whole and part.metadata_launches == 1 and part.host_reads == 0 for part in self.parts
        )

    @property
    def ok(self) -> bool:
        return self.whole and self.served == self.expected and self.status == 0


def serve(name: str, workload: Workload, *, seed: int, device: str, backend: str | None, progress: Progress) -> Result:
    """Serve `workload` with the small model of this name, then have the reference generate the same requests.

    Args:
        progress: called with what is going on and how many tokens came of it.
    """
    without_tf32()
    arch = architecture(name)
    reference = arch.build(seed, device)
    model = workload.paged(arch, reference)
    draft = workload.paged(arch, arch.draft(reference)) if workload.layout.max_draft_tokens else None
    result = run(name, model, workload, backend, progress, draft)
    for request in workload.requests:
        result.expected.append(generate(reference, request))
        progress(f"{name}: generate()", len(result.expected[-1]))
    return result


def run(
    name: str,
    model: PagedCausalLM,
    workload: Workload,
    backend: str | None,
    progress: Progress,
    draft: PagedCausalLM | None = None,
) -> Result:
    """Serve `workload` through the compiled steps of `model`, and of `draft` where there is one."""
    breaks = graph_breaks()
    progress(f"{name}: compiling", 0)
    allocator = Allocator(model, workload.num_pages, workload.num_swa_pages)
    decoder: PlainDecoder | SpeculativeDecoder
    if draft is None:
        decoder = PlainDecoder(model, backend, batch=workload.batch, chunk=workload.chunk)
    else:
        decoder = SpeculativeDecoder(model, draft, backend, batch=workload.batch, chunk=workload.chunk)
    loop = Loop(decoder, allocator, lambda count: progress(f"{name}: serving", count))
    start = time.perf_counter()
    served = loop.serve(workload.requests)
    seconds = time.perf_counter() - start
    return Result(
        name, workload, decoder.steps, graph_breaks() - breaks, seconds, loop.preemptions, allocator.shared_pages,
        allocator.full.taken, allocator.swa.taken, reduce(or_, (step.status for step in decoder.steps)), served,
        getattr(decoder, "accepted", 0), getattr(decoder, "drafted", 0),
    )  # fmt: skip
