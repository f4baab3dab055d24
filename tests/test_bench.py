"""The benchmark: it runs anywhere in its quick form, and everyone in it computes what the oracle computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import compiled_kv as ckv
from compiled_kv import reference
from compiled_kv.bench.cells import AXES, Cell, default_cells, full_cells
from compiled_kv.bench.contenders import contenders
from compiled_kv.bench.expected import check, expected
from compiled_kv.bench.inputs import make_inputs
from compiled_kv.bench.report import geometric_mean
from compiled_kv.bench.timing import interval_rank, paired_ratio
from tests.conftest import INTERPRETED

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
SMALL = {
    "plain": Cell(3, 600, 2048, 16),
    "page-one": Cell(2, 200, 256, 1),
    "skewed-row": Cell(4, 600, 1024, 16, "row", "skewed"),
    "window": Cell(3, 6000, 8192, 64, "window"),
    "trace": Cell(3, 1024, 1024, 64, "off", "trace"),
}
PUBLISHED = {"serial", "grid", "fused", "looped", "gather", "gather-compiled"}


@pytest.mark.parametrize("cell", SMALL.values(), ids=SMALL)
def test_what_is_expected_is_what_the_oracle_says(cell: Cell) -> None:
    given = make_inputs(cell, CPU, 2)
    for rows, seq_lens in zip(given.rows, given.seq_lens):
        wanted, _ = reference.decode_metadata(
            given.req_to_token, rows, seq_lens, layout=given.layout, full_to_swa=given.full_to_swa
        )
        found = expected(given, rows, seq_lens, 0, windowed=True)
        for name, a, b in zip(ckv.DecodeMetadata._fields, found, wanted):
            assert (a is None and b is None) or torch.equal(a, b), name


def check_everyone(cell: Cell) -> set[str]:
    """Raises where a contender differs from what is expected; returns those that do the same work as ours."""
    given = make_inputs(cell, CPU, 2)
    running = contenders(given)
    for name, contender in running.items():
        if not (INTERPRETED and ("compiled" in name or name == "inductor")):
            check(given, name, contender, 0)
            check(given, name, contender, 1)
    return {name for name, contender in running.items() if contender.same_work}


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be traced")
@pytest.mark.parametrize("name", ["plain", "window"])
def test_contenders_on_the_cpu_are_equal(name: str) -> None:
    assert check_everyone(SMALL[name]) == {"gather", "gather-compiled"}


@pytest.mark.skipif(INTERPRETED, reason="this process is the interpreted one")
def test_published_kernels_are_equal() -> None:
    pytest.importorskip("triton")
    script = (
        "from tests.test_bench import *\nassert [check_everyone(c) for c in SMALL.values()] == [PUBLISHED] * len(SMALL)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True,
        text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_a_wrong_contender_is_caught() -> None:
    given = make_inputs(SMALL["plain"], CPU, 1)
    contender = contenders(given)["ours"]
    right = contender.step

    def wrong(index: int) -> None:
        right(index)
        assert contender.out is not None
        contender.out.page_table[0, 0] += 1

    contender.step = wrong
    with pytest.raises(AssertionError, match="ours: page_table differs in"):
        check(given, "ours", contender, 0)


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be traced")
def test_quick_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "compiled_kv.bench", "--quick", "--only", "cells", "--match", "page16"]
    ran = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    (cell,) = results["cells"]
    assert {"ours", "ours-clear", "incremental", "gather", "gather-compiled"} <= set(cell["times"])
    assert cell["name"] in (tmp_path / "results.md").read_text()


def test_cells_cover_every_pair_of_neighbouring_axes() -> None:
    cells, everything = default_cells(), full_cells()
    assert len({cell.name for cell in cells}) == len(cells) == 150
    assert {cell.name for cell in cells} <= {cell.name for cell in everything}
    for one, other in zip(AXES, list(AXES)[1:]):
        pairs = {(getattr(cell, one), getattr(cell, other)) for cell in everything}
        assert {(getattr(cell, one), getattr(cell, other)) for cell in cells} == pairs, (one, other)


@pytest.mark.parametrize(
    ("n", "rank"), [(3, 0), (5, 0), (6, 0), (10, 1), (25, 7), (100, 39)], ids=lambda value: str(value)
)
def test_interval_of_a_median(n: int, rank: int) -> None:
    """Order statistics of the usual table: for 25 values the 8th and the 18th."""
    assert interval_rank(n) == rank


def test_ratios_are_paired() -> None:
    assert paired_ratio([1, 2, 30], [2, 4, 60]) == {"median": 0.5, "low": 0.5, "high": 0.5}
    assert geometric_mean([0.5, 2, 4, 0.25]) == pytest.approx(1)
