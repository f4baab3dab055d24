"""Request traces: prompt and output lengths, from a CSV file or drawn from the quantiles of a public trace.

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:15:46.6805900,374,44        -> Lengths(context=374, generated=44)

The quantiles are those of the conversation service in the Azure LLM inference trace 2023 (Azure/AzurePublicDataset,
data/AzureLLMInferenceTrace_conv.csv, CC-BY 4.0; Patel et al., "Splitwise: Efficient generative LLM inference using
phase splitting", ISCA 2024).
"""

from __future__ import annotations

import csv
import io
import math
import random
import re
import reprlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
QUANTILES = (0.0, 0.05, 0.5, 0.95, 0.99, 1.0)
CONTEXT = (1, 181, 1020, 4083, 4142, 14050)
GENERATED = (1, 41, 129, 451, 601, 1000)


class TraceError(ValueError):
    """A trace file that cannot be used; the message is one line and names the row."""


class Lengths(NamedTuple):
    """Tokens of one request: its prompt, and what it generates."""

    context: int
    generated: int

    def scaled(self, scale: float) -> Lengths:
        """Both lengths times `scale`, at least one token each."""
        return Lengths(max(round(self.context * scale), 1), max(round(self.generated * scale), 1))


def read_trace(path: Path) -> list[Lengths]:
    """Every request of a CSV file with the three `COLUMNS`; row 1 is the header.

    Raises:
        TraceError: the file is no UTF-8 text or no CSV, a column is missing, a time is neither a number nor an ISO
            date, a length is negative or no whole number, or there is no request.
        OSError: the file cannot be read.
    """
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), restkey="")
    try:
        trace = list(_rows(path, reader))
    except csv.Error as error:
        raise TraceError(f"{path}: row {reader.line_num + 1}: not CSV: {error}") from None
    if not trace:
        raise TraceError(f"{path}: row 2: no request, the trace is empty")
    return trace


def _text(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        row = 1 + data[: error.start].count(b"\n")
        raise TraceError(f"{path}: row {row}: not UTF-8 text: byte {data[error.start]:#04x}") from None


def _rows(path: Path, reader: csv.DictReader[str]) -> Iterator[Lengths]:
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        got = ",".join(reader.fieldnames) if reader.fieldnames else None
        raise TraceError(f"{path}: row 1: missing column {', '.join(missing)}, got {_short(got)}")
    for row in reader:
        where = f"{path}: row {reader.line_num}"
        if "" in row:
            raise TraceError(f"{where}: more fields than row 1 has")
        if not _is_time(row["TIMESTAMP"] or ""):
            raise TraceError(f"{where}: TIMESTAMP must be a number or an ISO date, got {_short(row['TIMESTAMP'])}")
        yield Lengths(*(_length(where, name, row[name]) for name in COLUMNS[1:]))


def _is_time(text: str) -> bool:
    try:
        datetime.fromisoformat(text.strip())
    except ValueError:
        return re.fullmatch(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", text, re.ASCII) is not None
    return True


def _length(where: str, column: str, text: str | None) -> int:
    if text is None or not re.fullmatch(r"\s*[+-]?\d{1,18}\s*", text, re.ASCII):
        raise TraceError(f"{where}: {column} must be a whole number, got {_short(text)}")
    if int(text) < 0:
        raise TraceError(f"{where}: {column} must not be negative, got {int(text)}")
    return int(text)


def _short(text: str | None) -> str:
    """What came, in one short line."""
    return "nothing" if text is None else reprlib.repr(text)


def synthetic_trace(requests: int, seed: int) -> list[Lengths]:
    """`requests` pairs of lengths drawn from the quantiles, on a logarithmic scale between them."""
    rng = random.Random(seed)
    return [Lengths(_draw(rng.random(), CONTEXT), _draw(rng.random(), GENERATED)) for _ in range(requests)]


def _draw(share: float, lengths: tuple[int, ...]) -> int:
    upper = next(i for i in range(1, len(QUANTILES)) if share <= QUANTILES[i])
    low, high = QUANTILES[upper - 1], QUANTILES[upper]
    start, end = math.log(lengths[upper - 1]), math.log(lengths[upper])
    return round(math.exp(start + (end - start) * (share - low) / (high - low)))
