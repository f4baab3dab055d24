"""Hold the auditor's verdicts on the corpus against a CUDA device: `python -m tests.audit_on_gpu`.

Each step runs alone in a process: compiled by Inductor, warmed, then once under torch's sync debug mode and once under
CUDA graph capture. It prints a line a step and the confusion table.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any

import torch

from compiled_kv.auditor import audit
from compiled_kv.tracing.fakes import host
from tests.audit_corpus.arguments import arguments
from tests.audit_corpus.clean import CLEAN
from tests.audit_corpus.hazards import HAZARDS

STEPS = {**HAZARDS, **CLEAN}
WAITS = ("host-read", "data-dependent-shape", "host-to-device-copy", "unsafe-under-capture")


def on_device(value: Any) -> Any:
    if isinstance(value, host):
        return value.tensor
    if isinstance(value, torch.Tensor | torch.nn.Module):
        return value.cuda()
    for name, held in vars(value).items() if hasattr(value, "__dict__") else ():
        setattr(value, name, on_device(held))
    return value


def measured(name: str) -> dict[str, str | None]:
    """What raised, if anything, when the step synchronized under the debug mode, and when it was captured."""
    step = torch.compile(STEPS[name])
    given = [on_device(value) for value in arguments(STEPS[name])]
    with torch.no_grad():
        for _ in range(3):
            step(*given)
        torch.cuda.synchronize()
        return {"sync": raised(with_sync_debug, step, given), "capture": raised(captured, step, given)}


def with_sync_debug(step: Any, given: list[Any]) -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(step: Any, given: list[Any]) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*given)
    graph.replay()
    torch.cuda.synchronize()


def raised(run: Any, *given: Any) -> str | None:
    try:
        run(*given)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return None


def main() -> None:
    table: Counter[tuple[bool, bool]] = Counter()
    for name, step in STEPS.items():
        command = [sys.executable, "-m", "tests.audit_on_gpu", name]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        found = (
            json.loads(run.stdout.splitlines()[-1])
            if run.returncode == 0
            else {"sync": run.stderr[-200:], "capture": "-"}
        )
        rules = sorted({each.rule for each in audit(step, *arguments(step)).at_least("warning")})
        waits, did = any(rule in WAITS for rule in rules), bool(found["sync"] or found["capture"])
        table[waits, did] += 1
        print(
            f"{name:26} static {', '.join(rules) or 'clean':44} sync {found['sync']} capture {found['capture']}",
            flush=True,
        )
    print("\nstatic says it waits / the device raised: " + ", ".join(f"{key}: {n}" for key, n in sorted(table.items())))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measured(sys.argv[1])))
    else:
        main()
