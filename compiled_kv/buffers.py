"""Every tensor that a captured decode step reads or writes to know its batch, at addresses that never change.

    buffers = DecodeBuffers(layout, req_to_token, max_batch_size=8)

    def decode_step(buffers, batch_size):
        meta = buffers.metadata(batch_size)          one launch; of the page tables only what changed is written
        return model(buffers.token_ids[:batch_size], meta)

    buffers.load(DecodeBatch(rows=[3, 1], seq_lens=[70, 5], generations=[0, 2], token_ids=[11, 12]))       one copy
    decode_step(buffers, 2)

They are buffers of a module because `torch.compile` skips CUDA graphs for graph inputs that are mutated, but not for
these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_kv.checks import Sizes, check_bool, check_int, check_map, check_token_pool
from compiled_kv.layout import KVLayout
from compiled_kv.loading import LoadedInputs
from compiled_kv.metadata_parts import DecodeMetadata
from compiled_kv.updates import clear_held, new_held, update_metadata

# What outputs were sized and captured steps made for.
SETTINGS = frozenset(
    ("layout", "max_batch_size", "q_len", "ragged", "seq_len_delta", "given_slots", "pad_seqlen", "max_num_tokens")
)


class DecodeBuffers(LoadedInputs):
    """Inputs and outputs of a step's metadata, for batches of up to `max_batch_size` requests.

    Args:
        layout: page size, bounds and window.
        req_to_token: int [R, C], the allocator's pool: shared, not copied.
        max_batch_size: M, the largest batch.
        q_len: queries a row, Q; with `ragged` the most a row may have.
        ragged: whether the queries of a row vary from step to step.
        seq_len_delta: tokens a step adds to `seq_lens`.
        given_slots: whether the allocator hands over slots; else they are looked up in `req_to_token`.
        full_to_swa, page_map: int [N] or [NP], the allocator's map into the sliding-window pool: shared; at most one.
        pad_seqlen: `cache_seqlens` of a padding row.

    Buffers, none of them in `state_dict`: `inputs` int64, `status` int32 [1], `held` int64 [M, parts, 5], and those of
    DecodeMetadata with room for M rows and M * Q tokens. They move with the module; a set belongs to its device and, on
    CUDA, to the stream that was current when it was made or moved.
    """

    held: Tensor
    status: Tensor
    full_to_swa: Tensor | None
    page_map: Tensor | None

    def __init__(
        self, layout: KVLayout, req_to_token: Tensor, *, max_batch_size: int, q_len: int = 1, ragged: bool = False,
        seq_len_delta: int = 0, given_slots: bool = False, full_to_swa: Tensor | None = None,
        page_map: Tensor | None = None, pad_seqlen: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        sizes = Sizes()
        check_token_pool(sizes, req_to_token, layout)
        check_int("max_batch_size", max_batch_size, 1)
        check_int("q_len", q_len, 1)
        check_bool("ragged", ragged)
        check_bool("given_slots", given_slots)
        check_int("seq_len_delta", seq_len_delta, 0, layout.max_seqlen_k)
        check_int("pad_seqlen", pad_seqlen, 0, layout.max_seqlen_k)
        check_map(sizes, full_to_swa, page_map)
        self.layout, self.max_batch_size, self.q_len, self.ragged = layout, max_batch_size, q_len, ragged
        self.seq_len_delta, self.given_slots, self.pad_seqlen = seq_len_delta, given_slots, pad_seqlen
        self.max_num_tokens = max_batch_size * q_len
        for name, shared in (("req_to_token", req_to_token), ("full_to_swa", full_to_swa), ("page_map", page_map)):
            self.register_buffer(name, shared, persistent=False)
        self._make_inputs(req_to_token.device)
        self._make_outputs(req_to_token.device, full_to_swa is not None or page_map is not None)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SETTINGS and name in self.__dict__:
            raise AttributeError(f"{name} stays as these buffers were made, {getattr(self, name)}: make others")
        super().__setattr__(name, value)

    def _make_outputs(self, device: torch.device, has_swa: bool) -> None:
        batch_size, width, tokens = self.max_batch_size, self.layout.max_num_pages, self.max_num_tokens
        shapes: dict[str, tuple[torch.dtype, tuple[int, ...] | None]] = {
            "status": (torch.int32, (1,)),
            "cache_seqlens": (torch.int32, (batch_size,)),
            "cu_seqlens_q": (torch.int32, (batch_size + 1,)),
            "cu_seqlens_k": (torch.int32, (batch_size + 1,)),
            "page_table": (torch.int32, (batch_size, width)),
            "swa_page_table": (torch.int32, (batch_size, width) if has_swa else None),
            "slot_mapping": (torch.int64, (tokens,)),
            "swa_slot_mapping": (torch.int64, (tokens,) if has_swa else None),
        }
        for name, (dtype, shape) in shapes.items():
            made = None if shape is None else torch.zeros(shape, dtype=dtype, device=device)
            self.register_buffer(name, made, persistent=False)
        self.register_buffer("held", new_held(self.layout, batch_size, device), persistent=False)

    def out(self) -> DecodeMetadata:
        """The whole persistent outputs."""
        return DecodeMetadata(*(getattr(self, name) for name in DecodeMetadata._fields))

    def metadata(
        self, batch_size: int, seq_len_delta: int | None = None, *, q_len: int | Tensor | None = None,
        seq_lens: Tensor | None = None,
    ) -> DecodeMetadata:  # fmt: skip
        """The metadata of the first `batch_size` rows, brought up to date in place; for use inside the step.

        A step that computes in several stages (draft steps, verify, draft-extend) calls it once a stage: the tables
        are shared, and each call holds until the next.

        Args:
            batch_size: B, a bucket: live rows are counted on the device.
            seq_len_delta: in place of the buffers' own.
            q_len: in place of the buffers' own, an int or int [B]: none above it.
            seq_lens: int [B] in place of those loaded, for what the device alone knows: how many drafts were right.

        Returns:
            DecodeMetadata, views of the buffers: B rows, B * Q tokens, Q the int `q_len` or the buffers' own.

        Raises:
            TypeError, ValueError: more rows or queries than the buffers have room for; the text names the argument.
        """
        check_int("batch_size", batch_size, 0, self.max_batch_size)
        own = self.q_len if self.q_lens is None else self.q_lens[:batch_size]
        queries = own if q_len is None else q_len
        if isinstance(queries, int):
            check_int("q_len", queries, 0, self.q_len)
        tokens = batch_size * (queries if isinstance(queries, int) else self.q_len)
        return update_metadata(
            self.req_to_token, self.req_pool_indices[:batch_size],
            self.seq_lens[:batch_size] if seq_lens is None else seq_lens, self.generations[:batch_size],
            layout=self.layout, held=self.held, out=self.out(), q_len=queries,
            seq_len_delta=self.seq_len_delta if seq_len_delta is None else seq_len_delta,
            slots=None if self.slots is None else self.slots[:tokens],
            num_tokens=None if isinstance(queries, int) and not self.given_slots else tokens,
            full_to_swa=self.full_to_swa, page_map=self.page_map, num_reqs=self.num_reqs, pad_seqlen=self.pad_seqlen,
            status=self.status,
        )  # fmt: skip

    def reset(self) -> None:
        """Back to zeroed tables that nobody's pages are in, in place."""
        for tensor in (self.inputs, self.status, *self.out()):
            if tensor is not None:
                tensor.zero_()
        clear_held(self.held)
        self._loaded = 0
