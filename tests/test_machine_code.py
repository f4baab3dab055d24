"""Every kernel builds to machine code for every target, without a GPU, with 64-bit addresses; without spills in the
forms listed here (others were seen to spill 8 to 24 bytes)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from compiled_kv import codegen, schedule_kernel, sharing, updates
from compiled_kv.launch import kernel as compiled
from compiled_kv.launch import tl
from compiled_kv.products import narrow_products
from compiled_kv.staging import HALF

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET", "0") == "1":
    pytest.skip("interpreted kernels have no machine code", allow_module_level=True)

# What a parameter's name says of its type. A parameter that no table knows fails `test_every_parameter_is_known`.
INPUTS = {  # int32 or int64
    "req_to_token_ptr", "pool_ptr", "req_pool_indices_ptr", "seq_lens_ptr", "kv_lens_ptr", "kv_start_ptr",
    "q_lens_ptr", "positions_ptr", "cu_seqlens_q_ptr", "num_reqs_ptr", "slots_ptr", "map_ptr",
    "generations_ptr", "page_map_ptr", "num_blocks_ptr", "block_sizes_ptr", "reach_ptr", "computed_ptr", "sharded_ptr",
    "given_indptr_ptr", "branch_lens_ptr",
}  # fmt: skip
OUTPUTS = {
    "page_table_ptr": "*i32",
    "swa_page_table_ptr": "*i32",
    "cache_seqlens_ptr": "*i32",
    "cu_q_ptr": "*i32",
    "cu_k_ptr": "*i32",
    "status_ptr": "*i32",
    "slot_mapping_ptr": "*i64",
    "swa_slot_mapping_ptr": "*i64",
    "out_ptr": "*i64",
    "tile_scheduler_metadata_ptr": "*i32",
    "num_splits_ptr": "*i32",
    "scratch_ptr": "*i32",
    "held_ptr": "*i64",
    "kv_indptr_ptr": "*i32",
    "kv_indices_ptr": "*i32",
    "kv_last_page_len_ptr": "*i32",
    "next_positions_ptr": "*i64",
    "next_seq_lens_ptr": "*i32",
    "batch_indices_ptr": "*i32",
    "lines_ptr": "*i64",
    "taken_ptr": "*i64",
    "inputs_ptr": "*i64",
}
INTS = {
    "pool_rows", "pool_width", "pool_row_stride", "pool_stride", "index_stride", "len_stride", "seq_stride", "q_stride",
    "start_stride", "position_stride", "cu_stride", "slots_stride", "map_stride", "map_size", "page_row_stride",
    "swa_row_stride", "batch_size", "num_slots", "num_tokens", "width", "delta", "q_len", "cap", "pad_seqlen", "window",
    "num_sm_parts", "overhead", "most", "generation_stride",
    "page_map_stride", "page_map_size", "page_stride", "swa_stride",
    "pool_group_stride", "count_group_stride", "count_stride", "block_size_stride", "reach_stride", "computed_stride",
    "page_group_stride", "sharded_stride", "slot_group_stride", "num_positions", "cp_size", "cp_rank", "cp_interleave",
    "indptr_stride", "capacity", "branch_stride", "indptr_row_stride", "indices_row_stride", "topk", "num_steps",
    "sinks", "num_rows", "line_stride", "parts", "helpers", "reciprocal", "clearers",
}  # fmt: skip
# The first value is the common one; the others are built besides it.
CONSTANTS: dict[str, tuple[object, ...]] = {
    "PAGE_SIZE": (64, 1, 48),
    "ENTRY_SIZE": (1, 64),
    "PAGED": (True, False),
    "PAGE_MAP": (False, True),
    "WINDOWED": (True, False),
    "CLEAR": (True, False),
    "COUNTED": (False, True),
    "DEBUG": (False, True),
    "PDL": (False, True),
    "UNIT_STRIDE": (True, False),
    "BLOCK": (sharing.BLOCK,),
    "SHORT": (sharing.LEAST,),
    "TOKENS": (sharing.TOKENS,),
    "LONG": (sharing.LONG,),
    "SHARED": (sharing.SHARED,),
    "GROUP": (updates.GROUP,),
    "LANES": (updates.LANES,),
    "WIDE": (updates.WIDE,),
    "TURNS": (updates.TURNS,),
    "FEW": (updates.FEW,),
    "CHUNK": (sharing.CHUNK,),
    "SCAN": (sharing.SCAN,),
    "BLOCK_SIZE": (64, 1, 48),
    "IN_TOKENS": (False, True),
    "LEGACY": (False, True),
    "PARTS": (256,),
    "LINES": (2 * HALF,),
}
# Pointers that may be None, and those that are None together.
OPTIONAL = [
    {"kv_start_ptr"},
    {"q_lens_ptr"},
    {"cu_seqlens_q_ptr"},
    {"num_reqs_ptr"},
    {"slots_ptr"},
    {"status_ptr"},
    {"map_ptr", "swa_page_table_ptr", "swa_slot_mapping_ptr"},
    {"slot_mapping_ptr", "swa_slot_mapping_ptr", "slots_ptr"},
]
FROM_TOKEN_POOL = {"_page_table_kernel", "_swa_page_table_kernel", "decode_metadata_kernel"}
# What a launch passes besides the common values.
OF_ROWS = {"TOKENS": sharing.ROW_TOKENS}
OF_UPDATES = {"CHUNK": updates.UPDATE_CHUNK, "SCAN": updates.UPDATE_SCAN}
PASSED = {"decode_metadata_kernel": OF_ROWS, "update_metadata_kernel": OF_UPDATES}
WARPS = {"_seqlens_kernel": sharing.WARPS}
WARPS["update_metadata_kernel"] = updates.WARPS
WARPS["flashmla_schedule_kernel"] = schedule_kernel.WARPS
# Names that one kernel uses in its own way: as an input, never None, or None where others need it.
READ_BY = {"_swa_page_table_kernel": {"cache_seqlens_ptr"}}
NEEDED_BY = {
    "_translate_slots_kernel": {"slots_ptr"},
    "_group_slot_mappings_kernel": {"cu_seqlens_q_ptr"},
    "_place_tokens_kernel": {"cu_seqlens_q_ptr"},
}
OPTIONAL_BY = {
    "_advance_draft_kernel": [{"next_positions_ptr", "next_seq_lens_ptr"}],
    "draft_kv_indices_kernel": [{"branch_lens_ptr"}, {"map_ptr"}],
    "csr_kernel": [{"given_indptr_ptr"}, {"map_ptr"}, {"kv_indptr_ptr", "kv_last_page_len_ptr"}],
    "_gather_block_tables_kernel": [{"reach_ptr", "block_sizes_ptr", "computed_ptr"}],
    "_group_slot_mappings_kernel": [{"sharded_ptr"}],
    "_place_tokens_kernel": [{"req_pool_indices_ptr"}, {"batch_indices_ptr"}, {"next_seq_lens_ptr"}],
    "write_metadata_kernel": [{"cache_seqlens_ptr", "cu_k_ptr"}, {"cu_q_ptr"}, {"page_map_ptr"},
                              {"page_table_ptr", "swa_page_table_ptr"}],
}  # fmt: skip
KNOWN = INPUTS | set(OUTPUTS) | INTS | set(CONSTANTS)


DTYPES = {"*i32": torch.int32, "*i64": torch.int64}


class Case(NamedTuple):
    """One way to compile a kernel: the types of its runtime parameters, the values of the others, its warps."""

    kernel: Any
    types: dict[str, str]
    constants: dict[str, object]
    warps: int


def specialise(kernel: Any, width: str, absent: Iterable[str] = (), **constants: object) -> Case:
    """`kernel` with all of its integers `width` wide, and None for the pointers in `absent`."""
    names = kernel.arg_names
    types = {name: OUTPUTS[name] for name in names if name in OUTPUTS}
    types |= {name: f"*{width}" for name in names if name in INPUTS | READ_BY.get(kernel.__name__, set())}
    types |= {name: width for name in names if name in INTS}
    common = {name: CONSTANTS[name][0] for name in names if name in CONSTANTS} | PASSED.get(kernel.__name__, {})
    page_size = constants.get("PAGE_SIZE", CONSTANTS["PAGE_SIZE"][0])
    warps = WARPS.get(kernel.__name__, 4)
    if kernel.__name__ in FROM_TOKEN_POOL:
        split = sharing.split_rows(
            1, 1, int(str(page_size)), is_mapped="map_ptr" in set(names) - set(absent),
            has_unit_stride=bool({**common, **constants}["UNIT_STRIDE"]),
        )  # fmt: skip
        common |= {name: value for name in common if (value := getattr(split, name.lower(), None)) is not None}
        warps = split.warps
    nones = dict.fromkeys(absent)
    return Case(kernel, {k: v for k, v in types.items() if k not in nones}, {**common, **constants, **nones}, warps)


def cases_of(kernel: Any) -> Iterator[tuple[str, Case]]:
    """Everything present in both widths, then without each optional pointer, then each constant's other values."""
    yield "int32", specialise(kernel, "i32")
    yield "int64", specialise(kernel, "i64")
    optional = set(kernel.arg_names) - NEEDED_BY.get(kernel.__name__, set())
    groups = [group for group in OPTIONAL if group <= optional] + OPTIONAL_BY.get(kernel.__name__, [])
    for group in groups:
        yield f"without-{min(group).removesuffix('_ptr')}", specialise(kernel, "i32", group)
    if len(groups) > 1:
        yield "bare", specialise(kernel, "i64", set().union(*groups))
    if "PAGE_SIZE" in kernel.arg_names:  # where programs take the most columns
        yield "bare-PAGE_SIZE=1", specialise(kernel, "i32", set().union(*groups), PAGE_SIZE=1)
    # torch 2.11's mutation analysis compiles a kernel with its ints as constants.
    folded = specialise(kernel, "i32")
    ints = {name: 16 for name in folded.types if name in INTS}
    types = {name: kind for name, kind in folded.types.items() if name not in ints}
    yield "ints-folded", Case(kernel, types, {**folded.constants, **ints}, folded.warps)
    for name in set(CONSTANTS) & set(kernel.arg_names):
        for value in CONSTANTS[name][1:]:
            yield f"{name}={value}", specialise(kernel, "i32", **{name: value})


