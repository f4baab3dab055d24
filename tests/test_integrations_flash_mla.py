"""FlashMLA's decode arguments and its schedule: names, dtypes and strides, and the lengths that a sparse call reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import compiled_kv as ckv
from compiled_kv import reference
from compiled_kv.integrations import flash_mla
from tests.cases import DEVICES
from tests.conftest import INTERPRETED

devices = pytest.mark.parametrize("device", DEVICES)


@pytest.mark.parametrize(
    ("kind", "sms", "heads", "parts"),
    [
        ("dense_sm90", 132, (128, 1, 1), 66),
        ("dense_sm90", 132, (128, 1, 2), 33),
        ("dense_sm90", 132, (16, 2, 1), 66),
        ("dense_sm90", 2, (128, 8, 1), 1),
        ("sparse_sm90", 132, (128, 1, 1), 66),
        ("sparse_sm90", 132, (64, 1, 2), 66),
        ("sparse_sm100", 148, (128, 1, 2), 74),
    ],
)
def test_number_of_parts(kind: str, sms: int, heads: tuple[int, int, int], parts: int) -> None:
    q, k, q_len = heads
    assert flash_mla.num_sm_parts(kind, num_sms=sms, num_heads_q=q, num_heads_k=k, q_len=q_len) == parts


@devices
@pytest.mark.parametrize(
    ("counts", "extra_columns", "extra_counts", "wanted"),
    [
        (None, None, None, [100, 100, 100, 100]),
        ([1, 0, -3, 2**40], None, None, [1, 1, 1, 100]),  # none is one, and none is more than there are
        ([64, 65, 0, 100], 70, None, [134, 198, 134, 198]),  # behind 64, 128, 64 and 128
        ([64, 65, 0, 100], 70, [0, 3, -1, 71], [64, 131, 64, 198]),
    ],
)
def test_tokens_that_a_sparse_call_reads(
    counts: list[int] | None, extra_columns: int | None, extra_counts: list[int] | None, wanted: list[int], device: str
) -> None:
    given = [
        torch.zeros(4, 2, 100, dtype=torch.int32, device=device),
        None if counts is None else torch.tensor(counts, device=device),
        None if extra_columns is None else torch.zeros(4, 2, extra_columns, dtype=torch.int32, device=device),
        None if extra_counts is None else torch.tensor(extra_counts, device=device),
    ]
    found = flash_mla.sparse_lengths(*given)
    assert found.dtype == torch.int32 and found.tolist() == wanted
    schedule = ckv.flashmla_schedule(found, num_sm_parts=3)
    lengths = torch.tensor(wanted)
    assert [part.tolist() for part in schedule] == [
        part.tolist() for part in reference.flashmla_schedule(lengths, num_sm_parts=3)
    ]


def test_sparse_lengths_name_what_is_wrong() -> None:
    indices, counts = torch.zeros(4, 2, 100, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    for given, error, sentence in (
        ((indices[0],), ValueError, "indices must be"),
        ((indices.float(),), TypeError, "indices must be int32 or int64, got float32"),
        ((indices, counts[:3]), ValueError, r"topk_length must be \[B\] with B=4, got \[3\]"),
        ((indices, counts, indices[:3]), ValueError, "extra_indices must be"),
        ((indices, counts, None, counts), ValueError, "extra_topk_length goes with extra_indices, got it alone"),
    ):
        with pytest.raises(error, match=sentence):
            flash_mla.sparse_lengths(*given)


@pytest.mark.skipif(INTERPRETED, reason="traced as for a real device")
def test_the_auditor_finds_nothing_in_a_sparse_schedule() -> None:
    pytest.importorskip("triton")

    def step(indices: Tensor, counts: Tensor, extra: Tensor) -> tuple[Tensor, Tensor]:
        return ckv.flashmla_schedule(flash_mla.sparse_lengths(indices, counts, extra), num_sm_parts=3)

    given = torch.zeros(4, 1, 100), torch.tensor([64, 65, 0, 100]), torch.zeros(4, 1, 70)
    given = given[0].int(), given[1], given[2].int()
    report = ckv.audit(step, *given, target="cuda:sm_90")
    assert report.ok and report.findings == (), str(report)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(*given)
    assert [part.tolist() for part in found] == [part.tolist() for part in step(*given)]


def test_the_older_metadata_function_counts_tokens() -> None:
    lengths = torch.tensor([192, 64, 1280, 0], dtype=torch.int32)
    found = flash_mla.get_mla_metadata(lengths, 128, 1, num_sms=4)
    wanted = reference.flashmla_schedule(lengths, num_sm_parts=2, form="legacy_tokens")
    assert [part.tolist() for part in found] == [part.tolist() for part in wanted]
    assert found[0].shape == (2, 8) and found[0].is_contiguous() and found[1].dtype == torch.int32


@dataclass
class ScheduleObject:
    """The fields of the newer releases' object, as their first call leaves them empty."""

    have_initialized: bool = False
    config: Any = None
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None


LENGTHS = torch.tensor([192, 64, 1280], dtype=torch.int32)


def test_a_schedule_object_holds_persistent_tensors() -> None:
    schedule = ckv.flashmla_schedule(LENGTHS, num_sm_parts=2)
    held = flash_mla.fill_schedule(ScheduleObject(), *schedule)
    assert held.config is None and not held.have_initialized  # its first call still checks the shapes
    ckv.flashmla_schedule(LENGTHS.flip(0), num_sm_parts=2, out=schedule)
    wanted = reference.flashmla_schedule(LENGTHS.flip(0), num_sm_parts=2)
    assert [held.tile_scheduler_metadata.tolist(), held.num_splits.tolist()] == [part.tolist() for part in wanted]
    with pytest.raises(ValueError, match="must not have been through a call"):
        flash_mla.fill_schedule(ScheduleObject(have_initialized=True), *schedule)
    with pytest.raises(TypeError, match="got none named tile_scheduler_metadata or num_splits"):
        flash_mla.fill_schedule(object(), *schedule)


def test_decode_arguments_of_flashmla() -> None:
    layout = ckv.KVLayout(64, 256)
    rows, lengths = torch.tensor([3, 1, 4]), torch.tensor([5, 0, 220])
    made = ckv.decode_metadata(torch.arange(5 * 256).view(5, -1), rows, lengths, layout=layout)
    schedule = ckv.flashmla_schedule(made.cache_seqlens, num_sm_parts=2)
    given = flash_mla.decode_arguments(made, *schedule, page_size=layout.page_size)
    assert [*given] == ["block_table", "cache_seqlens", "tile_scheduler_metadata", "num_splits"]
    assert given["block_table"] is made.page_table and made.page_table.stride(1) == 1
    assert given["cache_seqlens"].is_contiguous() and given["cache_seqlens"].dtype == torch.int32
    assert (given["tile_scheduler_metadata"], given["num_splits"]) == schedule
    held = flash_mla.fill_schedule(ScheduleObject(), *schedule)
    given = flash_mla.decode_arguments(made, held)
    assert given["tile_scheduler_metadata"] is held and given["num_splits"] is None
    with pytest.raises(ValueError, match="page_size must be 64 for FlashMLA, got 32"):
        flash_mla.decode_arguments(made, *schedule, page_size=32)
    with pytest.raises(ValueError, match="num_splits goes with a tensor schedule"):
        flash_mla.decode_arguments(made, held, schedule[1])
