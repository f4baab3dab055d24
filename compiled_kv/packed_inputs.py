"""The inputs of a step, one behind the other in one tensor, and the names that a step reads them by.

inputs      num_reqs 2 | rows 3 1 0 0 | seq_lens 70 5 0 0 | generations 0 2 0 0 | token_ids 7 9 0 0
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PackedInputs(nn.Module):
    """The inputs of `DecodeBuffers`, which makes and documents them: int64, in `inputs`."""

    max_batch_size: int
    max_num_tokens: int
    ragged: bool
    given_slots: bool
    inputs: Tensor

    def _make_inputs(self, device: torch.device) -> None:
        self._places = self._pack()
        inputs = torch.zeros(self._places["token_ids"][1], dtype=torch.int64, device=device)
        self.register_buffer("inputs", inputs, persistent=False)

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
