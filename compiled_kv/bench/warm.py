"""Compile what the cells need in several processes at once, into the caches on disk that this process then reads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable

from compiled_kv.bench.cells import Cell, K

PROCESSES = 15


def kinds(cells: Iterable[Cell]) -> list[tuple[int, str]]:
    """What kernels are specialized on: page size, and which maps and windows there are."""
    return sorted({(cell.page_size, cell.swa) for cell in cells})


def warm_caches(cells: list[Cell]) -> None:
    """One process a kind, each checking one small cell of it; what fails here fails again, and says so, in the run."""
    commands = [[sys.executable, "-m", "compiled_kv.bench.warm", str(page), swa] for page, swa in kinds(cells)]
    at_once = max(1, min(PROCESSES, (os.cpu_count() or 1) - 1))
    for begin in range(0, len(commands), at_once):
        running = [
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for command in commands[begin : begin + at_once]
        ]
        for process in running:
            process.wait()


def compile_kind(page_size: int, swa: str) -> None:
    import torch

    from compiled_kv.bench.contenders import contenders
    from compiled_kv.bench.expected import check
    from compiled_kv.bench.inputs import make_inputs

    given = make_inputs(Cell(2, K, 8 * K, page_size, swa), torch.device("cuda"), 2)
    for name, contender in contenders(given).items():
        if not name.startswith(("gather", "inductor")) or page_size in (1, 64):
            check(given, name, contender, 0)


if __name__ == "__main__":
    compile_kind(int(sys.argv[1]), sys.argv[2])
