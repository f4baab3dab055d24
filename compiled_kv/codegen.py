"""Machine code of Triton kernels for GPUs that are not here, and what it says about them.

    code = build(kernel, {"pool": "*i32", "rows": "*i64", "stride": "i64"}, {"PAGE": 64}, target="sm_90")
    resources(code)  -> Resources(registers=24, stack=0, local=0, shared=0)   spills: stack, local

Nothing here touches a device or a driver: Triton compiles for any target, and its package carries the tools
that read the result.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "sm_120": ("cuda", 120, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}
"""Targets by name: backend, architecture, threads a warp."""


class MachineCode(NamedTuple):
    """One kernel built for one target: name, Triton's first IR as text, and the binary (cubin or hsaco)."""

    name: str
    target: str
    ttir: str
    binary: bytes


class Resources(NamedTuple):
    """What a kernel takes on an NVIDIA GPU: registers a thread, bytes of stack, local and shared memory."""

    registers: int
    stack: int
    local: int
    shared: int


def kernels() -> dict[str, Any]:
    """Every module-level `@triton.jit` function of this package whose name ends with `_kernel`, by name.

    The baselines of `bench` are left out: they are what operators are measured against.
    """
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    found: dict[str, Any] = {}
    for module in map(importlib.import_module, _modules_with_kernels()):
        for name, value in vars(module).items():
            if not name.endswith("_kernel"):
                continue
            if isinstance(value, InterpretedFunction):
                raise RuntimeError(f"{name} is interpreted: unset TRITON_INTERPRET before the process starts")
            if isinstance(value, JITFunction):
                found[name] = value
    return found


def _modules_with_kernels() -> Iterator[str]:
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if "bench" not in parts and re.search(r"^def \w+_kernel\(", path.read_text(), re.MULTILINE):
            yield ".".join(("compiled_kv", *parts))


def build(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, object],
    *,
    target: str,
    num_warps: int = 4,
    registers: int | None = None,
) -> MachineCode:
    """Compile one specialisation of a kernel for one of `TARGETS`, with no GPU.

    Args:
        kernel: a `@triton.jit` function.
        types: Triton's type of each runtime parameter: `"*i32"`, `"*i64"`, `"i32"`, `"i64"`.
        constants: the value of each `tl.constexpr` parameter.
        target: a key of `TARGETS`.
        num_warps: warps a program.
        registers: the most that a thread may take; None leaves it to the compiler.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, dict(constants))
    options = {"num_warps": num_warps} | ({} if registers is None else {"maxnreg": registers})
    compiled = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    binary = compiled.asm["cubin" if TARGETS[target][0] == "cuda" else "hsaco"]
    return MachineCode(kernel.__name__, target, compiled.asm["ttir"], binary)


def resources(code: MachineCode) -> Resources:
    """What `cuobjdump`, shipped inside Triton's package, reads from an NVIDIA binary."""
    import triton

    if TARGETS[code.target][0] != "cuda":
        raise ValueError(f"code must be built for an NVIDIA target, got {code.target}")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(code.binary)
        command = [str(tool), "--dump-resource-usage", str(cubin)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    fields = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", text)}
    return Resources(fields["REG"], fields["STACK"], fields["LOCAL"], fields["SHARED"])
