"""The operators behind the integrations refuse bad input before any write: argument, rule and what came."""

# ruff: noqa: E501  (a row a line, for the sentences are what is to be read)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_kv import KVLayout
from compiled_kv.peers.block_tables import gather_block_tables
from compiled_kv.peers.engine_parts import EngineMetadata
from tests.harness import POISON, around, poisoned
from tests.peer_calls import CALLS

i32, i64 = torch.int32, torch.int64


def ints(*shape: int, dtype: torch.dtype = i64) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def out(*shape: int, dtype: torch.dtype = i32) -> Tensor:
    return poisoned(shape, dtype, "cpu")


def good(operator: str) -> dict[str, Any]:
    """A call that is accepted, with outputs for all there is."""
    pool = {"req_pool_indices": ints(3), "layout": KVLayout(4, 24)}
    match operator:
        case "write_metadata":
            buffers = EngineMetadata(out(3), out(4), out(4), out(3, 6), out(3, 6), out(5, dtype=i64))
            given = {"req_to_token": ints(2, 24), "seq_lens": ints(3), "out": buffers, "full_to_swa": ints(9)}
            return pool | given
        case "gather_block_tables":
            below = {"block_sizes": ints(2), "reach": ints(2), "num_computed_tokens": ints(4)}
            tables = {"block_tables": ints(2, 4, 5), "num_blocks": ints(2, 4), "req_pool_indices": ints(3)}
            return tables | below | {"out": out(2, 4, 5)}
        case "group_slot_mappings":
            tables = {"block_tables": ints(2, 4, 5), "block_sizes": ints(2), "req_pool_indices": ints(3)}
            return tables | {
                "cu_seqlens_q": ints(4),
                "positions": ints(6),
                "sharded": ints(2),
                "out": out(2, 7, dtype=i64),
            }
        case "csr_tables":
            return pool | {
                "pool": ints(2, 24),
                "kv_lens": ints(3),
                "kv_start": ints(3),
                "token_map": ints(9),
                "out": (out(4), out(18), out(3)),
            }
        case "fill_kv_indices":
            return pool | {"pool": ints(2, 24), "kv_lens": ints(3), "kv_indptr": ints(4), "kv_indices": out(18)}
        case "draft_kv_indices":
            return pool | {
                "pool": ints(2, 24),
                "seq_lens": ints(3),
                "num_steps": 2,
                "topk": 2,
                "positions": ints(6),
                "out": (out(2, 7), out(2, 90)),
            }
        case "advance_draft":
            return {
                "positions": ints(3),
                "block_table": ints(3, 4),
                "seq_lens": ints(3),
                "page_size": 4,
                "max_context_len": 16,
            }
        case "advance_draft_":
            given = {"positions": out(3, dtype=i64), "seq_lens": out(3), "slot_mapping": out(5, dtype=i64)}
            return given | {"block_table": ints(3, 4), "page_size": 4, "max_context_len": 16}
        case "place_tokens_":
            given = {"positions": out(5, dtype=i64), "batch_indices": out(5), "seq_lens": out(4)}
            return given | {"held": ints(6), "cu_seqlens_q": ints(4), "req_pool_indices": ints(3)}
    raise AssertionError(operator)


def into(**fields: Any) -> Callable[[EngineMetadata], EngineMetadata]:
    return lambda buffers: buffers._replace(**fields)


