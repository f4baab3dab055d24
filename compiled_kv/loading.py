"""How a batch gets from the host into the inputs of a step: packed into a line of pinned memory, and sent in one copy.

    buffers.load(DecodeBatch(rows=[3, 1], seq_lens=[70, 5], generations=[0, 2]))
    inputs      num_reqs 2 | rows 3 1 0 0 | seq_lens 70 5 0 0 | generations 0 2 0 0 | token_ids as they were

In most steps rows and generations are those of the step before, which were looked at: only lengths are packed then.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from compiled_kv.batches import DecodeBatch, check_batch, check_ints, check_tensors, is_ordered, refuse_batch
from compiled_kv.layout import KVLayout
from compiled_kv.packed_inputs import PackedInputs
from compiled_kv.staging import Ring

RingKind = TypeVar("RingKind", bound=Ring)
REMEMBERED = (list, tuple)


class LoadedInputs(PackedInputs):
    """The inputs of `DecodeBuffers`, and how they get there."""

    layout: KVLayout
    q_len: int
    seq_len_delta: int
    req_to_token: Tensor
    _ring: Ring | None

    def _make_inputs(self, device: torch.device) -> None:
        super()._make_inputs(device)
        # What `load` compares with, and how much of the inputs it sends without and with token ids.
        self._pool_rows, self._longest = self.req_to_token.shape[0], self.layout.max_seqlen_k - self.seq_len_delta
        self._plain, self._heads = not (self.ragged or self.given_slots), self._places["token_ids"]
        self._loaded = 0
        self._bind()

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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._ring = None
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_ring": None}

    @property
    def loaded(self) -> int:
        """Requests of the batch that was loaded last, as the host knows them; 0 where none was since `reset`."""
        return self._loaded

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
