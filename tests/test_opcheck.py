"""`torch.library.opcheck` passes for every registered operator, functional and in place.

Its arguments are those that the public functions pass, recorded from real calls.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cases import CASES, DEVICES, FORMS, SMALL_CASES
from tests.conftest import INTERPRETED
from tests.harness import Batch, Form, check

pytestmark = pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be traced")

# Checked by test_peer_operators, once loaded.
PEERS = {
    *("compiled_kv::write_metadata", "compiled_kv::gather_block_tables", "compiled_kv::gather_block_tables_out"),
    *("compiled_kv::group_slot_mappings", "compiled_kv::group_slot_mappings_out"),
    *("compiled_kv::csr_tables", "compiled_kv::csr_tables_out", "compiled_kv::fill_kv_indices"),
    *("compiled_kv::draft_kv_indices", "compiled_kv::draft_kv_indices_out"),
    *("compiled_kv::advance_draft", "compiled_kv::advance_draft_in_place"),
    "compiled_kv::place_tokens_in_place",
}
SAMPLES = {
    "plain": CASES["plain"],
    "bad-row-index": CASES["bad-row-index"],
    "one-row": SMALL_CASES["one-row"],
    "empty-batch": SMALL_CASES["empty-batch"],
}


class Recorder(TorchDispatchMode):
    """The calls of this package's operators, each with copies of its arguments from before it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "compiled_kv":
            copies = tuple(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args)
            self.calls.append((func, copies, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


def operator_call(form: Form, batch: Batch, device: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    with Recorder() as recorder:
        check(form, batch, device)
    assert len(recorder.calls) == 1, "a public function calls one operator, once"
    return recorder.calls[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_opcheck(form: Form, sample: str, device: str) -> None:
    operator, args, kwargs = operator_call(form, SAMPLES[sample], device)
    outcomes = torch.library.opcheck(operator, args, kwargs)
    assert len(outcomes) == 4 and set(outcomes.values()) == {"SUCCESS"}


def test_every_registered_operator_is_checked() -> None:
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("compiled_kv::")}
    reached = {operator_call(form, CASES["plain"], "cpu")[0].name() for form in FORMS}
    elsewhere = {name for name in registered if "schedule" in name or "update" in name or name in PEERS}
    assert reached == registered - elsewhere
