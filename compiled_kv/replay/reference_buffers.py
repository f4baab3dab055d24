"""What a step reads in place of `DecodeBuffers` for the eager run that its outputs are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compiled_kv.buffers import SETTINGS, DecodeBuffers
from compiled_kv.metadata_parts import DecodeMetadata
from compiled_kv.replay.names import SLOTS
from compiled_kv.replay.reference import Expected
from compiled_kv.updates import first_rows

OWN = {"inputs", "held", "status", "req_to_token", "full_to_swa", "page_map", *DecodeMetadata._fields}


def added_to(buffers: DecodeBuffers) -> dict[str, Tensor]:
    """Copies of what a subclass registered beside the buffers that every set has, by name."""
    return {name: t.clone() for name, t in buffers._buffers.items() if name not in OWN and t is not None}


class ReferenceBuffers:
    """The attributes and `metadata` of `DecodeBuffers`, filled with what is expected of them.

    Args:
        expected: the step.
        buffers: the real ones.
        added: what a subclass registered, as it was when made: each run gets copies of its own.
    """

    def __init__(self, expected: Expected, buffers: DecodeBuffers, added: Mapping[str, Tensor]) -> None:
        self.is_asked, self._added = False, {name: tensor.clone() for name, tensor in added.items()}
        for name in SETTINGS:
            setattr(self, name, getattr(buffers, name))
        self.req_to_token, self.full_to_swa = buffers.req_to_token, buffers.full_to_swa
        self.page_map, self.status = buffers.page_map, torch.zeros_like(buffers.status)
        device = buffers.inputs.device
        inputs = {name: torch.tensor(values, device=device) for name, values in expected.values["inputs"].items()}
        self.num_reqs, self.req_pool_indices, self.seq_lens = inputs["num_reqs"], inputs["rows"], inputs["seq_lens"]
        self.generations, self.token_ids = inputs["generations"], inputs["token_ids"]
        self.q_lens, self.slots = inputs.get("q_lens"), inputs.get("slots")

        def made(name: str) -> Tensor | None:
            dtype = torch.int64 if name in SLOTS else torch.int32
            return torch.tensor(expected.values[name], dtype=dtype, device=device) if name in expected.values else None

        self._out = DecodeMetadata(*map(made, DecodeMetadata._fields))  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_added", ()):
            return self._added[name]
        raise AttributeError(
            f"a checked step cannot read buffers.{name}: use the inputs and what buffers.metadata(...) returns"
        )

    def out(self) -> DecodeMetadata:
        """Everything, whatever the bucket."""
        return self._out

    def metadata(self, batch_size: int, seq_len_delta: int | None = None, **stage: Any) -> DecodeMetadata:
        """What `DecodeBuffers.metadata` must return."""
        self.is_asked = True
        own = {"seq_len_delta": self.seq_len_delta} | ({} if self.ragged else {"q_len": self.q_len})
        stage["seq_len_delta"] = seq_len_delta
        changed = {
            name: value for name, value in stage.items()
            if value is not None and not (isinstance(value, int) and value == own.get(name))
        }  # fmt: skip
        if changed:
            name, value = next(iter(changed.items()))
            raise ValueError(f"{name} must be the buffers' own in a checked step, got {value}")
        return first_rows(self._out, batch_size, batch_size * self.q_len)
