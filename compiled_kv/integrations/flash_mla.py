"""Arguments of FlashMLA's decode call, its schedule among them, built by the operators.

    tile_scheduler_metadata, num_splits = ckv.flashmla_schedule(metadata.cache_seqlens, num_sm_parts=parts)
    flash_mla_with_kvcache(q, cache, head_dim_v=512, **decode_arguments(metadata, tile_scheduler_metadata, num_splits))

FlashMLA need not be installed. Its newer releases take an opaque schedule object, which their first call fills unless
it holds a schedule already: `fill_schedule` puts ours in. See docs/integrations/flashinfer_flashmla.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_kv.checks import INT32, INTS, Sizes, check_int
from compiled_kv.layout import ceil_div
from compiled_kv.metadata_parts import DecodeMetadata
from compiled_kv.rows_cpu import pages_of
from compiled_kv.schedules import COLUMNS, flashmla_schedule

BLOCK_SIZE = 64
KINDS = ("dense_sm90", "sparse_sm90", "sparse_sm100")


def num_sm_parts(kind: str, *, num_sms: int, num_heads_q: int, num_heads_k: int = 1, q_len: int = 1) -> int:
    """Parts that share the work: `num_sm_parts` of `compiled_kv.flashmla_schedule`.

    Args:
        kind: the kernel: "dense_sm90", "sparse_sm90" or "sparse_sm100".
        num_sms: multiprocessors of the device.
        num_heads_q, num_heads_k: heads of queries and of the cache.
        q_len: queries a request.

    Raises:
        TypeError, ValueError: another kind; a count that is no int, or below 1; fewer heads of queries than of keys.
    """
    _check_counts(num_sms=num_sms, num_heads_q=num_heads_q, num_heads_k=num_heads_k, q_len=q_len)
    check_int("num_heads_q", num_heads_q, num_heads_k)
    if kind == "dense_sm90":
        return max(num_sms // num_heads_k // ceil_div(q_len * num_heads_q // num_heads_k, BLOCK_SIZE), 1)
    if kind == "sparse_sm90":
        return max(num_sms // q_len // max(num_heads_q // BLOCK_SIZE, 1), 1)
    if kind == "sparse_sm100":
        return max(num_sms // q_len, 1)
    raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        check_int(name, count, 1)


def sparse_lengths(
    indices: Tensor, topk_length: Tensor | None = None, extra_indices: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Tokens that a sparse call reads of each request: what `compiled_kv.flashmla_schedule` takes as lengths for it.

    Plain torch, one kernel where the step around it is compiled.

    Args:
        indices: int [B, Q, K], the tokens that each query reads, as the call takes them.
        topk_length: int [B], how many of the K count; all of them if absent. Clamped to [1, K].
        extra_indices: int [B, Q, K2], those of a second cache, which begin a block of 64 of their own.
        extra_topk_length: int [B], how many of the K2 count, likewise; clamped to [0, K2].

    Returns:
        int32 [B].

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape or device is wrong, or the last one stands alone; the
            text names it.
    """
    sizes = Sizes()
    found = _counted(sizes, "indices", indices, "topk_length", topk_length).clamp(min=1)
    if extra_indices is not None:
        more = _counted(sizes, "extra_indices", extra_indices, "extra_topk_length", extra_topk_length).clamp(min=0)
        found = pages_of(found, BLOCK_SIZE) * BLOCK_SIZE + more
    elif extra_topk_length is not None:
        raise ValueError("extra_topk_length goes with extra_indices, got it alone")
    return found.int()


def _counted(sizes: Sizes, name: str, indices: Tensor, lengths_name: str, lengths: Tensor | None) -> Tensor:
    sizes.check(name, indices, INTS, "B", f"queries of {name}", f"columns of {name}")
    if lengths is None:
        return indices.new_full((indices.shape[0],), indices.shape[2], dtype=torch.int64)
    sizes.check(lengths_name, lengths, INTS, "B")
    return lengths.long().clamp(max=indices.shape[2])


