"""Every kernel builds to machine code for every target, without a GPU, without spills, with 64-bit addresses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from compiled_kv import codegen  # noqa: E402

if os.environ.get("TRITON_INTERPRET", "0") == "1":
    pytest.skip("interpreted kernels have no machine code", allow_module_level=True)

# Types by parameter name. A kernel with a parameter that no table names fails `test_every_parameter_is_known`.
INPUTS = {"req_to_token_ptr", "req_pool_indices_ptr", "kv_lens_ptr"}
OPTIONAL_INPUTS = {"kv_start_ptr"}
OUTPUTS = {"page_table_ptr": "*i32"}
INTS = {
    "pool_rows", "pool_width", "pool_row_stride", "pool_stride", "index_stride", "len_stride", "start_stride",
    "page_row_stride", "width", "cap",
}  # fmt: skip
CONSTANTS: dict[str, tuple[object, ...]] = {
    "PAGE_SIZE": (64, 1, 48),
    "BLOCK": (512,),
    "CLEAR": (True, False),
    "DEBUG": (False, True),
}


class Specialisation(NamedTuple):
    """One way to compile a kernel: a readable name, the runtime types, the compile-time values."""

    label: str
    types: dict[str, str]
    constants: dict[str, object]


KERNELS = codegen.kernels()


def specialisations(kernel: Any) -> Iterator[Specialisation]:
    """Both integer widths, then everything optional present, then each switch away from its first value."""
    names = kernel.arg_names
    optional = [name for name in names if name in OPTIONAL_INPUTS]
    values = {name: CONSTANTS[name] for name in names if name in CONSTANTS}
    first: dict[str, object] = {name: choices[0] for name, choices in values.items()}
    yield specialise("int32", names, "i32", first, absent=optional)
    yield specialise("int64", names, "i64", first, absent=optional)
    if optional:
        yield specialise("optional", names, "i64", first)
    for name, choices in values.items():
        for value in choices[1:]:
            yield specialise(f"{name}={value}", names, "i32", {**first, name: value})


def specialise(
    label: str, names: list[str], width: str, constants: dict[str, object], absent: list[str] | None = None
) -> Specialisation:
    types = {name: f"*{width}" for name in names if name in INPUTS | OPTIONAL_INPUTS}
    types |= {name: OUTPUTS[name] for name in names if name in OUTPUTS}
    types |= {name: width for name in names if name in INTS}
    for name in absent or []:
        del types[name]
        constants = {**constants, name: None}
    return Specialisation(label, types, constants)


CASES = [
    pytest.param(kernel, case, id=f"{name.strip('_')}-{case.label}")
    for name, kernel in KERNELS.items()
    if all(p in INPUTS | OPTIONAL_INPUTS | set(OUTPUTS) | INTS | set(CONSTANTS) for p in kernel.arg_names)
    for case in specialisations(kernel)
]


def test_every_parameter_is_known():
    known = INPUTS | OPTIONAL_INPUTS | set(OUTPUTS) | INTS | set(CONSTANTS)
    unknown = {name: [p for p in kernel.arg_names if p not in known] for name, kernel in KERNELS.items()}
    assert KERNELS
    assert {name: missing for name, missing in unknown.items() if missing} == {}


@pytest.mark.parametrize("target", codegen.TARGETS)
@pytest.mark.parametrize(("kernel", "case"), CASES)
def test_kernel_builds_for_every_target(kernel, case, target):
    code = codegen.build(kernel, case.types, case.constants, target=target)
    assert code.binary.startswith(b"\x7fELF")


@pytest.mark.parametrize(("kernel", "case"), CASES)
def test_kernel_spills_nothing_on_sm_90(kernel, case):
    used = codegen.resources(codegen.build(kernel, case.types, case.constants, target="sm_90"))
    assert 0 < used.registers <= 128
    assert (used.stack, used.local) == (0, 0)


@pytest.mark.parametrize(("kernel", "case"), CASES)
def test_addresses_are_64_bits_wide_from_the_first_product_on(kernel, case):
    code = codegen.build(kernel, case.types, case.constants, target="sm_90")
    assert codegen.narrow_products(code.ttir) == []
