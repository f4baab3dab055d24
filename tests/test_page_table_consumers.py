"""PyTorch's own paged attention reads our tables: FlexAttention by block indices, `varlen_attn` by block table."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import compiled_kv as ckv
from tests.cases import needs_cuda

ROWS, LENGTHS = (2, 0, 1), (700, 256, 1)  # pages in the middle, whole pages, and a single token
HEADS, KV_HEADS, DIM = 4, 2, 64
WINDOWS = {"full": None, "window-of-300": 300}


class Scene(NamedTuple):
    """Pools of keys and values, [slots, KV_HEADS, DIM] each, what decode_metadata is called with, and queries."""

    layout: ckv.KVLayout
    req_to_token: Tensor
    rows: Tensor
    seq_lens: Tensor
    full_to_swa: Tensor | None
    pools: tuple[Tensor, Tensor]
    query: Tensor  # [B, HEADS, 1, DIM]

    def table(self) -> tuple[Tensor, Tensor]:
        """The table that this scene's layers read, and the lengths."""
        meta = ckv.decode_metadata(
            self.req_to_token, self.rows, self.seq_lens, layout=self.layout, full_to_swa=self.full_to_swa
        )
        return meta.page_table if meta.swa_page_table is None else meta.swa_page_table, meta.cache_seqlens


def scene(page_size: int, window: int | None, device: str, dtype: torch.dtype) -> Scene:
    """Pages lie in any order; those of sliding layers in another, and none where the window has passed."""
    generator = torch.Generator().manual_seed(0)
    layout = ckv.KVLayout(page_size, max_context_len=768, window=window)
    width = layout.max_num_pages
    order = torch.randperm(4 * width, generator=generator)[: 3 * width].view(3, width) + 1
    slots = (order[..., None] * page_size + torch.arange(page_size)).flatten(1)
    num_slots = (4 * width + 1) * page_size
    page = torch.arange(num_slots) // page_size
    mirrored = torch.where(page > 0, (4 * width + 1 - page) * page_size + torch.arange(num_slots) % page_size, 0)
    if window is not None:
        for row, length in zip(ROWS, LENGTHS):
            mirrored[slots[row, : max(length - window, 0) // page_size * page_size]] = -1
    states = [torch.randn(num_slots, KV_HEADS, DIM, generator=generator) for _ in range(2)]
    query = torch.randn(len(ROWS), HEADS, 1, DIM, generator=generator)
    tensors = slots, torch.tensor(ROWS), torch.tensor(LENGTHS, dtype=torch.int32), mirrored
    slots, rows, lengths, mirrored = (tensor.to(device) for tensor in tensors)
    pools = states[0].to(device, dtype), states[1].to(device, dtype)
    return Scene(layout, slots, rows, lengths, None if window is None else mirrored, pools, query.to(device, dtype))


def dense(given: Scene) -> Tensor:
    """Attention of each row over its own keys, one after the other: [B, HEADS, 1, DIM]."""
    out = []
    for query, row, length in zip(given.query, ROWS, LENGTHS):
        first = 0 if given.layout.window is None else max(length - given.layout.window, 0)
        slots = given.req_to_token[row, first:length]
        if given.full_to_swa is not None:
            slots = given.full_to_swa[slots]
        keys, values = (pool[slots].transpose(0, 1) for pool in given.pools)
        out.append(F.scaled_dot_product_attention(query, keys, values, enable_gqa=True))
    return torch.stack(out)


def flex_mask(given: Scene) -> BlockMask:
    """What of the pools each row sees, as they lie; a block is a page."""
    table, lengths = given.table()
    size, batch, num_pages = given.layout.page_size, table.shape[0], given.pools[0].shape[0] // given.layout.page_size
    column = torch.arange(table.shape[1], dtype=torch.int32, device=table.device).expand(batch, -1)
    column_of = torch.full((batch, num_pages), -1, dtype=torch.int32, device=table.device)
    column_of = column_of.scatter(1, table.long(), column)  # of each page that a row holds; the null page is nobody's
    window = given.layout.max_seqlen_k if given.layout.window is None else given.layout.window

    def seen(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        page = slot // size
        position = column_of[row, page] * size + slot % size
        return (page > 0) & (position >= 0) & (position < lengths[row]) & (position >= lengths[row] - window)

    blocks = F.pad(table, (0, num_pages - table.shape[1]))[:, None, None]
    counts = ((lengths + size - 1) // size)[:, None, None]
    return BlockMask.from_kv_blocks(
        counts.int(), blocks, BLOCK_SIZE=(128, size), mask_mod=seen, seq_lengths=(1, num_pages * size)
    )


def attend(given: Scene, mask: BlockMask) -> Tensor:
    keys, values = (pool.transpose(0, 1)[None] for pool in given.pools)
    return flex_attention(given.query, keys, values, block_mask=mask, enable_gqa=True)


def flex_step(given: Scene) -> Tensor:
    """Metadata and FlexAttention."""
    return attend(given, flex_mask(given))


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_flex_attention_reads_a_table_as_dense_attention_reads_its_tokens(window: int | None) -> None:
    """In one graph. On a CPU its mask decides alone; the block indices are read on a CUDA device."""
    given = scene(128, window, "cpu", torch.float32)
    got = torch.compile(flex_step, fullgraph=True, backend="eager")(given)
    torch.testing.assert_close(got, dense(given), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_compiled_flex_attention_reads_the_blocks_of_a_table(window: int | None) -> None:
    given = scene(128, window, "cuda", torch.float32)
    got = torch.compile(attend, fullgraph=True)(given, flex_mask(given))
    torch.testing.assert_close(got, dense(given), rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.xfail(
    torch.__version__.startswith("2.11."),
    reason="Inductor 2.11 takes what a mask captures for the constant it was filled with before it was written",
)
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_one_graph_of_metadata_and_flex_attention_is_dense_attention(window: int | None) -> None:
    given = scene(128, window, "cuda", torch.float32)
    got = torch.compile(flex_step, fullgraph=True)(given)
    torch.testing.assert_close(got, dense(given), rtol=1e-2, atol=1e-2)


def block_table_attention() -> Callable[..., Tensor]:
    """`varlen_attn`, where this version of PyTorch gives it a block table."""
    varlen: Any = pytest.importorskip("torch.nn.attention.varlen", reason="this PyTorch has no varlen_attn")
    if "block_table" not in inspect.signature(varlen.varlen_attn).parameters:
        pytest.skip(f"varlen_attn of PyTorch {torch.__version__} takes no block_table; 2.13 does")
    attention: Callable[..., Tensor] = varlen.varlen_attn
    return attention


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_varlen_attention_reads_a_table_as_its_block_table(window: int | None) -> None:
    attention = block_table_attention()
    given = scene(256, window, "cuda", torch.bfloat16)  # FlashAttention 2 takes pages of a multiple of 256 tokens
    table, lengths = given.table()
    keys, values = (pool.unflatten(0, (-1, given.layout.page_size)) for pool in given.pools)
    cu_seqlens_q = torch.arange(len(ROWS) + 1, dtype=torch.int32, device="cuda")
    got = attention(
        given.query[:, :, 0], keys, values, cu_seqlens_q, None, 1, given.layout.max_seqlen_k, enable_gqa=True,
        window_size=(-1 if window is None else window - 1, 0), seqused_k=lengths, block_table=table,
    )  # fmt: skip
    torch.testing.assert_close(got[:, :, None], dense(given), rtol=2e-2, atol=2e-2)
