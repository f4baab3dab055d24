"""Steps in which Python counts, indexes or slices with a number that was read from the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NUMBERS: dict[str, Any] = {}


def hazard(step: Any) -> Any:
    NUMBERS[step.__name__] = step
    return step


@hazard
def range_of_item(x: Tensor, lens: Tensor) -> Tensor:
    longest = lens.max()
    for i in range(longest.item()):  # HAZARD host-read
        x = x + i
    return x


@hazard
def range_of_int(x: Tensor, lens: Tensor) -> Tensor:
    for i in range(int(lens.max())):  # HAZARD host-read
        x = x + i
    return x


@hazard
def range_of_tensor(x: Tensor, lens: Tensor) -> Tensor:
    for i in range(lens.max()):  # HAZARD host-read
        x = x + i
    return x


@hazard
def range_behind_read(x: Tensor, lens: Tensor) -> Tensor:
    count = int(lens.max())  # HAZARD host-read
    for _ in range(count):  # HAZARD host-read
        x = x + 1
    return x


@hazard
def range_in_steps(x: Tensor, lens: Tensor) -> Tensor:
    total = x[0].sum()
    for start in range(0, lens.sum().item(), 2):  # HAZARD host-read
        total = total + x[start : start + 2].sum()
    return total


@hazard
def list_of_range(x: Tensor, lens: Tensor) -> Tensor:
    rows = list(range(int(lens[0])))  # HAZARD host-read
    return x[rows]  # HAZARD host-to-device-copy


@hazard
def sum_of_range(x: Tensor, lens: Tensor) -> Tensor:
    return x + sum(range(lens[0].item()))  # HAZARD host-read


@hazard
def while_number(x: Tensor, lens: Tensor) -> Tensor:
    left = lens.max().item()  # HAZARD host-read
    while left > 0:  # HAZARD host-read
        x = x + 1
        left -= 1
    return x


@hazard
def while_tensor(x: Tensor, lens: Tensor) -> Tensor:
    left = lens.max()
    while left > 0:  # HAZARD host-read
        x = x + 1
        left = left - 1
        if x.shape[0] == 4:
            break
    return x


@hazard
def slices_of_list(x: Tensor, lens: Tensor) -> Tensor:
    parts, start = [], 0
    for n in lens.tolist():  # HAZARD host-read
        parts.append(x[:, start : start + n].sum())
        start += n
    return torch.stack(parts)


@hazard
def filled_by_list(x: Tensor, lens: Tensor) -> Tensor:
    y = x.clone()
    for i, n in enumerate(lens.tolist()):  # HAZARD host-read
        y[i, :n] = 0
    return y


@hazard
def split_by_list(x: Tensor, lens: Tensor) -> Tensor:
    return torch.split(x, lens.tolist())[0] + 1  # HAZARD host-read


@hazard
def all_of_list(x: Tensor, lens: Tensor) -> Tensor:
    if all(n > 0 for n in lens.tolist()):  # HAZARD host-read
        return x + 1
    return x


@hazard
def repeated_list(x: Tensor, lens: Tensor) -> Tensor:
    return torch.cat([x] * int(lens.max()))  # HAZARD host-read


@hazard
def python_table(x: Tensor, lens: Tensor) -> Tensor:
    scales = [1.0, 2.0, 3.0]
    return x * scales[lens.max().item()]  # HAZARD host-read


@hazard
def dictionary(x: Tensor, lens: Tensor) -> Tensor:
    return x * {1: 0.5, 2: 0.25}.get(int(lens.max()), 1.0)  # HAZARD host-read


@hazard
def divided(x: Tensor, lens: Tensor) -> Tensor:
    pages, rest = divmod(lens.max().item(), 4)  # HAZARD host-read
    return x.new_zeros(pages + 1) + rest


@hazard
def bounded(x: Tensor, lens: Tensor) -> Tensor:
    return x[:, : min(int(lens.max()), 8)]  # HAZARD host-read


@hazard
def narrowed(x: Tensor, lens: Tensor) -> Tensor:
    return x.narrow(1, 0, lens.max().item())  # HAZARD host-read


@hazard
def viewed(x: Tensor, lens: Tensor) -> Tensor:
    return x.view(lens[0].item(), -1)  # HAZARD host-read


@hazard
def made_to_measure(x: Tensor, lens: Tensor) -> Tensor:
    return torch.zeros(int(lens.max()), 8, device=x.device) + x[0]  # HAZARD host-read
