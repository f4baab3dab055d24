"""The serving loop: every token is the reference's, through one graph a step, while rows and pages are reused."""

from __future__ import annotations

import copy
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from compiled_kv.cli import main
from compiled_kv.demo import serving
from compiled_kv.demo.decoding import buckets, buffers_for
from compiled_kv.demo.progress import Lines
from compiled_kv.demo.report import complaints
from compiled_kv.demo.serving import run, serve
from compiled_kv.demo.speculative import verification
from compiled_kv.demo.workload import Workload, make_requests, plan
from compiled_kv.models import NAMES, architecture
from compiled_kv.models.allocator import Allocator
from compiled_kv.request_traces import Lengths
from compiled_kv.tracing.graphs import capture
from tests.cases import DEVICES, needs_cuda

# Prompts shorter and longer than a chunk, a page and Gemma's window of 24; outputs from one token to several windows.
CONTEXTS = 3, 90, 1, 40, 64, 17, 100, 30, 5, 50
GENERATED = 30, 12, 1, 60, 5, 20, 9, 40, 64, 1
LENGTHS = [Lengths(*pair) for pair in zip(CONTEXTS, GENERATED)]
DRAFTS = {"plain": 0, "speculative": 4}


def workload(name: str, draft_tokens: int = 0) -> Workload:
    """Ten requests for four rows and 60 % of the pages that those would like to have."""
    arch = architecture(name)
    requests = make_requests(LENGTHS, arch, seed=3)
    return plan(requests, arch, batch=4, chunk=16, draft_tokens=draft_tokens, pool=0.6)


def quiet(what: str, count: int) -> None:
    """No progress bar."""


@pytest.fixture(scope="module", params=[(name, kind) for name in NAMES for kind in DRAFTS], ids="-".join)
def result(request: pytest.FixtureRequest) -> serving.Result:
    """Plain decoding shows little of a port that speculative decoding does not."""
    name, kind = request.param
    if kind == "plain" and name not in ("llama", "gemma3") and "COMPILED_KV_EXAMPLES" not in os.environ:
        pytest.skip("make test-all runs it")
    return serve(name, workload(name, DRAFTS[kind]), seed=3, device="cpu", backend="eager", progress=quiet)


def test_every_token_is_the_reference_s(result: serving.Result) -> None:
    assert [len(tokens) for tokens in result.expected] == [row.generated for row in LENGTHS]
    assert result.served == result.expected
    assert len(set(result.served[3])) > 10, "a model that repeats itself would hide mistakes"
    assert result.status == 0


def test_every_step_is_one_graph_that_ran_in_every_call(result: serving.Result) -> None:
    """For every batch size: also where the batch is as wide as the drafts are many."""
    assert [step.graphs.batch_sizes for step in result.steps] == [[2, 4]] * 2
    for part in result.parts:
        assert len(part.graphs) == 1 and part.graph_calls == part.calls > 1, part.name
        assert (part.metadata_launches, part.host_reads) == (1, 0), part.name
    assert all(step.served > 1 and step.strays == {} and step.graphs.captured == 0 for step in result.steps)
    assert result.graph_breaks == 0 and result.ok and complaints(result) == []