KERNELS = codegen.kernels()
CASES = {
    f"{name.strip('_').removesuffix('_kernel')}-{label}": case
    for name, kernel in KERNELS.items()
    if KNOWN.issuperset(kernel.arg_names)
    for label, case in cases_of(kernel)
}
REPRESENTATIVE = ("-int32", "-int64", "-bare", "-PAGE_MAP=True")
every_case = pytest.mark.parametrize("name", sorted(CASES))


def build(name: str, target: str) -> codegen.MachineCode:
    case = CASES[name]
    given = {name: SimpleNamespace(dtype=DTYPES.get(kind)) for name, kind in case.types.items()}
    registers = case.kernel.registers and case.kernel.registers(given)
    return codegen.build(
        case.kernel, case.types, case.constants, target=target, num_warps=case.warps, registers=registers
    )


def test_every_operator_has_its_kernel():
    operators = {"decode_metadata", "page_table", "swa_page_table", "slot_mapping", "translate_slots", "seqlens"}
    operators |= {"flashmla_schedule"}
    assert operators <= {name.strip("_").removesuffix("_kernel") for name in KERNELS}


def test_every_parameter_is_known():
    unknown = {name: sorted(set(kernel.arg_names) - KNOWN) for name, kernel in KERNELS.items()}
    assert {name: parameters for name, parameters in unknown.items() if parameters} == {}


