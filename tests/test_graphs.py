"""The captured graphs of every operator: whole, one launch on CUDA, no host read, and the same as the goldens."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from functools import cache
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

import compiled_kv
import compiled_kv as ckv
from compiled_kv import KVLayout
from compiled_kv.goldens import assert_graph
from compiled_kv.models import NAMES
from compiled_kv.tracing.graphs import Graphs, capture
from compiled_kv.tracing.rendering import body, summary
from tests import graph_cases
from tests.graph_cases import BATCH, FULL_TO_SWA, LAYOUT
from tests.graph_cases_engines import ENGINE_CASES

pytest.importorskip("triton", reason="kernels are traced")

GRAPHS = Path(__file__).parent.parent / "graphs"
TARGETS = ("cuda:sm_90", "cpu")
SIZES = {"static": False, "dynamic": True}
CASES = graph_cases.CASES | ENGINE_CASES
IN_PLACE = ("update_metadata", "write_metadata", "fill_kv_indices", "place_tokens")


@cache
def graphs_of(operator: str, form: str, sizes: str, target: str) -> Graphs:
    case = CASES[operator][form]
    return capture(case.step, *case.arguments, target=target, dynamic=SIZES[sizes])


@pytest.mark.parametrize("operator", CASES)
def test_graphs_are_whole_clean_and_as_accepted(operator: str) -> None:
    shown: dict[str, list[Graphs]] = {}
    for form in CASES[operator]:
        for sizes in SIZES:
            shown[f"{form}, {sizes}"] = captured = [graphs_of(operator, form, sizes, target) for target in TARGETS]
            for graphs in captured:
                check_is_clean(graphs, in_place=writes(operator, form))
    assert_graph(shown, GRAPHS / "dynamo" / f"{operator}.txt")
    on_cuda = {title: pair[0] for title, pair in shown.items()}
    on_cpu = {title: pair[1] for title, pair in shown.items() if title.endswith("dynamic")}
    assert_graph(on_cuda, GRAPHS / "aot" / f"{operator}.txt")
    assert_graph(on_cpu, GRAPHS / "aot" / f"{operator}_cpu.txt", detail="counts")


def writes(operator: str, form: str) -> bool:
    return operator in IN_PLACE or "out" in form or form in ("in place", "status")


def check_is_clean(graphs: Graphs, in_place: bool) -> None:
    assert graphs.is_whole, graphs
    assert graphs.host_reads == [], graphs
    if graphs.target == "cpu":
        assert graphs.launches == {}
        assert in_place or graphs.copies == []
    else:
        assert list((graphs.launches or {}).values()) == [1], graphs
        assert graphs.copies == [], graphs
    assert len([node for node in graphs.dynamo[0].graph.nodes if "compiled_kv" in str(node.target)]) == 1


def test_every_golden_is_of_an_operator_or_of_a_models_step() -> None:
    shown = [*CASES, *(f"step_{model}{sizes}" for model in NAMES for sizes in ("", "_dynamic"))]
    wanted = {f"{tier}/{name}" for tier in ("dynamo", "aot") for name in shown} | {f"aot/{name}_cpu" for name in CASES}
    assert {str(path.relative_to(GRAPHS).with_suffix("")) for path in GRAPHS.glob("*/*.txt")} == wanted


def test_every_registered_operator_is_in_a_golden() -> None:
    for module in pkgutil.walk_packages(compiled_kv.__path__, "compiled_kv."):
        with contextlib.suppress(ImportError):  # what a peer that is not installed would need registers nothing
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("compiled_kv::")}
    assert len(registered) >= 29
    shown = "\n".join(path.read_text(encoding="utf-8") for path in GRAPHS.glob("dynamo/*.txt"))
    assert {name for name in registered if f"{name.replace('::', '.')}(" not in shown} == set()


@pytest.mark.parametrize("target", ["cuda:sm_80", "hip:gfx942"])
@pytest.mark.parametrize("operator", CASES)
def test_other_devices_get_the_same_launch(operator: str, target: str) -> None:
    form = next(iter(CASES[operator]))
    one, other = (graphs_of(operator, form, "dynamic", each) for each in ("cuda:sm_90", target))
    assert body(other, "aot") == body(one, "aot")
    assert summary(other) == "launches 1  copies 0  host reads 0"


@pytest.mark.parametrize("operator", ["page_table", "flashmla_kv_indices", "swa_page_table", "decode_metadata"])
def test_a_layout_given_to_a_dynamic_step_traces_whole(operator: str) -> None:
    """Its numbers are then symbols in the trace."""
    maps = (FULL_TO_SWA,) if operator == "swa_page_table" else ()

    def step(layout: KVLayout, *tensors: Tensor) -> object:
        return getattr(ckv, operator)(*tensors, layout=layout)

    check_is_clean(capture(step, LAYOUT, *BATCH, *maps, target="cuda:sm_90", dynamic=True), in_place=False)


def test_page_table_as_its_caller_sees_it() -> None:
    graphs = graphs_of("page_table", "functional", "dynamic", "cuda:sm_90")
    assert_expected_inline(
        body(graphs, "dynamo"),
        """\
in   req_to_token i32[s0, s1], req_pool_indices i64[s2], cache_seqlens i32[s2]
page_table = compiled_kv.page_table(req_to_token, req_pool_indices, cache_seqlens, page_size=64, cap=1024,
     width=16)
     i32[s2, 16]
out  page_table""",
    )


def test_plain_decode_as_its_caller_sees_it() -> None:
    graphs = graphs_of("decode_metadata", "plain decode", "dynamic", "cuda:sm_90")
    assert_expected_inline(
        body(graphs, "dynamo"),
        """\
in   req_to_token i32[s0, s1], req_pool_indices i64[s2], seq_lens i32[s2]
decode_metadata = compiled_kv.decode_metadata(req_to_token, req_pool_indices, seq_lens, page_size=64,
     cap=1024, delta=0, q_len=1, pad_seqlen=0, width=16, num_tokens=s2)
     (i32[s2], i32[s2 + 1], i32[s2 + 1], i32[s2, 16], i32[0], i64[s2], i64[0])
out  decode_metadata[0], decode_metadata[1], decode_metadata[2], decode_metadata[3], decode_metadata[5]""",
    )


def test_every_mode_is_one_launch() -> None:
    forms = CASES["decode_metadata"]
    lines = [f"{form:32}{summary(graphs_of('decode_metadata', form, 'dynamic', 'cuda:sm_90'))}" for form in forms]
    assert_expected_inline(
        "\n".join(lines),
        """\
plain decode                    launches 1  copies 0  host reads 0
verify                          launches 1  copies 0  host reads 0
draft step 2                    launches 1  copies 0  host reads 0
ragged draft-extend             launches 1  copies 0  host reads 0
ragged draft-extend, no slots   launches 1  copies 0  host reads 0
slots given                     launches 1  copies 0  host reads 0
padded                          launches 1  copies 0  host reads 0
sliding window, token map       launches 1  copies 0  host reads 0
sliding window, page map        launches 1  copies 0  host reads 0
status                          launches 1  copies 0  host reads 0
out, tail kept                  launches 1  copies 0  host reads 0
everything, out                 launches 1  copies 0  host reads 0""",
    )
