"""The benchmark: it runs anywhere in its quick form, and everyone in it computes what the oracle computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch

import compiled_kv as ckv
from compiled_kv import reference
from compiled_kv.bench.cells import AXES, QUICK, Cell, default_cells, full_cells
from compiled_kv.bench.claims import FORMS, bound_ratios, claims, geometric_mean, misses
from compiled_kv.bench.contenders import contenders, incremental
from compiled_kv.bench.expected import check, expected
from compiled_kv.bench.inputs import make_inputs
from compiled_kv.bench.results import opened
from compiled_kv.bench.timing import interval_rank, paired_ratio
from compiled_kv.bench.warm import kinds
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


def check_gather(cell: Cell) -> None:
    """The floor that knows every address reads what the others read, and writes their tables."""
    given = make_inputs(cell, CPU, 2)
    running = contenders(given)
    table, swa_table = running["ours"].out[3:5]
    for index, (rows, seq_lens) in enumerate(zip(given.rows, given.seq_lens)):
        wanted = expected(given, rows, seq_lens, 77, windowed=True)
        for tensor in (table, swa_table):
            if tensor is not None:
                tensor.fill_(77)
        running["gather-known"].step(index)
        assert torch.equal(table, wanted.page_table)
        assert swa_table is None or torch.equal(swa_table, wanted.swa_page_table)


@pytest.mark.skipif(INTERPRETED, reason="the same in either process")
def test_tasks_of_the_known_gather() -> None:
    pytest.importorskip("triton")
    from compiled_kv.bench.floors import tasks_of

    given = make_inputs(Cell(2, 6000, 8192, 4, "window"), CPU, 1)
    given.rows, given.seq_lens = torch.tensor([[3, 0]]), torch.tensor([[4100, 5]], dtype=torch.int32)
    assert tasks_of(given, 0).tolist() == [
        [3 * 8192, 0, 512, 1],  # the window of 4,096 tokens has passed one page
        [3 * 8192 + 2048, 512, 512, 1 - 512],
        [3 * 8192 + 4096, 1024, 1, 1 - 1024],
        [0, 2048, 2, 0],
    ]


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
        "from tests.test_bench import *\n"
        "assert [check_everyone(c) for c in SMALL.values()] == [PUBLISHED] * len(SMALL)\n"
        "for cell in SMALL.values(): check_gather(cell)\n"
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
from compiled_kv.bench import llama_kernels
from compiled_kv.bench.llama_kernels import attention

for queries, heads, kv_heads, lens, programs in (
    (1, 4, 2, [5, 1100], 1024), (3, 4, 2, [130, 3], 1024), (3, 4, 2, [130, 3], 8), (1, 4, 2, [130, 300], 1)
):
    llama_kernels.PROGRAMS = programs
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

FORWARD = """
import torch
import torch.nn.functional as F
from compiled_kv import DecodeMetadata
from compiled_kv.bench.llama import CONFIGS, Llama, Weights

weights = Weights(CONFIGS["tiny"], torch.device("cpu"), torch.float32)
config, table = weights.config, torch.tensor([[2, 4], [3, 1]], dtype=torch.int32)
model = Llama(weights, slots=5 * 16, page_size=16)
tokens = torch.randint(0, config.vocab, (2, 20))
slots = (table[:, :, None] * 16 + torch.arange(16)).flatten(1)


def rotated(x, position):
    half = config.head_dim // 2
    angle = position[:, None, None] * 500000.0 ** -(torch.arange(half) / half)
    one, other = x[..., :half], x[..., half:]
    return torch.cat((one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()), -1)


def dense(sequence):
    hidden, position = weights.embedding[sequence], torch.arange(len(sequence))
    unit = lambda x: x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    heads = (config.heads, config.kv_heads, config.kv_heads)
    for qkv, out, gate_up, down in weights.layers:
        q, k, v = (unit(hidden) @ qkv.T).view(len(sequence), -1, config.head_dim).split(heads, dim=1)
        q, k, v = (x.transpose(0, 1) for x in (rotated(q, position), rotated(k, position), v))
        attended = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        hidden = hidden + attended.transpose(0, 1).flatten(1) @ out.T
        gate, up = (unit(hidden) @ gate_up.T).chunk(2, -1)
        hidden = hidden + (F.silu(gate) * up) @ down.T
    return (unit(hidden) @ weights.head.T).argmax(-1)


done = 0
for queries in (3, 1, 1, 4):
    done += queries
    lengths = torch.full((2,), done, dtype=torch.int32)
    placed = slots[:, done - queries : done].flatten().contiguous()
    found = model.step(tokens[:, done - queries : done], DecodeMetadata(lengths, lengths, lengths, table, None, placed))
    wanted = torch.stack([dense(row[:done])[-queries:] for row in tokens])
    assert torch.equal(found, wanted), (done, found, wanted)
