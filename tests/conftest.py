"""How many examples hypothesis draws, and one option: `--operator NAME` runs the tests of that operator alone."""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("tests.harness")

# Derandomized: a failure is everyone's failure, and the same run twice is the same run.
settings.register_profile(
    "tables",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)
settings.load_profile("tables")

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
EXAMPLES = int(os.environ.get("COMPILED_KV_EXAMPLES", "200")) if INTERPRETED else 2000


def _patch_once() -> None:
    """Halve what interpreted kernels take: Triton looks through its whole language, to patch it, at each call of a
    device function, though the kernel that makes the call has had it patched."""
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patch_what_is_not(fn: Any) -> Any:
        found = [each for each in fn.__globals__.values() if each is language or each is language.core]
        if any(language.core.is_builtin(each.load) for each in found):
            return patch(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_what_is_not


if INTERPRETED:
    _patch_once()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--operator", help="run only the tests parametrized with this operator")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "any_call" not in item.name)  # the longest first: nobody waits for one at the end
    wanted = config.getoption("--operator")
    if wanted:
        items[:] = [item for item in items if _operator(item) == wanted]


def _operator(item: pytest.Item) -> object:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("operator")


@pytest.fixture(autouse=True)
def fresh_state() -> None:
    random.seed(0)
    torch.manual_seed(0)
    torch._dynamo.reset()


def take_small_sizes(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]) -> None:
    """Give the package's sizes of these names other values, in every module that has one."""
    for name, module in list(sys.modules.items()):
        if name.startswith("compiled_kv."):
            for size, small in sizes.items():
                if isinstance(getattr(module, size, None), int):
                    monkeypatch.setattr(module, size, small)


def take_last_program_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted programs then run in the opposite order: what one of them spoils, none repairs behind it."""
    from triton.runtime.interpreter import interpreter_builder as builder

    place = builder.set_grid_idx

    def place_backwards(*index: int) -> None:
        place(*(size - 1 - each for size, each in zip(builder.grid_dim, index, strict=True)))

    monkeypatch.setattr(builder, "set_grid_idx", place_backwards)
