"""Who runs in a cell, by name: ours, the published designs, and the floors.

A contender is made for one `Inputs` and one set of outputs, and then called with the number of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

import compiled_kv as ckv
from compiled_kv import updates
from compiled_kv.bench import baselines_torch
from compiled_kv.bench.inputs import Inputs, aligned
from compiled_kv.launch import INTERPRETED, triton
from compiled_kv.layout import ceil_div

Step = Callable[[int], Any]
GROW = 1024  # tokens by which the incremental form's requests may grow while they are timed
LARGEST = 1 << 31  # bytes of a table that a gather over the static bound may make


@dataclass
class Contender:
    """`same_work`: it turns the same pool into the same outputs, so ours must not take longer."""

    label: str
    step: Step
    out: ckv.DecodeMetadata | None = None  # what it writes, where that can be compared
    same_work: bool = False
    windowed: bool = False  # columns before the window are null
    clears: bool = False  # columns past the live ones are null
    persists: bool = False  # it relies on what it left in its outputs
    before: Callable[[], None] | None = None  # between replays, not timed
    seq_lens: Tensor | None = None  # [sets, B], where they are not those of the inputs


def new_outputs(given: Inputs) -> ckv.DecodeMetadata:
    """Zeroed outputs for one batch."""
    batch, device, swa = given.cell.batch, given.rows.device, given.full_to_swa is not None

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    table = partial(zeros, batch, given.layout.max_num_pages)
    slots = partial(zeros, batch, dtype=torch.int64)
    return ckv.DecodeMetadata(
        zeros(batch), zeros(batch + 1), zeros(batch + 1), table(), table() if swa else None, slots(),
        slots() if swa else None,
    )  # fmt: skip


def contenders(given: Inputs) -> dict[str, Contender]:
    """Everyone who can run here, ours first. All but the incremental form write to the same outputs."""
    out = new_outputs(given)
    found = {
        "ours": ours(given, out, "keep"),
        "ours-clear": ours(given, out, "clear"),
        # First, for both move on over the same places.
        "incremental-untouched": incremental(given, is_untouched=True),
        "incremental": incremental(given),
    }
    if INTERPRETED or (triton is not None and given.rows.is_cuda):
        found |= published(given, out) | floors(given, out)
    return found | gathers(given, out)


def ours(given: Inputs, out: ckv.DecodeMetadata, tail: str) -> Contender:
    def step(index: int) -> None:
        ckv.decode_metadata(
            given.req_to_token, given.rows[index], given.seq_lens[index], layout=given.layout,
            full_to_swa=given.full_to_swa, out=out, tail=tail,
        )  # fmt: skip

    label = "ours" if tail == "keep" else "ours, clearing tails"
    return Contender(label, step, out, windowed=True, clears=tail == "clear")


def incremental(given: Inputs, is_untouched: bool = False) -> Contender:
    """Every call one token on; between replays all batches move on together, so that no request ever shrinks.

    Ahead of a replay its tokens' slots are written into the pool and the map, as an engine's allocator does in every
    step: they may lie in the L2 cache then, as whatever the others read does after a replay that does not count. Unless
    `is_untouched`: then nobody touched them since the pool was made.
    """
    out, rows = new_outputs(given), given.rows[0]
    held = updates.new_held(given.layout, given.cell.batch, rows.device)
    room = max(given.layout.max_seqlen_k - GROW, 1)
    first = given.seq_lens[0].clamp(max=room)
    seq_lens = aligned(first + torch.arange(given.sets, device=rows.device, dtype=torch.int32)[:, None])
    generations = torch.zeros_like(rows)

    def step(index: int) -> None:
        updates.update_metadata(
            given.req_to_token, rows, seq_lens[index], generations, layout=given.layout, held=held, out=out,
            full_to_swa=given.full_to_swa,
        )  # fmt: skip

    def advance() -> None:
        seq_lens.add_(given.sets)
        if not is_untouched:
            _allocate(given, rows, seq_lens)

    label = "ours, only what changed"
    return Contender(
        f"{label}, slots untouched" if is_untouched else label, step, out, windowed=True, clears=True, persists=True,
        before=advance, seq_lens=seq_lens,
    )  # fmt: skip


def _allocate(given: Inputs, rows: Tensor, seq_lens: Tensor) -> None:
    """Write the slots of the last token of each length anew, and what the map says of them."""
    newest = seq_lens.long() - 1
    slots = given.req_to_token[rows, newest]
    given.req_to_token[rows, newest] = slots
    if given.full_to_swa is not None:
        index = slots.long()
        given.full_to_swa[index] = given.full_to_swa[index]


def published(given: Inputs, out: ckv.DecodeMetadata) -> dict[str, Contender]:
    from compiled_kv.bench import baselines_triton as designs

    labels = {
        "serial": "one program a request, 4,096 tokens a step",
        "grid": "static grid, 4,096 tokens a program",
        "fused": "fused, 128 columns a program",
        "looped": "one program a row, looping",
    }
    found = {
        name: Contender(label, partial(getattr(designs, name), given, out), out, same_work=True)
        for name, label in labels.items()
    }
    if given.full_to_swa is None:
        # It reads page ids where the others read a slot a page, so it stands beside them.
        found["copied"] = Contender("copy of 1,024 page ids a step", partial(designs.copied, given, out), out)
    return found


def floors(given: Inputs, out: ckv.DecodeMetadata) -> dict[str, Contender]:
    from compiled_kv.bench import floors as kernels

    tables = 1 if given.full_to_swa is None else 2
    count = max(ceil_div(given.live_pages * tables, kernels.UNIT), 1) * kernels.UNIT
    source, target = aligned(torch.zeros(2, count, dtype=torch.int32, device=given.rows.device))
    slots = torch.zeros(given.cell.batch, dtype=torch.int32, device=given.rows.device)
    filled = [torch.empty_like(out.page_table) for _ in range(tables)]
    tasks = [kernels.tasks_of(given, index) for index in range(given.sets)]

    def copy(index: int) -> None:
        kernels.copy(source, target, count)

    def clear(index: int) -> None:
        for table in filled:
            kernels.fill(table)

    def copy_tables(index: int) -> None:
        for table in filled:
            kernels.copy(out.page_table, table, table.numel())

    def gather(index: int) -> None:
        kernels.gather(given, tasks[index], out.page_table, out.swa_page_table)

    return {
        "copy": Contender("copy of the same bytes", copy),
        "gather-known": Contender("gather of the same entries, every address known to the host", gather),
        "loads": Contender("dependent loads only", partial(kernels.dependent_loads, given, slots)),
        "copy-tables": Contender("copy of as many bytes as a cleared table must write", copy_tables),
        "fill": Contender("a plain fill of these bytes", clear),
    }


@cache
def _compiled(name: str) -> Any:
    """One graph for all sizes: sizes that happen to be equal in the first cell must not be taken for one."""
    compiled = torch.compile(getattr(baselines_torch, name), fullgraph=True, dynamic=True)
    shapes: Any = torch.fx.experimental._config

    def call(*arguments: Any) -> Any:
        with shapes.patch(use_duck_shape=False), torch._dynamo.config.patch(recompile_limit=64):
            return compiled(*arguments)

    return call


def gathers(given: Inputs, out: ckv.DecodeMetadata) -> dict[str, Contender]:
    """The gathers as wide as the context bound, where their tables fit."""
    width, page_size = given.layout.max_num_pages, given.layout.page_size
    if given.cell.batch * width * 8 > LARGEST:
        return {}
    fixed = (page_size, width)

    def arguments(index: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return given.req_to_token, given.rows[index], given.seq_lens[index], given.full_to_swa

    def eager(index: int) -> None:
        baselines_torch.gather(*arguments(index), out, *fixed)

    def compiled(index: int) -> None:
        _compiled("gather")(*arguments(index), out, *fixed)

    def inductor(index: int) -> tuple[Tensor | None, ...]:
        return _compiled("cpu_body")(
            *arguments(index), page_size, given.layout.max_seqlen_k, width, given.layout.window
        )  # fmt: skip

    found = {"gather": Contender("gather over the static bound, eager", eager, out, same_work=True)}
    if given.cell.batch > 1:  # torch compiles sizes of 1 on their own
        found["gather-compiled"] = Contender("the same, compiled", compiled, out, same_work=True)
        if page_size > 1:
            found["inductor"] = Contender("our CPU body, compiled for the device", inductor, windowed=True, clears=True)
    return found
