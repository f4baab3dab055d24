"""What is told of an error: `ValueError: scale must be positive, at step.py:12`."""

from __future__ import annotations

from compiled_kv.auditor import places

LONGEST = 200


def said(error: BaseException) -> str:
    """The name and first line of an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:LONGEST]}".removesuffix(": ")


def where(error: BaseException) -> str:
    """The line of the step that raised it, to be put behind; "" where none did."""
    place = places.of_step(error)
    return f", at {place[0]}:{place[1]}" if place else ""
