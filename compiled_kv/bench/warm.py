"""Compile what a run needs in many processes at once, into the caches on disk that the run's own process then reads.

Nothing is timed here, and nothing compiles while something is timed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable

from compiled_kv.bench.cells import Cell, K

PROCESSES = 15
COMPILED = (1, 64)  # page sizes whose gathers are compiled; the graph of 64 serves all others
SECTIONS = ("schedule", "host", "cpu")


def kinds(cells: Iterable[Cell]) -> list[tuple[int, str]]:
    """What kernels are specialized on: page size, and which maps and windows there are; what takes longest first."""
    found = {(cell.page_size, cell.swa) for cell in cells}
    found |= {(64, swa) for _, swa in found}
    return sorted(found, key=lambda kind: (kind[0] not in COMPILED, kind))


def warm_caches(cells: list[Cell], sections: Iterable[str]) -> list[str]:
    """One process a kind, checking one cell of it, and one a section; returns those that failed."""
    waiting = [[section] for section in sections if section in SECTIONS]
    waiting += [[str(page), swa] for page, swa in kinds(cells)]
    at_once = max(1, min(PROCESSES, (os.cpu_count() or 1) - 1))
    running: dict[str, subprocess.Popen[bytes]] = {}
    failed = []
    while waiting or running:
        while waiting and len(running) < at_once:
            words = waiting.pop(0)
            running[" ".join(words)] = _started(words)
        for name in [name for name, process in running.items() if process.poll() is not None]:
            if running.pop(name).returncode:
                failed.append(name)
        time.sleep(0.05)
    return failed


def _started(words: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "compiled_kv.bench.warm", *words]
    # One process compiles with one thread: they share the processors already.
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def compile_kind(page_size: int, swa: str) -> None:
    import torch

    from compiled_kv.bench.contenders import contenders
    from compiled_kv.bench.expected import check
    from compiled_kv.bench.inputs import make_inputs

    # The size of a default run's cells: a compiled gather is laid out for the sizes that it meets first.
    given = make_inputs(Cell(64, 8 * K, 128 * K, page_size, swa), torch.device("cuda"), 1)
    for name, contender in contenders(given).items():
        if not name.endswith(("compiled", "inductor")) or page_size in COMPILED:
            check(given, name, contender, 0)


def compile_section(section: str) -> None:
    import torch

    from compiled_kv.bench import extras

    device = torch.device("cuda")
    if section == "cpu":
        extras.cpu(1)
    else:
        {"schedule": extras.schedule, "host": extras.host}[section](device, 1)


if __name__ == "__main__":
    if sys.argv[1] in SECTIONS:
        compile_section(sys.argv[1])
    else:
        compile_kind(int(sys.argv[1]), sys.argv[2])
