"""Lines of the step's that dynamo would lose while it traces."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

from compiled_kv.tracing.events import Place, of_the_caller


@contextmanager
def lines_of_no_file_kept() -> Iterator[None]:
    """Nodes made by code in no file, as of `python -c`, keep their lines, which dynamo takes for generated code's."""
    from torch._dynamo import output_graph

    before = getattr(output_graph, "uninteresting_files", None)
    if before is None:  # a name of torch's own: where it has another the nodes are told without a line
        yield
        return
    files = before() - {"<string>"}
    with patch.object(output_graph, "uninteresting_files", lambda: files):
        yield


class Formats:
    """The lines that format what a graph gives. Dynamo puts that off until the graph has run, and does it in code of
    its own that has the first line of the function for all it does."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str, int], dict[Place, None]] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note them as dynamo comes by."""
        try:
            from torch._dynamo.variables.misc import StringFormatVariable as Deferred

            before: Callable[..., Any] = Deferred.create
        except (ImportError, AttributeError):  # names of torch's own: where it has others the function's line is told
            yield
            return

        def create(text: str, args: Sequence[Any], named: dict[str, Any]) -> Any:
            # The parts of an f-string have been here before they are put together, on a line that may be another.
            if sys._getframe(1).f_code.co_name != "BUILD_STRING":
                with suppress(ImportError, AttributeError):
                    self._note([*args, *named.values()])
            return before(text, args, named)

        with patch.object(Deferred, "create", create):
            yield

    def running(self, skipped: Sequence[str]) -> list[Place]:
        """Those that dynamo's code may be at now, if it is what formats; `skipped` are files that lie between."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(tuple(skipped)):
            frame = frame.f_back
        if frame is None or frame.f_lineno != frame.f_code.co_firstlineno:
            return []
        return list(self._places.get(_function(frame.f_code), ()))

    def _note(self, values: Sequence[Any]) -> None:
        from torch._dynamo.symbolic_convert import InstructionTranslator
        from torch._guards import TracingContext

        if not any(map(_may_wait, values)):
            return
        root = InstructionTranslator.current_tx().output.root_tx.f_code
        frames = [(frame.filename, frame.lineno or 0) for frame in TracingContext.extract_stack()]
        if place := of_the_caller(frames):
            self._places.setdefault(_function(root), {})[place] = None


def _function(code: CodeType) -> tuple[str, str, int]:
    """What dynamo's code has in common with the code that it was made of."""
    return code.co_filename, code.co_name, code.co_firstlineno


def _may_wait(argument: Any) -> bool:
    """Whether this is a tensor of an accelerator, or a list of some, in dynamo's words for them."""
    from torch._dynamo.variables.lists import BaseListVariable

    value = argument.realize()
    return any(map(_is_on_a_device, value.items if isinstance(value, BaseListVariable) else [value]))


def _is_on_a_device(value: Any) -> bool:
    from torch._dynamo.variables.tensor import TensorVariable

    return isinstance(value, TensorVariable) and getattr(value.device, "type", "") != "cpu"
