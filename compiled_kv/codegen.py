"""Machine code of Triton kernels for GPUs that are not here, and what it says about them.

    code = build(kernel, {"pool": "*i32", "rows": "*i64", "stride": "i64"}, {"PAGE": 64}, target="sm_90")
    resources(code)             -> Resources(registers=24, stack=0, local=0, shared=0)   spills: stack, local
    narrow_products(code.ttir)  -> []    every multiplication that feeds an address is 64 bits wide

Nothing here touches a device or a driver: Triton compiles for any target, and its package carries the tools
that read the result.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections import defaultdict
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


def kernels(package: str = "compiled_kv") -> dict[str, Any]:
    """Every module-level `@triton.jit` function of the package whose name ends with `_kernel`, by name.

    The baselines of a `bench` package are left out: they are what operators are measured against.
    """
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    found: dict[str, Any] = {}
    for module in map(importlib.import_module, _modules_with_kernels(package)):
        for name, value in vars(module).items():
            if not name.endswith("_kernel"):
                continue
            if isinstance(value, InterpretedFunction):
                raise RuntimeError(f"{name} is interpreted: unset TRITON_INTERPRET before the process starts")
            if isinstance(value, JITFunction):
                found[name] = value
    return found


def _modules_with_kernels(package: str) -> Iterator[str]:
    root = Path(importlib.import_module(package).__path__[0])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if "bench" not in parts and re.search(r"^def \w+_kernel\(", path.read_text(), re.MULTILINE):
            yield ".".join((package, *parts))


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


def narrow_products(ttir: str) -> list[str]:
    """Products narrower than 64 bits (left shifts count) that reach a pointer offset, in textual order.

    What a load returns is data, and what a comparison returns is a flag: neither is followed further.
    """
    flow = _Flow(ttir)
    seen: set[int] = set()
    waiting = [op.get_operand(1).id() for op in flow.ops if op.get_name() == "tt.addptr"]
    while waiting:
        value = waiting.pop()
        if value not in seen:
            seen.add(value)
            waiting.extend(flow.sources(value))
    products = [op.get_result(0) for op in flow.ops if op.get_name() in ("arith.muli", "arith.shli")]
    reached = [value for value in products if value.id() in seen]
    return [_describe(value) for value in reached if "i64" not in str(value.get_type())]


class _Flow:
    """Where each value of a TTIR module comes from, through loops and branches."""

    OPAQUE = ("tt.load", "tt.atomic_rmw", "tt.atomic_cas", "arith.constant")
    ENDS = ("scf.yield", "scf.condition", "cf.br", "cf.cond_br")

    def __init__(self, ttir: str) -> None:
        self.module = _parse(ttir)
        self.ops: list[Any] = []
        self.module.walk(self.ops.append)
        self.results: dict[int, tuple[Any, int]] = {}
        self.arguments: dict[int, tuple[Any, int]] = {}
        self.owners: dict[int, Any] = {}
        self.ends: dict[int, list[Any]] = defaultdict(list)
        for op in self.ops:
            self._note(op)

    def _note(self, op: Any) -> None:
        self.results |= {op.get_result(i).id(): (op, i) for i in range(op.get_num_results())}
        self.owners |= {op.get_region(i).id(): op for i in range(op.get_num_regions())}
        block = op.get_block()
        if block is None:
            return
        region = block.get_parent()
        self.arguments |= {block.get_argument(i).id(): (region, i) for i in range(block.get_num_arguments())}
        if op.get_name() in self.ENDS:
            self.ends[region.id()].append(op)

    def sources(self, value: int) -> list[int]:
        if value in self.results:
            op, index = self.results[value]
            found = self._of_result(op, index)
        else:
            region, index = self.arguments[value]
            found = self._of_argument(self.owners[region.id()], region, index)
        return [source.id() for source in found if "i1" not in re.findall(r"i\d+", str(source.get_type()))]

    def _of_result(self, op: Any, index: int) -> list[Any]:
        name = op.get_name()
        if name in self.OPAQUE:
            return []
        if name == "scf.for":
            return [op.get_operand(3 + index), *self._ended(op.get_region(0), index)]
        if name == "scf.if":
            return [v for i in range(op.get_num_regions()) for v in self._ended(op.get_region(i), index)]
        if name == "scf.while":
            return self._ended(op.get_region(0), 1 + index)
        return _operands(op)

    def _of_argument(self, owner: Any, region: Any, index: int) -> list[Any]:
        name = owner.get_name()
        if name == "scf.for" and index == 0:
            return [owner.get_operand(0), owner.get_operand(2)]
        if name == "scf.for":
            return [owner.get_operand(2 + index), *self._ended(region, index - 1)]
        if name == "scf.while" and region.id() == owner.get_region(0).id():
            return [owner.get_operand(index), *self._ended(owner.get_region(1), index)]
        if name == "scf.while":
            return self._ended(owner.get_region(0), 1 + index)
        if name == "tt.func":
            return [value for end in self.ends[region.id()] for value in _operands(end)]
        return _operands(owner)

    def _ended(self, region: Any, index: int) -> list[Any]:
        return [end.get_operand(index) for end in self.ends[region.id()] if end.get_num_operands() > index]


def _describe(value: Any) -> str:
    places = re.findall(r'/([^/"]+)":(\d+)', str(value.get_loc()))
    return f"{value.get_type()} at {' from '.join(f'{file}:{line}' for file, line in places)}"


def _operands(op: Any) -> list[Any]:
    return [op.get_operand(i) for i in range(op.get_num_operands())]


def _parse(ttir: str) -> Any:
    from triton._C.libtriton import ir

    context = ir.context()
    ir.load_dialects(context)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ttir")
        path.write_text(ttir)
        module = ir.parse_mlir_module(str(path), context)
    module.context = context
    return module
