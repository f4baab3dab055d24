"""What torch logs during a trace, kept instead of printed: breaks, recompiles past the limit, analyses given up."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compiled_kv.tracing.events import GraphBreak, Limit, Place, frames_in, innermost, of_the_step, running

_OWN = str(Path(__file__).parent)
_BREAK_LOG = "torch._dynamo.symbolic_convert.__graph_breaks"
_BREAK = re.compile(r"in user code at (.+):(\d+)\n")


class Listener(logging.Handler):
    """Takes the place of torch's log handlers for the time of a trace."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.fallbacks: list[str] = []
        self.limits: list[Limit] = []
        self.breaks: list[GraphBreak] = []
        self.callers: dict[tuple[Any, str], Place] = {}
        self.sizes: tuple[int, ...] = ()  # batch sizes of the last call and of the one that runs

    @contextmanager
    def listening(self) -> Iterator[None]:
        """What torch would print of breaks and failures goes on record here instead."""
        breaks, structured = logging.getLogger(_BREAK_LOG), logging.getLogger("torch.__trace")
        loggers = dict.fromkeys([logging.getLogger("torch._dynamo"), breaks, structured, *_torchs_loggers()])
        before = [(logger, logger.handlers, logger.propagate, logger.level) for logger in loggers]
        for logger in loggers:
            logger.handlers, logger.propagate = [self], False
        breaks.setLevel(logging.DEBUG)
        structured.handlers = []  # torch then leaves out its structured trace, which no one reads here
        disabled, logging.root.manager.disable = logging.root.manager.disable, logging.NOTSET
        try:
            yield
        finally:
            logging.root.manager.disable = disabled
            for logger, handlers, propagate, level in before:
                logger.handlers, logger.propagate = handlers, propagate
                logger.setLevel(level)

    def guard_failed(self, failure: Any) -> None:
        """What dynamo calls when a guard fails; where that is in Python's own library, the step's line called it."""
        code = failure.orig_code
        if not of_the_step([(code.co_filename, code.co_firstlineno)]) and (place := running(_OWN)):
            self.callers[code, failure.reason] = place

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "assuming every input is mutated" in text:
            cause = record.exc_info[1] if record.exc_info else None
            self.fallbacks.append(f"{type(cause).__name__}: {cause}")
        elif "recompile_limit" in text:
            self.limits.append(Limit(text, self.sizes))
        elif match := _BREAK.search(text):
            reason = text.partition("Graph Break Reason: ")[2].partition("\n\nUser code traceback")[0]
            frames = frames_in(text) or [(match[1], int(match[2]))]
            # In code of Python's own that dynamo compiles for itself the step's line is the one that runs.
            called = None if of_the_step(frames) else running(_OWN)
            self.breaks.append(GraphBreak(reason, *(called or innermost(frames))))


def _torchs_loggers() -> Iterator[logging.Logger]:
    """Those of torch's loggers that print by themselves."""
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger) and logger.handlers:
            yield logger
