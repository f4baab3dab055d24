"""The Triton kernels themselves, interpreted on CPU tensors, equal the oracle.

Interpreted kernels cannot be traced, so `test_operators` runs once more in a process of its own, TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import ALL_CASES
from tests.conftest import INTERPRETED
from tests.harness import OPERATORS
from tests.test_operators import FULL_BLOCKS

pytest.importorskip("triton")

FORMS_OF_OUTPUT = 2  # functional and in place, each with its examples


@pytest.mark.skipif(INTERPRETED, reason="this process is the interpreted one")
@pytest.mark.parametrize("operator", OPERATORS)
def test_interpreted_kernel_equals_the_oracle(operator: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "tests/test_operators.py", f"--operator={operator}"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed is not None and int(passed[1]) == len(ALL_CASES) + len(FULL_BLOCKS) + FORMS_OF_OUTPUT