def test_a_call_beside_the_served_batches_is_seen(result: serving.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    part = result.parts[-1]
    monkeypatch.setattr(part, "calls", part.calls + 1)
    monkeypatch.setattr(part, "graph_calls", part.graph_calls + 1)
    assert not result.ok
    assert complaints(result) == [f"step {part.name}: called 1 times more than serving takes"]


def test_requests_are_evicted_share_prefixes_and_reuse_pages(result: serving.Result) -> None:
    assert result.preemptions >= 1
    assert result.shared_pages >= 1
    assert result.pages_taken > result.workload.num_pages
    if result.model == "gemma3":
        assert result.swa_pages_taken > result.workload.num_swa_pages
        assert result.workload.num_swa_pages < result.workload.num_pages


def test_drafts_are_accepted_and_rejected(result: serving.Result) -> None:
    if result.workload.layout.max_draft_tokens:
        assert 0 < result.drafts_accepted < result.drafts_verified


def test_through_inductor_every_token_is_the_reference_s() -> None:
    arch = architecture("llama")
    config = copy.deepcopy(arch.config)
    config.num_hidden_layers = 1
    arch = arch._replace(config=config)
    requests = make_requests(LENGTHS[:2], arch, seed=3)
    work = plan(requests, arch, batch=2, chunk=16, draft_tokens=0, pool=1.0)
    model = arch.build(3)
    result = run("llama", work.paged(arch, model), work, "inductor", quiet)
    assert result.whole and result.served == [serving.generate(model, request) for request in requests]


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_lost_when_everyone_has_left(device: str) -> None:
    """Kind 16 too: neither warming up nor serving leaves anything in the null pages."""
    work = workload("gemma3")
    arch = architecture("gemma3")
    made: list[Allocator] = []

    class Watched(Allocator):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "Allocator", Watched)
        run("gemma3", work.paged(arch, arch.build(3, device)), work, None, quiet)
    (allocator,) = made
    pools = [pool.data for layer in allocator.model.pools for pool in layer]
    assert all(pool[:16].eq(0).all() and pool[16:].ne(0).any() for pool in pools)
    while allocator.prefixes:
        allocator.forget()
    assert sorted(allocator.full.free) == list(range(1, work.num_pages))
    assert sorted(allocator.swa.free) == list(range(1, work.num_swa_pages))
    assert sorted(allocator.rows) == list(range(8))
    assert Counter(allocator.model.full_to_swa.tolist()) == {0: 16, -1: 16 * (work.num_pages - 1)}


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, ["demo", "--requests", "3", "--scale", "0.02", "--backend", "eager", *args])


def test_the_command_prints_the_table_and_ends_with_status_0() -> None:
    ended = invoke()
    assert ended.exit_code == 0, ended.output
    assert ended.output.startswith("llama: compiling\nllama: serving\n")
    assert "llama: generate(), 8 of 8 tokens\n" in ended.output
    for label in ("tokens equal to the reference", "graphs compiled", "graph breaks", "host reads", "tokens/s"):
        assert label in ended.output


def test_one_different_token_ends_the_command_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = serving.generate
    monkeypatch.setattr(serving, "generate", lambda model, request: [*generate(model, request)[:-1], 512])
    ended = invoke()
    assert ended.exit_code == 1
    assert "request 0 differs from token" in ended.output


def test_a_step_that_is_not_whole_ends_the_command_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.PlainDecoder, "decode", uncompiled(serving.PlainDecoder.decode))
    ended = invoke()
    assert ended.exit_code == 1
    assert "step decode: 1 graphs, which ran in" in ended.output


def uncompiled(decode: object) -> object:
    """`decode` of a decoder whose step runs outside its graph."""

    def changed(self: serving.PlainDecoder, runs: object) -> object:
        (part,) = self.steps[1].parts
        part._run = getattr(part._run, "_torchdynamo_orig_callable", part._run)
        return decode(self, runs)  # type: ignore[operator]

    return changed


@pytest.mark.parametrize(("batch", "sizes"), [(1, [1]), (2, [2]), (5, [2, 4, 5]), (8, [2, 4, 8])])
def test_batch_sizes_that_one_graph_serves(batch: int, sizes: list[int]) -> None:
    assert buckets(batch) == sizes


def test_a_round_traced_for_cuda_launches_once_a_stage_and_copies_no_table() -> None:
    pytest.importorskip("triton")
    arch, work = architecture("gemma3"), workload("gemma3", 4)
    model = work.paged(arch, arch.build(3))
    buffers = buffers_for(model, 4, 4, delta=4)
    pending = [torch.zeros(4, 1, dtype=torch.int64) for _ in range(4)]
    with torch.no_grad(), torch._dynamo.config.patch(specialize_float=True):
        graphs = capture(verification(model), buffers, 4, *pending, target="cuda:sm_90", dynamic=True)
    assert graphs.is_whole and graphs.host_reads == [] and graphs.launches == {"update_metadata_kernel": 1}
    tables = [tensor.untyped_storage().nbytes() for tensor in (buffers.held, buffers.page_table)]
    assert not {copy.bytes for copy in graphs.copies} & {*tables, model.pools[0][0].data.untyped_storage().nbytes()}


