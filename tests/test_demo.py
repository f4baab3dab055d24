"""The serving loop: every token is the reference's, through one graph a step, while rows and pages are reused."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from click.testing import CliRunner, Result

from compiled_kv.cli import main
from compiled_kv.demo import serving
from compiled_kv.demo.report import complaints
from compiled_kv.demo.serving import run, serve
from compiled_kv.demo.workload import Workload, make_requests, plan
from compiled_kv.models import NAMES, architecture
from compiled_kv.models.allocator import Allocator
from compiled_kv.request_traces import Lengths

# Prompts shorter and longer than a chunk, a page and Gemma's window of 24; outputs from one token to several windows.
CONTEXTS = 3, 90, 1, 40, 64, 17, 100, 30, 5, 50
GENERATED = 30, 12, 1, 60, 5, 20, 9, 40, 64, 1
LENGTHS = [Lengths(*pair) for pair in zip(CONTEXTS, GENERATED)]
DRAFTS = {"plain": 0, "speculative": 3}


def workload(name: str, draft_tokens: int = 0) -> Workload:
    """Ten requests for four rows and 60 % of the pages that those would like to have."""
    arch = architecture(name)
    requests = make_requests(LENGTHS, arch, seed=3)
    return plan(requests, arch, batch=4, chunk=16, draft_tokens=draft_tokens, pool=0.6)


def quiet(what: str, count: int) -> None:
    """No progress bar."""


@pytest.fixture(scope="module", params=[(name, kind) for name in NAMES for kind in DRAFTS], ids="-".join)
def result(request: pytest.FixtureRequest) -> serving.Result:
    name, kind = request.param
    return serve(name, workload(name, DRAFTS[kind]), seed=3, device="cpu", backend="eager", progress=quiet)


def test_every_token_is_the_reference_s(result: serving.Result) -> None:
    assert [len(tokens) for tokens in result.expected] == [row.generated for row in LENGTHS]
    assert result.served == result.expected
    assert len(set(result.served[3])) > 10, "a model that repeats itself would hide mistakes"
    assert result.status == 0


def test_every_step_is_one_graph_that_ran_in_every_call(result: serving.Result) -> None:
    for step in result.steps:
        assert len(step.graphs) == 1 and step.graph_calls == step.calls > 1, step.name
        assert (step.metadata_launches, step.host_reads) == (1, 0), step.name
    assert result.graph_breaks == 0 and result.ok and complaints(result) == []


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


def test_nothing_is_lost_when_everyone_has_left() -> None:
    work = workload("gemma3")
    arch = architecture("gemma3")
    made: list[Allocator] = []

    class Watched(Allocator):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "Allocator", Watched)
        run("gemma3", work.paged(arch, arch.build(3)), work, "eager", quiet)
    (allocator,) = made
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
    for label in ("tokens equal to the reference", "graphs compiled", "graph breaks", "host reads", "tokens/s"):
        assert label in ended.output


def test_one_different_token_ends_the_command_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = serving.generate
    monkeypatch.setattr(serving, "generate", lambda model, request: [*generate(model, request)[:-1], 512])
    ended = invoke()
    assert ended.exit_code == 1
    assert "request 0 differs from token" in ended.output


def test_a_step_that_is_not_whole_ends_the_command_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.PlainDecoder, "decode", eagerly(serving.PlainDecoder.decode))
    ended = invoke()
    assert ended.exit_code == 1
    assert "step decode: 1 graphs, which ran in" in ended.output


def eagerly(decode: object) -> object:
    """`decode` of a decoder whose step runs outside its graph."""

    def changed(self: serving.PlainDecoder, runs: object) -> object:
        step = self.steps[1]
        step._run = getattr(step._run, "_orig_mod", step._run)
        return decode(self, runs)  # type: ignore[operator]

    return changed


@pytest.mark.parametrize("device", ["cuda:99", "abacus"])
def test_a_device_that_is_not_there_ends_the_command_with_status_2(device: str) -> None:
    ended = invoke("--device", device)
    assert ended.exit_code == 2
    assert f"device {device} cannot be used" in ended.output and ended.output.count("\n") == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("draft_tokens", DRAFTS.values(), ids=DRAFTS)
@pytest.mark.parametrize("name", NAMES)
def test_on_a_cuda_device_every_token_is_the_reference_s(name: str, draft_tokens: int) -> None:
    served = serve(name, workload(name, draft_tokens), seed=3, device="cuda", backend="inductor", progress=quiet)
    assert complaints(served) == [] and served.ok


def test_an_unknown_model_is_a_usage_error() -> None:
    ended = invoke("--model", "gpt")
    assert ended.exit_code == 2 and "'gpt' is not one of" in ended.output
