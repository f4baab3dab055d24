"""Why Inductor skips a CUDA graph under mode="reduce-overhead"."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def skips_logged() -> Iterator[list[str]]:
    """Inductor's own words on CUDA graphs that it skips, which it logs."""
    import torch._inductor.compile_fx
    import torch._inductor.cudagraph_trees
    import torch._inductor.cudagraph_utils  # noqa: F401

    reasons: list[str] = []
    handler = _Skips(reasons)
    loggers = [
        logging.getLogger(name)
        for name in list(logging.root.manager.loggerDict)
        if name.startswith("torch._inductor") and name.endswith(("__cudagraphs", "__perf_hints"))
    ]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    try:
        yield reasons
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


class _Skips(logging.Handler):
    def __init__(self, reasons: list[str]):
        super().__init__()
        self.reasons = reasons

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "skipping cudagraph" in text.lower():
            reason = text.strip().splitlines()[0].removeprefix("skipping cudagraphs due to ")
            self.reasons.append(reason.partition(" Found from")[0].rstrip(". ")[:200])
