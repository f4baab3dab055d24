"""Persistent metadata brought up to date: of the page tables only what changed is written.

    page_size 4; row 0 of the batch is request row 1, generation 7

    seq_lens  held before                 page_table        what is written
    [6]       nobody                      [[2, 1, 0, 0]]    the row, rebuilt
    [8]       row 1, generation 7, 2 col  [[2, 1, 0, 0]]    nothing
    [9]       the same                    [[2, 1, 5, 0]]    column 2
    [3]       the same, 3 columns         [[2, 0, 0, 0]]    rebuilt, columns 1 and 2 cleared: the row shrank
    [3]       generation 8 came           [[4, 0, 0, 0]]    rebuilt: another request

`held` remembers on the device whose pages a row shows. What it may rely on is the caller's word: while a row keeps its
pool row and its generation, the page of a committed token stays, and so does its sliding-window page as long as it is
seen. Committed are here the tokens ahead of a step's own queries: pages beyond them (of drafts, or of a decode step's
own token) are written anew in every call. Row reuse, preemption and copy on write raise the generation; so does taking
back a step that had a token ahead of its own, if the page of that token goes to another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kv.checks import INT32, INT64, INTS, Sizes, check_least, check_presence, check_width
from compiled_kv.launch import launch, runs_kernel
from compiled_kv.layout import KVLayout, ceil_div
from compiled_kv.metadata import check_step
from compiled_kv.metadata_parts import DecodeMetadata, Inputs, Settings, kernel_arguments
from compiled_kv.overlap import check_distinct, check_distinct_fake
from compiled_kv.registration import operator
from compiled_kv.sharing import chunks, is_reciprocal_exact, programs_a_row, reciprocal_of
from compiled_kv.update_kernel import update_metadata_kernel
from compiled_kv.updates_cpu import cpu_body

# Pool row or -1, generation, columns of the tokens ahead of a step's own, live columns, first column of the window.
RECORD = 5
# Rows a program takes side by side, and lanes of each: most steps add a column and a token at the most. Where that is
# not enough, columns a lane takes at a time, and how many times, before all lanes take a long row or two one by one.
# Programs in all where rows are few: more would rebuild long rows faster, and make each step wait for them.
GROUP = 8
LANES = 16
WIDE = 8
TURNS = 8
UPDATERS = 32
WARPS = 4
# Rows a program takes prefix sums of, as in `sharing`: so many that none are ahead in most batches; and lanes where the
# whole batch has no more rows than these.
UPDATE_CHUNK = 512
UPDATE_SCAN = 128
FEW = 64


def new_held(layout: KVLayout, capacity: int, device: torch.device | str) -> Tensor:
    """What `capacity` rows of zeroed tables hold, for `update_metadata`: nobody's pages. int64 [capacity, parts, 5]."""
    parts = programs_a_row(ceil_div(capacity, GROUP), layout.max_num_pages, LANES * WIDE, UPDATERS)
    return clear_held(torch.zeros(capacity, parts, RECORD, dtype=torch.int64, device=device))


def clear_held(held: Tensor) -> Tensor:
    """Forget in place what the rows hold; their tables must be zeroed too. Returns `held`."""
    held.zero_()[..., 0].fill_(-1)
    return held


def _launch(
    out: DecodeMetadata, held: Tensor, generations: Tensor, given: Inputs, settings: Settings, num_tokens: int
) -> None:
    batch_size, parts = given.seq_lens.shape[0], held.shape[1]
    groups = ceil_div(batch_size, GROUP)
    launch(
        update_metadata_kernel, (chunks(batch_size, UPDATE_CHUNK) + groups * parts,),
        **kernel_arguments(out, given, settings, num_tokens), held_ptr=held, generations_ptr=generations,
        generation_stride=generations.stride(0), parts=parts, reciprocal=reciprocal_of(groups), GROUP=GROUP,
        LANES=LANES, WIDE=WIDE, TURNS=TURNS, FEW=FEW, CHUNK=UPDATE_CHUNK, SCAN=UPDATE_SCAN, num_warps=WARPS,
    )  # fmt: skip


@operator("compiled_kv::update_metadata", mutates_args=("status", "held", *DecodeMetadata._fields))
def _update_metadata(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, generations: Tensor, q_lens: Tensor | None,
    slots: Tensor | None, full_to_swa: Tensor | None, page_map: Tensor | None, num_reqs: Tensor | None,
    status: Tensor | None, held: Tensor,
    cache_seqlens: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, page_table: Tensor,
    swa_page_table: Tensor | None, slot_mapping: Tensor | None, swa_slot_mapping: Tensor | None,
    page_size: int, cap: int, delta: int, q_len: int, pad_seqlen: int, window: int | None, num_tokens: int,
) -> None:  # fmt: skip
    given = Inputs(req_to_token, req_pool_indices, seq_lens, q_lens, slots, full_to_swa, page_map, num_reqs, status)
    settings = Settings(page_size, cap, delta, q_len, pad_seqlen, window)
    out = DecodeMetadata(
        cache_seqlens, cu_seqlens_q, cu_seqlens_k, page_table, swa_page_table, slot_mapping, swa_slot_mapping
    )
    check_distinct_fake(_outputs(out, held, status), {**given._asdict(), "generations": generations})
    body = _launch if runs_kernel(req_to_token) else cpu_body
    body(out, held, generations, given, settings, num_tokens)