# id: operator, changes to its arguments (a value, or a function of the good one), error, sentence
BAD: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "float-lengths": ("write_metadata", {"seq_lens": ints(3).float()}, TypeError, "seq_lens must be int32 or int64, got float32"),
    "out-of-another-kind": ("write_metadata", {"out": (out(3),)}, TypeError, "out must be an EngineMetadata, got tuple"),
    "table-of-no-tensor": ("write_metadata", {"out": into(page_table=3)}, TypeError, "out.page_table must be a tensor, got int"),
    "slots-of-no-tensor": ("group_slot_mappings", {"out": 5, "num_tokens": 6}, TypeError, "out must be a tensor, got int"),
    "counted-in-words": ("place_tokens_", {"counted": "x"}, TypeError, "counted must be a bool, got str"),
    "too-few-lengths": ("write_metadata", {"out": into(cache_seqlens=out(2))}, ValueError, "out.cache_seqlens must have at least 3 entries, got 2"),
    "too-few-sums": ("write_metadata", {"out": into(cu_seqlens_k=out(3))}, ValueError, "out.cu_seqlens_k must have at least 4 entries, got 3"),
    "sums-of-int64": ("write_metadata", {"out": into(cu_seqlens_q=out(4, dtype=i64))}, TypeError, "out.cu_seqlens_q must be int32, got int64"),
    "too-few-rows": ("write_metadata", {"out": into(page_table=out(2, 6))}, ValueError, "out.page_table must have at least 3 rows, got 2"),
    "too-few-columns": ("write_metadata", {"out": into(swa_page_table=out(3, 5))}, ValueError, "out.swa_page_table must have at least 6 columns, got 5"),
    "narrower-than-the-layout": ("write_metadata", {"width": 5}, ValueError, "width must be at least 6, got 5"),
    "wider-than-the-table": ("write_metadata", {"width": 7}, ValueError, "out.page_table must have at least 7 columns, got 6"),
    "entries-that-overlap": ("write_metadata", {"out": into(page_table=out(30).as_strided((3, 6), (2, 1)))}, ValueError, "out.page_table must have entries that do not overlap, got strides [2, 1]"),
    "one-row-repeated": ("write_metadata", {"out": into(page_table=out(1, 6)[0].expand(3, 6))}, ValueError, "out.page_table must have entries that do not overlap, got strides [0, 1]"),
    "swa-table-alone": ("write_metadata", {"out": into(page_table=None)}, ValueError, "out.page_table must be given where out.swa_page_table is, got None"),
    "no-map": ("write_metadata", {"full_to_swa": None}, ValueError, "exactly one of full_to_swa and swa_page_map goes with out.swa_page_table, got neither"),
    "slots-without-a-token-map": ("write_metadata", {"full_to_swa": None, "swa_page_map": ints(9)}, ValueError, "full_to_swa must be given where out.swa_slot_mapping is, got None"),
    "negative-offset": ("write_metadata", {"seq_len_delta": -1}, ValueError, "seq_len_delta must be at least 0, got -1"),
    "flat-block-tables": ("gather_block_tables", {"block_tables": ints(4, 5)}, ValueError, "block_tables must be [G, R, W], got [4, 5]"),
    "counts-of-other-groups": ("gather_block_tables", {"num_blocks": ints(3, 4)}, ValueError, "num_blocks must be [G, R] with G=2, R=4, got [3, 4]"),
    "reach-alone": ("gather_block_tables", {"block_sizes": None, "num_computed_tokens": None}, ValueError, "block_sizes, reach, num_computed_tokens go together, got no block_sizes and no num_computed_tokens"),
    "out-with-too-few-rows": ("gather_block_tables", {"out": out(2, 2, 5)}, ValueError, "out must have at least the 3 rows of the batch, got 2"),
    "out-of-another-width": ("gather_block_tables", {"out": out(2, 4, 6)}, ValueError, "out must be [G, N, W] with G=2, N=4, W=5, got [2, 4, 6]"),
    "groups-that-overlap": ("gather_block_tables", {"out": out(60).as_strided((2, 4, 5), (10, 5, 1))}, ValueError, "out must have unit column stride and rows that do not overlap, got strides [10, 5, 1]"),
    "kept-without-out": ("gather_block_tables", {"out": None, "tail": "keep"}, ValueError, "tail='keep' needs out"),
    "rank-beyond-the-size": ("group_slot_mappings", {"cp_size": 2, "cp_rank": 2}, ValueError, "cp_rank must be at most 1, got 2"),
    "no-interleave": ("group_slot_mappings", {"cp_interleave": 0}, ValueError, "cp_interleave must be at least 1, got 0"),
    "bounds-too-few": ("group_slot_mappings", {"cu_seqlens_q": ints(3)}, ValueError, "cu_seqlens_q must be [B+1] with B+1=4, got [3]"),
    "slots-narrower-than-positions": ("group_slot_mappings", {"out": out(2, 5, dtype=i64)}, ValueError, "out must have at least the 6 columns of positions, got 5"),
    "slots-of-int32": ("group_slot_mappings", {"out": out(2, 7)}, TypeError, "out must be int64, got int32"),
    "tokens-beside-out": ("group_slot_mappings", {"num_tokens": 9}, ValueError, "num_tokens goes with a new result: out has its own 7, got 9"),
    "a-page-size-for-a-layout": ("csr_tables", {"layout": 4}, TypeError, "layout must be a KVLayout, got int"),
    "fill-by-a-page-size": ("fill_kv_indices", {"layout": 4}, TypeError, "layout must be a KVLayout, got int"),
    "drafts-by-a-page-size": ("draft_kv_indices", {"layout": 4}, TypeError, "layout must be a KVLayout, got int"),
    "narrow-pool": ("csr_tables", {"pool": ints(2, 23)}, ValueError, "pool must have at least 24 tokens a row for this layout, got 23"),
    "no-entry-size": ("csr_tables", {"entry_page_size": 0}, ValueError, "entry_page_size must be at least 1, got 0"),
    "starts-too-many": ("csr_tables", {"kv_start": ints(4)}, ValueError, "kv_start must be [B] with B=3, got [4]"),
    "two-outs": ("csr_tables", {"out": (out(4), out(18))}, ValueError, "out must be (kv_indptr, kv_indices, kv_last_page_len), got 2 entries"),
    "capacity-beside-out": ("csr_tables", {"capacity": 4}, ValueError, "capacity goes with a new result: out has its own, got 4"),
    "negative-capacity": ("csr_tables", {"out": None, "capacity": -1}, ValueError, "capacity must be at least 0, got -1"),
    "indptr-too-short": ("fill_kv_indices", {"kv_indptr": ints(3)}, ValueError, "kv_indptr must be [B+1] with B+1=4, got [3]"),
    "indices-apart": ("fill_kv_indices", {"kv_indices": out(36)[::2]}, ValueError, "kv_indices must have unit column stride, got strides [2]"),
    "narrow-pool-of-drafts": ("draft_kv_indices", {"pool": ints(2, 23)}, ValueError, "pool must have at least 24 tokens a row for this layout, got 23"),
    "no-entry-size-of-drafts": ("draft_kv_indices", {"entry_page_size": 0}, ValueError, "entry_page_size must be at least 1, got 0"),
    "no-steps": ("draft_kv_indices", {"num_steps": 0}, ValueError, "num_steps must be at least 1, got 0"),
    "positions-of-other-branches": ("draft_kv_indices", {"positions": ints(5)}, ValueError, "positions must be [B*topk] with B*topk=6, got [5]"),
    "too-few-steps": ("draft_kv_indices", {"num_steps": 3}, ValueError, "kv_indptr must be at least [3, 7], got [2, 7]"),
    "bounds-for-fewer-branches": ("draft_kv_indices", {"topk": 3, "positions": None}, ValueError, "kv_indptr must be at least [2, 10], got [2, 7]"),
    "table-of-another-batch": ("advance_draft", {"block_table": ints(4, 4)}, ValueError, "block_table must be [B, W] with B=3, got [4, 4]"),
    "no-context": ("advance_draft", {"max_context_len": 0}, ValueError, "max_context_len must be at least 1, got 0"),
    "slots-for-fewer-rows": ("advance_draft", {"num_tokens": 2}, ValueError, "num_tokens must be at least 3, got 2"),
    "lengths-of-int64": ("advance_draft_", {"seq_lens": ints(3)}, TypeError, "seq_lens must be int32, got int64"),
    "bounds-of-nothing": ("place_tokens_", {"cu_seqlens_q": ints(0)}, ValueError, "the length of cu_seqlens_q must be at least 1, got 0"),
    "rows-of-another-batch": ("place_tokens_", {"req_pool_indices": ints(2)}, ValueError, "req_pool_indices must be [B] with B=3, got [2]"),
    "held-by-other-rows": ("place_tokens_", {"req_pool_indices": None}, ValueError, "held must be [B] with B=3, got [6]"),
    "entries-of-int64": ("place_tokens_", {"batch_indices": ints(5)}, TypeError, "batch_indices must be int32, got int64"),
    "entries-for-other-tokens": ("place_tokens_", {"batch_indices": out(4)}, ValueError, "batch_indices must be [T] with T=5, got [4]"),
    "too-few-entries": ("place_tokens_", {"seq_lens": out(2)}, ValueError, "seq_lens must have at least 3 entries, got 2"),
    "more-tokens-than-slots": ("advance_draft_", {"num_tokens": 6}, ValueError, "num_tokens must be at most 5, got 6"),
}  # fmt: skip


