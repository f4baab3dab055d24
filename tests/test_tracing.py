"""Graphs of a toy operator: what tracing for a device that is not there shows, counts, and leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sympy
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.utils._sympy import functions

from compiled_kv.auditor import audit
from compiled_kv.goldens import assert_graph
from compiled_kv.tracing import targets
from compiled_kv.tracing.graphs import Graphs, capture, host, trace
from compiled_kv.tracing.rendering import render
from compiled_kv.tracing.spelling import sizes

toy_op = pytest.importorskip("tests.toy_op", reason="needs Triton")
bump, bump_out, bump_pair_out = toy_op.bump, toy_op.bump_out, toy_op.bump_pair_out

GPU = "cuda:sm_90"
TARGETS = [GPU, "cuda:sm_80", "hip:gfx942", "cuda"]


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def strided(stride: int) -> Tensor:
    return torch.zeros(40 * stride, dtype=torch.int32)[::stride]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_functional_operator_is_one_launch(target: str, dynamic: bool) -> None:
    graphs = capture(bump, ints(40), target=target, dynamic=dynamic)
    assert graphs.is_whole
    assert graphs.launches == {"_bump_kernel": 1}
    assert graphs.copies == [] and graphs.host_reads == [] and graphs.copied_bytes == 0


@pytest.mark.parametrize("target", TARGETS)
def test_in_place_operator_is_one_launch_without_a_copy(target: str) -> None:
    graphs = capture(bump_out, ints(40), ints(40), target=target)
    assert graphs.launches == {"_bump_kernel": 1}
    assert graphs.copies == []


# Kind 9: a stride of 1 among the arguments once made torch's analysis fall back to "every argument is mutated".
@pytest.mark.parametrize("stride", [1, 2, 16])
@pytest.mark.parametrize(
    ("step", "buffers", "writes"),
    [(bump, 0, ["out"]), (bump_out, 1, ["out"]), (bump_pair_out, 2, ["also", "out"])],
    ids=["functional", "in-place", "pair"],
)
def test_only_outputs_are_written(step: Any, buffers: int, writes: list[str], stride: int) -> None:
    graphs = capture(step, strided(stride), *(ints(40) for _ in range(buffers)), target=GPU)
    (line,) = [line for line in render(graphs, "aot").splitlines() if "writes" in line]
    assert line.partition("writes ")[2] == ", ".join(writes)
    assert graphs.fallbacks == ()


def test_fallen_back_analysis_is_said_and_spoils_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("a real driver answers here")
    monkeypatch.setattr(targets, "_triton_driver", lambda arch: nullcontext())
    graphs = trace(bump, (ints(40),), {}, target=GPU, dynamic=False)
    assert len(graphs.fallbacks) == 1 and "active driver" in graphs.fallbacks[0]
    assert not graphs.is_whole


def test_result_that_is_read_never_vanishes() -> None:
    def step(x: Tensor, out: Tensor) -> Tensor:
        bump_out(x, out)
        return bump(out)[:3]

    assert capture(step, ints(40), ints(40), target=GPU).launches == {"_bump_kernel": 2}


# Kind 13.
def test_two_buffers_are_written_without_a_copy() -> None:
    assert capture(bump_pair_out, ints(40), ints(40), ints(40), target=GPU).copies == []


def carve_inside(x: Tensor, workspace: Tensor) -> None:
    bump_pair_out(x, workspace[:40], workspace[40:80])


def test_slices_of_a_workspace_cost_copies_which_are_counted() -> None:
    workspace = ints(100)
    inside = capture(carve_inside, ints(40), workspace, target=GPU)
    assert inside.launches == {"_bump_kernel": 1}
    assert inside.copied_bytes is not None and inside.copied_bytes >= workspace.nbytes
    as_arguments = capture(bump_pair_out, ints(40), workspace[:40], workspace[40:80], target=GPU)
    assert as_arguments.copied_bytes is not None and as_arguments.copied_bytes >= 80 * 4


def test_separate_slice_of_a_workspace_costs_no_copy() -> None:
    assert capture(bump_out, ints(40), ints(100)[:40], target=GPU).copies == []


def read_item(x: Tensor) -> Tensor:
    return x + x.sum().item()


def read_branch(x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else x


def read_mask(x: Tensor) -> Tensor:
    return x[x > 0]


def read_cpu(x: Tensor) -> Tensor:
    return x.cpu()


@pytest.mark.parametrize("step", [read_item, read_branch, read_mask, read_cpu], ids=lambda step: step.__name__)
@pytest.mark.parametrize("scalars", [False, True], ids=["breaks", "scalars-captured"])
def test_host_read_is_counted_inside_and_between_graphs(step: Any, scalars: bool) -> None:
    settings = {"capture_scalar_outputs": scalars, "capture_dynamic_output_shape_ops": scalars}
    graphs = trace(step, (ints(40),), {}, target=GPU, dynamic=False, settings=settings)
    assert graphs.host_reads
    assert graphs.graph_breaks or graphs.is_whole
    assert not any("host reads 0" in render(graphs, tier) for tier in ("dynamo", "aot"))


def test_graph_break_names_its_line_and_later_code_is_still_traced() -> None:
    def step(x: Tensor) -> Tensor:
        y = x + 1
        print(end="")
        return bump(y)

    graphs = capture(step, ints(40), target=GPU)
    (broken,) = graphs.graph_breaks
    assert (broken.file, broken.line) == (__file__, step.__code__.co_firstlineno + 2)
    assert graphs.launches == {"_bump_kernel": 1} and not graphs.is_whole


def test_nothing_captured_counts_as_unknown() -> None:
    graphs = capture(lambda x: x, ints(4), target=GPU)
    assert graphs.dynamo == () and not graphs.is_whole
    assert (graphs.launches, graphs.copies, graphs.copied_bytes, graphs.host_reads) == (None, None, None, None)
    assert render(graphs, "aot").endswith("launches unknown  copies unknown  host reads unknown")


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


@dataclass
class Cache:
    keys: list[Tensor]
    seen: int = 0
    extra: dict[str, Tensor] = field(default_factory=dict)

    def step(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.keys.append(x)
        return self.keys[0] + x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.left_behind = torch.ones(4)  # no buffer: module.to() would leave it

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def devices(graphs: Graphs) -> set[str]:
    inputs = graphs.dynamo[0].graph.find_nodes(op="placeholder")
    return {node.meta["example_value"].device.type for node in inputs}


MODEL = Model()


def global_step(x: Tensor) -> Tensor:
    return helper(x)


def helper(x: Tensor) -> Tensor:
    return MODEL(x)


def closure_step() -> Any:
    model = Model()
    return lambda x: model(x)


@pytest.mark.parametrize(
    ("step", "arguments"),
    [
        (lambda pair: pair.first + 1, (Pair(ints(4), None),)),
        (lambda cache: cache.keys[0] + cache.extra["bias"], (Cache([ints(4)], extra={"bias": ints(4)}),)),
        (Cache([ints(4)]).step, (ints(4),)),
        (partial(lambda x, y: x + y, y=ints(4)), (ints(4),)),
        (Model(), (torch.zeros(2, 4),)),
        (closure_step(), (torch.zeros(2, 4),)),
        (global_step, (torch.zeros(2, 4),)),
        (lambda model, x: model(x), (Model(), torch.zeros(2, 4))),
    ],
    ids=["named-tuple", "dataclass", "bound-method", "partial", "module", "closure", "global", "module-argument"],
)
def test_every_tensor_moves_to_the_target(step: Any, arguments: tuple[Any, ...]) -> None:
    graphs = capture(step, *arguments, target=GPU)
    assert graphs.is_whole and devices(graphs) == {"cuda"}


def test_host_tensors_and_tensors_that_a_module_would_leave_stay() -> None:
    assert devices(capture(torch.add, ints(4), host(ints()), target=GPU)) == {"cuda", "cpu"}
    assert devices(capture(lambda model, x: x + model.left_behind.sum(), Model(), ints(4), target=GPU)) == {
        "cuda",
        "cpu",
    }


def test_callers_objects_stay_as_they_were() -> None:
    cache, model, x = Cache([ints(4)]), Model(), torch.zeros(2, 4)
    before = dict(model.state_dict(keep_vars=True))
    capture(cache.step, ints(4), target=GPU)
    capture(model, x, target=GPU)
    assert cache.seen == 0 and len(cache.keys) == 1
    assert all(tensor is before[name] for name, tensor in model.state_dict(keep_vars=True).items())
    assert type(x) is Tensor and x.device.type == "cpu"


def test_torch_and_triton_stay_as_they_were() -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode
    from triton.runtime import driver

    def state() -> tuple[Any, ...]:
        settings = {**torch._dynamo.config.get_config_copy(), **torch._functorch.config.get_config_copy()}
        guard = None if torch.version.cuda else targets._guard_registry()[1]
        return driver._active, guard, torch.is_grad_enabled(), _get_current_dispatch_mode(), settings

    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("my own error")

    before = state()
    capture(bump, ints(40), target=GPU)
    with pytest.raises(RuntimeError, match="my own error"):
        capture(fails, ints(4), target=GPU)
    assert state() == before


def test_meta_weights_are_traced_without_allocating() -> None:
    with torch.device("meta"):
        model = nn.Linear(1 << 20, 1 << 20)  # 4 TiB
    graphs = capture(model, torch.empty(2, 1 << 20, device="meta"), target=GPU)
    assert devices(graphs) == {"cuda"}
    assert "addmm(fn.bias, input, t)" in render(graphs, "aot")


@pytest.mark.parametrize(
    "target",
    ["tpu", "", "cuda:90", "cuda:sm_", "cuda:sm_999", "cuda:sm_9", "hip:sm_90", "hip:gfx000", "rocm:gfx000", "cpu:x"],
)
def test_unknown_target_is_refused(target: str) -> None:
    rule = f"target must be cpu, cuda, cuda:sm_NN or hip:gfxNNN, got {target!r}; NN and NNN are of sm_70, .*gfx942"
    with pytest.raises(ValueError, match=rule):
        capture(bump, ints(4), target=target)


def test_known_architectures_are_traced_for() -> None:
    names = [*(f"cuda:sm_{number}" for number in targets.NVIDIA), *(f"hip:{name}" for name in targets.AMD)]
    assert [targets.Target.parse(name).name for name in names] == names
    for name in ("cuda:sm_70", "cuda:sm_121", "hip:gfx908", "hip:gfx1250"):
        assert capture(bump, ints(40), target=name).launches == {"_bump_kernel": 1}, name


def test_argument_that_cannot_be_copied_is_refused() -> None:
    with pytest.raises(TypeError, match="arguments must be copyable to be re-created on the target"):
        capture(lambda lines: torch.zeros(2), (line for line in "ab"), target=GPU)


def test_rendering_for_reading() -> None:
    graphs = capture(bump_out, ints(40), ints(40), target=GPU, dynamic=True)
    assert_expected_inline(
        str(graphs),
        """\
