"""How the house is built: which way imports point, what enters a kernel's compilation key, and life without Triton."""

from __future__ import annotations

import ast
import graphlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import INTERPRETED

PACKAGE = Path(__file__).parent.parent / "compiled_kv"

# From the ground up; each may import those before it. All build on the base, the pieces of bodies are for operators.
BASE = ("layout", "status", "checks", "overlap", "launch")
GROUND = (*BASE, "sharing", "rows_cpu", "rows_triton", "columns_triton")
TOOLS = {"auditor", "codegen", "goldens", "misused", "products", "tracing"}
# Replay drives the persistent buffers, whatever step reads them.
REPLAY = {"replay"}
OUTER = {"request_traces", "__init__", "__main__", "bench", "cli", "demo", "integrations", "models", "pytest_plugin"}
ORACLES = {"reference", "reference_peers"}
COMMANDS = {"auditor.command", "auditor.terminal", "misused", "replay.command"}
EXTRAS = {"transformers", "rich", "click", "matplotlib", "pytest"}

FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
}
OPERATORS = {name.split(".")[0] for name in FILES} - {*GROUND, *TOOLS, *REPLAY, *OUTER, *ORACLES}


def imports(tree: ast.AST, module: str) -> Iterator[str]:
    """Full names of everything that `tree`, a part of `module`, imports."""
    package = ["compiled_kv", *module.split(".")][: -1 if "." in module or not is_package(module) else None]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            full = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            yield from (f"{full}.{alias.name}" for alias in node.names)


def is_package(module: str) -> bool:
    return (PACKAGE / module.replace(".", "/")).is_dir()


def parts_of_the_house(names: Iterator[str]) -> set[str]:
    """First names inside the package; a public name, or the package as a whole, counts as its `__init__`."""
    inside = {(name.split(".") + ["__init__"])[1] for name in names if name.split(".")[0] == "compiled_kv"}
    parts = {name.split(".")[0] for name in FILES}
    return {name if name in parts else "__init__" for name in inside}


def imported_by(part: str) -> set[str]:
    found: set[str] = set()
    for module, tree in FILES.items():
        if module.split(".")[0] == part:
            found |= parts_of_the_house(imports(tree, module))
    return found - {part}


@pytest.mark.parametrize("part", GROUND)
def test_the_ground_imports_only_what_lies_below_it(part: str) -> None:
    assert imported_by(part) <= set(GROUND[: GROUND.index(part)])


@pytest.mark.parametrize("part", sorted(OPERATORS))
def test_operators_know_no_tool_and_no_oracle(part: str) -> None:
    assert imported_by(part) <= {*GROUND, *OPERATORS}


@pytest.mark.parametrize("part", sorted(TOOLS & {name.split(".")[0] for name in FILES}))
def test_tools_know_no_particular_operator(part: str) -> None:
    assert imported_by(part) <= {*BASE, *TOOLS}


@pytest.mark.parametrize("part", sorted(REPLAY & {name.split(".")[0] for name in FILES}))
def test_replay_knows_the_buffers_and_no_other_operator(part: str) -> None:
    others = {"batches", "buffers", "metadata_parts", "page_pool", "request_traces", "staging", "updates"}
    assert imported_by(part) <= {*BASE, *TOOLS, *REPLAY, *others}


@pytest.mark.parametrize("part", sorted(ORACLES))
def test_an_oracle_shares_nothing_but_the_layout(part: str) -> None:
    assert imported_by(part) <= {"layout"}


def test_only_the_outer_parts_and_the_commands_import_optional_extras() -> None:
    users = {m for m, tree in FILES.items() if {name.split(".")[0] for name in imports(tree, m)} & EXTRAS}
    assert {user for user in users - COMMANDS if user.split(".")[0] not in OUTER} == set()


def test_nothing_imports_in_a_circle() -> None:
    graph = {}
    for module, tree in FILES.items():
        top = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        names = {name.removeprefix("compiled_kv.") for name in imports(top, module) if name.startswith("compiled_kv.")}
        graph[module] = {other for other in FILES for name in names if name == other or name.startswith(f"{other}.")}
    list(graphlib.TopologicalSorter(graph).static_order())


# Words that no compile-time parameter may be named by, for what they name changes from batch to batch.
# UNIT_STRIDE is a flag: pools whose columns lie side by side, or not.
FLAGS = {"UNIT_STRIDE"}
RUNTIME_WORDS = {"bs", "batch", "stride", "strides", "len", "lens", "length", "lengths", "width", "rows", "reqs"}


