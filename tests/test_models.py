"""The paged steps: the same logits as the plain transformers model, one graph, one launch, and a clean null page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import compiled_kv as ckv
from compiled_kv.goldens import assert_graph
from compiled_kv.models import NAMES, architecture
from compiled_kv.models.pools import PagedPool, visible_keys
from compiled_kv.models.state import SLIDING, by_row
from compiled_kv.models.step import PagedCausalLM, layer_types
from compiled_kv.tracing.graphs import Graphs, capture

GRAPHS = Path(__file__).parent.parent / "graphs"
NAME_OF = {architecture(name).paged: name for name in NAMES}
KERNEL = "decode_metadata_kernel"
LENGTHS = (70, 3)  # of two requests: one spans several windows and pages, one is short
ROWS = (2, 0)


def paged(name: str, model: Any) -> PagedCausalLM:
    """A step over pools in which page p of row r is page 1 + r + 3 p: neighbours in a request lie apart."""
    arch = architecture(name)
    window = arch.config.sliding_window if SLIDING in layer_types(arch.config) else None
    layout = ckv.KVLayout(arch.page_size, max_context_len=128, max_draft_tokens=4, window=window)
    num_pages = 1 + 3 * layout.max_num_pages
    step = arch.paged(model, layout, max_reqs=3, num_pages=num_pages, num_swa_pages=num_pages if window else 0)
    position = torch.arange(layout.max_seqlen_k)
    for row in range(3):
        page = 1 + row + 3 * (position // arch.page_size)
        step.req_to_token[row] = page * arch.page_size + position % arch.page_size
    slot = torch.arange(step.full_to_swa.shape[0])
    mirrored = num_pages - slot // arch.page_size  # page p of the full pools is page num_pages - p of the sliding ones
    step.full_to_swa.copy_((mirrored * arch.page_size + slot % arch.page_size) * (slot >= arch.page_size))
    return step


def inputs(tokens: list[list[int]], lengths: list[int], q_max: int, ragged: bool) -> tuple[Tensor, ...]:
    """Two live rows and one padding row that still names a live request."""
    padded = [row + [0] * (q_max - len(row)) for row in [*tokens, []]]
    fixed = torch.tensor(padded), torch.tensor([*ROWS, ROWS[0]]), torch.tensor([*lengths, 5]), torch.tensor([2])
    return (*fixed, torch.tensor([*map(len, tokens), 4])) if ragged else fixed


@pytest.fixture(scope="module", params=NAMES)
def served(request: pytest.FixtureRequest) -> tuple[PagedCausalLM, list[list[int]], list[Tensor]]:
    """A paged step, two requests, and the plain model's logits for each of their positions."""
    model = architecture(request.param).build(seed=1)
    generator = torch.Generator().manual_seed(2)
    requests = [torch.randint(512, (length,), generator=generator).tolist() for length in LENGTHS]
    with torch.no_grad():
        logits = [model(torch.tensor([tokens])).logits[0] for tokens in requests]
    return paged(request.param, model), requests, logits


def prefill(step: PagedCausalLM, requests: list[list[int]], upto: list[int], chunk: int = 32) -> Tensor:
    """The first `upto` tokens of each request into the cache, in ragged chunks; the last chunk's logits."""
    done, logits = [0, 0], torch.empty(0)
    while done != upto:
        ends = [min(start + chunk, end) for start, end in zip(done, upto)]
        tokens = [row[start:end] for row, start, end in zip(requests, done, ends)]
        with torch.no_grad():
            logits = step(*inputs(tokens, ends, chunk, ragged=True))
        done = ends
    return logits


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)


def test_chunked_prefill_gives_the_plain_logits_of_the_last_token(served: Any) -> None:
    step, requests, logits = served
    close(prefill(step, requests, [70, 3])[0, 0], logits[0][69])
    close(prefill(step, requests, [20, 3])[1, 0], logits[1][2])


def test_decode_gives_the_plain_logits(served: Any) -> None:
    step, requests, logits = served
    prefill(step, requests, [69, 2])
    with torch.no_grad():
        got = step(*inputs([requests[0][69:], requests[1][2:]], [70, 3], 1, ragged=False))
    close(got[0, 0], logits[0][69])
    close(got[1, 0], logits[1][2])


def test_verify_gives_the_plain_logits_of_every_draft(served: Any) -> None:
    step, requests, logits = served
    prefill(step, requests, [66, 0])
    with torch.no_grad():
        got = step(*inputs([requests[0][66:], [0] * 4], [66, 0], 4, ragged=False), seq_len_delta=4)
    close(got[0], logits[0][66:70])


