"""Traces: what a file may say, one line for what it may not, and synthetic lengths with the published quantiles."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from compiled_kv.cli import main
from compiled_kv.request_traces import CONTEXT, GENERATED, Lengths, TraceError, read_trace, synthetic_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"

BAD_FILES = {
    "empty-file": ("", "row 1: missing column TIMESTAMP, ContextTokens, GeneratedTokens, got nothing"),
    "header-alone": (HEADER, "row 2: no request, the trace is empty"),
    "missing-column": ("TIMESTAMP,ContextTokens\na,1\n", "row 1: missing column GeneratedTokens"),
    "renamed-column": ("TIMESTAMP,context,GeneratedTokens\na,1,2\n", "row 1: missing column ContextTokens"),
    "negative-context": (HEADER + "a,5,6\na,-5,6\n", "row 3: ContextTokens must not be negative, got -5"),
    "negative-generated": (HEADER + "a,5,-6\n", "row 2: GeneratedTokens must not be negative, got -6"),
    "a-word": (HEADER + "a,5,6\na,5,6\na,five,6\n", "row 4: ContextTokens must be a whole number, got 'five'"),
    "a-fraction": (HEADER + "a,5,6.5\n", "row 2: GeneratedTokens must be a whole number, got '6.5'"),
    "an-empty-cell": (HEADER + "a,,6\n", "row 2: ContextTokens must be a whole number, got ''"),
    "a-short-row": (HEADER + "a,5\n", "row 2: GeneratedTokens must be a whole number, got nothing"),
    "not-text": (b"\xff\xfe\x00a", "not a CSV file"),
}


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(("content", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_trace_is_refused_in_one_line_that_names_the_row(
    content: str | bytes, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "trace.csv", content)
    with pytest.raises(TraceError, match=message.replace("(", r"\(")) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", HEADER + "a,-5,6\n"], ids=["empty-file", "negative-context"])
def test_the_command_ends_with_status_2_and_that_line(content: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["demo", "--trace", str(write(tmp_path / "trace.csv", content))])
    assert result.exit_code == 2
    assert result.output.count("\n") == 1 and "row" in result.output


def test_a_trace_that_is_not_there_ends_with_status_2(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["demo", "--trace", str(tmp_path / "none.csv")])
    assert result.exit_code == 2
    assert "none.csv: No such file or directory" in result.output and result.output.count("\n") == 1


def test_a_good_trace_is_read_in_order_whatever_else_it_holds(tmp_path: Path) -> None:
    rows = "Extra,GeneratedTokens,TIMESTAMP,ContextTokens\nx,44,2023-11-16 18:15:46.68,374\nx,0,,7\n"
    assert read_trace(write(tmp_path / "trace.csv", rows)) == [Lengths(374, 44), Lengths(7, 0)]


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
