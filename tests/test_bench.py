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


SCHEDULE = """
from compiled_kv.bench import baseline_schedule
lengths = torch.randint(0, 3000, (70,), dtype=torch.int32)
out = torch.zeros(9, 8, dtype=torch.int32), torch.zeros(71, dtype=torch.int32)
baseline_schedule.run(lengths, out)
assert all(map(torch.equal, out, reference.flashmla_schedule(lengths, num_sm_parts=9)))
"""


@pytest.mark.skipif(INTERPRETED, reason="this process is the interpreted one")
def test_published_kernels_are_equal() -> None:
    pytest.importorskip("triton")
    script = (
        "from tests.test_bench import *\nassert [check_everyone(c) for c in SMALL.values()] == [PUBLISHED] * len(SMALL)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script + SCHEDULE], env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=ROOT,
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]


ATTENTION = """
import torch
import torch.nn.functional as F
from compiled_kv import DecodeMetadata
from compiled_kv.bench.llama import attention

for queries, heads, kv_heads, lens in ((1, 4, 2, [5, 1100]), (3, 4, 2, [130, 3])):
    lengths, dim = torch.tensor(lens, dtype=torch.int32), 32
    table = (1 + torch.randperm(2 * 40)).int().view(2, 40)
    k, v = (torch.randn(81 * 32, kv_heads, dim) for _ in range(2))
    q = torch.randn(2, queries, heads, dim)
    found = attention(q, k, v, DecodeMetadata(lengths, lengths, lengths, table), 32)
    for row, length in enumerate(lens):
        slots = (table[row, :, None] * 32 + torch.arange(32)).flatten()[:length].long()
        keys, values = (pool[slots].transpose(0, 1)[None] for pool in (k, v))
        seen = torch.arange(length) <= length - queries + torch.arange(queries)[:, None]
        wanted = F.scaled_dot_product_attention(
            q[row].transpose(0, 1)[None], keys, values, attn_mask=seen, enable_gqa=True
        )[0].transpose(0, 1)
        assert (found[row] - wanted).abs().max() < 1e-4, (queries, row)
"""

LOOP = """
import torch
from compiled_kv.bench import step
for speculative in (True, False):
    loop = step.Loop("tiny", 1, 63, 2, speculative, torch.device("cpu"))
    step.run(loop, 1)
loop.layout = step.ckv.KVLayout(64, 8)  # shorter than the requests: lengths are clamped
try:
    step.run(loop, 1)
except AssertionError as error:
    assert "the ways differ" in str(error)
else:
    raise SystemExit("tokens did not depend on the metadata")
"""


@pytest.mark.skipif(INTERPRETED, reason="this process is the interpreted one")
@pytest.mark.parametrize("script", [ATTENTION, LOOP], ids=["attention-is-that-of-torch", "ways-give-the-same-tokens"])
def test_decode_step_interpreted(script: str) -> None:
    pytest.importorskip("triton")
    ran = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True,
        text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]


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