def test_padding_leaves_the_null_page_zero_and_other_requests_alone(served: Any) -> None:
    step, requests, _ = served
    prefill(step, requests, [20, 3])
    before = [pool.data.clone() for pools in step.pools for pool in pools]
    with torch.no_grad():
        step(*inputs([[7], [7]], [21, 4], 1, ragged=False))
    for pool, old in zip((pool for pools in step.pools for pool in pools), before):
        assert not pool.data[: step.layout.page_size].any()
        assert (pool.data != old).flatten(1).any(1).sum() == 2  # one slot of each live row
    assert step.status.item() == 0


def test_weights_and_logits_of_the_plain_model_are_untouched(served: Any) -> None:
    step, requests, logits = served
    prefill(step, requests, [20, 3])
    with torch.no_grad():
        assert torch.equal(step.model(torch.tensor([requests[1]])).logits[0], logits[1])


MODES: dict[str, tuple[int, bool, int]] = {
    "decode": (1, False, 0), "verify": (4, False, 4), "draft-step-2": (1, False, 3), "extend": (8, True, 0),
}  # fmt: skip


def trace(step: PagedCausalLM, mode: str, target: str = "cuda:sm_90", dynamic: bool = False) -> Graphs:
    q_max, ragged, delta = MODES[mode]
    arguments = inputs([[1] * q_max, [2]], [9, 3], q_max, ragged)
    return capture(step, *arguments, target=target, dynamic=dynamic, seq_len_delta=delta)


def test_traced_for_cuda_each_step_is_one_graph_with_one_launch_and_no_host_read(served: Any) -> None:
    step = served[0]
    graphs = {mode: trace(step, mode) for mode in MODES}
    for mode, captured in graphs.items():
        assert captured.is_whole, mode
        assert captured.launches == {KERNEL: 1}, mode
        assert captured.host_reads == [], mode
    on_cpu = trace(step, "decode", "cpu")
    assert on_cpu.is_whole and on_cpu.launches == {} and on_cpu.host_reads == []
    shown = {mode: [captured] for mode, captured in graphs.items()}
    shown["decode"].append(on_cpu)
    golden = f"step_{NAME_OF[type(step)]}.txt"
    assert_graph(shown, GRAPHS / "dynamo" / golden, detail="own")
    assert_graph(graphs, GRAPHS / "aot" / golden, detail="own")


def test_traced_for_cuda_with_sizes_free_the_step_is_one_graph_with_one_launch(served: Any) -> None:
    name = NAME_OF[type(served[0])]
    if name != "llama" and not {"COMPILED_KV_EXAMPLES", "EXPECTTEST_ACCEPT"} & set(os.environ):
        pytest.skip("make test-all runs it")
    graphs = trace(served[0], "decode", dynamic=True)
    assert graphs.is_whole and graphs.launches == {KERNEL: 1} and graphs.host_reads == []
    for tier in ("dynamo", "aot"):
        assert_graph({"decode": graphs}, GRAPHS / tier / f"step_{name}_dynamic.txt", detail="own")


def test_a_write_to_slot_minus_one_is_dropped() -> None:
    pool = PagedPool(num_pages=3, page_size=2, heads=1, dim=1, like=torch.zeros(1))
    pool.write(torch.tensor([[4, -1], [3, -1]]), torch.tensor([1.0, 2.0, 3.0, 4.0]).view(2, 2, 1, 1))
    assert pool.data.flatten().tolist() == [0, 0, 0, 3, 1, 0]


def test_pages_are_read_in_order_and_page_minus_one_is_the_null_page() -> None:
    pool = PagedPool(num_pages=3, page_size=2, heads=1, dim=1, like=torch.zeros(1))
    pool.data.copy_(torch.arange(6.0).view(6, 1, 1))
    assert pool.read(torch.tensor([[2, 1], [-1, 2]])).flatten(1).tolist() == [[4, 5, 2, 3], [0, 1, 4, 5]]


def test_a_query_sees_the_keys_of_its_window() -> None:
    seen = visible_keys(torch.tensor([[-1, 0, 3]]), num_keys=5, window=2)
    assert seen[0, 0].int().tolist() == [[1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 0, 1, 1, 0]]


def test_packed_slots_are_laid_out_by_row() -> None:
    slots, cu_seqlens_q = torch.tensor([8, 9, 20, -1, -1, -1]), torch.tensor([0, 2, 3, 3])
    assert by_row(slots, cu_seqlens_q, 2).tolist() == [[8, 9], [20, -1], [-1, -1]]


def test_an_unknown_architecture_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"name must be one of llama, .*, got 'gpt'"):
        architecture("gpt")