dynamo
in   args_0 i32[s0], args_1 i32[s0]
toy.bump_out(x=args_0, out=args_1)
out
launches 1  copies 0  host reads 0

aot
in   args_0 i32[s0], args_1 i32[s0]
bump = launch _bump_kernel[ceil_div(s0, 128)]
     writes out
     x=args_0, out=args_1, also=None, n=s0, stride=1, BLOCK=128
aten.copy_(args_1, bump.out)
out
launches 1  copies 0  host reads 0""",
    )


def test_what_cannot_be_called_is_refused_by_name() -> None:
    for asked in (capture, audit):
        with pytest.raises(TypeError, match="fn must be callable, got int"):
            asked(3, ints(40), target=GPU)


def test_golden_is_accepted_compared_and_shown_as_a_diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = tmp_path / "aot" / "bump.txt"
    graphs = capture(bump, ints(40), target=GPU)
    monkeypatch.delenv("EXPECTTEST_ACCEPT", raising=False)
    with pytest.raises(AssertionError, match="does not exist yet\n---"):
        assert_graph(graphs, golden)
    monkeypatch.setenv("EXPECTTEST_ACCEPT", "1")
    assert_graph({"static": graphs}, golden)
    monkeypatch.delenv("EXPECTTEST_ACCEPT")
    assert_graph({"static": graphs}, golden)
    with pytest.raises(AssertionError) as caught:
        assert_graph({"static": capture(bump, ints(41), target=GPU)}, golden)
    assert "-in   args_0 i32[40]\n" in str(caught.value) and "+in   args_0 i32[41]\n" in str(caught.value)
    assert "EXPECTTEST_ACCEPT=1" in str(caught.value)


def run_python(code: str, **environment: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_rendering_is_the_same_in_every_process() -> None:
    code = """
