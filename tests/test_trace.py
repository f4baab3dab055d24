"""Traces: what a file may say, one line for what it may not, and synthetic lengths with the published quantiles."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from compiled_kv.cli import main
from compiled_kv.request_traces import CONTEXT, GENERATED, Lengths, TraceError, read_trace, synthetic_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"

BAD_FILES = {
    "empty-file": ("", "row 1: missing column TIMESTAMP, ContextTokens, GeneratedTokens, got nothing"),
    "header-alone": (HEADER, "row 2: no request, the trace is empty"),
    "missing-column": ("TIMESTAMP,ContextTokens\n0,1\n", "row 1: missing column GeneratedTokens"),
    "renamed-column": ("TIMESTAMP,context,GeneratedTokens\n0,1,2\n", "row 1: missing column ContextTokens"),
    "negative-context": (HEADER + "0,5,6\n1,-5,6\n", "row 3: ContextTokens must not be negative, got -5"),
    "negative-generated": (HEADER + "0,5,-6\n", "row 2: GeneratedTokens must not be negative, got -6"),
    "a-word": (HEADER + "0,5,6\n0,5,6\n0,five,6\n", "row 4: ContextTokens must be a whole number, got 'five'"),
    "a-fraction": (HEADER + "0,5,6.5\n", "row 2: GeneratedTokens must be a whole number, got '6.5'"),
    "an-underscore": (HEADER + "0,5,1_0\n", "row 2: GeneratedTokens must be a whole number, got '1_0'"),
    "a-number-without-end": (HEADER + f"0,{'9' * 5000},6\n", "row 2: ContextTokens must be a whole number, got '9999"),
    "an-empty-cell": (HEADER + "0,,6\n", "row 2: ContextTokens must be a whole number, got ''"),
    "a-short-row": (HEADER + "0,5\n", "row 2: GeneratedTokens must be a whole number, got nothing"),
    "a-long-row": (HEADER + "0,5,6\n0,5,6,7\n", "row 3: more fields than row 1 has"),
    "no-time": (HEADER + "0,5,6\n,5,6\n", "row 3: TIMESTAMP must be a number or an ISO date, got ''"),
    "a-word-for-a-time": (HEADER + "noon,5,6\n", "row 2: TIMESTAMP must be a number or an ISO date, got 'noon'"),
    "a-time-that-is-none": (HEADER + "nan,5,6\n", "row 2: TIMESTAMP must be a number or an ISO date, got 'nan'"),
    "a-day-that-is-none": (HEADER + "2023-02-30 18:15:46,5,6\n", "row 2: TIMESTAMP must be a number or an ISO date"),
    "not-text": (b"\xff\xfe\x00a", "row 1: not UTF-8 text: byte 0xff"),
    "not-text-further-on": (HEADER.encode() + b"0,5,6\n0,5\xe9,6\n", "row 3: not UTF-8 text: byte 0xe9"),
    "a-field-without-end": (HEADER + f"0,5,6\n{'0' * 200_000},5,6\n", "row 3: not CSV: field larger than field limit"),
}


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(("content", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_trace_is_refused_in_one_line_that_names_the_row(
    content: str | bytes, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "trace.csv", content)
    with pytest.raises(TraceError, match=re.escape(message)) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize(
    "content", ["", HEADER + "0,-5,6\n", b"\xff\xfe"], ids=["empty-file", "negative-context", "not-text"]
)
def test_the_command_ends_with_status_2_and_that_line(content: str | bytes, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["demo", "--trace", str(write(tmp_path / "trace.csv", content))])
    assert result.exit_code == 2
    assert result.output.count("\n") == 1 and "row" in result.output


def test_a_trace_that_is_not_there_ends_with_status_2(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["demo", "--trace", str(tmp_path / "none.csv")])
    assert result.exit_code == 2
    assert "none.csv: No such file or directory" in result.output and result.output.count("\n") == 1


def test_a_good_trace_is_read_in_order_whatever_else_it_holds(tmp_path: Path) -> None:
    rows = "Extra,GeneratedTokens,TIMESTAMP,ContextTokens\nx,44,2023-11-16 18:15:46.6805900,374\nx,0,2023-11-16, 7\n"
    rows += ",1,-1.5e3,2\n,3,2023-11-16T18:15:46+01:00,4\n"  # times may go back, and be numbers
    read = read_trace(write(tmp_path / "trace.csv", b"\xef\xbb\xbf" + rows.replace("\n", "\r\n").encode()))
    assert read == [Lengths(374, 44), Lengths(7, 0), Lengths(2, 1), Lengths(4, 3)]


def test_scaling_leaves_at_least_one_token() -> None:
    assert Lengths(374, 44).scaled(0.1) == Lengths(37, 4)
    assert Lengths(7, 0).scaled(0.05) == Lengths(1, 1)


@pytest.mark.parametrize(("field", "published"), [(0, CONTEXT), (1, GENERATED)], ids=["context", "generated"])
def test_synthetic_lengths_have_the_published_quantiles(field: int, published: tuple[int, ...]) -> None:
    lengths = [row[field] for row in synthetic_trace(20_000, seed=1)]
    for share, quantile in zip((0.05, 0.5, 0.95, 0.99), published[1:]):
        assert sum(length <= quantile for length in lengths) / len(lengths) == pytest.approx(share, abs=0.012)
    assert published[0] <= min(lengths) and max(lengths) <= published[-1]


def test_a_seed_fixes_the_synthetic_trace() -> None:
    assert synthetic_trace(9, seed=3) == synthetic_trace(9, seed=3) != synthetic_trace(9, seed=4)