def kernel_parameters() -> Iterator[tuple[str, ast.arg]]:
    for module, tree in FILES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and "kernel" in map(decorator_name, node.decorator_list):
                yield from ((f"{module}.{node.name}", arg) for arg in node.args.args)


def decorator_name(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


def is_constexpr(arg: ast.arg) -> bool:
    return arg.annotation is not None and "constexpr" in ast.unparse(arg.annotation)


def test_nothing_that_changes_with_the_batch_is_constexpr() -> None:
    parameters = list(kernel_parameters())
    assert {"metadata_kernel.decode_metadata_kernel", "update_kernel.update_metadata_kernel"} <= set(dict(parameters))
    constants = {(kernel, arg.arg) for kernel, arg in parameters if is_constexpr(arg) and arg.arg not in FLAGS}
    assert {(k, name) for k, name in constants if set(name.lower().split("_")) & RUNTIME_WORDS} == set()


def test_kernels_are_made_by_the_decorator_that_leaves_arguments_unspecialized() -> None:
    """`bench` holds the published designs that ours is measured against, as they were published."""
    for module, tree in FILES.items():
        if module.split(".")[0] not in {"launch", "bench"}:
            decorators = {
                ast.unparse(d) for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) for d in n.decorator_list
            }
            assert not {d for d in decorators if "triton" in d and "jit" in d}, module


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel has no compilation key")
def test_no_runtime_argument_is_specialized() -> None:
    pytest.importorskip("triton")
    from compiled_kv import codegen

    kernels = codegen.kernels()
    assert kernels
    for name, kernel in kernels.items():
        for parameter in kernel.params:
            if not parameter.is_constexpr:
                pointer = parameter.name.endswith("_ptr")
                free = parameter.do_not_specialize_on_alignment if pointer else parameter.do_not_specialize
                assert free, f"{name}: {parameter.name} is specialized"


WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""

CPU_BODIES = """
from tests.cases import ALL_CASES, FORMS
from tests.harness import check

for form in FORMS:
    for batch in ALL_CASES.values():
        check(form, batch)
assert "triton" not in sys.modules
print("equal without triton")
"""

COMPILED_BODY = """
import torch
import compiled_kv as ckv
from tests.cases import CASES, FORMS
from tests.harness import check

check(FORMS[0], CASES["plain"], call=torch.compile(ckv.page_table, fullgraph=True))
print("compiled without triton")
"""

ACCELERATOR = """
import torch
import compiled_kv as ckv

pool = torch.zeros(2, 8, dtype=torch.int64, device="meta")
rows = torch.zeros(2, dtype=torch.int64, device="meta")
try:
    ckv.page_table(pool, rows, rows, layout=ckv.KVLayout(4, 8))
except RuntimeError as error:
    print(error)
"""

SCRIPTS = {
    "cpu-bodies-equal-the-oracle": (CPU_BODIES, "equal without triton"),
    "inductor-compiles-a-cpu-body": (COMPILED_BODY, "compiled without triton"),
    "an-accelerator-is-told-what-is-missing": (ACCELERATOR, "need Triton, which is not installed"),
}


@pytest.mark.parametrize("script, said", SCRIPTS.values(), ids=SCRIPTS)
def test_without_triton(script: str, said: str) -> None:
    assert said in run(WITHOUT.format(absent={"triton"}) + script)


def test_without_extras_every_inner_part_imports() -> None:
    inner = [m for m in FILES if m.split(".")[0] not in OUTER - {"__init__"} and m not in COMMANDS]
    modules = [f"compiled_kv.{module}".removesuffix(".__init__") for module in inner]
    script = f"import importlib\nfor name in {modules}: importlib.import_module(name)\nprint('imported all')"
    assert "imported all" in run(WITHOUT.format(absent=EXTRAS) + script)


def test_an_import_does_not_wait_for_torchs_compiler() -> None:
    """Registering operators with their source searched loads it, which takes a second or more."""
    script = "import sys, compiled_kv; print([name for name in sys.modules if name.startswith('torch._inductor.')])"
    assert run(script).strip() == "[]"


def run(script: str) -> str:
    """What a fresh process that runs `script` to its end prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=PACKAGE.parent, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
