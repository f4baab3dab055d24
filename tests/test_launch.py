"""What a launch of ours adds on a device: the next kernel may start early, and finds room."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from compiled_kv import launch


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return []


def launched(seen: list[dict[str, Any]], device: str, dtype: torch.dtype, *by_position: Any, **given: Any) -> None:
    """Launch a kernel of two parameters, of pools of 32 bits with at most 96 registers a thread."""

    def run(*args: Any, **kwargs: Any) -> None:
        seen.append({**dict(zip(("pool_ptr", "PDL"), args)), **kwargs})

    def registers(arguments: Any) -> int | None:
        return 96 if arguments["pool_ptr"].dtype == torch.int32 else None

    with FakeTensorMode():
        pool = torch.empty(1, dtype=dtype, device=device)
    wrapped = launch._on_the_tensors_device(run, ["pool_ptr", "PDL"], registers)
    wrapped(pool, *by_position, **given) if by_position else wrapped(pool_ptr=pool, **given)
    seen[-1].pop("pool_ptr")


@pytest.mark.parametrize("by_position", [(), (False,)], ids=["by-name", "by-position"])
def test_what_a_launch_adds(by_position: tuple[bool, ...], seen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given = {} if by_position else {"PDL": False}
    for is_hopper in (True, False):
        monkeypatch.setattr(launch, "_is_hopper_or_later", lambda device, found=is_hopper: found)
        for device, dtype in (("cuda:0", torch.int32), ("cuda:0", torch.int64), ("cpu", torch.int32)):
            launched(seen, device, dtype, *by_position, **given)
    early, late = {"PDL": True, "launch_pdl": True}, {"PDL": False}
    assert seen == [early | {"maxnreg": 96}, early, late, late | {"maxnreg": 96}, late, late]


def test_no_registers_are_named_on_rocm(seen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    launched(seen, "cuda:0", torch.int32, PDL=False)
    assert seen == [{"PDL": False}]