"""

LOOP = """
import torch
from compiled_kv.bench import llama_kernels, step, step_loop
step_loop.CONTEXT, llama_kernels.PROGRAMS = 256, 2  # fewer programs to interpret
for speculative in (True, False):
    loop = step.Loop("tiny", 1, 63, 2, speculative, torch.device("cpu"))
    step.run(loop, 1)
loop.layout = step_loop.ckv.KVLayout(64, 8)  # shorter than the requests: lengths are clamped
try:
    step.run(loop, 1)
except AssertionError as error:
    assert "the ways differ" in str(error)
else:
    raise SystemExit("tokens did not depend on the metadata")
"""


@pytest.mark.skipif(INTERPRETED, reason="this process is the interpreted one")
@pytest.mark.parametrize(
    "script",
    [ATTENTION, FORWARD, LOOP],
    ids=["attention", "forward-pass-is-that-of-a-dense-one", "ways-give-the-same-tokens"],
)
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
    ours = {"ours", "ours-clear", "incremental", "incremental-untouched"}
    assert ours | {"gather", "gather-compiled"} <= set(cell["times"])
    assert cell["name"] in (tmp_path / "results.md").read_text()


def beside(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/beside.py", "--quick", "--rounds", "1", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_trees_side_by_side() -> None:
    ran = beside(".", ".,WARPS=4", "--contender", "ours")
    assert ran.returncode == 0, ran.stderr
    found = [line.split()[:3] for line in ran.stdout.splitlines()]
    assert found == [[cell.name, "ours", tree] for cell in QUICK for tree in (".", ".,WARPS=4")]


@pytest.mark.parametrize(
    "tree, said", [("nobody", "neither a folder with compiled_kv/"), (".,NOTHING=3", "no file begins a line with")]
)
def test_a_tree_that_is_not_there(tree: str, said: str) -> None:
    ran = beside(tree)
    assert ran.returncode == 2 and f"{tree}" in ran.stderr and said in ran.stderr


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


def made_up(name: str, ours: float, context: int = 8192) -> dict[str, object]:
    """A cell in which the best published design takes 2 us."""
    ratio = {"median": ours / 2, "low": ours / 2, "high": ours / 2}
    samples = [ours] * 25
    sizes = {"batch": 1, "length": 128, "context": context, "page_size": 64, "swa": "off", "lengths": "uniform"}
    times = {form: {"median": ours, "samples": samples} for form in FORMS}
    floors = ("ours/gather-known", "ours-clear/copy-tables", "ours-clear/loads", "ours-clear/gather-known")
    ratios = dict.fromkeys(("rebuild", *FORMS, *floors), ratio)
    ratios["ours-clear/loads"] = {"median": 1.3, "low": 1.2, "high": 1.4}
    return {"name": name, **sizes, "times": times, "best": "grid", "ratios": ratios}


def test_claims_are_judged() -> None:
    cells = [made_up("level", 2.0), made_up("wide", 2.2, 1 << 20)]
    found = {each.what: each for each in claims({"cells": cells})}
    worst = found["full rebuild over the best published design, worst cell"]
    assert (worst.measured, worst.where, worst.is_met) == ("1.100 [1.100, 1.100]", "wide, grid", False)
    assert [cell["name"] for cell in misses(cells)] == ["wide"]
    assert found["the same, cells above 1.03"].measured == "1 of 2"
    assert found["context bound 1 M over 8 K, kept tails, worst of 1"].is_met
    untouched = found["context bound 1 M over 8 K, incremental, slots that nobody touched before, worst of 1"]
    assert (untouched.measured, untouched.is_met) == ("1.100 [1.100, 1.100]", None)
    assert not found["best published design over the incremental update, geometric mean"].is_met
    for name, ours, slowest in (("wide", 2.2, "1.100 [1.100, 1.100]"), ("slow", 2.8, "1.300 [1.200, 1.400]")):
        (held,) = (each for each in claims({"cells": [made_up(name, ours)]}) if "slowest of its floors" in each.what)
        assert (held.measured, held.where) == (slowest, name)
    ((name, ratio),) = bound_ratios(cells, "ours")
    assert name == "wide" and ratio["median"] == pytest.approx(1.1)


@pytest.mark.skipif(INTERPRETED, reason="the same in either process")
def test_figures_are_drawn_of_what_there_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from compiled_kv.bench.plots import plots

    assert plots({"machine": {}}, tmp_path) == []
    (drawn,) = plots({"machine": {}, "cells": [made_up("level", 2.0), made_up("wide", 2.2, 1 << 20)]}, tmp_path)
    text = drawn.read_text()
    assert drawn.name == "ratios.svg" and "<svg" in text


def test_results_of_other_code_are_not_added_to(tmp_path: Path) -> None:
    now = {"device": "one", "torch": "2", "triton": "3", "code": "abc"}
    (tmp_path / "results.json").write_text(json.dumps({"machine": now, "cells": [1], "failed": {"cell": "text"}}))
    assert opened(tmp_path, now) == {"machine": now, "cells": [1]}
    with pytest.raises(click.UsageError, match=r"this is .*'code': 'def'"):
        opened(tmp_path, {**now, "code": "def"})
    assert opened(tmp_path, {**now, "code": "def"}, anew=True) == {"machine": {**now, "code": "def"}}


def test_every_batch_of_a_cell_is_aligned() -> None:
    given = make_inputs(Cell(1, 1024, 8192, 16), CPU, 5)
    for index in range(5):
        assert given.rows[index].data_ptr() % 16 == given.seq_lens[index].data_ptr() % 16 == 0
        assert given.rows[index].shape == (1,) and 896 <= int(given.seq_lens[index]) <= 1024


def test_slots_are_allocated_as_they_were_unless_they_stay_untouched() -> None:
    given = make_inputs(Cell(2, 600, 2048, 16, "row"), CPU, 3)
    assert given.full_to_swa is not None
    pool, swa = given.req_to_token.clone(), given.full_to_swa.clone()
    for is_untouched, writes in ((False, 1), (True, 0)):
        contender, before = incremental(given, is_untouched), (given.req_to_token._version, given.full_to_swa._version)
        assert contender.before is not None and contender.seq_lens is not None
        lengths = contender.seq_lens.clone()
        contender.before()
        assert (given.req_to_token._version, given.full_to_swa._version) == tuple(n + writes for n in before)
        assert torch.equal(contender.seq_lens, lengths + 3)
    assert torch.equal(given.req_to_token, pool) and torch.equal(given.full_to_swa, swa)


@pytest.mark.skipif(INTERPRETED, reason="the same in either process")
@pytest.mark.parametrize(
    ("spans", "share"),
    [([], None), ([(0, 4), (1, 2), (8, 10)], 0.4), ([(3, 5), (0, 3)], 0.0)],
    ids=["none", "gap", "full"],
)
def test_idle_share_of_a_timeline(spans: list[tuple[float, float]], share: float | None) -> None:
    pytest.importorskip("triton")
    from compiled_kv.bench.step import idle_share

    assert idle_share(spans) == share


def test_warming_compiles_what_every_cell_needs() -> None:
    wanted = {(cell.page_size, cell.swa) for cell in default_cells()}
    assert wanted <= set(kinds(default_cells()))
    assert kinds([Cell(8, 1024, 8192, 16, "row")]) == [(64, "row"), (16, "row")]


@pytest.mark.skipif(INTERPRETED, reason="the same in either process")
def test_frozen_metadata_is_that_of_the_mean_lengths() -> None:
    pytest.importorskip("triton")
    from compiled_kv.bench.step_loop import DRAFTS, Loop

    plain = Loop("tiny", 1, 100, 5, False, CPU)
    plain.freeze(5)
    assert plain.metas[0].cache_seqlens.tolist() == [102]  # 100 to 104
    drafting = Loop("tiny", 2, 100, 3, True, CPU)
    drafting.accepted[:3] = torch.tensor([[1, 4], [3, 4], [2, 4]])
    drafting.freeze(3)
    means = [100 + 2, 100 + 4]  # of 0, 1, 4 and of 0, 4, 8 tokens more; 5 / 3 is nearest to 2
    for index, (queries, added) in enumerate([(1, 1), (1, 2), (1, 3), (DRAFTS, DRAFTS)]):
        meta = drafting.metas[index]
        assert meta.cache_seqlens.tolist() == [mean + added for mean in means]
        assert meta.slot_mapping is not None and len(meta.slot_mapping) == 2 * queries
    assert drafting.seq_lens.tolist() == [100, 100] and drafting.tokens_a_step == pytest.approx(3)


@pytest.mark.gpu
@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
def test_captured_ways_give_the_same_tokens(speculative: bool) -> None:
    from compiled_kv.bench.step import run
    from compiled_kv.bench.step_loop import WAYS, Loop

    with torch.no_grad():
        found = run(Loop("tiny", 8, 700, 12, speculative, torch.device("cuda")), 2)
    assert set(found["times"]) == set(WAYS)
    assert all(0 <= each["waits"] < 1 for each in found["times"].values())
