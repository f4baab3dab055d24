"""More spellings of the hazards, as serving code writes them. A line that ends in `# HAZARD rule` must be found."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.audit_corpus.library import compiled_alone

SERVING: dict[str, Any] = {}
log = logging.getLogger("serving")


def hazard(step: Any) -> Any:
    SERVING[step.__name__] = step
    return step


# host-read


@hazard
def numpy_of_lengths(x: Tensor, lens: Tensor) -> Tensor:
    on_host = lens.cpu().numpy()  # HAZARD host-read
    return x * int(on_host.max())


@hazard
def forced_numpy(x: Tensor, lens: Tensor) -> Tensor:
    on_host = lens.numpy(force=True)  # HAZARD host-read
    return x * float(on_host.sum())


@hazard
def bound_method(x: Tensor) -> Tensor:
    read = x.sum().item
    return x + read()  # HAZARD host-read


@hazard
def mapped_item(x: Tensor, lens: Tensor) -> Tensor:
    values = list(map(Tensor.item, lens.unbind()))  # HAZARD host-read
    return x + sum(values)


@hazard
def asserted_with_words(x: Tensor, lens: Tensor) -> Tensor:
    assert lens.max() <= 8, f"too long: {lens.max()}"  # HAZARD host-read
    return x + 1


@hazard
def checked_finite(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():  # HAZARD host-read
        raise ValueError("not finite")
    return x * 2


@hazard
def formatted_tensor(x: Tensor) -> Tensor:
    text = f"x is {x}"  # HAZARD host-read
    return x + len(text)


@hazard
def str_of(x: Tensor) -> Tensor:
    text = str(x.sum())  # HAZARD host-read
    return x + len(text)


@hazard
def repr_of(x: Tensor) -> Tensor:
    return x + len(repr(x))  # HAZARD host-read


@hazard
def printed_tensor(x: Tensor) -> Tensor:
    print(x.sum(), end="\r")  # HAZARD host-read graph-break
    return x + 1


@hazard
def logged_item(x: Tensor) -> Tensor:
    log.info("sum %f", x.sum().item())  # HAZARD host-read graph-break
    return x + 1


@hazard
def to_cpu_without_waiting(x: Tensor) -> Tensor:
    return x.to("cpu", non_blocking=True)  # HAZARD host-read


@hazard
def copied_into_cpu_buffer(x: Tensor, cpu_lens: Tensor) -> Tensor:
    cpu_lens.copy_(x[:, 0], non_blocking=True)  # HAZARD host-read
    return x + 1


@hazard
def there_and_back(x: Tensor) -> Tensor:
    return x.cpu().cuda()  # HAZARD host-read host-to-device-copy


@hazard
def is_nonzero(x: Tensor) -> Tensor:
    return x + torch.is_nonzero(x.sum())  # HAZARD host-read


@hazard
def in_list(x: Tensor, ids: Tensor) -> Tensor:
    return x if ids[0] in [1, 2, 3] else x + 1  # HAZARD host-read


@hazard
def contained(x: Tensor, ids: Tensor) -> Tensor:
    return x if 3 in ids else x + 1  # HAZARD host-read


@hazard
def sorted_by_length(x: Tensor, lens: Tensor) -> Tensor:
    order = sorted(range(4), key=lambda i: lens[i])  # HAZARD host-read
    return x[order[0]]


@hazard
def indexed_by_each(x: Tensor, ids: Tensor) -> Tensor:
    return torch.stack([x[i] for i in ids])  # HAZARD host-read


@hazard
def rounded_up(x: Tensor, lens: Tensor) -> Tensor:
    return x * math.ceil(lens.max() / 2)  # HAZARD host-read


@hazard
def zeros_of_tensor(x: Tensor, lens: Tensor) -> Tensor:
    return torch.zeros(lens.max(), 8, device=x.device)  # HAZARD host-read


@hazard
def suppressed(x: Tensor) -> Tensor:
    with contextlib.suppress(RuntimeError):
        x = x + int(x.argmax())  # HAZARD host-read
    return x


def rows_of(x: Tensor, lens: Tensor) -> Iterator[Tensor]:
    for i in range(4):
        yield x[i] * lens[i].item()  # HAZARD host-read


@hazard
def from_generator(x: Tensor, lens: Tensor) -> Tensor:
    return torch.stack(list(rows_of(x, lens)))


class Scored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * int(x.argmax())  # HAZARD host-read

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@hazard
def in_autograd_function(x: Tensor) -> Tensor:
    return Scored.apply(x)


@hazard
def nested_compile(x: Tensor) -> Tensor:
    return compiled_alone(x) + 1


@hazard
def solved(x: Tensor) -> Tensor:
    return torch.linalg.solve(x[:, :4] + torch.eye(4, device=x.device), x)  # HAZARD host-read


@hazard
def cond(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t - 1, (x,))  # HAZARD host-read


# data-dependent-shape


@hazard
def where_mask(x: Tensor, mask: Tensor) -> Tensor:
    rows = torch.where(mask)[0]  # HAZARD data-dependent-shape
    return x[rows]


@hazard
def count_of_unique(x: Tensor, ids: Tensor) -> Tensor:
    return x * len(ids.unique())  # HAZARD data-dependent-shape


@hazard
def unique_in_order(ids: Tensor) -> Tensor:
    return torch.unique_consecutive(ids)  # HAZARD data-dependent-shape


@hazard
def repeats_alone(lens: Tensor) -> Tensor:
    return torch.repeat_interleave(lens)  # HAZARD data-dependent-shape


@hazard
def one_hot_of_any(ids: Tensor) -> Tensor:
    return F.one_hot(ids)  # HAZARD data-dependent-shape host-read


@hazard
def counted_ids(ids: Tensor) -> Tensor:
    return torch.bincount(ids, minlength=8)  # HAZARD data-dependent-shape


@hazard
def written_from_mask(x: Tensor, mask: Tensor) -> Tensor:
    y = x.clone()
    y[mask] = x[mask]  # HAZARD data-dependent-shape
    return y


@hazard
def size_of_kept(x: Tensor, ids: Tensor) -> Tensor:
    return x + ids[ids > 0].numel()  # HAZARD data-dependent-shape


@hazard
def nonzero_in_loop(x: Tensor, mask: Tensor) -> Tensor:
    for i in mask[:, 0].nonzero():  # HAZARD data-dependent-shape
        x = x + i
    return x


@hazard
def packed_sequence(x: Tensor, cpu_lens: Tensor) -> Tensor:
    pack = nn.utils.rnn.pack_padded_sequence
    return pack(x[..., None], cpu_lens, batch_first=True, enforce_sorted=False).data  # HAZARD data-dependent-shape


# host-to-device-copy


@hazard
def tensor_of_batch(x: Tensor, limits: Any) -> Tensor:
    lengths = [limits.width, limits.width + 1, 3, 4]
    return x * torch.tensor(lengths, device=x.device)[:, None]  # HAZARD host-to-device-copy


@hazard
def array_as_tensor(x: Tensor) -> Tensor:
    return x + torch.as_tensor(np.arange(8, dtype=np.float32), device=x.device)  # HAZARD host-to-device-copy


@hazard
def long_tensor(x: Tensor) -> Tensor:
    return x[torch.LongTensor([0, 2]).cuda()]  # HAZARD host-to-device-copy


@hazard
def cuda_method(x: Tensor) -> Tensor:
    return x + torch.arange(8).cuda()  # HAZARD host-to-device-copy


@hazard
def to_cuda_by_name(x: Tensor) -> Tensor:
    return x + torch.arange(8).to("cuda")  # HAZARD host-to-device-copy


@hazard
def new_tensor(x: Tensor) -> Tensor:
    return x + x.new_tensor([1.0] * 8)  # HAZARD host-to-device-copy


@hazard
def index_of_one(x: Tensor) -> Tensor:
    return x[[0]]  # HAZARD host-to-device-copy


# unsafe-under-capture


@hazard
def pinned_scratch(x: Tensor) -> Tensor:
    scratch = torch.empty(8, pin_memory=True)  # HAZARD unsafe-under-capture
    return x + scratch.to(x.device, non_blocking=True)  # HAZARD host-to-device-copy


@hazard
def number_moved(x: Tensor) -> Tensor:
    """Gemma 3n of transformers does so in every step."""
    least = torch.tensor(1e-5)
    return torch.maximum(x, least.to(x.device))  # HAZARD host-to-device-copy


@hazard
def own_generator(x: Tensor) -> Tensor:
    generator = torch.Generator(device=x.device)  # HAZARD unsafe-under-capture
    return torch.rand(4, 8, generator=generator, device=x.device) + x


@hazard
def stream_synchronized(x: Tensor) -> Tensor:
    torch.cuda.current_stream().synchronize()  # HAZARD unsafe-under-capture
    return x + 1


@hazard
def forked_rng(x: Tensor) -> Tensor:
    with torch.random.fork_rng():  # HAZARD unsafe-under-capture
        return x + torch.rand_like(x)


@hazard
def saved_rng(x: Tensor) -> Tensor:
    state = torch.cuda.get_rng_state()  # HAZARD unsafe-under-capture
    return x + state.numel()


# mutated-input


@hazard
def written_through_view(x: Tensor) -> Tensor:
    x[:, :2].mul_(2)  # HAZARD mutated-input
    return x + 1


@hazard
def out_of_add(x: Tensor, pool: Tensor) -> Tensor:
    torch.add(x, 1, out=pool[:4])  # HAZARD mutated-input
    return x * 2


@hazard
def inplace_relu(x: Tensor) -> Tensor:
    return F.relu(x, inplace=True)  # HAZARD mutated-input


# graph-break


@hazard
def logged_tensor(x: Tensor) -> Tensor:
    log.debug("sum %s", x.sum())  # HAZARD graph-break
    return x + 1


@hazard
def address_of(x: Tensor) -> Tensor:
    aligned = x.data_ptr() % 16 == 0  # HAZARD graph-break
    return x + aligned