def _outputs(out: DecodeMetadata, held: Tensor, status: Tensor | None) -> dict[str, Tensor]:
    named = {**{f"out.{name}": t for name, t in out._asdict().items()}, "held": held, "status": status}
    return {name: t for name, t in named.items() if t is not None}


def update_metadata(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, generations: Tensor, *, layout: KVLayout,
    held: Tensor, out: DecodeMetadata, seq_len_delta: int = 0, q_len: int | Tensor = 1, slots: Tensor | None = None,
    num_tokens: int | None = None, full_to_swa: Tensor | None = None, page_map: Tensor | None = None,
    num_reqs: Tensor | None = None, pad_seqlen: int = 0, status: Tensor | None = None,
) -> DecodeMetadata:  # fmt: skip
    """`decode_metadata` into tables that persist from step to step, at a cost of O(batch) while requests only grow.

    Args:
        req_to_token, req_pool_indices, seq_lens, layout, seq_len_delta, q_len, slots, num_tokens, full_to_swa,
            page_map, num_reqs, pad_seqlen: as in `decode_metadata`.
        generations: int [B], a number that the pool row never had before whenever the pages of its committed tokens
            change: rows beyond this batch keep old ones on record.
        held: int64 [M, parts, 5], M >= B, made by `new_held` and kept with `out`; updated in place.
        out: DecodeMetadata with room for M rows; its first B (and T tokens) are written. Tables start zeroed, and only
            this function writes to them.
        status: int32 [1]; bits of a column are OR-ed in when the column is written.

    Returns:
        DecodeMetadata, views of the first B rows and T tokens of `out`.

    Raises:
        TypeError, ValueError: as `decode_metadata`; the text names the argument.
    """
    sizes = Sizes()
    q_lens, fixed_q_len, tokens = check_step(
        sizes, req_to_token, req_pool_indices, seq_lens, layout, seq_len_delta, q_len, slots, num_tokens, full_to_swa,
        page_map, num_reqs, pad_seqlen, status,
    )  # fmt: skip
    sizes.check("generations", generations, INTS, "B")
    batch_size = sizes.named["B"]
    _check_room(sizes, held, out, layout, full_to_swa is not None or page_map is not None, tokens)
    inputs = (req_to_token, req_pool_indices, seq_lens, generations, q_lens, slots, full_to_swa, page_map, num_reqs)
    named = dict(zip(_INPUTS, inputs))
    check_distinct(_outputs(out, held, status), named)
    settings = (layout.page_size, layout.max_seqlen_k, seq_len_delta, fixed_q_len, pad_seqlen, layout.window)
    torch.ops.compiled_kv.update_metadata(*inputs, status, held, *out, *settings, tokens or 0)
    return first_rows(out, batch_size, tokens)


_INPUTS = (
    "req_to_token", "req_pool_indices", "seq_lens", "generations", "q_len", "slots", "full_to_swa", "page_map",
    "num_reqs",
)  # fmt: skip


def first_rows(out: DecodeMetadata, batch_size: int, num_tokens: int | None) -> DecodeMetadata:
    """Views of the first rows and tokens."""
    sizes = (batch_size, batch_size + 1, batch_size + 1, batch_size, batch_size, num_tokens, num_tokens)
    return DecodeMetadata(*(None if t is None else t[:size] for t, size in zip(out, sizes)))  # type: ignore[arg-type]


def _check_room(
    sizes: Sizes, held: Tensor, out: DecodeMetadata, layout: KVLayout, has_swa: bool, tokens: int | None
) -> None:
    if not isinstance(out, DecodeMetadata):
        raise TypeError(f"out must be a DecodeMetadata, got {type(out).__name__}")
    sizes.check_output("held", held, INT64, "M", "parts", str(RECORD))
    if held.shape[2] != RECORD or held.shape[1] < 1 or not held.is_contiguous():
        raise ValueError(f"held must be contiguous [M, parts, {RECORD}] with parts >= 1, got {list(held.shape)}")
    if not is_reciprocal_exact(ceil_div(held.shape[0], GROUP), held.shape[1]):
        raise ValueError(f"held must be made by new_held, which makes fewer parts, got {list(held.shape)}")
    batch_size = sizes.named["B"]
    rows = {"cache_seqlens": batch_size, "cu_seqlens_q": batch_size + 1, "cu_seqlens_k": batch_size + 1}
    check_least("held", held.shape[0], batch_size, "rows for this batch")
    for name, least in rows.items():
        tensor = getattr(out, name)
        sizes.check_output(f"out.{name}", tensor, INT32, f"{name} entries")
        check_least(f"out.{name}", tensor.shape[0], least, "entries for this batch")
    present = {"page_table": True, "swa_page_table": has_swa}
    present |= {"slot_mapping": tokens is not None, "swa_slot_mapping": has_swa and tokens is not None}
    for name, wanted in present.items():
        tensor = getattr(out, name)
        check_presence(f"out.{name}", tensor, wanted)
        if tensor is not None and name.endswith("table"):
            sizes.check_output(f"out.{name}", tensor, INT32, f"{name} rows", "P")
            check_least(f"out.{name}", tensor.shape[0], batch_size, "rows for this batch")
            check_width(f"out.{name}", tensor.shape[1], layout.max_num_pages, "columns")
        elif tensor is not None:
            sizes.check_output(f"out.{name}", tensor, INT64, f"{name} tokens")
            check_least(f"out.{name}", tensor.shape[0], tokens or 0, "entries for this batch")
