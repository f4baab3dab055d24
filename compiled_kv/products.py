"""Products in a Triton kernel that are too narrow for the address they go into, read off its first IR.

code = build(kernel, {"pool": "*i32", "rows": "*i64", "stride": "i64"}, {"PAGE": 64}, target="sm_90")
narrow_products(code.ttir)  -> []    every multiplication that feeds an address is 64 bits wide
narrow_products(other.ttir) -> ["i32 at step.py:12"]    `row * stride`, which wraps in a pool of 2^31 entries
"""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any


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
