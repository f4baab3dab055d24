"""What `compiled-kv audit` is pointed at in the tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_kv import DecodeBuffers, KVLayout, host


def _reading(pool: Tensor, rows: Tensor, lens: Tensor) -> Tensor:
    return pool[rows, : int(lens.max())] + 1


def _whole(pool: Tensor, rows: Tensor, lens: Tensor) -> Tensor:
    return torch.where(torch.arange(64, device=lens.device) < lens[:, None], pool[rows], 0)


def _scaled(x: Tensor) -> Tensor:
    return x * x.sum().item()


def _arguments(batch_size: int) -> tuple[Tensor, ...]:
    return (
        torch.zeros(8, 64, dtype=torch.int32),
        torch.zeros(batch_size, dtype=torch.int64),
        torch.ones(batch_size, dtype=torch.int32),
    )


def reading(batch_size: int = 4) -> Any:
    return _reading, _arguments(batch_size)


def whole(batch_size: int = 4) -> Any:
    return _whole, _arguments(batch_size)


def scaled() -> Any:
    return _scaled, (torch.zeros(4),)


def fixed_size() -> Any:
    return _whole, _arguments(4)


def no_pair() -> Any:
    return 3


def no_callable() -> Any:
    return 3, ()


def raising() -> Any:
    def step(x: Tensor) -> Tensor:
        raise OverflowError("the step's own error")

    return step, (torch.zeros(4),)


def exiting() -> Any:
    def step(x: Tensor) -> Tensor:
        raise SystemExit(3)

    return step, (torch.zeros(4),)


def leaving() -> None:
    raise SystemExit(3)


def mismatched() -> Any:
    return (lambda x: x @ x), (torch.zeros(2, 3),)


def apart() -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        return _product(x, y)

    return step, (torch.zeros(2, 2), host(torch.zeros(2, 2)))


def _product(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


def short() -> Any:
    return _product, (torch.zeros(2, 2),)


def _served(buffers: DecodeBuffers, batch_size: int) -> Tensor:
    return buffers.metadata(batch_size).page_table


def _buffers() -> DecodeBuffers:
    return DecodeBuffers(KVLayout(4, 16), torch.zeros(2, 16, dtype=torch.int64), max_batch_size=4)


def sized() -> Any:
    return _served, (_buffers(), 4)


def closed_for(batch_size: int) -> Any:
    buffers = _buffers()
    return (lambda made: _served(made, batch_size)), (buffers,)


def other_for_eight(batch_size: int) -> Any:
    return (_scaled if batch_size == 8 else torch.relu), (torch.zeros(batch_size, 4),)


def made_anew(batch_size: int) -> Any:
    return (lambda pool, rows, lens: _whole(pool, rows, lens)), _arguments(batch_size)


class _Toggled(torch.nn.Module):
    bright = False

    def forward(self, x: Tensor) -> Tensor:
        self.bright = not self.bright
        return x + 1 if self.bright else x - 1


def toggled(batch_size: int) -> Any:
    return _Toggled(), (torch.zeros(batch_size, 16),)


def unbound(batch_size: int) -> Any:
    def step(x: Tensor) -> Tensor:
        return x + late if x.shape[1] > 64 else x + 1

    if batch_size < 0:
        late = 3
    return step, (torch.zeros(batch_size, 16),)


def bound_for_eight(batch_size: int) -> Any:
    def step(x: Tensor) -> Tensor:
        return x + late if x.shape[1] > 64 else x + 1

    if batch_size == 8:
        late = 3
    return step, (torch.zeros(batch_size, 16),)


def bound_by_turns(batch_size: int) -> Any:
    early, late = (3, torch.relu) if batch_size == 8 else (torch.relu, 3)
    return (lambda x: torch.relu(x) if early == late else x + 1), (torch.zeros(batch_size, 16),)


def closed() -> Any:
    return lambda buffers: _served(buffers, 4), (_buffers(),)


def unmade() -> None:
    raise KeyError("no weights")


instance = torch.nn.Linear(3, 3)
