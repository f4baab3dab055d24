"""What a capture freezes, and what may not happen while one is made.

Frozen(step, (2.0, bias), {}).check((3.0, bias), {}, outputs)
-> ValueError: argument scale changed from 2.0 to 3.0: a captured graph holds the value that it was captured with
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compiled_kv.launch import triton
from compiled_kv.replay.steps import parameters_of

DATA_PTR = Tensor.data_ptr
UNDER_CAPTURE = "under capture, where nothing can be compiled"
AFTER_WARM_UP = "after warming up, when a captured step could compile nothing"
REPLAYED = "a captured graph reads the address that it was captured with"


class Places:
    """Where the buffers of a module lie; they may not move."""

    def __init__(self, module: nn.Module) -> None:
        self.buffers = module._buffers
        self.names = [name for name, tensor in self.buffers.items() if tensor is not None]
        self.get = itemgetter(*self.names)
        self.pointers = [*map(DATA_PTR, self.get(self.buffers))]

    def check(self) -> None:
        """Refuse a buffer that is not where it was, by name."""
        if (now := [*map(DATA_PTR, self.get(self.buffers))]) != self.pointers:
            name, was, here = next(each for each in zip(self.names, self.pointers, now) if each[1] != each[2])
            raise ValueError(
                f"buffers.{name} moved from {address(was)} to {address(here)}: {REPLAYED}; write into it instead"
            )


class Frozen:
    """The arguments of a captured step: values that may not change, tensors that may not move."""

    def __init__(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.parameters = parameters_of(step)
        # Arrays are copied: they can be written into in place.
        leaves = self._flatten(args, kwargs).items()
        self.leaves = {name: copy(leaf) if _is_array(leaf) else leaf for name, leaf in leaves}
        self.pointers = {name: leaf.data_ptr() for name, leaf in self.leaves.items() if isinstance(leaf, Tensor)}

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        named = {self.parameters[i] if i < len(self.parameters) else f"args[{i}]": arg for i, arg in enumerate(args)}
        found: dict[str, Any] = {}
        for name, value in (named | kwargs).items():
            for path, leaf in pytree.tree_flatten_with_path(value)[0]:
                found[name + pytree.keystr(path)] = leaf
        return found

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Mapping[int, Any]) -> None:
        """Refuse what is not as it was, by name."""
        leaves = self._flatten(args, kwargs)
        for name in self.leaves.keys() | leaves.keys():
            if (name in leaves) != (name in self.leaves):
                raise ValueError(
                    f"argument {name} must be passed as it was at capture: {'added' if name in leaves else 'missing'}"
                )
        for name, leaf in leaves.items():
            was = self.leaves[name]
            if isinstance(leaf, Tensor) and isinstance(was, Tensor):
                if leaf.data_ptr() != self.pointers[name] or _form(leaf) != _form(was):
                    self._refuse_tensor(name, leaf, outputs)
            elif not _is_same(leaf, was):
                raise ValueError(
                    f"argument {name} changed from {_said(was)} to {_said(leaf)}: a captured graph holds the value "
                    "that it was captured with; pass what changes as a tensor"
                )

    def _refuse_tensor(self, name: str, leaf: Tensor, outputs: Mapping[int, Any]) -> None:
        mine = {
            t.untyped_storage().data_ptr() for t in pytree.tree_leaves(list(outputs.values())) if isinstance(t, Tensor)
        }
        if leaf.untyped_storage().data_ptr() in mine:
            raise ValueError(
                f"argument {name} is an output of these graphs, in their memory pool, which the next replay "
                "overwrites: copy it into a buffer of your own"
            )
        if _form(leaf) != _form(self.leaves[name]):
            raise ValueError(
                f"argument {name} changed from {_said(self.leaves[name])} to {_said(leaf)}: {REPLAYED}; copy into the "
                "captured tensor instead"
            )
        raise ValueError(
            f"argument {name} moved from {address(self.pointers[name])} {_shown(self.leaves[name])} to "
            f"{address(leaf.data_ptr())} {_shown(leaf)}: {REPLAYED}; copy into the captured tensor instead"
        )


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _said(leaf: Any) -> str:
    return f"{_shown(leaf)} of strides {list(leaf.stride())}" if isinstance(leaf, Tensor) else repr(leaf)


def _is_array(leaf: Any) -> bool:
    """Whether it is an array of NumPy's or Python's own."""
    return hasattr(leaf, "tobytes") and not isinstance(leaf, memoryview)


def _is_same(leaf: Any, was: Any) -> bool:
    if _is_array(leaf) and type(leaf) is type(was):
        shapes = [(getattr(each, "shape", None), getattr(each, "dtype", None)) for each in (leaf, was)]
        return shapes[0] == shapes[1] and leaf.tobytes() == was.tobytes()
    try:
        return leaf is was or (type(leaf) is type(was) and bool(leaf == was))
    except (RuntimeError, ValueError):  # an array of several values has no one truth
        return False


@contextmanager
def refuse_cold_start(step: str, when: str) -> Iterator[None]:
    """Inside, whatever would compile raises a RuntimeError that names it and says when that was: a capture must meet
    nothing for the first time."""
    cold: list[str] = []

    def met(*_: Any, **given: Any) -> bool:
        cold.append(f"kernel {getattr(given.get('fn'), 'name', given.get('repr'))}")
        raise RuntimeError(cold[-1])

    runtime = getattr(getattr(triton, "knobs", None), "runtime", None)
    before = getattr(runtime, "jit_cache_hook", None)
    if runtime is not None:
        runtime.jit_cache_hook = met
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            yield
    except Exception as error:
        if not cold and "fail_on_recompile" not in str(error):
            raise
        what = cold[0] if cold else "a function compiled by torch.compile"
        raise RuntimeError(
            f"{step} met {what} for the first time {when}: it must take the same path each time, so that warming up "
            f"reaches everything ({error})"
        ) from error
    finally:
        if runtime is not None:
            runtime.jit_cache_hook = before


def address(pointer: int) -> str:
    return f"{pointer:#x}"