REFUSED = {
    "no-such-device": (["--device", "cuda:99"], "device cuda:99 cannot be used"),
    "no-device": (["--device", "abacus"], "device abacus cannot be used"),
    "no-values": (["--device", "meta"], "device meta cannot be used: it must be cpu or cuda"),
    "scale-nan": (["--scale", "nan"], "--scale must be a number from 1e-09 to 1e+09, got nan"),
    "scale-inf": (["--scale", "inf"], "--scale must be a number from 1e-09 to 1e+09, got inf"),
    "scale-zero": (["--scale", "0"], "--scale must be a number from 1e-09 to 1e+09, got 0"),
    "scale-too-large": (["--scale", "1e300"], "--scale must be a number from 1e-09 to 1e+09, got 1e+300"),
    "too-long": (["--scale", "1e4"], "--scale 10000 makes request 1 longer than the 32736 tokens of llama"),
    "pool-nan": (["--pool", "nan"], "--pool must be a number from 0 to 16, got nan"),
    "pool-inf": (["--pool", "inf"], "--pool must be a number from 0 to 16, got inf"),
    "pool-negative": (["--pool", "-1"], "--pool must be a number from 0 to 16, got -1"),
    "draft-of-none": (["--draft-tokens", "1"], "--draft-tokens must be 0, or 2 and more"),
}


@pytest.mark.parametrize(("arguments", "line"), REFUSED.values(), ids=REFUSED)
def test_an_argument_that_cannot_be_used_ends_the_command_with_one_line(arguments: list[str], line: str) -> None:
    ended = invoke(*arguments)
    assert ended.exit_code == 2
    assert ended.output.startswith(f"Error: {line}") and ended.output.count("\n") == 1


def test_a_trace_of_fewer_requests_than_asked_for_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "requests.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,100,40\n1,100,40\n")
    ended = invoke("--trace", str(trace))
    assert ended.exit_code == 2
    assert ended.output == f"Error: --requests must be at most the 2 rows of {trace}, got 3\n"


@pytest.mark.parametrize(
    "arguments", [["--batch", "0"], ["--chunk", "5000"], ["--draft-tokens", "65"], ["--seed", "-1"]], ids=" ".join
)
def test_a_count_out_of_bounds_is_a_usage_error(arguments: list[str]) -> None:
    ended = invoke(*arguments)
    assert ended.exit_code == 2 and f"Invalid value for '{arguments[0]}'" in ended.output


def test_without_a_terminal_each_quarter_of_a_phase_is_a_line() -> None:
    said: list[str] = []
    lines = Lines(10, said.append)
    for what, count in [("a: compiling", 0), *[("a: serving", 1)] * 10, ("a: generate()", 6), ("a: generate()", 4)]:
        lines(what, count)
    assert said == [
        "a: compiling",
        "a: serving",
        *(f"a: serving, {done} of 10 tokens" for done in (3, 5, 8, 10)),
        "a: generate()",
        *(f"a: generate(), {done} of 10 tokens" for done in (6, 10)),
    ]


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("draft_tokens", DRAFTS.values(), ids=DRAFTS)
@pytest.mark.parametrize("name", NAMES)
def test_on_a_cuda_device_replays_serve_every_token(name: str, draft_tokens: int) -> None:
    served = serve(name, workload(name, draft_tokens), seed=3, device="cuda", backend="inductor", progress=quiet)
    assert complaints(served) == [] and served.ok
    assert [step.graphs.captured for step in served.steps] == [2, 2]
    assert all(step.served > 10 and step.strays == {} for step in served.steps), "a part ran outside its CUDA graph"
    assert served.preemptions >= 1 and served.pages_taken > served.workload.num_pages


def test_an_unknown_model_is_a_usage_error() -> None:
    ended = invoke("--model", "gpt")
    assert ended.exit_code == 2 and "'gpt' is not one of" in ended.output