@every_case
def test_kernel_builds_for_sm_90(name):
    assert build(name, "sm_90").binary.startswith(b"\x7fELF")


# The other targets get what differs most: both integer widths, everything absent, and a map of pages.
@pytest.mark.parametrize("target", sorted(set(codegen.TARGETS) - {"sm_90"}))
@pytest.mark.parametrize("name", sorted(name for name in CASES if name.endswith(REPRESENTATIVE)))
def test_kernel_builds_elsewhere(name, target):
    assert build(name, target).binary.startswith(b"\x7fELF")


@pytest.mark.parametrize("target", ["sm_100", "sm_120"])
@pytest.mark.parametrize("name", sorted(name for name in CASES if name.endswith("-PDL=True")))
def test_kernel_with_dependent_launch_builds_beyond_sm_90(name, target):
    assert build(name, target).binary.startswith(b"\x7fELF")


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_kernel_may_start_early_and_waits_before_it_reads_or_writes(name):
    """NOTE [Dependent launch] in launch.py: on every path."""
    ttir = build(f"{name.strip('_').removesuffix('_kernel')}-PDL=True", "sm_90").ttir
    assert WAIT.search(ttir)
    assert early_accesses(ttir) == []


# Of ours, and of Triton's own before and from version 3.9.
WAIT = re.compile(r"griddepcontrol\.wait|grid_dependency_wait")


