"""results.json, to which a run adds what is missing if it is of the same code and the same kind of machine."""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch

PACKAGE = Path(__file__).parent.parent
SHOWN = {"report.py", "claims.py", "plots.py", "plots_axes.py", "results.py", "__main__.py"}  # they change no time


def machine(device: torch.device) -> dict[str, Any]:
    """What times depend on: device, versions, and a digest of the operators and of the benchmark."""
    from compiled_kv.launch import triton

    named = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "device": named, "torch": torch.__version__, "triton": getattr(triton, "__version__", "absent"),
        "code": digest(),
    }  # fmt: skip


def digest() -> str:
    """Of the source files that what is timed depends on; the same on every machine."""
    files = [*PACKAGE.glob("*.py"), *(p for p in (PACKAGE / "bench").glob("*.py") if p.name not in SHOWN)]
    text = hashlib.sha256()
    for path in sorted(files):
        text.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return text.hexdigest()[:12]


def opened(out: Path, now: dict[str, Any], anew: bool = False) -> dict[str, Any]:
    """The results to add to; those that are there, where they are of the same machine and code.

    Raises:
        click.UsageError: they are of others; times of both must not stand in one table.
    """
    known = out / "results.json"
    if anew or not known.exists():
        return {"machine": now}
    results: dict[str, Any] = json.loads(known.read_text())
    there = {name: results["machine"].get(name) for name in now}
    if there != now:
        raise click.UsageError(
            f"{known} holds results of {there}, this is {now}: name another folder with --out, or drop them with --anew"
        )
    results.pop("failed", None)
    return results


def reported(out: Path) -> dict[str, Any]:
    """What a folder holds, to be shown.

    Raises:
        click.UsageError: it holds no results.
    """
    known = out / "results.json"
    if not known.exists():
        raise click.UsageError(f"{known} does not exist")
    results: dict[str, Any] = json.loads(known.read_text())
    return results


@contextmanager
def noted(results: dict[str, Any], what: str) -> Iterator[None]:
    """Let the run go on after an error, which is kept, shown, and makes the exit status 1."""
    try:
        yield
    except Exception as error:
        results.setdefault("failed", {})[what] = traceback.format_exc()[-3000:]
        click.echo(f"{what} FAILED: {type(error).__name__}: {str(error)[:500]}", err=True)