import torch
from compiled_kv.tracing.graphs import capture
from tests.toy_op import bump_pair_out
x, out, also = (torch.zeros(40, dtype=torch.int32) for _ in range(3))
print(capture(bump_pair_out, x, out, also, target="cuda:sm_90", dynamic=True), end="")
"""
    capture(bump, ints(40), target=GPU)  # the kernel's place in torch's side table is another one here
    with torch.fx.experimental._config.patch(use_duck_shape=False):  # as a process may have set it
        here = capture(bump_pair_out, ints(40), ints(40), ints(40), target=GPU, dynamic=True)
    assert run_python(code, PYTHONHASHSEED="7") == str(here)


def test_sizes_are_spelt_in_one_way_whoever_wrote_them() -> None:
    s0, s1 = sympy.symbols("s0 s1", integer=True, positive=True)
    up, down = -functions.FloorDiv(-s0, 512), functions.FloorDiv(640, s1)
    assert sizes(functions.Max(1, functions.Min(up, down))) == "Max(1, Min(ceil_div(s0, 512), floor_div(640, s1)))"
    assert sizes(functions.Max(functions.Min(down, up), 1)) == sizes(functions.Max(1, functions.Min(up, down)))
    assert [sizes(each) for each in (s1 + 1, 2 * s0 - 3, s0 * s1, -s0, down - 5, 3 * down)] == [
        "s1 + 1", "2*s0 - 3", "s0*s1", "-s0", "floor_div(640, s1) - 5", "3*floor_div(640, s1)",
    ]  # fmt: skip


def test_a_number_that_a_dynamic_trace_must_specialize_is_no_failure() -> None:
    class Settings:
        eps = 1e-5

    def step(x: Tensor, settings: Settings) -> Tensor:
        return nn.functional.layer_norm(x, (4,), eps=settings.eps)

    graphs = capture(step, torch.zeros(3, 4), Settings(), target=GPU, dynamic=True)
    assert graphs.is_whole and len(graphs.dynamo) == len(graphs.aot) == 1


def test_counts_are_of_different_computations() -> None:
    def step(x: Tensor) -> Tensor:
        return ((x + 1)[:, None] * (x + 1)[:, None]) + x.view(-1, 1)

    assert render(capture(step, ints(4), target="cpu"), "aot", "counts").startswith("aten.add 2  aten.mul 1\n")


# Kind 10.
INTERPRETER = """
import os, torch
from compiled_kv.page_tables import page_table
from compiled_kv.layout import KVLayout
from compiled_kv.tracing.graphs import capture
pool, rows, lengths = torch.tensor([[0] * 6, [8, 9, 10, 11, 4, 5]]), torch.tensor([1]), torch.tensor([6])
layout = KVLayout(page_size=4, max_context_len=6)
if os.environ["TRITON_INTERPRET"] == "1":
    print(page_table(pool, rows, lengths, layout=layout).tolist())
else:
    print(capture(page_table, pool, rows, lengths, layout=layout, target="cuda:sm_90").launches)
os.environ["TRITON_INTERPRET"] = "0" if os.environ["TRITON_INTERPRET"] == "1" else "1"
try:
    page_table(pool, rows, lengths, layout=layout)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("interpret", "result"), [("1", "[[2, 1]]"), ("0", "{'_page_table_kernel': 1}")], ids=["interpreter", "tracer"]
)
def test_interpreter_and_tracer_work_in_processes_of_their_own(interpret: str, result: str) -> None:
    first, error = run_python(INTERPRETER, TRITON_INTERPRET=interpret).splitlines()
    assert first == result
    assert error.startswith("TRITON_INTERPRET must keep the value it had when compiled_kv was imported")


def test_tracing_under_the_interpreter_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="capture cannot trace interpreted kernels"):
        capture(bump, ints(4), target=GPU)