def early_accesses(ttir: str) -> list[str]:
    """Loads and stores with no wait ahead of them, in their own region or in one around it."""
    found, waited = [], [False]
    for line in ttir.splitlines():
        if line.lstrip().startswith("}"):
            waited.pop()
        if WAIT.search(line):
            waited[-1] = True
        if re.search(r"tt\.(load|store|atomic)", line) and not waited[-1]:
            found.append(line)
        if line.rstrip().endswith("{"):
            waited.append(waited[-1])
    return found


@every_case
def test_kernel_spills_nothing_on_sm_90(name):
    used = codegen.resources(build(name, "sm_90"))
    assert used.registers > 0
    assert (used.stack, used.local) == (0, 0)


@every_case
def test_addresses_are_64_bits_wide_from_the_first_product_on(name):
    assert narrow_products(build(name, "sm_90").ttir) == []


@compiled
def _wide(table_ptr, rows_ptr, out_ptr, stride, width, BLOCK: tl.constexpr):
    row = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        value = tl.load(table_ptr + row * stride + column, mask=column < width, other=0)
        tl.store(out_ptr + column, value * stride, mask=column < width)


@compiled
def _narrow(table_ptr, rows_ptr, out_ptr, stride, width, BLOCK: tl.constexpr):
    row = tl.load(rows_ptr + tl.program_id(0))
    offset = row * stride
    for begin in range(tl.program_id(1) * BLOCK, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        if width > 7:
            offset += 1
        value = tl.load(table_ptr + offset.to(tl.int64) + column, mask=column < width, other=0)
        tl.store(out_ptr + column, value * stride, mask=column < width)


@compiled
def _spilling(table_ptr, out_ptr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    value = tl.load(table_ptr + lane)
    tl.store(out_ptr + lane, value * tl.sum(value, 0))


TOY = {"table_ptr": "*i32", "rows_ptr": "*i32", "out_ptr": "*i32", "stride": "i32", "width": "i32"}


@pytest.mark.parametrize(("kernel", "products"), [(_wide, 0), (_narrow, 2)], ids=["wide", "narrow"])
def test_narrow_products_are_found_through_loops_and_branches(kernel, products):
    code = codegen.build(kernel, TOY, {"BLOCK": 128}, target="sm_90")
    assert len(narrow_products(code.ttir)) == products


def test_spills_are_seen():
    toy = {name: TOY[name] for name in ("table_ptr", "out_ptr")}
    used = codegen.resources(codegen.build(_spilling, toy, {"BLOCK": 8192}, target="sm_90", num_warps=1))
    assert used.stack + used.local > 0


def test_resources_refuse_what_cuobjdump_cannot_read():
    code = codegen.build(_wide, TOY, {"BLOCK": 128}, target="gfx942")
    with pytest.raises(ValueError, match="code must be built for an NVIDIA target, got gfx942"):
        codegen.resources(code)
