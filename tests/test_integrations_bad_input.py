"""The layers refuse bad input in their own words, those of the peer, before anything is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import compiled_kv as ckv
from compiled_kv.integrations import flash_mla, flashinfer, sglang, tensorrt_llm, vllm

i32, i64 = torch.int32, torch.int64
LAYOUT = ckv.KVLayout(page_size=4, max_context_len=64)


def ints(*shape: int, dtype: torch.dtype = i64) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def out(*shape: int, dtype: torch.dtype = i32) -> Tensor:
    return torch.full(shape, -7, dtype=dtype)


def block_tables() -> vllm.BlockTables:
    return vllm.BlockTables([4, 8], 6, 16, max_num_blocks_per_group=[5, 3], device="cpu", sliding_window_reach=[0, 8])


def block_table() -> vllm.BlockTable:
    return vllm.BlockTable(4, 6, 5, 16, pin_memory=False, device="cpu")


def gridded(function: Any, *grid: int) -> Callable[..., None]:
    return partial(lambda **given: function[grid](**given))


def batch(rows: str = "req_pool_indices", pool: str = "req_to_token") -> dict[str, Tensor]:
    return {rows: ints(3), pool: ints(4, 64, dtype=i32)}


def lengths() -> dict[str, Tensor]:
    return {"cache_seqlens_int32": out(3), "cu_seqlens_k": out(4), "page_table": out(3, 16)}


SPEC = SimpleNamespace(block_size=4, num_speculative_blocks=1)
MHA: dict[str, Any] = {"bs": 3, "seqlen_offset": 0, "max_seq_pages": 16, "page_size": 4}
STRIDES = {"row_stride": 64, "kv_indices_stride": 40, "kv_indptr_stride": 7}
UPPER = {"bs_upper": 4, "iter_upper": 2, "num_tokens_upper": 8}

# id: a call, and arguments that it accepts
GOOD: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "mha-graph": (sglang.update_trtllm_mha_graph_metadata, lambda: batch() | MHA | {
        "seq_lens": ints(3), "cache_seqlens": out(3), "cu_seqlens_k": out(4), "page_table": out(3, 16),
        "swa_mapping": ints(99), "swa_page_table": out(3, 16), "out_cache_loc": ints(3),
        "swa_out_cache_loc": out(5, dtype=i64), "cu_seqlens_q": out(4), "qlens": ints(3), "q_mode": 1}),
    "mla-graph": (sglang.update_trtllm_mla_graph_metadata, lambda: batch() | {
        "seq_lens": ints(3), "block_kv_indices": out(3, 16), "bs": 3, "seqlen_offset": 0, "page_size": 4,
        "seq_lens_k": out(3)}),
    "mha-table": (sglang.build_trtllm_mha_page_table, lambda: batch() | {
        "cache_seqlens": ints(3), "page_table": out(3, 16), "page_size": 4, "swa_page_table": out(3, 16),
        "full_to_swa": ints(99)}),
    "decode": (sglang.normal_decode_set_metadata, lambda: batch() | lengths() | {
        "max_seq_pages": 16, "seq_lens": ints(3), "seq_len_delta": 0, "page_size": 4, "swa_page_table": out(3, 16),
        "swa_v2p": ints(99), "full_v2p": ints(99)}),
    "extend": (sglang.draft_extend_set_metadata, lambda: batch() | lengths() | {
        "cu_seqlens_q": out(4), "seq_lens": ints(3), "extend_seq_lens": ints(3), "page_size": 4,
        "full_to_swa_index_mapping": ints(99), "swa_page_table": out(3, 16), "out_cache_loc": ints(6),
        "swa_out_cache_loc": out(6, dtype=i64)}),
    "block-indices": (gridded(sglang.create_flashmla_kv_indices_triton, 3, 1), lambda: {
        **batch("req_pool_indices_ptr", "req_to_token_ptr"), "page_kernel_lens_ptr": ints(3), "kv_start_idx": ints(3),
        "kv_indices_ptr": out(3, 16), "req_to_token_ptr_stride": 64, "kv_indices_ptr_stride": 16, "PAGED_SIZE": 4}),
    "token-indices": (gridded(sglang.create_flashinfer_kv_indices_triton, 3), lambda: {
        **batch("req_pool_indices_ptr", "req_to_token_ptr"), "page_kernel_lens_ptr": ints(3),
        "kv_indptr": torch.arange(4), "kv_start_idx": ints(3), "kv_indices_ptr": out(9),
        "req_to_token_ptr_stride": 64, "token_mapping": ints(99)}),
    "draft-indices": (gridded(sglang.generate_draft_decode_kv_indices, 2, 3, 2), lambda: batch() | STRIDES | UPPER | {
        "paged_kernel_lens": ints(3), "kv_indices": out(2, 40), "kv_indptr": out(2, 7), "positions": ints(6),
        "page_size": 4, "v2p": ints(99), "TRANSLATE": True}),
    "gather": (lambda **given: block_tables().gather_block_tables(**given), lambda: {
        "idx_mapping": ints(3), "num_reqs_padded": 4, "out": out(2, 6, 5), "num_computed_tokens": ints(6)}),
    "slots": (lambda **given: block_tables().compute_slot_mappings(**given), lambda: {
        "idx_mapping": ints(3), "query_start_loc": torch.arange(4), "positions": ints(3), "num_tokens_padded": 5,
        "out": out(2, 9, dtype=i64)}),
    "v1-slots": (lambda **given: block_table().compute_slot_mapping(**given), lambda: {
        "num_reqs": 3, "query_start_loc": torch.arange(4), "positions": ints(3)}),
    "draft-step": (vllm.eagle_step_update_slot_mapping_and_metadata, lambda: {
        "positions_1d": ints(3), "block_table_tensor": ints(3, 5), "seq_lens": out(3), "block_size": 4,
        "max_model_len": 20, "out_clamped_positions": out(3, dtype=i64), "out_slot_mapping": out(5, dtype=i64),
        "input_batch_size": 4}),
    "positions": (vllm.prepare_pos_seq_lens, lambda: {
        "idx_mapping": ints(3), "query_start_loc": torch.arange(4), "num_computed_tokens": ints(6),
        "pos": out(5, dtype=i64), "seq_lens": out(5)}),
    "pooled-keys": (vllm.compute_kpool_tail_slot_mapping, lambda: {
        "slot_mapping": ints(5), "block_table": ints(4, 5), "query_start_loc": torch.arange(4), "positions": ints(5),
        "num_actual_tokens": 4, "num_reqs": 3, "kpool": 4, "out": out(5, dtype=i64)}),
    "compressed": (vllm.get_compressed_slot_mapping, lambda: {
        "num_tokens": 4, "slot_mapping": ints(5), "query_start_loc": torch.arange(4), "seq_lens": ints(3),
        "block_table": ints(3, 5), "block_size": 4, "compress_ratio": 2}),
    "local-lengths": (vllm.get_dcp_local_seq_lens, lambda: {"seq_lens": ints(3), "dcp_size": 2, "interleave": 1}),
    "mamba": (vllm.mamba_get_block_table_tensor, lambda: {
        "block_table": ints(3, 5), "seq_lens": ints(3), "kv_cache_spec": SPEC, "mamba_cache_mode": "align"}),
    "expand": (vllm.expand_page_indices, lambda: {
        "block_table": ints(3, 5), "cu_num_tokens": torch.arange(4), "out": out(9), "page_size": 4}),
    "width": (vllm.get_block_table_width, lambda: {"max_num_blocks": 3, "block_size": 16, "token_alignment": 128}),
    "plan": (partial(flashinfer.plan_arguments, layout=LAYOUT), lambda: batch() | {
        "seq_lens": ints(3), "num_reqs": torch.tensor(2)}),
    "lengths": (flashinfer.get_seq_lens, lambda: {
        "kv_indptr": torch.arange(4), "kv_last_page_len": ints(3), "page_size": 4}),
    "appended": (flashinfer.get_batch_indices_positions, lambda: {
        "append_indptr": torch.arange(4), "seq_lens": ints(3), "nnz": 5, "batch_indices": out(5),
        "positions": out(5)}),
    "sparse-lengths": (flash_mla.sparse_lengths, lambda: {
        "indices": ints(3, 1, 8), "topk_length": ints(3), "extra_indices": ints(3, 1, 8),
        "extra_topk_length": ints(3)}),
    "parts": (partial(flash_mla.num_sm_parts, "dense_sm90"), lambda: {
        "num_sms": 132, "num_heads_q": 128, "num_heads_k": 1, "q_len": 1}),
    "schedule": (partial(flash_mla.get_mla_metadata, num_sms=132), lambda: {
        "cache_seqlens": ints(3), "num_heads_per_head_k": 128, "num_heads_k": 1}),
    "to-table": (tensorrt_llm.ragged_to_block_table, lambda: {
        "cache_loc": ints(9), "cu_num_blocks": torch.arange(4), "block_table": out(4, 5), "num_sequences": 3}),
    "to-ragged": (tensorrt_llm.block_table_to_ragged, lambda: {
        "block_table": ints(4, 5), "num_blocks": ints(3), "cache_loc": out(9), "cu_num_blocks": out(4),
        "num_sequences": 3}),
}  # fmt: skip
UNUSED = {*UPPER}  # sizes of kernel blocks, which nothing reads
FLAGS = {"q_mode", "TRANSLATE", "kv_cache_spec", "mamba_cache_mode"}  # tested where their function is
TENSORS = [(case, name) for case, (_, good) in GOOD.items() for name, v in good().items() if isinstance(v, Tensor)]
NUMBERS = [
    (case, name)
    for case, (_, good) in GOOD.items()
    for name, v in good().items()
    if isinstance(v, int) and name not in UNUSED | FLAGS
]


OF_ANY_SHAPE, ALONE = {"local-lengths"}, {"local-lengths", "schedule"}  # one tensor is on a device of its own choice


def not_such_a_tensor(case: str, tensor: Tensor) -> Iterator[Any]:
    yield from (tensor.tolist(), tensor.numpy(), tensor.float(), tensor.to(torch.int16), tensor.to_sparse())
    if case not in ALONE and tensor.ndim > 0:
        yield tensor.to("meta")
    if case in OF_ANY_SHAPE:
        return
    yield tensor[None].repeat(2, *[1] * tensor.ndim)
    if tensor.ndim > 0:
        yield tensor.flatten()[0]
    if tensor.ndim > 1:
        yield tensor.flatten()


def assert_refused(case: str, name: str, bad: Any) -> None:
    call, good = GOOD[case]
    given = good() | {name: bad}
    before = {n: v.clone() for n, v in given.items() if isinstance(v, Tensor) and v.device.type == "cpu"}
    with pytest.raises((TypeError, ValueError)) as refused:
        call(**given)
    assert re.search(rf"(?<![\w.]){name}\b", str(refused.value)), f"{name} is not named: {refused.value}"
    for kept, tensor in before.items():
        assert tensor.is_sparse or torch.equal(tensor, given[kept]), f"{kept} was written"


@pytest.mark.parametrize("case", GOOD)
def test_the_good_call_is_accepted(case: str) -> None:
    call, good = GOOD[case]
    call(**good())


@pytest.mark.parametrize(("case", "name"), TENSORS)
def test_what_is_no_such_tensor_is_refused_under_the_name_it_came_by(case: str, name: str) -> None:
    for bad in not_such_a_tensor(case, GOOD[case][1]()[name]):
        assert_refused(case, name, bad)


@pytest.mark.parametrize(("case", "name"), NUMBERS)
def test_what_is_no_such_number_is_refused_under_the_name_it_came_by(case: str, name: str) -> None:
    for bad in (-1, "4"):
        assert_refused(case, name, bad)


def tables(**changes: Any) -> vllm.BlockTables:
    good = {"block_sizes": [4, 8], "max_num_reqs": 4, "max_num_batched_tokens": 16, "device": "cpu"}
    return vllm.BlockTables(**good | {"max_num_blocks_per_group": [5, 3]} | changes)


def metadata(rows: int) -> ckv.DecodeMetadata:
    return ckv.decode_metadata(ints(4, 256), ints(rows), ints(rows), layout=ckv.KVLayout(64, 256))


def schedule(rows: int) -> tuple[Tensor, Tensor]:
    return ckv.flashmla_schedule(ints(rows), num_sm_parts=4)


def holder() -> SimpleNamespace:
    return SimpleNamespace(tile_scheduler_metadata=None, num_splits=None)


def mha(**changes: Any) -> None:
    call, good = GOOD["mha-graph"]
    call(**good() | changes)


CSR = out(5), out(9), out(4)
# id: a call, the error, its sentence
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "swa-table-alone": (lambda: mha(swa_mapping=None), ValueError,
                        "swa_mapping must be given where swa_page_table is, got None"),
    "strided-by-nothing": (lambda: mha(q_mode=2, q_stride=None), TypeError, "q_stride must be an int, got NoneType"),
    "one-count-for-all": (lambda: sglang.draft_extend_set_metadata(**GOOD["extend"][1]() | {"extend_seq_lens": 4}),
                          TypeError, "extend_seq_lens must be a tensor, got int"),
    "more-lengths-than-rows": (lambda: sglang.normal_decode_set_metadata(**GOOD["decode"][1]() | {"seq_lens": ints(4)}),
                               ValueError, "the length of seq_lens must be at most 3, got 4"),
    "overlap": (lambda: mha(qlens=(shared := out(4))[:3], cu_seqlens_q=shared), ValueError,
                "cu_seqlens_q must not overlap qlens: got views of the same memory"),
    "grid-of-a-number": (lambda: sglang.create_flashmla_kv_indices_triton[3], TypeError,
                         "grid must be a tuple of ints, got int"),
    "grid-too-short": (lambda: sglang.generate_draft_decode_kv_indices[2, 3](**GOOD["draft-indices"][1]()), ValueError,
                       "grid must be (steps, bs, topk), got 2 entries"),
    "block-of-a-fraction": (lambda: tables().append_block_ids(0, ([1, 1.5], []), True), TypeError,
                            "new_block_ids[0][1] must be an int, got float"),
    "block-beyond-int32": (lambda: tables().append_block_ids(0, ([], [2**31]), True), ValueError,
                           "new_block_ids[1][0] must be at most 2147483647, got 2147483648"),
    "v1-block-beyond-int32": (lambda: block_table().add_row([2**40], 0), ValueError,
                              "block_ids[0] must be at most 2147483647, got 1099511627776"),
    "widths-of-other-groups": (lambda: tables(max_num_blocks_per_group=[5]), ValueError,
                               "max_num_blocks_per_group must hold 2 entries, one a group, got 1"),
    "reach-of-other-groups": (lambda: tables(sliding_window_reach=[8]), ValueError,
                              "sliding_window_reach must hold 2 entries, one a group, got 1"),
    "negative-width": (lambda: tables(max_num_blocks_per_group=[5, -3]), ValueError,
                       "max_num_blocks_per_group[1] must be at least 0, got -3"),
    "negative-rows": (lambda: tables(max_num_reqs=-1), ValueError, "max_num_reqs must be at least 0, got -1"),
    "more-dummies-than-rows": (lambda: tables().get_dummy_block_tables(5), ValueError,
                               "num_reqs must be at most 4, got 5"),
    "more-dummies-than-slots": (lambda: tables().get_dummy_slot_mappings(17), ValueError,
                                "num_tokens must be at most 16, got 17"),
    "more-rows-than-the-table": (lambda: block_table().get_device_tensor(7), ValueError,
                                 "num_reqs must be at most 6, got 7"),
    "schedule-swapped": (lambda: flash_mla.decode_arguments(metadata(2), *reversed(schedule(2))), ValueError,
                         "schedule must be [num_sm_parts, columns] with columns=8, got [3]"),
    "schedule-of-another-batch": (lambda: flash_mla.decode_arguments(metadata(2), *schedule(3)), ValueError,
                                  "num_splits must be [B+1] with B+1=3, got [4]"),
    "filled-with-nothing": (lambda: flash_mla.fill_schedule(holder(), None, None), TypeError,
                            "tile_scheduler_metadata must be a tensor, got NoneType"),
    "heads-that-none-shares": (lambda: flash_mla.num_sm_parts("dense_sm90", num_sms=9, num_heads_q=1, num_heads_k=2),
                               ValueError, "num_heads_q must be at least 2, got 1"),
    "csr-of-another-batch": (lambda: flashinfer.mla_plan_arguments(metadata(2), CSR, layout=LAYOUT), ValueError,
                             "kv_indptr must be [B+1] with B+1=3, got [5]"),
    "table-of-a-shorter-layout": (
        lambda: flashinfer.trtllm_decode_arguments(metadata(2), layout=ckv.KVLayout(64, 257)), ValueError,
        "metadata.page_table must have at least 5 columns for this layout, got 4"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_the_sentence(case: str) -> None:
    call, error, sentence = REFUSED[case]
    with pytest.raises(error) as refused:
        call()
    assert str(refused.value) == sentence


def test_positions_partly_in_one_another_are_refused_and_a_view_of_the_same_is_not() -> None:
    call, good = GOOD["draft-step"]
    held = torch.arange(6)
    given = good() | {"positions_1d": held[:3], "out_clamped_positions": held[1:4]}
    with pytest.raises(ValueError, match=r"^out_clamped_positions must not overlap positions_1d: got views of the sam"):
        call(**given)
    assert held.tolist() == [0, 1, 2, 3, 4, 5] and given["seq_lens"].eq(-7).all()
    call(**good() | {"positions_1d": held[1:4], "out_clamped_positions": held[1:4]})
    assert held.tolist() == [0, 2, 3, 4, 4, 5]


def test_an_empty_batch_raises_nothing_without_a_map() -> None:
    none = ints(0)
    mha(bs=0, swa_mapping=None, req_pool_indices=none, seq_lens=none, qlens=none)


def test_numpy_block_ids_are_taken() -> None:
    held = tables()
    held.append_block_ids(1, (list(np.array([3, 4])), []), True)
    held.apply_staged_writes()
    assert held.block_tables[0].tolist()[1] == [3, 4, 0, 0, 0]
