"""The bits that a device may set where no host can look: what was clamped, skipped or left unmapped."""

from __future__ import annotations

import enum
import os


class Status(enum.IntFlag):
    """Bits of the `status` tensor, int32 [1]; an operator sets them and never clears them. See docs/contract.md."""

    TOO_LONG = 1
    NEGATIVE_LENGTH = 2
    BAD_ROW = 4
    BAD_SLOT = 8
    UNMAPPED = 16
    SUM_OVERFLOW = 32
    TOO_MANY_TOKENS = 64

    def __str__(self) -> str:
        return self.name or "0"


# Read once: it is compiled into kernels and graphs, so a later change could not be honoured.
DEBUG = os.environ.get("COMPILED_KV_DEBUG", "0") == "1"
