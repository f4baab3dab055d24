"""`MODULE:FUNCTION` on a command line: the step to audit, and example arguments for it, or the step to replay."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_UNBOUND = object()  # what a step closes over by a name that nothing is bound to yet


class Example(NamedTuple):
    """A step and the arguments to call it with."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class EntryError(Exception):
    """What is wrong with MODULE:FUNCTION, in one line."""


def load(name: str) -> Callable[..., Any]:
    """The function that `MODULE:FUNCTION` names; MODULE may be a path that ends in .py.

    Raises:
        EntryError: there is no such module or function, or importing it fails.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise EntryError(f"the step must be given as MODULE:FUNCTION, got {name!r}")
    path = Path(module_name)
    if path.suffix == ".py":
        if not path.is_file():
            raise EntryError(f"cannot import {module_name}: there is no such file")
        sys.path.insert(0, str(path.parent.resolve()))
        module_name = path.stem
    else:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise EntryError(f"cannot import {module_name}: {type(error).__name__}: {error}") from error
    found = getattr(module, "__file__", None) or module_name
    if path.suffix == ".py" and Path(found).resolve() != path.resolve():
        raise EntryError(f"cannot import {path}: {module_name} is another module's name, of {found}")
    function = getattr(module, function_name, None)
    if not callable(function):
        raise EntryError(f"{module_name} has no function {function_name}")
    return function  # type: ignore[no-any-return]


def examples(function: Callable[..., Any], batch_sizes: Sequence[int] = ()) -> list[Example]:
    """What `function` returns, once for each batch size if it takes one.

    Raises:
        EntryError: it raises, returns something else than (step, arguments), or takes no batch size where some are
            given; or another step for another size, of which only the first would be looked at.
    """
    if not batch_sizes:
        return [_checked(_made(function))]
    if not inspect.signature(function).parameters:
        raise EntryError(f"--batch-sizes needs a {_name(function)}(batch_size) to call with each of them")
    made = [_checked(_made(function, size)) for size in batch_sizes]
    for size, each in zip(batch_sizes, made):
        if each.step is not made[0].step and _essence(each.step) != _essence(made[0].step):
            raise EntryError(
                f"--batch-sizes needs one step for all sizes, and {_name(function)}({size}) returned another than "
                f"{_name(function)}({batch_sizes[0]}): audit each by itself, with --batch-sizes {size} alone"
            )
    return made


def _essence(step: Any) -> Any:
    """What two steps that were made anew for each size have in common where they are one: the code, and the plain
    values that it closes over."""
    step = getattr(step, "_torchdynamo_orig_callable", step)
    if isinstance(step, functools.partial):
        return _essence(step.func), _plain(step.args), _plain(step.keywords.values())
    if isinstance(step, types.MethodType):
        return _essence(step.__func__)
    if isinstance(step, types.FunctionType):
        return step.__code__, _plain(step.__defaults__ or ()), _plain(map(_content, step.__closure__ or ()))
    return step if isinstance(step, types.BuiltinFunctionType) else type(step)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _UNBOUND


def _plain(values: Iterable[Any]) -> list[Any]:
    """Each in its place, None for one that is not plain."""
    return [value if isinstance(value, int | float | str) or value is _UNBOUND else None for value in values]


def _made(function: Callable[..., Any], *size: int) -> Any:
    try:
        return function(*size)
    except (Exception, SystemExit) as error:
        raise EntryError(f"{_name(function)} raised {type(error).__name__}: {error}") from error


def _name(function: Callable[..., Any]) -> str:
    """A module or a partial that was named in place of a function has no name of its own."""
    return getattr(function, "__name__", type(function).__name__)


def _checked(made: Any) -> Example:
    rule = "the function must return (step, arguments) or (step, arguments, keyword arguments)"
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise EntryError(f"{rule}, got {type(made).__name__}")
    step, args, kwargs = (*made, {})[:3]
    if not callable(step) or not isinstance(args, tuple | list) or not isinstance(kwargs, dict):
        raise EntryError(f"{rule}, got ({', '.join(type(each).__name__ for each in made)})")
    return Example(step, tuple(args), kwargs)
