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

import struct
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from compiled_kv.batches import DecodeBatch, check_batch, check_ints, check_tensors, is_ordered, refuse_batch
from compiled_kv.checks import Sizes, check_int, check_map, check_token_pool
from compiled_kv.layout import KVLayout
from compiled_kv.metadata_parts import DecodeMetadata
from compiled_kv.staging import Ring
from compiled_kv.updates import clear_held, new_held, update_metadata

RingKind = TypeVar("RingKind", bound=Ring)
REMEMBERED = (list, tuple)
# What outputs were sized and captured steps made for.
SETTINGS = frozenset(
    ("layout", "max_batch_size", "q_len", "ragged", "seq_len_delta", "given_slots", "pad_seqlen", "max_num_tokens")
)


class DecodeBuffers(nn.Module):
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

    inputs: Tensor
    held: Tensor
    status: Tensor
    req_to_token: Tensor
    full_to_swa: Tensor | None
    page_map: Tensor | None
    _ring: Ring | None

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
        check_int("seq_len_delta", seq_len_delta, 0, layout.max_seqlen_k)
        check_int("pad_seqlen", pad_seqlen, 0, layout.max_seqlen_k)
        check_map(sizes, full_to_swa, page_map)
        self.layout, self.max_batch_size, self.q_len, self.ragged = layout, max_batch_size, q_len, ragged
        self.seq_len_delta, self.given_slots, self.pad_seqlen = seq_len_delta, given_slots, pad_seqlen
        self.max_num_tokens = max_batch_size * q_len
        for name, shared in (("req_to_token", req_to_token), ("full_to_swa", full_to_swa), ("page_map", page_map)):
            self.register_buffer(name, shared, persistent=False)
        self._places = self._pack()
        # What `load` compares with, and how much of the inputs it sends without and with token ids.
        self._pool_rows, self._longest = req_to_token.shape[0], layout.max_seqlen_k - seq_len_delta
        self._plain, self._heads = not (ragged or given_slots), self._places["token_ids"]
        self._make(req_to_token.device, full_to_swa is not None or page_map is not None)
        self._loaded = 0
        self._bind()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SETTINGS and name in self.__dict__:
            raise AttributeError(f"{name} stays as these buffers were made, {getattr(self, name)}: make others")
        super().__setattr__(name, value)

    def _pack(self) -> dict[str, tuple[int, int]]:
        """Begin and end of each input in `inputs`; token ids come last, for a batch may leave them alone."""
        batch_size, tokens = self.max_batch_size, self.max_num_tokens
        sizes = {"num_reqs": 1, "rows": batch_size, "seq_lens": batch_size, "generations": batch_size}
        sizes |= {"q_lens": batch_size} if self.ragged else {}
        sizes |= {"slots": tokens} if self.given_slots else {}
        places, end = {}, 0
        for name, size in (sizes | {"token_ids": tokens}).items():
            places[name] = (end, end + size)
            end += size
        return places

    def _make(self, device: torch.device, has_swa: bool) -> None:
        batch_size, width, tokens = self.max_batch_size, self.layout.max_num_pages, self.max_num_tokens
        shapes: dict[str, tuple[torch.dtype, tuple[int, ...] | None]] = {
            "inputs": (torch.int64, (self._places["token_ids"][1],)),
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

    def new_ring(self, kind: type[RingKind]) -> RingKind:
        """Lines of the host's for these inputs, of the kind that is asked for."""
        sizes = [end - begin for name, (begin, end) in self._places.items() if name != "num_reqs"]
        return kind(self.inputs, sizes, unsigned=2, most=self._longest)

    def _bind(self) -> Ring:
        """Make the host's side, for the device that the buffers are on and the stream that is current."""
        device = self.inputs.device
        self._ring = ring = self.new_ring(Ring)
        self._device_index = device.index
        self._stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
        return ring

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DecodeBuffers:
        super()._apply(fn, recurse)
        self._ring = None
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_ring": None}

    def _input(self, name: str) -> Tensor:
        begin, end = self._places[name]
        return self.inputs[begin:end]

    @property
    def num_reqs(self) -> Tensor:
        """int64 [1], live rows."""
        return self._input("num_reqs")

    @property
    def req_pool_indices(self) -> Tensor:
        """int64 [M]; this and the others are 0 in padding rows, where nobody reads them."""
        return self._input("rows")

    @property
    def seq_lens(self) -> Tensor:
        """int64 [M]."""
        return self._input("seq_lens")

    @property
    def generations(self) -> Tensor:
        """int64 [M]."""
        return self._input("generations")

    @property
    def q_lens(self) -> Tensor | None:
        """int64 [M] of ragged buffers, else None."""
        return self._input("q_lens") if self.ragged else None

    @property
    def slots(self) -> Tensor | None:
        """int64 [M * Q] where the allocator gives slots, else None; -1 for queries that it gave none."""
        return self._input("slots") if self.given_slots else None

    @property
    def token_ids(self) -> Tensor:
        """int64 [M * Q]; 0 beyond the tokens loaded, which are one a query or, of a fixed `q_len`, one a row."""
        return self._input("token_ids")

    @property
    def loaded(self) -> int:
        """Requests of the batch that was loaded last, as the host knows them; 0 where none was since `reset`."""
        return self._loaded

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

    def load(self, batch: DecodeBatch) -> int:
        """Refresh the inputs, with one copy to the device or, where the batch is there already, none; the rest is
        padding. Called by DecodeGraphs it sends no copy: the graph fetches the batch when it is replayed.

        Returns:
            The number of requests.

        Raises:
            TypeError, ValueError: an entry has the wrong kind or length, or a number that the host knows is out of
                bounds; nothing is written.
            RuntimeError: on CUDA, another stream than the buffers' own is current.
        """
        ring = self._ring
        if ring is None or ring.target() is not self._buffers["inputs"]:
            ring = self._bind()
        self.check_stream()
        try:
            rows, seq_lens, generations, q_lens, slots, token_ids = batch
        except (TypeError, ValueError):
            refuse_batch(batch)
            raise
        # Rows and generations of most steps are those of the step before, which were looked at.
        if (
            q_lens is slots is None
            and type(rows) is type(seq_lens) is type(generations) in REMEMBERED
            and ring.kept == (rows, generations)
            and len(seq_lens) == len(rows)
            and (
                token_ids is None
                or (type(token_ids) in REMEMBERED and len(token_ids) in (len(rows) * self.q_len, len(rows)))
            )
        ):
            try:
                ring.fill_second(seq_lens, token_ids)
            except (struct.error, TypeError):
                self._refuse(batch)
                raise
        elif isinstance(rows, Tensor):
            ring.deliver()
            return self._load_tensors(batch)
        else:
            self._fill(ring, batch)
        ring.send(self._heads[token_ids is not None])
        self.__dict__["_loaded"] = size = len(rows)  # a module takes long to set an attribute
        return size

    def _fill(self, ring: Ring, batch: DecodeBatch) -> None:
        """Fill the ring's next line with a batch of ints."""
        rows, seq_lens, generations, q_lens, slots, token_ids = batch
        kind = type(rows)
        try:
            # A glance at a plain batch. Negative rows and lengths are left to the packing, which refuses them.
            if (
                self._plain
                and is_ordered(kind)
                and q_lens is slots is None
                and type(seq_lens) is type(generations) is kind
                and len(seq_lens) == len(generations) == len(rows) <= self.max_batch_size
                and (
                    token_ids is None
                    or (type(token_ids) is kind and len(token_ids) in (len(rows) * self.q_len, len(rows)))
                )
                and (len(rows) == 0 or (max(rows) < self._pool_rows and max(seq_lens) <= self._longest))
            ):
                fields = (rows, seq_lens, generations)
                ring.fill(len(rows), fields if token_ids is None else (*fields, token_ids))
                if kind in REMEMBERED:
                    ring.keep(rows, generations)
            else:
                check_batch(self, batch)
                whole = batch
                if slots is not None:  # a query without a slot has none: slot 0 is one
                    whole = batch._replace(slots=[*slots, *[-1] * (len(rows) * self.q_len - len(slots))])
                ring.fill(len(rows), [values for values in whole if values is not None])
        except (struct.error, TypeError):
            self._refuse(batch)
            raise

    def _refuse(self, batch: DecodeBatch) -> None:
        """Say what is wrong in a batch that could not be packed."""
        check_batch(self, batch)
        check_ints(batch)

    def _load_tensors(self, batch: DecodeBatch) -> int:
        refuse_batch(batch)
        given = {name: values for name, values in batch._asdict().items() if values is not None}
        check_tensors(self, given)
        given = {name: self._apart(name, values) for name, values in given.items()}
        for name, values in given.items():
            begin, end = self._places[name]
            self.inputs[begin : begin + len(values)].copy_(values)
            self.inputs[begin + len(values) : end].fill_(-1 if name == "slots" else 0)
        self._loaded = size = len(batch.rows)
        self.num_reqs.fill_(size)
        return size

    def _apart(self, name: str, values: Tensor) -> Tensor:
        """`values`, out of the way of what is written if they are a view of other inputs than those of this name."""
        place = self._input(name)[: len(values)]
        if values.untyped_storage().data_ptr() != place.untyped_storage().data_ptr():
            return values
        is_there = (values.data_ptr(), values.dtype, values.stride()) == (place.data_ptr(), place.dtype, place.stride())
        return values if is_there else values.clone()

    def check_stream(self) -> None:
        """Refuse, on CUDA, that another stream than the buffers' own is current."""
        if self._stream is not None and torch._C._cuda_getCurrentRawStream(self._device_index) != self._stream:
            self._refuse_stream()

    def _refuse_stream(self) -> None:
        now = torch._C._cuda_getCurrentRawStream(self._device_index)
        raise RuntimeError(
            f"buffers belong to the stream they were made on, {self._stream:#x}, but stream {now:#x} is current: make "
            "a set of buffers for each stream"
        )
