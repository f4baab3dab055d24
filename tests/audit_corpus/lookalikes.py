"""Steps that look like those of `serving.py` and are none: torch keeps each on the device when it compiles."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LOOKALIKES: dict[str, Any] = {}


def clean(step: Any) -> Any:
    LOOKALIKES[step.__name__] = step
    return step


@clean
def one_hot_of_classes(ids: Tensor) -> Tensor:
    return F.one_hot(ids, num_classes=8)


@clean
def where_of_three(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, -x)


@clean
def nonzero_static(mask: Tensor) -> Tensor:
    return torch.nonzero_static(mask, size=8, fill_value=-1)


@clean
def repeats_by_number(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=0)


@clean
def masked_scatter(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_scatter(mask, x * 2)


@clean
def scattered(x: Tensor, ids: Tensor) -> Tensor:
    return x.scatter(1, ids[:, None], 1.0)


@clean
def added_by_id(x: Tensor, ids: Tensor) -> Tensor:
    return torch.zeros(8, device=x.device).scatter_add(0, ids, x[:, 0])


@clean
def counts_by_id(ids: Tensor) -> Tensor:
    return torch.zeros(8, dtype=torch.int64, device=ids.device).index_add(0, ids, torch.ones_like(ids))


@clean
def rows_by_mask(x: Tensor, mask: Tensor) -> Tensor:
    y = x.clone()
    y[mask[:, 0]] = 0.0
    return y


@clean
def own_copy_in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :2].mul_(2)
    return y


@clean
def clamped_by_tensor(x: Tensor, lens: Tensor) -> Tensor:
    return x.clamp(max=lens.max())


@clean
def filled_with_tensor(x: Tensor, lens: Tensor) -> Tensor:
    return torch.full((4,), lens.max(), device=x.device)


@clean
def larger_of_two(x: Tensor, lens: Tensor) -> Tensor:
    return x * max(lens[0], lens[1])  # dynamo makes torch.maximum of it


@clean
def summed_by_python(x: Tensor, lens: Tensor) -> Tensor:
    return x * sum(lens)


@clean
def asserted(x: Tensor) -> Tensor:
    assert (x >= 0).all()  # dynamo makes an assertion on the device of it
    return x + 1


@clean
def on_cuda_by_name(x: Tensor) -> Tensor:
    return x.cuda() + torch.arange(8, device="cuda")


@clean
def moved_where_it_is(x: Tensor) -> Tensor:
    return x.to("cuda") * 2


@clean
def cast(x: Tensor) -> Tensor:
    return x.to(torch.float16) + x.to(device=x.device, dtype=torch.float16)


@clean
def if_capturing(x: Tensor) -> Tensor:
    return x + 1 if torch.cuda.is_current_stream_capturing() else x + 2


@clean
def sampled(x: Tensor) -> Tensor:
    return torch.multinomial(x.softmax(-1), 1)


@clean
def sampled_by_noise(x: Tensor) -> Tensor:
    return (x.softmax(-1) / torch.empty_like(x).exponential_(1)).argmax(-1)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@clean
def autograd_function(x: Tensor) -> Tensor:
    return Doubled.apply(x)


@clean
def in_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return x @ x.t()


@clean
def without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 2