def get_mla_metadata(
    cache_seqlens: Tensor, num_heads_per_head_k: int, num_heads_k: int, *, num_sms: int | None = None
) -> tuple[Tensor, Tensor]:
    """The older releases' function of this name: a schedule in their columns, which count tokens.

    Args:
        cache_seqlens: int [B].
        num_heads_per_head_k: query heads times queries a request, for each head of the cache.
        num_heads_k: heads of the cache.
        num_sms: multiprocessors; those of the lengths' CUDA device if absent.

    Returns:
        (tile_scheduler_metadata int32 [num_sm_parts, 8], num_splits int32 [B + 1]).

    Raises:
        TypeError, ValueError: a count is no int or below 1; or as `compiled_kv.flashmla_schedule`.
    """
    if num_sms is None:
        num_sms = torch.cuda.get_device_properties(cache_seqlens.device).multi_processor_count
    _check_counts(num_heads_per_head_k=num_heads_per_head_k, num_heads_k=num_heads_k, num_sms=num_sms)
    parts = max(num_sms // num_heads_k // ceil_div(num_heads_per_head_k, BLOCK_SIZE), 1)
    return flashmla_schedule(cache_seqlens, num_sm_parts=parts, form="legacy_tokens")


def fill_schedule(schedule: Any, tile_scheduler_metadata: Tensor, num_splits: Tensor) -> Any:
    """Put a schedule into FlashMLA's object, before its first call; returns the object.

    The object keeps the two tensors, so a step that updates them in place (`flashmla_schedule(..., out=)`) keeps the
    object up to date.

    Raises:
        TypeError: this release's object has no such fields: leave the schedule to its first call.
        TypeError, ValueError: a call has filled the object already, or the tensors are no schedule.
    """
    missing = [f for f in ("tile_scheduler_metadata", "num_splits") if not hasattr(schedule, f)]
    if missing:
        raise TypeError(f"schedule must have the fields that FlashMLA fills, got none named {' or '.join(missing)}")
    if getattr(schedule, "have_initialized", False):
        raise ValueError("schedule must not have been through a call, got one whose have_initialized is True")
    _check_schedule("tile_scheduler_metadata", tile_scheduler_metadata, num_splits)
    schedule.tile_scheduler_metadata, schedule.num_splits = tile_scheduler_metadata, num_splits
    return schedule


def decode_arguments(
    metadata: DecodeMetadata, schedule: Any, num_splits: Tensor | None = None, *, page_size: int = BLOCK_SIZE
) -> dict[str, Any]:
    """What `flash_mla_with_kvcache` takes of the cache.

    Args:
        metadata: of this step, made with a layout of `page_size`.
        schedule: `tile_scheduler_metadata` int32 [num_sm_parts, 8], or FlashMLA's object.
        num_splits: int32 [B + 1], beside a tensor; None beside the object.
        page_size: tokens a page of the cache: the dense kernel knows 64 alone.

    Returns:
        block_table int32 [B, P], cache_seqlens int32 [B], tile_scheduler_metadata and num_splits.

    Raises:
        TypeError, ValueError: another page size; or tensors that are no schedule of this batch.
    """
    if page_size != BLOCK_SIZE:
        raise ValueError(f"page_size must be {BLOCK_SIZE} for FlashMLA, got {page_size}")
    if isinstance(schedule, Tensor) != isinstance(num_splits, Tensor):
        raise ValueError("num_splits goes with a tensor schedule, and an object brings its own")
    if num_splits is not None:
        _check_schedule("schedule", schedule, num_splits, metadata.cache_seqlens.shape[0])
    return {
        "block_table": metadata.page_table,
        "cache_seqlens": metadata.cache_seqlens,
        "tile_scheduler_metadata": schedule,
        "num_splits": num_splits,
    }


def _check_schedule(name: str, schedule: Tensor, num_splits: Tensor, batch_size: int | None = None) -> None:
    """Refuse what is no schedule, or that of another batch."""
    sizes = Sizes()
    sizes.named["columns"] = COLUMNS
    if batch_size is not None:
        sizes.named["B"] = batch_size
    sizes.check(name, schedule, INT32, "num_sm_parts", "columns")
    sizes.check("num_splits", num_splits, INT32, "B+1")
