"""`python -m compiled_kv.bench.step`: a decode loop of Llama, its metadata made in four ways.

    host read            the host waits for the longest length, gathers tables of that width, replays a captured step
    device, eager        decode_metadata launched by the host, then the captured step
    in the captured step the whole step is one graph
    frozen               the captured step alone, its metadata made once: what metadata that costs nothing would give

Plain: one token a step. Speculative: a small draft model proposes in DRAFTS - 1 short steps, the model verifies DRAFTS
tokens at once, and the device decides how many stand (a fixed random sequence, 1 to DRAFTS of them).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

import compiled_kv as ckv
from compiled_kv.bench import baselines_torch
from compiled_kv.bench.llama import CONFIGS, Llama
from compiled_kv.bench.report import write
from compiled_kv.bench.timing import summary

PAGE_SIZE = 64
DRAFTS = 4
WAYS = ("host read", "device, eager", "in the captured step", "frozen")
Piece = Callable[[], Any]


class Loop:
    """One batch of requests, its models, and the state that lives on the device between steps."""

    def __init__(
        self, model: str, batch: int, length: int, steps: int, speculative: bool, device: torch.device
    ) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.batch, self.length, self.steps, self.speculative = batch, length, steps, speculative
        self.layout = ckv.KVLayout(PAGE_SIZE, length + DRAFTS * (steps + 4), max_draft_tokens=DRAFTS)
        pages = self.layout.max_num_pages
        page = 1 + torch.randperm(batch * pages, device=device).int().view(batch, pages)
        offset = torch.arange(PAGE_SIZE, device=device, dtype=torch.int32)
        self.req_to_token = (page[:, :, None] * PAGE_SIZE + offset).flatten(1).contiguous()
        self.rows = torch.arange(batch, device=device)
        slots = (batch * pages + 1) * PAGE_SIZE
        make = partial(Llama, slots=slots, page_size=PAGE_SIZE, device=device, dtype=dtype)
        self.model = make(CONFIGS[model])
        self.draft = make(CONFIGS["tiny-draft" if model == "tiny" else "draft"]) if speculative else None
        self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(batch, DRAFTS, dtype=torch.int64, device=device)
        self.accepted = 1 + torch.randint(0, DRAFTS, (512, batch), dtype=torch.int32, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)
        # One set of metadata a forward pass: its queries a row, and the tokens it adds to the committed ones.
        self.passes = [(1, k + 1) for k in range(DRAFTS - 1)] + [(DRAFTS, DRAFTS)] if speculative else [(1, 0)]
        self.metas = [self._new_metadata(queries) for queries, _ in self.passes]
        self.reset()

    def _new_metadata(self, queries: int) -> ckv.DecodeMetadata:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.rows.device)

        batch, slots = self.batch, zeros(self.batch * queries, dtype=torch.int64)
        table = zeros(batch, self.layout.max_num_pages)
        return ckv.DecodeMetadata(zeros(batch), zeros(batch + 1), zeros(batch + 1), table, slot_mapping=slots)

    def reset(self) -> None:
        self.seq_lens.fill_(self.length)
        self.tokens.copy_(torch.arange(self.tokens.numel(), device=self.rows.device).view_as(self.tokens))
        self.count.zero_()

    @property
    def tokens_a_step(self) -> float:
        """Output tokens of a request and step, over the steps of a run."""
        return float(self.accepted[: self.steps].float().mean()) if self.speculative else 1.0

    def on_device(self, index: int) -> None:
        queries, delta = self.passes[index]
        ckv.decode_metadata(
            self.req_to_token, self.rows, self.seq_lens, layout=self.layout, seq_len_delta=delta, q_len=queries,
            out=self.metas[index], tail="keep",
        )  # fmt: skip

    def on_host(self, index: int, longest: int) -> None:
        """The gather, as wide as the longest request."""
        (queries, delta), meta = self.passes[index], self.metas[index]
        width = -(-(longest + delta) // PAGE_SIZE)
        if queries == 1:
            baselines_torch.gather(
                self.req_to_token, self.rows, self.seq_lens + delta, None, meta, PAGE_SIZE, width
            )  # fmt: skip
            return
        lengths = self.seq_lens + delta
        single = meta._replace(slot_mapping=torch.empty_like(self.rows))
        baselines_torch.gather(self.req_to_token, self.rows, lengths, None, single, PAGE_SIZE, width)
        meta.cu_seqlens_q.mul_(queries)
        positions = (lengths[:, None] - queries + torch.arange(queries, device=lengths.device)).long()
        assert meta.slot_mapping is not None
        meta.slot_mapping.copy_(self.req_to_token[self.rows[:, None], positions].flatten())

    def forward(self, index: int) -> None:
        """One pass over its metadata; the last one of a step also commits."""
        meta = self.metas[index]
        if not self.speculative:
            self.tokens[:, :1] = self.model.step(self.tokens[:, :1], meta)
            self.seq_lens += 1
        elif index < len(self.passes) - 1:
            assert self.draft is not None
            self.tokens[:, index + 1] = self.draft.step(self.tokens[:, index, None], meta)[:, 0]
        else:
            found = self.model.step(self.tokens, meta)
            accepted = self.accepted[self.count % len(self.accepted)][0]
            self.tokens[:, 0] = found.gather(1, accepted[:, None].long() - 1)[:, 0]
            self.seq_lens += accepted
            self.count += 1

    def way(self, name: str) -> Piece:
        """One step, made in this way; everything that can be captured is."""
        passes = range(len(self.passes))
        made = [partial(self.on_device, i) for i in passes]
        computed = [partial(self.forward, i) for i in passes]
        if name == "in the captured step":
            return self._captured(_in_order(*(piece for pair in zip(made, computed) for piece in pair)))
        if name == "frozen":
            return self._captured(_in_order(*computed))
        replays = [self._captured(piece) for piece in computed]
        if name == "device, eager":
            return _in_order(*(piece for pair in zip(made, replays) for piece in pair))

        def step() -> None:
            longest = int(self.seq_lens.max().item())
            for i in passes:
                self.on_host(i, longest)
                replays[i]()

        return step

    def _captured(self, piece: Piece) -> Piece:
        if not self.rows.is_cuda:
            return piece
        self.reset()
        for i in range(len(self.passes)):
            self.on_device(i)
        piece()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            piece()
        torch.cuda.synchronize()
        return graph.replay


def _in_order(*pieces: Piece) -> Piece:
    def run_all() -> None:
        for piece in pieces:
            piece()

    return run_all


def run(loop: Loop, rounds: int) -> dict[str, Any]:
    """Microseconds an output token for each way, in turn; the three true ways must give the same tokens."""
    ways = {name: loop.way(name) for name in WAYS}
    samples: dict[str, list[float]] = {name: [] for name in ways}
    ends: dict[str, list[int]] = {}
    for _ in range(rounds):
        for name, step in ways.items():
            elapsed = _steps(loop, name, step)
            samples[name].append(elapsed * 1e6 / loop.steps / loop.tokens_a_step)
            ends[name] = [*loop.tokens.flatten().tolist(), *loop.seq_lens.tolist()]
    true = [ends[name] for name in WAYS if name != "frozen"]
    if any(each != true[0] for each in true):
        raise AssertionError(f"the ways differ in their tokens: {ends}")
    times = {name: summary(each) for name, each in samples.items()}
    for name, step in ways.items():
        times[name]["idle"] = idle(loop, name, step)
    return times


def _steps(loop: Loop, name: str, step: Piece, count: int | None = None) -> float:
    """Seconds for a run of steps from the same start."""
    loop.reset()
    if name == "frozen":
        for index in range(len(loop.passes)):
            loop.on_device(index)
    _settle(loop)
    begin = time.perf_counter()
    for _ in range(count or loop.steps):
        step()
    _settle(loop)
    return time.perf_counter() - begin


def _settle(loop: Loop) -> None:
    if loop.rows.is_cuda:
        torch.cuda.synchronize()


def idle(loop: Loop, name: str, step: Piece) -> float | None:
    """Share of the timeline in which the device ran nothing; None where the profiler sees no device."""
    if not loop.rows.is_cuda:
        return None
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            _steps(loop, name, step, 8)
        events = [e for e in profile.events() if str(e.device_type).endswith("CUDA")]
    except RuntimeError:
        return None
    spans = sorted((e.time_range.start, e.time_range.end) for e in events)
    if not spans:
        return None
    busy, reached = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(end - max(begin, reached), 0)
        reached = max(reached, end)
    return 1 - busy / max(reached - spans[0][0], 1e-9)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/bench"), help="results.json to add to.")
@click.option("--model", "models", multiple=True, type=click.Choice(["1B", "8B", "tiny"]), default=["1B", "8B"])
@click.option("--batch", "batches", multiple=True, type=int, default=[1, 8, 64], show_default=True)
@click.option("--length", default=2048, show_default=True, help="Tokens of each request at the start.")
@click.option("--steps", default=64, show_default=True)
@click.option("--rounds", default=7, show_default=True)
def main(out: Path, models: tuple[str, ...], batches: tuple[int, ...], length: int, steps: int, rounds: int) -> None:
    """Time per output token of decode loops of Llama stacks with random weights."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = out / "results.json"
    results: dict[str, Any] = json.loads(known.read_text()) if known.exists() else {"machine": {"device": str(device)}}
    results["steps"] = []
    for model in models:
        for batch in batches:
            for speculative in (False, True):
                name = f"{model}, batch {batch}, {'speculative' if speculative else 'plain'}"
                with torch.no_grad():
                    torch.manual_seed(0)
                    times = run(Loop(model, batch, length, steps, speculative, device), rounds)
                results["steps"].append({"name": name, "times": times})
                medians = {way: each["median"] for way, each in times.items()}
                inside = medians["in the captured step"]
                less, over = 1 - inside / medians["host read"], inside / medians["frozen"] - 1
                click.echo(
                    f"{name}: {', '.join(f'{way} {us:.0f}' for way, us in medians.items())} us a token; "
                    f"{less:.1%} less than the host read, {over:.1%} over frozen"
                )
                write(results, out)


if __name__ == "__main__":
    main()
