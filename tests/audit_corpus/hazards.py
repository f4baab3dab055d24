"""Steps that each hold hazards. A line that ends in `# HAZARD rule` is where the auditor must find that rule.

Parameters are made by name: see `arguments.py`.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.audit_corpus.library import Router, drop_padding, longest
from tests.audit_corpus.numbers import NUMBERS
from tests.audit_corpus.serving import SERVING
from tests.toy_op import bump_out, bump_pair_out

HAZARDS: dict[str, Any] = NUMBERS | SERVING


def hazard(step: Any) -> Any:
    HAZARDS[step.__name__] = step
    return step


# host-read


@hazard
def item(x: Tensor) -> Tensor:
    return x * x.sum().item()  # HAZARD host-read


@hazard
def int_of(x: Tensor, lens: Tensor) -> Tensor:
    longest = int(lens.max())  # HAZARD host-read
    return x + longest


@hazard
def float_of(x: Tensor) -> Tensor:
    scale = float(x.abs().max())  # HAZARD host-read
    return x / scale


@hazard
def bool_of(x: Tensor) -> Tensor:
    if bool((x > 0).all()):  # HAZARD host-read
        return x + 1
    return x - 1


@hazard
def branch(x: Tensor) -> Tensor:
    if x.sum() > 0:  # HAZARD host-read
        x = x + 1
    return x * 2


@hazard
def while_loop(x: Tensor, lens: Tensor) -> Tensor:
    steps = 0
    while lens.sum() > steps and steps < 2:  # HAZARD host-read
        steps += 1
        x = x + 1
    return x


@hazard
def conditional_expression(x: Tensor) -> Tensor:
    return x if x.min() >= 0 else -x  # HAZARD host-read


@hazard
def tolist(x: Tensor, lens: Tensor) -> Tensor:
    total = sum(lens.tolist())  # HAZARD host-read
    return x * total


@hazard
def item_in_loop(x: Tensor, lens: Tensor) -> Tensor:
    for i in range(2):
        x = x + lens[i].item()  # HAZARD host-read
    return x


@hazard
def cpu(x: Tensor) -> Tensor:
    return x.cpu()  # HAZARD host-read


@hazard
def to_cpu(x: Tensor) -> Tensor:
    y = x + 1
    return y.to("cpu")  # HAZARD host-read


@hazard
def equal(x: Tensor) -> Tensor:
    same = torch.equal(x, x.relu())  # HAZARD host-read
    return x + int(same)


@hazard
def allclose(x: Tensor) -> Tensor:
    if torch.allclose(x, x + 1):  # HAZARD host-read
        return x
    return x + 1


@hazard
def tensor_in_slice(x: Tensor, lens: Tensor) -> Tensor:
    return x[:, : lens.max()]  # HAZARD host-read


@hazard
def python_max(x: Tensor, lens: Tensor) -> Tensor:
    return x + max(lens.tolist())  # HAZARD host-read


@hazard
def formatted(x: Tensor) -> Tensor:
    name = f"{x.sum().item():.0f}"  # HAZARD host-read
    return x + len(name)


@hazard
def arange_of_tensor(x: Tensor, lens: Tensor) -> Tensor:
    positions = torch.arange(lens.max(), device=x.device)  # HAZARD host-read
    return positions + lens[0]


@hazard
def in_library(x: Tensor, lens: Tensor) -> Tensor:
    return x + longest(lens)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.isnan().any():  # HAZARD host-read
            y = y.nan_to_num()
        return y


@hazard
def in_module(x: Tensor, scaled: Scaled) -> Tensor:
    return scaled(x)


def make_closure() -> Any:
    threshold = 0.5

    def closure(x: Tensor) -> Tensor:
        return x + (x.mean().item() > threshold)  # HAZARD host-read

    return closure


HAZARDS["closure"] = make_closure()


@hazard
def in_lambda(x: Tensor) -> Tensor:
    pick = lambda t: t.argmax().item()  # noqa: E731 # HAZARD host-read
    return x[:, 0] + pick(x)


@hazard
def in_comprehension(x: Tensor, lens: Tensor) -> Tensor:
    parts = [x[i] * n.item() for i, n in enumerate(lens[:2])]  # HAZARD host-read
    return torch.stack(parts)


# behind a value that was read: torch's own trace ends at some of these


@hazard
def behind_slice_bound(x: Tensor, lens: Tensor) -> Tensor:
    kept = x[:, : lens.max().item()]  # HAZARD host-read
    return kept.sum() + x.nonzero().shape[0]  # HAZARD data-dependent-shape


@hazard
def behind_column(x: Tensor, lens: Tensor) -> Tensor:
    column = x[:, lens.max().item()]  # HAZARD host-read
    offset = torch.tensor([1.0, 2.0], device=x.device)[0]  # HAZARD host-to-device-copy
    return column[column > 0] + offset  # HAZARD data-dependent-shape


@hazard
def behind_select(x: Tensor, lens: Tensor) -> Tensor:
    column = x.select(1, lens.max())  # HAZARD host-read
    return column[column > 0]  # HAZARD data-dependent-shape


@hazard
def behind_pad(x: Tensor, lens: Tensor) -> Tensor:
    padded = F.pad(x, (0, lens.max()))  # HAZARD host-read
    return padded if padded.sum() > 0 else x  # HAZARD host-read


@hazard
def behind_range(x: Tensor, lens: Tensor) -> Tensor:
    kept = x[:, range(int(lens.max()))]  # HAZARD host-read
    return kept[kept > 0]  # HAZARD data-dependent-shape


@hazard
def behind_list(x: Tensor, lens: Tensor) -> Tensor:
    parts = [x[i, :n] for i, n in enumerate(lens.tolist())]  # HAZARD host-read
    return torch.cat(parts).nonzero()  # HAZARD data-dependent-shape


# data-dependent-shape


@hazard
def nonzero(x: Tensor) -> Tensor:
    return x.nonzero()  # HAZARD data-dependent-shape


@hazard
def boolean_mask(x: Tensor, mask: Tensor) -> Tensor:
    kept = x[mask]  # HAZARD data-dependent-shape
    return kept * 2


@hazard
def masked_select(x: Tensor, mask: Tensor) -> Tensor:
    return torch.masked_select(x, mask)  # HAZARD data-dependent-shape


@hazard
def where_one_argument(x: Tensor) -> Tensor:
    rows, columns = torch.where(x > 0)  # HAZARD data-dependent-shape
    return rows + columns


@hazard
def unique(ids: Tensor) -> Tensor:
    return torch.unique(ids)  # HAZARD data-dependent-shape


@hazard
def repeat_interleave(x: Tensor, lens: Tensor) -> Tensor:
    return x.repeat_interleave(lens, dim=0)  # HAZARD data-dependent-shape


@hazard
def mask_in_library(x: Tensor, mask: Tensor) -> Tensor:
    return drop_padding(x, mask)


@hazard
def router(x: Tensor, router: Router) -> Tensor:
    return router(x)


@hazard
def argwhere(mask: Tensor) -> Tensor:
    return torch.argwhere(mask)  # HAZARD data-dependent-shape


# host-to-device-copy


@hazard
def tensor_of_list(x: Tensor) -> Tensor:
    offsets = torch.tensor([0, 1, 2, 3], device=x.device)  # HAZARD host-to-device-copy
    return x + offsets[:, None]


@hazard
def tensor_of_scalar(x: Tensor) -> Tensor:
    return x * torch.tensor(0.5, device=x.device)  # HAZARD host-to-device-copy


@hazard
def arange_then_to(x: Tensor) -> Tensor:
    positions = torch.arange(4).to(x.device)  # HAZARD host-to-device-copy
    return x + positions[:, None]


@hazard
def as_tensor(x: Tensor) -> Tensor:
    sizes = torch.as_tensor([1.0, 2.0, 3.0, 4.0]).to(x.device)  # HAZARD host-to-device-copy
    return x + sizes[:, None]


@hazard
def numpy_then_to(x: Tensor) -> Tensor:
    return x + torch.from_numpy(np.ones(8, dtype=np.float32)).to(x.device)  # HAZARD host-to-device-copy


@hazard
def index_by_list(x: Tensor) -> Tensor:
    return x[[2, 0, 1]]  # HAZARD host-to-device-copy


# cpu-tensor


@hazard
def cpu_constant(x: Tensor) -> Tensor:
    scale = torch.ones(())
    return x * scale  # HAZARD cpu-tensor


@hazard
def cpu_argument(x: Tensor, cpu_scalar: Tensor) -> Tensor:
    return x + cpu_scalar  # HAZARD cpu-tensor


@hazard
def cpu_index(x: Tensor) -> Tensor:
    order = torch.arange(4)
    return x[order]  # HAZARD cpu-tensor


@hazard
def cpu_lengths(x: Tensor, cpu_lens: Tensor) -> Tensor:
    return x[:, : cpu_lens.max().item()]  # HAZARD cpu-tensor


# graph-break


@hazard
def printed(x: Tensor) -> Tensor:
    print("step", end="\r")  # HAZARD graph-break
    return x + 1


@hazard
def disabled(x: Tensor) -> Tensor:
    return leave_alone(x) * 2  # HAZARD graph-break


@torch._dynamo.disable
def leave_alone(x: Tensor) -> Tensor:
    return x + 1


@hazard
def broken_in_loop(x: Tensor) -> Tensor:
    for _ in range(2):
        x = x + 1
        torch._dynamo.graph_break()  # HAZARD graph-break
    return x


@hazard
def break_under_with(x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        x = x + 1
        print(end="")  # HAZARD graph-break
        x = x * 2
    return x


@hazard
def opened_file(x: Tensor) -> Tensor:
    with open(__file__) as lines:  # HAZARD graph-break
        first = lines.readline()
    return x + len(first)


@hazard
def warned(x: Tensor) -> Tensor:
    breakpoint_like = input if False else print
    breakpoint_like(end="")  # HAZARD graph-break
    return x + 1


# hidden-copy


@hazard
def carved_workspace(lens: Tensor, workspace: Tensor) -> None:
    bump_pair_out(lens, workspace[:4], workspace[4:8])  # HAZARD hidden-copy


@hazard
def overlapping_slices(lens: Tensor, workspace: Tensor) -> Tensor:
    before = workspace + 0
    bump_out(lens, workspace[:4])  # HAZARD hidden-copy
    bump_out(lens, workspace[2:6])  # HAZARD hidden-copy
    return before


# mutated-input


@hazard
def written_argument(x: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    pool[slots] = x  # HAZARD mutated-input
    return x * 2


@hazard
def added_in_place(x: Tensor, pool: Tensor) -> Tensor:
    pool[:4].add_(x)  # HAZARD mutated-input
    return x


@hazard
def counted(x: Tensor, lens: Tensor) -> Tensor:
    lens += 1  # HAZARD mutated-input
    return x * lens[:, None]


# unsafe-under-capture


@hazard
def synchronized(x: Tensor) -> Tensor:
    y = x + 1
    torch.cuda.synchronize()  # HAZARD unsafe-under-capture
    return y * 2


@hazard
def emptied_cache(x: Tensor) -> Tensor:
    torch.cuda.empty_cache()  # HAZARD unsafe-under-capture
    return x + 1


@hazard
def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(0)  # HAZARD unsafe-under-capture
    return x + 1


@hazard
def pinned(cpu_scalar: Tensor) -> Tensor:
    return cpu_scalar.pin_memory()  # HAZARD unsafe-under-capture


# frozen-argument


@hazard
def frozen_length(x: Tensor, max_seqlen: int) -> Tensor:
    return x[:, :max_seqlen]  # HAZARD frozen-argument


@hazard
def frozen_scale(x: Tensor, scale: float) -> Tensor:
    return x * scale  # HAZARD frozen-argument


@hazard
def frozen_axis(x: Tensor, axis: int) -> Tensor:
    return x.sum(axis)  # HAZARD frozen-argument


@hazard
def frozen_loop(x: Tensor, count: int) -> Tensor:
    for _ in range(count):  # HAZARD frozen-argument
        x = x + 1
    return x


# aliased-mutation


@hazard
def aliased_arguments(slots: Tensor, pool: Tensor, pool_view: Tensor) -> Tensor:
    pool[slots] = 1.0  # HAZARD aliased-mutation mutated-input
    return pool_view + 1


@hazard
def mutated_and_read(lens: Tensor) -> None:
    bump_out(lens, lens)  # HAZARD aliased-mutation


# recompile


@hazard
def counter(x: Tensor, engine: Any) -> Tensor:
    engine.steps += 1  # HAZARD recompile
    return x[:, : engine.steps]


@hazard
def growing_list(x: Tensor, engine: Any) -> Tensor:
    engine.parts.append(1.0)  # HAZARD recompile
    return x * len(engine.parts)


@hazard
def changing_factor(x: Tensor, engine: Any) -> Tensor:
    engine.factor *= 2  # HAZARD recompile
    return x * engine.factor


# output-fed-back


@hazard
def kept_output(x: Tensor, engine: Any) -> Tensor:
    y = x + engine.last  # HAZARD output-fed-back
    engine.last = y
    return y


@hazard
def kept_in_a_dict(x: Tensor, engine: Any) -> Tensor:
    y = x + engine.kept["y"]  # HAZARD output-fed-back
    engine.kept["y"] = y
    return y


@hazard
def kept_in_pieces(x: Tensor, engine: Any) -> Tensor:
    first, second = (x + engine.last).chunk(2)  # HAZARD output-fed-back
    engine.last = torch.cat([second, first])
    return first


_ = (F, warnings)