def outputs(value: Any) -> list[Tensor]:
    parts = value if isinstance(value, tuple) else (value,)
    return [part for part in parts if isinstance(part, Tensor)]


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_sentence(case: str) -> None:
    operator, changes, error, sentence = BAD[case]
    given = good(operator)
    given |= {name: new(given[name]) if callable(new) else new for name, new in changes.items()}
    with pytest.raises(error) as refused:
        CALLS[operator][0](**given)
    assert str(refused.value).startswith(sentence)
    for name in ("out", "kv_indices", "positions", "seq_lens", "slot_mapping", "batch_indices"):
        for tensor in outputs(given.get(name)):
            whole = around(tensor)
            assert (whole == POISON.get(whole.dtype, 0)).all() or (whole == 0).all(), f"{name} was written"


@pytest.mark.parametrize("operator", CALLS)
def test_the_good_call_is_accepted(operator: str) -> None:
    CALLS[operator][0](**good(operator))


OVERLAPS = {
    "write_metadata": ("seq_lens", lambda given: given["out"].cache_seqlens, "cache_seqlens"),
    "gather_block_tables": ("block_tables", lambda given: given["out"], "out"),
    "group_slot_mappings": ("positions", lambda given: given["out"][0, :6], "out"),
    "csr_tables": ("kv_lens", lambda given: given["out"][2], "kv_last_page_len"),
    "fill_kv_indices": ("kv_lens", lambda given: given["kv_indices"][:3], "kv_indices"),
    "draft_kv_indices": ("seq_lens", lambda given: given["out"][1][0, :3], "kv_indices"),
    "place_tokens_": ("held", lambda given: given["positions"], "positions"),
    "advance_draft_": ("seq_lens", lambda given: given["positions"].view(i32)[:3], "positions|seq_lens"),
}


