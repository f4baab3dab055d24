"""What dynamo tells of a trace: where a graph broke, which guard failed, which Python number it was specialized on.

And whose line is meant, of those in a traceback or of those that run: none of torch's, none of Python's own library.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

TORCH = str(Path(torch.__file__).parent) + os.sep  # torchvision's files are no files of torch's
Place = tuple[str, int]  # a file and a line of it
_OWN = str(Path(__file__).parent.parent)
_PYTHON = sysconfig.get_path("stdlib")
# What a person typed has no file, and is that person's all the same.
_TYPED = ("<stdin>", "<console>", "<ipython-input", "<python-input")
_WRITTEN = ("<eval_with_key>", "<frozen")  # by torch, and Python's own
_FRAME = re.compile(r'File "(.+?)", line (\d+)')
_SHORT_PLACE = re.compile(r"  # (\S+?):(\d+) in ")


@dataclass(frozen=True)
class GraphBreak:
    """Where dynamo stopped a graph, and why, in its own words."""

    reason: str
    file: str
    line: int


@dataclass(frozen=True)
class Recompile:
    """A call that no compiled graph fitted: the guard that failed, in dynamo's words, and where it was made.

    `sizes` are the batch sizes of the call before and of this one, where they were given.
    """

    reason: str
    file: str
    line: int
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Limit:
    """Dynamo's word that it compiles a function no more; `sizes` as for a call that compiles again."""

    reason: str
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Frozen:
    """A Python number among the arguments: the graph was specialized on it, or, `is_input`, takes it as an input."""

    name: str
    value: Any
    file: str
    line: int
    is_input: bool = False


def graph_breaks(logged: Iterable[GraphBreak]) -> list[GraphBreak]:
    """The breaks of the trace just made, with those that dynamo only logs: where it left a whole function alone."""
    from torch._dynamo.utils import graph_break_reasons

    logged = list(logged)
    listed = [_graph_break(reason) for reason in graph_break_reasons]
    # Behind a break dynamo also looks into what Python's own library calls, logging above all: the logged ones know
    # the line of the step that called it.
    listed = [each for each in listed if not logged or of_the_step([(each.file, each.line)])]
    places = {(each.file, each.line) for each in listed}
    return listed + [each for each in logged if (each.file, each.line) not in places]


def recompiles(callers: Mapping[tuple[Any, str], Place] | None = None) -> list[Recompile]:
    """The guards that failed since this was last asked for, or since dynamo forgot all.

    `callers` has, by code and reason, the lines that called code of Python's own library.
    """
    from torch._dynamo.utils import guard_failures

    found = [
        _recompile(code, reason, (callers or {}).get((code, reason)))
        for code, reasons in guard_failures.items()
        for reason in reasons
    ]
    guard_failures.clear()
    return found


def _recompile(code: Any, reason: str, caller: Place | None) -> Recompile:
    guard = reason.partition(": ")[2].partition("  # ")[0].partition("\n")[0].strip()
    if caller is not None:
        return Recompile(guard, *caller)
    if frames := frames_in(reason):
        return Recompile(guard, *(of_the_caller(frames) or frames[-1]))
    short = _SHORT_PLACE.search(reason)
    known = short is not None and code.co_filename.endswith(short[1])  # it may be a file of torch's
    return Recompile(guard, code.co_filename, int(short[2]) if short and known else code.co_firstlineno)


def _graph_break(reason: Any) -> GraphBreak:
    frames = [(frame.filename, frame.lineno or 0) for frame in reason.user_stack]
    return GraphBreak(str(reason.reason), *innermost(frames))


def frames_in(text: str) -> list[Place]:
    """File and line of each frame that a traceback in `text` tells, the innermost last."""
    return [(match[1], int(match[2])) for match in _FRAME.finditer(text)]


def call_step(step: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    """Call a step. What runs further out than this is whoever traces it, and no line of the step's."""
    return step(*args, **(kwargs or {}))


def innermost(frames: Sequence[Place]) -> Place:
    """The last frame of the step's that is neither torch's nor Python's own."""
    users = of_the_step(frames) or frames
    return users[-1] if users else ("", 0)


def of_the_caller(frames: Sequence[Place]) -> Place | None:
    """The innermost frame that is neither torch's nor Python's, nor this package's where there is another."""
    users = of_the_step(frames)
    outside = [frame for frame in users if not frame[0].startswith(_OWN)]
    return next(iter(reversed(outside or users)), None)


def of_the_step(frames: Sequence[Place]) -> list[Place]:
    """The frames inside `call_step` that are neither torch's nor Python's; of code in no file where there is no other,
    as under `python -c`."""
    outside = max((i + 1 for i, frame in enumerate(frames) if frame[0] == __file__), default=0)
    users = [frame for frame in frames[outside:] if not is_torchs_or_pythons(frame[0])]
    return users or [frame for frame in frames[outside:] if _is_of_no_file(frame[0])]


def running(own: str, generated: Sequence[str] = ()) -> Place | None:
    """The innermost line of the step that runs now and is neither torch's, Python's nor of a file under `own`.

    None in code that a compiler wrote: in a file with one of the texts `generated` in its name. Of code that stands in
    no file, as of `python -c`, the innermost line counts where there is no other.
    """
    frame: FrameType | None = sys._getframe(1)
    nowhere = None
    while frame is not None and frame.f_code is not call_step.__code__:
        name, line = frame.f_code.co_filename, frame.f_lineno
        if any(text in name for text in generated):
            return None
        if _is_of_no_file(name):
            nowhere = nowhere or (name, line)
        elif not (is_torchs_or_pythons(name) or name.startswith(own + os.sep)):
            return name, line
        frame = frame.f_back
    return nowhere


def is_torchs_or_pythons(file: str) -> bool:
    """Whether a file is of torch, of Python's standard library, or none at all."""
    in_python = file.startswith(_PYTHON) and "site-packages" not in file
    return in_python or file.startswith(TORCH) or _is_nowhere(file)


def _is_nowhere(file: str) -> bool:
    return file.startswith("<") and not file.startswith(_TYPED)


def _is_of_no_file(file: str) -> bool:
    """Whether code was handed to Python as text: `<string>`, that is `python -c` or `exec`."""
    return _is_nowhere(file) and not file.startswith(_WRITTEN)
