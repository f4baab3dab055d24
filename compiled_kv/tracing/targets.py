"""A device to trace for, whether or not this machine has one.

Target.parse("cuda:sm_90")  -> fake tensors on cuda:0, kernels analysed for compute capability 9.0
Target.parse("hip:gfx942")  -> the same for an AMD device (torch calls that device cuda as well)
Target.parse("cpu")         -> fake tensors on the CPU
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DEFAULT_ARCH = 90
# What Triton 3.7 builds kernels for.
NVIDIA = (70, 75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121)
AMD = (
    "gfx908", "gfx90a", "gfx942", "gfx950", "gfx1030", "gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151",
    "gfx1152", "gfx1153", "gfx1200", "gfx1201", "gfx1250",
)  # fmt: skip
HOST = torch.device("cpu")
_SM = re.compile(r"sm_(\d+)[a-z]?")


@dataclass(frozen=True)
class Target:
    """A device type for tensors, and the architecture that Triton analyses kernels for (None: whatever is there)."""

    name: str
    device: torch.device
    arch: int | str | None = None

    @classmethod
    def parse(cls, name: str) -> Target:
        """Read `cpu`, `cuda`, `cuda:sm_90` or `hip:gfx942`.

        Raises:
            ValueError: the name is none of those, or Triton builds no kernels for the architecture.
        """
        backend, _, arch = name.partition(":")
        if name == "cpu":
            return cls(name, torch.device("cpu"))
        if name == "cuda":
            return cls(name, torch.device("cuda", 0))
        if backend == "cuda" and (match := _SM.fullmatch(arch)) and int(match[1]) in NVIDIA:
            return cls(name, torch.device("cuda", 0), int(match[1]))
        if backend == "hip" and arch in AMD:
            return cls(name, torch.device("cuda", 0), arch)
        known = ", ".join([*(f"sm_{number}" for number in NVIDIA), *AMD])
        raise ValueError(f"target must be cpu, cuda, cuda:sm_NN or hip:gfxNNN, got {name!r}; NN and NNN are of {known}")

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make torch and Triton take this target for present; everything is as before afterwards."""
        with ExitStack() as stack:
            if not self.is_cpu:
                stack.enter_context(_cuda_guard())
                stack.enter_context(_cuda_calls())
                stack.enter_context(_triton_driver(self.arch))
                stack.enter_context(_capability(self.arch))
            yield


class _TargetDriver:
    """Answers the one question that Triton asks when it lowers a kernel to its IR."""

    def __init__(self, arch: int | str):
        self.arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        if isinstance(self.arch, int):
            return GPUTarget("cuda", self.arch, 32)
        return GPUTarget("hip", self.arch, 64 if self.arch.startswith("gfx9") else 32)


@contextmanager
def _triton_driver(arch: int | str | None) -> Iterator[None]:
    """Without a driver the analysis of what a kernel writes fails, and torch assumes that it writes every argument."""
    try:
        from triton.runtime import driver
    except ImportError:
        yield
        return
    if arch is None:
        if torch.cuda.is_available():
            yield
            return
        arch = DEFAULT_ARCH
    before = driver._active
    driver._active = _TargetDriver(arch)
    try:
        yield
    finally:
        driver._active = before


@contextmanager
def _capability(arch: int | str | None) -> Iterator[None]:
    """Model code asks torch for the device's capability to pick a kernel: let the target answer."""
    if arch is None:
        if torch.cuda.is_available():
            yield
            return
        arch = DEFAULT_ARCH
    digits = str(arch).removeprefix("gfx")
    answer = (int(digits[:-1]), int(digits[-1])) if isinstance(arch, int) else (int(digits[0]), int(digits[1], 16))
    before = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda device=None: answer
    try:
        yield
    finally:
        torch.cuda.get_device_capability = before


_CUDA, _META = 1, 14  # c10::DeviceType
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"


@contextmanager
def _cuda_guard() -> Iterator[None]:
    """In a CPU-only build nothing answers for CUDA when Python indexes a fake tensor: lend it the meta device's guard.

    CUDA builds install such a guard by themselves under FakeTensorMode.
    """
    if torch.version.cuda or torch.version.hip:
        yield
        return
    guards = _guard_registry()
    before = guards[_CUDA]
    guards[_CUDA] = guards[_META]
    try:
        yield
    finally:
        guards[_CUDA] = before


@contextmanager
def _cuda_calls() -> Iterator[None]:
    """Without a device, answer what asks which one is current."""
    if torch.cuda.is_available():
        yield
        return
    from torch._dynamo.device_interface import CudaInterface
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.fx.experimental import proxy_tensor

    def cuda(self: Any, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        return self.to(torch.device("cuda", 0), non_blocking=non_blocking, **kwargs)

    def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The borrowed guard says of `cuda` without an index that it is the meta device."""
        if func is torch.ops.aten._to_copy.default and kwargs and kwargs.get("device") == torch.device("meta"):
            kwargs = {**kwargs, "device": torch.device("cuda", 0)}
        return plain(mode, func, types, args, kwargs)

    def proxy_call(mode: Any, func: Any, pre_dispatch: Any, args: Any, kwargs: Any) -> Any:
        """A single number made on the host is computed along as a constant, and would be moved there for real."""
        moves = func is torch.ops.aten._to_copy.default and (kwargs or {}).get("device") not in (None, HOST)
        with _replaced(proxy_tensor, "CONSTANT_NUMEL_LIMIT", 0) if moves else nullcontext():
            return traced(mode, func, pre_dispatch, args, kwargs)

    plain, traced = FakeTensorMode.dispatch, proxy_tensor.proxy_call
    with ExitStack() as stack:
        if not (torch.version.cuda or torch.version.hip):
            stack.enter_context(_replaced(FakeTensorMode, "dispatch", dispatch))
        for owner, name, stand_in in (
            (FunctionalTensor, "cuda", cuda),
            (proxy_tensor, "proxy_call", proxy_call),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "_exchange_device", lambda device: 0),
            (torch.cuda, "_maybe_exchange_device", lambda device: 0),
            (CudaInterface, "exchange_device", staticmethod(lambda device: 0)),
            (CudaInterface, "maybe_exchange_device", staticmethod(lambda device: 0)),
        ):
            stack.enter_context(_replaced(owner, name, stand_in))
        yield


@contextmanager
def _replaced(owner: Any, name: str, stand_in: Any) -> Iterator[None]:
    before = vars(owner)[name]  # as it stands there: a static method stays one
    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _guard_registry() -> Any:
    for library in Path(torch.__file__).parent.joinpath("lib").glob("libc10.*"):
        return (ctypes.c_void_p * (_META + 1)).in_dll(ctypes.CDLL(str(library)), _REGISTRY)
    raise RuntimeError("tracing for cuda in a CPU-only build of torch needs its libc10, which was not found")
