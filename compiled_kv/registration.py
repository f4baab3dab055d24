"""How an operator becomes one of torch's: `torch.library.triton_op`, without what its registration costs an import."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch.library import triton_op


def operator(name: str, *, mutates_args: str | Iterable[str]) -> Callable[[Callable[..., object]], Any]:
    """`triton_op(name, mutates_args=mutates_args)`, which reads no source.

    Torch looks for kernels in an operator's source and in all that it calls. That takes a second or more of each import
    of this package, and finds none behind `launch`. A function that wraps a builtin has no source to look through, so
    each operator does while it is registered.
    """

    def register(fn: Any) -> Any:
        vars(fn).update(__signature__=inspect.signature(fn), __wrapped__=len)
        try:
            return triton_op(name, mutates_args=mutates_args)(fn)
        finally:
            del fn.__signature__, fn.__wrapped__

    return register
