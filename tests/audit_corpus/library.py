"""A helper library of somebody else's: hazards behind a call are found where they stand."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def longest(lens: Tensor) -> int:
    return int(lens.max())  # HAZARD host-read


def drop_padding(x: Tensor, mask: Tensor) -> Tensor:
    return x[mask]  # HAZARD data-dependent-shape


@torch.compile
def compiled_alone(x: Tensor) -> Tensor:
    return x + int(x.argmax())  # HAZARD host-read


class Router(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for expert in range(2):
            hit = torch.where(x[:, 0] > expert)  # HAZARD data-dependent-shape
            x = x.index_add(0, hit[0], torch.ones_like(x[hit[0]]))
        return x
