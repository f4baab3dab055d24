"""COMPILED_KV_DEBUG=1, read at import, turns a status bit into an assert; each case is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import DEVICES

PREPARE = """
import sys, torch
import compiled_kv as ckv

device, row, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
pool, rows = torch.arange(16, device=device).reshape(2, 8), torch.tensor([row], device=device)
layout = ckv.KVLayout(page_size=4, max_context_len=8)
lengths = torch.tensor([length], device=device)
"""

DECODE = PREPARE + "print(ckv.decode_metadata(pool, rows, lengths, layout=layout).cache_seqlens.tolist())"
COMPILED = PREPARE + (
    "step = torch.compile(ckv.decode_metadata, fullgraph=True)\n"
    "print(step(pool, rows, lengths, layout=layout).cache_seqlens.tolist())"
)
TABLE = PREPARE + "print(ckv.page_table(pool - 12, rows, lengths, layout=layout).tolist())"

# script, row, length, debug, what it prints (None: it must fail)
CASES = {
    "good": (DECODE, 0, 8, True, "[8]"),
    "too-long": (DECODE, 0, 9, True, None),
    "bad-row": (DECODE, 5, 3, True, None),
    "too-long-compiled": (COMPILED, 0, 9, True, None),
    "good-compiled": (COMPILED, 0, 8, True, "[8]"),
    "bad-slot-of-a-table": (TABLE, 0, 8, True, None),
    "without-debug-it-is-clamped": (DECODE, 0, 9, False, "[8]"),
}


def run(script: str, *arguments: object, debug: bool) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("COMPILED_KV_DEBUG", "TRITON_INTERPRET")}
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**environment, **({"COMPILED_KV_DEBUG": "1"} if debug else {})},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("script, row, length, debug, printed", CASES.values(), ids=CASES)
def test_a_status_bit_becomes_an_assert(
    script: str, row: int, length: int, debug: bool, printed: str | None, device: str
) -> None:
    ran = run(script, device, row, length, debug=debug)
    if printed is None:
        assert ran.returncode != 0 and "a status bit was set (COMPILED_KV_DEBUG=1)" in ran.stdout + ran.stderr
    else:
        assert ran.stdout.strip() == printed, ran.stderr


KERNELS = """
from compiled_kv import codegen
kernels = codegen.kernels()
print(len(kernels) > 3, {kernel.debug for kernel in kernels.values()})
"""


@pytest.mark.parametrize("debug, said", [(True, "True {True}"), (False, "True {None}")], ids=["on", "off"])
def test_kernels_keep_their_asserts_only_then(debug: bool, said: str) -> None:
    """Triton drops every `device_assert` of a kernel that is not built for debugging."""
    pytest.importorskip("triton")
    assert run(KERNELS, debug=debug).stdout.strip() == said
