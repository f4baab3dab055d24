"""Measure a step in a process of its own, which a failed capture or a device assert may ruin.

python -m compiled_kv.auditor.apart MODULE:FUNCTION FILE
    [--batch-sizes 2,4,8] [--dynamic true|false] [--no-capture-scalars]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from compiled_kv.auditor.entry import EntryError, examples, load
from compiled_kv.auditor.errors import said
from compiled_kv.auditor.measured import Measured
from compiled_kv.auditor.measuring import measure
from compiled_kv.tracing.targets import Target

SECONDS = 600.0
_DYNAMIC = {"true": True, "false": False, "none": None}


def obstacle(target: str) -> str | None:
    """Why a step for `target` cannot be measured on this machine, None if it can."""
    wanted = Target.parse(target)
    if wanted.is_cpu:
        return "the target is the CPU"
    if not torch.cuda.is_available():
        return "no CUDA device"
    here = _architecture()
    if wanted.arch is None or wanted.arch == here:
        return None
    return f"the device here is {torch.cuda.get_device_name(0)} ({here}), the target {target}"


def _architecture() -> int | str:
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(0).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(0)
    return 10 * major + minor


def measure_apart(
    entry: str, batch_sizes: Sequence[int] = (), dynamic: bool | None = None, capture_scalars: bool = True,
    seconds: float = SECONDS,
) -> Measured | str:  # fmt: skip
    """`measure` the step that MODULE:FUNCTION gives in another process; why that failed, where it did.

    Args:
        entry, batch_sizes: as on the command line.
        dynamic, capture_scalars: as in `measure`.
        seconds: after these the process is ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "measured.json", Path(folder) / "log.txt"
        command = [sys.executable, "-m", __name__, entry, str(file), "--dynamic", str(dynamic).lower()]
        command += ["--batch-sizes", ",".join(map(str, batch_sizes))] if batch_sizes else []
        command += [] if capture_scalars else ["--no-capture-scalars"]
        try:
            with log.open("w") as kept:  # no pipe: compiler processes may outlive the one that is waited for
                run = subprocess.run(command, stdout=kept, stderr=kept, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return f"it took longer than {seconds:.0f} s"
        if not file.exists():
            last = (log.read_text(errors="replace").strip().splitlines() or ["no word of why"])[-1]
            return f"the process that ran the step ended with status {run.returncode}: {last[:300]}"
        found = json.loads(file.read_text(encoding="utf-8"))
    return str(found["error"]) if "error" in found else Measured.of(found)


def main() -> None:
    """Measure, write the file, and leave without the teardown of a CUDA context that may be spoilt."""
    parser = argparse.ArgumentParser()
    parser.add_argument("entry")
    parser.add_argument("file", type=Path)
    parser.add_argument("--batch-sizes", default="")
    parser.add_argument("--dynamic", choices=_DYNAMIC, default="none")
    parser.add_argument("--no-capture-scalars", dest="capture_scalars", action="store_false")
    given = parser.parse_args()
    sizes = [int(size) for size in given.batch_sizes.split(",") if size]
    found = _measured(given.entry, sizes, _DYNAMIC[given.dynamic], given.capture_scalars)
    given.file.write_text(json.dumps(found), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _measured(entry: str, sizes: Sequence[int], dynamic: bool | None, capture_scalars: bool) -> dict[str, object]:
    try:
        first, *others = examples(load(entry), sizes)
        seen = measure(
            first.step, first.args, first.kwargs, batches=[each.args for each in others], dynamic=dynamic,
            capture_scalars=capture_scalars,
        )  # fmt: skip
        return asdict(seen)
    except EntryError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": said(error)}


if __name__ == "__main__":
    main()