@pytest.mark.parametrize("operator", OVERLAPS)
def test_outputs_that_overlap_are_refused(operator: str) -> None:
    given = good(operator)
    argument, shared, name = OVERLAPS[operator]
    given[argument] = shared(given)
    with pytest.raises(ValueError, match=f"^({name}) must not overlap"):
        CALLS[operator][0](**given)


def test_tables_of_several_groups_that_overlap_an_input_are_refused() -> None:
    """Rows of groups lie at a distance of their own, which is not that of the groups."""
    whole = torch.zeros(80, dtype=torch.int32)
    indices = whole[11:14]
    tables, counts = torch.ones(2, 4, 3, dtype=torch.int32), torch.full((2, 4), 3)
    for strides, begin in (((18, 5, 1), 0), ((20, 5, 1), 0), ((30, 6, 1), 4)):
        out = whole.as_strided((2, 3, 3), strides, begin)
        with pytest.raises(ValueError, match="out must not overlap req_pool_indices"):
            gather_block_tables(tables, counts, indices, out=out)
    assert not whole.any()
    beside = torch.full((2, 3, 9), -7, dtype=torch.int32)
    beside[0, 0, 5:8] = torch.arange(3, dtype=torch.int32)
    gather_block_tables(tables, counts, beside[0, 0, 5:8], out=beside[..., 1:4])
    assert beside[..., 1:4].eq(1).all() and beside[..., 4:5].eq(-7).all() and beside[..., :1].eq(-7).all()
