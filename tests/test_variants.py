"""One dynamic graph serves every batch size, and few compiled kernels serve every batch size and row width."""

from __future__ import annotations

import importlib
import pkgutil
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import compiled_kv as ckv
from tests.cases import FORMS, batch, batch_of
from tests.conftest import INTERPRETED
from tests.harness import Batch, Form, arguments, check, outputs, packed

pytestmark = pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel is neither traced nor compiled")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

# 33 first: torch takes numbers that are equal in the first call, such as a size and a stride of 2, for one.
BATCH_SIZES = (33, 2, 3, 7, 8, 16, 17, 64, 512)
KERNEL_BATCH_SIZES = (1, 2, 3, 7, 8, 15, 16, 17, 32, 33, 64, 512)
WIDTHS = range(8, 401, 3)
MOST_VARIANTS = 4


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_one_dynamic_graph_serves_every_batch_size(form: Form) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(getattr(ckv, form.operator), fullgraph=True, dynamic=True, backend=counter)
    for size in BATCH_SIZES:
        check(form, batch_of(size), call=call)
    assert counter.frame_count == 1


ONE_OF_EACH = {(form.operator, form.in_place): form for form in FORMS}


@pytest.mark.parametrize("form", ONE_OF_EACH.values(), ids=str)
def test_a_second_graph_is_the_last_when_nobody_asks_for_dynamic_shapes(form: Form) -> None:
    """Plain `torch.compile`: the first size is taken for static, the second makes the graph dynamic."""
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(getattr(ckv, form.operator), fullgraph=True, backend=counter)
    for size in BATCH_SIZES:
        check(form, batch_of(size, pad_seqlen=3), call=call)
    assert counter.frame_count <= 2


def sweep(form: Form) -> Iterator[Batch]:
    yield from (batch_of(size) for size in KERNEL_BATCH_SIZES)
    yield from (batch(max_context_len=4 * width, max_draft_tokens=0) for width in WIDTHS)


def call_with_outputs(form: Form, step: Batch, device: str) -> None:
    call = arguments(form, step, device)
    if form.in_place:
        call["out"] = packed(form, outputs(form, call, device), ckv.DecodeMetadata)
    getattr(ckv, form.operator)(**call)


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Compilation keys that Triton would give each launch on an H100, by kernel; nothing is launched."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import compute_cache_key, create_function_from_signature

    backend = make_backend(GPUTarget("cuda", 90, 32))
    found: dict[str, set[str]] = defaultdict(set)

    def launch(fn: Any, grid: tuple[Any, ...], **given: Any) -> None:
        bind = create_function_from_signature(fn.signature, fn.params, backend)
        _, specialization, options = bind(**given, PDL=False)
        found[fn.__name__].add(compute_cache_key({}, specialization, options))

    for info in pkgutil.iter_modules(ckv.__path__, "compiled_kv."):
        if not info.ispkg and not info.name.endswith("__main__"):
            module = importlib.import_module(info.name)
            if hasattr(module, "runs_kernel") and module.__name__ != "compiled_kv.launch":
                monkeypatch.setattr(module, "launch", launch)
                monkeypatch.setattr(module, "runs_kernel", lambda tensor: True)
    return found


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_few_kernel_variants_by_their_keys(form: Form, keys: dict[str, set[str]]) -> None:
    for step in sweep(form):
        call_with_outputs(form, step, "cpu")
    assert len(keys) == 1, "an operator launches one kernel"
    assert {kernel: len(variants) for kernel, variants in keys.items() if len(variants) > MOST_VARIANTS} == {}


def test_the_keys_tell_variants_apart(keys: dict[str, set[str]]) -> None:
    """The test above can fail: another dtype, another page size and a huge stride are variants of their own."""
    layouts = ({}, {"page_size": 8})
    for wide in (0, 0xFFFF):
        for layout in layouts:
            call_with_outputs(Form("page_table", wide=wide), batch(**layout), "cpu")
    assert [len(variants) for variants in keys.values()] == [4]


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_few_kernel_variants_on_the_device(form: Form) -> None:
    from compiled_kv import codegen

    kernels = codegen.kernels()
    for kernel in kernels.values():
        kernel.device_caches.clear()
    for step in sweep(form):
        call_with_outputs(form, step, "cuda")
    device = torch.cuda.current_device()
    variants = {name: len(kernel.device_caches[device][0]) for name, kernel in kernels.items()}
    assert 0 < max(variants.values()) <= MOST_VARIANTS
