"""A callable and its arguments, copied with every tensor re-created as a fake one.

Nothing is allocated, and nothing of the caller's is touched. Arguments, and what a bound method is bound to, go to the
target whole. A module goes as `module.to(target)` would take it: parameters and buffers move, other tensors that it
holds stay where they are. Tensors that a function closes over stay too. `host(tensor)` stays on the CPU.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from compiled_kv.tracing.walking import LEAVES, inside, is_opaque


@dataclass(frozen=True, eq=False)
class host:
    """Marks a tensor argument that truly lives on the CPU, so that it is not re-created on the target.

    Args:
        tensor: any shape and dtype.
    """

    tensor: Tensor


class Fakes:
    """Copies callables and arguments; within one instance tied tensors stay tied, and views of one storage stay that.

    Args:
        mode: the fake mode the new tensors belong to.
        device: where they are said to be; None keeps each tensor's own device.
    """

    def __init__(self, mode: FakeTensorMode, device: torch.device | None):
        self.mode = mode
        self.device = device
        self._memo: dict[int, Any] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._seen: dict[int, Any] = {}
        self._globals: dict[int, dict[str, Any]] = {}

    def arguments(self, value: Any) -> Any:
        """A copy of `value` with every tensor in it on the target."""
        self._find(value, moves=True)
        return self._copy(value)

    def callable(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A copy of `fn` whose modules live on the target."""
        if isinstance(fn, partial):
            return partial(self.callable(fn.func), *self.arguments(fn.args), **self.arguments(fn.keywords))
        if isinstance(fn, types.MethodType):
            return types.MethodType(self.callable(fn.__func__), self.arguments(fn.__self__))
        if isinstance(fn, types.FunctionType):
            return self._function(fn)
        return self.arguments(fn)

    def tensor(self, tensor: Tensor, device: torch.device | None) -> Tensor:
        """A fake tensor of the same shape, strides and storage relations, on `device`."""
        if type(tensor) not in (Tensor, FakeTensor) and not isinstance(tensor, nn.Parameter):
            raise TypeError(f"tensor arguments must be plain tensors, got {type(tensor).__name__}")
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            base = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
            self._storages[storage._cdata] = base.untyped_storage()
        meta = torch.empty(0, dtype=tensor.dtype, device="meta")
        meta.set_(self._storages[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
        fake: Tensor = FakeTensor(self.mode, meta, device or tensor.device)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, tensor.requires_grad)
        for name, value in vars(tensor).items():
            if name.startswith("_dynamo_"):  # what mark_dynamic and mark_static said of it
                setattr(fake, name, value)
        return fake

    def tensors(self) -> Iterator[Tensor]:
        """Every fake tensor made so far."""
        yield from (value for value in self._memo.values() if isinstance(value, Tensor))

    def _keep(self, value: Any, fake: Any) -> None:
        self._memo[id(value)] = fake
        self._seen[id(value)] = value

    def _find(self, root: Any, moves: bool) -> None:
        stack: list[tuple[Any, bool]] = [(root, moves)]
        while stack:
            value, moves = stack.pop()
            if isinstance(value, torch.device) and moves and self.device is not None:
                self._keep(value, self.device)  # what an object says of where its tensors are
            if isinstance(value, LEAVES) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if isinstance(value, host):
                self._keep(value, self.tensor(value.tensor, torch.device("cpu")))
            elif isinstance(value, Tensor):
                self._keep(value, self.tensor(value, self.device if moves else None))
            elif isinstance(value, types.FunctionType):
                self._keep(value, self._function(value))
            elif is_opaque(value):
                self._keep(value, value)
            else:
                stack += inside(value, moves)

    def _copy(self, value: Any) -> Any:
        try:
            return copy.deepcopy(value, self._memo)
        except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
            raise TypeError(
                f"arguments must be copyable to be re-created on the target, got {type(value).__name__}: {error}"
            ) from error

    def _function(self, fn: types.FunctionType) -> types.FunctionType:
        if id(fn) in self._memo:
            return self._memo[id(fn)]
        names = self._globals_of(fn)
        if not fn.__closure__ and names is fn.__globals__:
            return fn
        cells = tuple(types.CellType() for _ in fn.__closure__ or ())
        new = types.FunctionType(fn.__code__, names, fn.__name__, fn.__defaults__, cells)
        new.__kwdefaults__, new.__module__, new.__qualname__ = fn.__kwdefaults__, fn.__module__, fn.__qualname__
        new.__dict__.update(fn.__dict__)
        self._keep(fn, new)
        for cell, old in zip(cells, fn.__closure__ or (), strict=True):
            try:
                value = old.cell_contents
            except ValueError:  # a name not bound yet
                continue
            self._find(value, moves=False)
            cell.cell_contents = self._copy(value)
        return new

    def _globals_of(self, fn: types.FunctionType) -> dict[str, Any]:
        """The globals of `fn`, with modules that it names, itself or through functions beside it, on the target."""
        names = fn.__globals__
        if id(names) not in self._globals:
            found = {name: value for name, value in names.items() if isinstance(value, nn.Module)}
            self._globals[id(names)] = names if not found else dict(names)
            if found:
                self._move_globals(names, found)
        return self._globals[id(names)]

    def _move_globals(self, names: dict[str, Any], modules: dict[str, nn.Module]) -> None:
        beside = {k: v for k, v in names.items() if isinstance(v, types.FunctionType) and v.__globals__ is names}
        new = self._globals[id(names)]
        for name, module in modules.items():
            self._find(module, moves=False)
            new[name] = self._copy(module)
        new.update({name: self._function(function) for name, function in beside.items()})
