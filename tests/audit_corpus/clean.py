"""Steps that look like the hazards and are none: the auditor must have nothing to say about them, not even a note."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.audit_corpus.lookalikes import LOOKALIKES
from tests.toy_op import bump, bump_out

CLEAN: dict[str, Any] = dict(LOOKALIKES)


def clean(step: Any) -> Any:
    CLEAN[step.__name__] = step
    return step


@clean
def arithmetic(x: Tensor) -> Tensor:
    return (x * 2 + 1).relu()


@clean
def masked_by_where(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, 0.0)


@clean
def masked_fill(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(~mask, float("-inf")).softmax(-1)


@clean
def longest_on_device(x: Tensor, lens: Tensor) -> Tensor:
    return x * lens.max()


@clean
def branch_on_shape(x: Tensor) -> Tensor:
    return x + 1 if x.shape[0] > 1 else x


@clean
def branch_on_none(x: Tensor) -> Tensor:
    bias: Tensor | None = None
    return x * 2 if bias is None else x + bias


@clean
def sizes_from_shapes(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0], device=x.device)


@clean
def zeros_on_device(x: Tensor) -> Tensor:
    return x + torch.zeros(8, device=x.device)


@clean
def new_full(x: Tensor) -> Tensor:
    return x.new_full((8,), 0.5) * x


@clean
def gather_rows(x: Tensor, slots: Tensor) -> Tensor:
    return x[slots]


@clean
def index_select(x: Tensor, slots: Tensor) -> Tensor:
    return x.index_select(0, slots)


@clean
def topk(x: Tensor) -> Tensor:
    values, indices = x.topk(2)
    return values + indices


@clean
def sorted_rows(x: Tensor) -> Tensor:
    return x.sort(-1).values


@clean
def cumulative(lens: Tensor) -> Tensor:
    return F.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))


@clean
def searched(lens: Tensor, ids: Tensor) -> Tensor:
    return torch.searchsorted(lens.cumsum(0), ids, right=True)


@clean
def repeat_with_output_size(x: Tensor, lens: Tensor) -> Tensor:
    return x.repeat_interleave(lens, dim=0, output_size=4)


@clean
def written_fresh(x: Tensor, slots: Tensor) -> Tensor:
    out = x.new_zeros(64, 8)
    out[slots] = x
    return out


@clean
def mask_as_numbers(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum(-1) / mask.sum(-1).clamp(min=1)


@clean
def filled_by_mask(x: Tensor, mask: Tensor) -> Tensor:
    y = x.clone()
    y[mask] = 0.0
    return y


@clean
def attention(x: Tensor) -> Tensor:
    q = x[None, None]
    return F.scaled_dot_product_attention(q, q, q)[0, 0]


@clean
def one_hot(ids: Tensor) -> Tensor:
    return (ids[:, None] == torch.arange(8, device=ids.device)).int()


@clean
def unrolled_loop(x: Tensor) -> Tensor:
    for scale in (1.0, 2.0, 3.0):
        x = x * scale
    return x


@clean
def comprehension(x: Tensor) -> Tensor:
    return torch.stack([x[i] * i for i in range(4)])


@clean
def functional_kernel(lens: Tensor) -> Tensor:
    return bump(lens)


@clean
def kernel_into_fresh_buffer(lens: Tensor) -> Tensor:
    out = torch.empty_like(lens)
    bump_out(lens, out)
    return out


class Cache(nn.Module):
    """Persistent state as buffers, which CUDA graphs take as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("pool", torch.zeros(64, 8))

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        self.pool[slots] = self.linear(x)
        return self.pool[slots]


@clean
def written_module_buffer(x: Tensor, slots: Tensor, cache: Cache) -> Tensor:
    return cache(x, slots)


@clean
def named_constant(x: Tensor, limits: Any) -> Tensor:
    return x[:, : limits.width]


@clean
def device_assert(x: Tensor) -> Tensor:
    torch._assert_async((x >= 0).all())
    return x + 1


@clean
def scalar_tensor_math(x: Tensor, lens: Tensor) -> Tensor:
    longest = lens.max().float()
    return x / torch.maximum(longest, torch.ones_like(longest))
