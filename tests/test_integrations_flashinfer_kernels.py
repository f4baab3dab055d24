"""FlashInfer's own kernels read what is built here, and match dense attention in float64.

They are compiled where they run: a minute or so the first time. Skipped without a CUDA device or the package.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_kv.integrations import flashinfer
from compiled_kv.peers.csr import csr_tables
from tests.cases import needs_cuda
from tests.decode_scene import DEVICE, batch, buffers, captured, check, fill, paged, queries, states, workspace

pytestmark = [pytest.mark.gpu, needs_cuda]

HEADS, KV_HEADS, DIM = 8, 2, 128
LATENT, ROPE, MLA_HEADS = 512, 64, 16
SHAPE: dict[str, Any] = {
    "num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "q_data_type": torch.bfloat16,
}  # fmt: skip


@pytest.fixture(scope="module")
def package() -> Any:
    return pytest.importorskip("flashinfer")


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_the_installed_flashinfer_takes_what_is_built(package: Any, page_size: int, kv_layout: str) -> None:
    given = batch(page_size, dtype=torch.int32)
    wrapper = package.BatchDecodeWithPagedKVCacheWrapper(workspace(), kv_layout)
    keys, values = states(given, 2, KV_HEADS, DIM).unbind(1)
    cache, query = paged(given, kv_layout, keys, values), queries(HEADS, DIM)
    for step in (0, 1):
        fill(given, step)
        arguments = given.plan_arguments()
        assert {*arguments} <= {*inspect.signature(wrapper.plan).parameters}
        wrapper.plan(**arguments, **SHAPE)
        check(wrapper.run(query, cache), given, query, keys, values)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_captured_decode_reads_buffers_that_a_captured_step_fills(package: Any, page_size: int) -> None:
    """FlashInfer plans on the host, between the graph of the tables and the graph of the attention."""
    given = batch(page_size)
    out = buffers(7, 6 * given.layout.max_num_pages, 6)
    wrapper = package.BatchDecodeWithPagedKVCacheWrapper(
        workspace(), "NHD", use_cuda_graph=True, paged_kv_indptr_buffer=out[0], paged_kv_indices_buffer=out[1],
        paged_kv_last_page_len_buffer=out[2],
    )  # fmt: skip
    keys, values = states(given, 2, KV_HEADS, DIM).unbind(1)
    cache, query = paged(given, "NHD", keys, values), queries(HEADS, DIM)
    fill(given, 0)
    tables, arguments = captured(lambda: given.plan_arguments(out=out))
    tables.replay()
    wrapper.plan(**arguments, **SHAPE)
    attention, found = captured(lambda: wrapper.run(query, cache))
    for step in (0, 1, 0):
        fill(given, step)
        tables.replay()
        wrapper.plan(**arguments, **SHAPE)
        attention.replay()
        check(found, given, query, keys, values)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_the_installed_mla_kernel_takes_what_is_built(package: Any, backend: str, page_size: int) -> None:
    if backend == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("a kernel for compute capability 9.0")
    given = batch(page_size)
    out = buffers(7, 6 * given.layout.max_num_pages, 6)
    keys, query = states(given, 1, LATENT + ROPE), queries(MLA_HEADS, LATENT + ROPE)
    caches = [part.contiguous() for part in keys[:, 0].unflatten(0, (-1, page_size)).split([LATENT, ROPE], 2)]
    parts = [part.contiguous() for part in query.split([LATENT, ROPE], 2)]

    def step() -> dict[str, Any]:
        tables = csr_tables(
            given.pool,
            given.rows,
            given.lens,
            layout=given.layout,
            num_reqs=given.num_reqs,
            out=(out[0], out[1], out[2]),
        )
        return flashinfer.mla_plan_arguments(given.metadata(), tables, layout=given.layout)

    fill(given, 0)
    tables, arguments = captured(step)
    tables.replay()
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
    wrapper = package.BatchMLAPagedAttentionWrapper(
        workspace(), use_cuda_graph=True, backend=backend, **{name: arguments[name] for name in names}
    )
    shape: dict[str, Any] = {
        "num_heads": MLA_HEADS, "head_dim_ckv": LATENT, "head_dim_kpe": ROPE, "causal": False,
        "sm_scale": (LATENT + ROPE) ** -0.5, "q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16,
    }  # fmt: skip
    assert {*arguments} <= {*inspect.signature(wrapper.plan).parameters}
    wrapper.plan(**arguments, **shape)
    attention, found = captured(lambda: wrapper.run(*parts, *caches))
    for number in (0, 1, 0):
        fill(given, number)
        tables.replay()
        wrapper.plan(**arguments, **shape)
        attention.replay()
        check(found, given, query, keys, keys[:, :, :LATENT])


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("window", [None, 300])
def test_one_graph_holds_metadata_and_trtllm_decode(package: Any, window: int | None, kv_layout: str) -> None:
    """No plan and no host in between. A padding row has one token, in the null page."""
    if torch.cuda.get_device_capability()[0] not in (9, 12):
        pytest.skip("elsewhere it takes kernels that it fetches")
    given, swa, memory = batch(16, window), window is not None, workspace()
    keys, values = states(given, 2, KV_HEADS, DIM).unbind(1)
    cache, query = paged(given, kv_layout, keys, values), queries(HEADS, DIM)

    def step() -> Tensor:
        made = given.metadata(pad_seqlen=1, **({"full_to_swa": given.full_to_swa} if swa else {}))
        arguments = flashinfer.trtllm_decode_arguments(made, layout=given.layout, swa=swa)
        found: Tensor = package.decode.trtllm_batch_decode_with_kv_cache(
            query, cache, memory, **arguments, bmm1_scale=DIM**-0.5, bmm2_scale=1.0, kv_layout=kv_layout,
            window_left=-1 if window is None else window - 1,
        )  # fmt: skip
        return found

    fill(given, 0)
    graph, found = captured(step)
    for number in (0, 1, 0):
        fill(given, number)
        graph.replay()
        check(found, given, query, keys, values, swa)


@pytest.mark.parametrize("page_size", [1, 16])
def test_new_tokens_go_where_flashinfer_puts_them(package: Any, page_size: int) -> None:
    given = batch(page_size)
    fill(given, 0)
    plan = given.plan_arguments()
    lens = flashinfer.get_seq_lens(plan["indptr"], plan["last_page_len"], page_size)
    assert lens.equal(package.get_seq_lens(plan["indptr"], plan["last_page_len"], page_size))
    bounds = torch.tensor([0, 1, 1, 3, 10, 140, 140], dtype=torch.int32, device=DEVICE)
    made = flashinfer.get_batch_indices_positions(bounds, lens, 140)
    for mine, theirs in zip(made, package.get_batch_indices_positions(bounds, lens, 140), strict=True):
        assert mine.equal(theirs)
    cache = torch.zeros(len(given.full_to_swa) // page_size, 2, page_size, KV_HEADS, DIM, device=DEVICE).bfloat16()
    new = states(given, 2, KV_HEADS, DIM)[:140].unbind(1)
    package.append_paged_kv_cache(*new, *made, cache, plan["indices"], plan["indptr"], plan["last_page_len"])
    slots = given.pool[given.rows[made[0].long()], made[1].long()].long()
    wanted = torch.zeros_like(cache.transpose(0, 1).flatten(1, 2))
    wanted[:, slots] = torch.stack(new)
    assert cache.transpose(0, 1).flatten(1, 2).equal(wanted)
