"""Whether what a call writes shares memory with another of its tensors.

    check_distinct({"out": table[:, 0:4]}, {"pool": table[:, 2:6]})
    -> ValueError: out must not overlap pool: got views of the same memory

Columns 0 .. 3 and 4 .. 7 of one table share no byte and are let through, though their addresses interleave.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

PLAIN = (Tensor, torch.nn.Parameter)


def check_distinct(outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor | None]) -> None:
    """Refuse outputs that overlap each other or an input, as far as can be seen where this runs.

    Eagerly: by address. While a graph is traced anything about storage would break it, so the public function
    compares objects, and the operator's fake implementation compares storages and offsets.
    """
    everything = {**{k: v for k, v in inputs.items() if v is not None}, **outputs}
    if torch.compiler.is_compiling():
        _check_distinct_objects(outputs, everything)
    else:
        _check_distinct_spans(outputs, everything)


def check_distinct_fake(outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor | None]) -> None:
    """`check_distinct` for an operator's body, where it runs as the fake implementation; elsewhere nothing."""
    if outputs and all(type(tensor) is FakeTensor for tensor in outputs.values()):
        _check_distinct_spans(outputs, {**{k: v for k, v in inputs.items() if v is not None}, **outputs})


def _check_distinct_spans(outputs: Mapping[str, Tensor], everything: Mapping[str, Tensor]) -> None:
    if not all(type(tensor) in PLAIN for tensor in everything.values()):
        # To compare spans of fake tensors is to guard on sizes, and other kinds may have no address.
        storages = {tensor.untyped_storage()._cdata for tensor in everything.values()}
        if len(storages) == len(everything):
            return
    spans = sorted((*_span(tensor), name) for name, tensor in everything.items() if _has_memory(tensor))
    for index, (_, end, name) in enumerate(spans):
        for begin, _, other in spans[index + 1 :]:
            if begin >= end:
                break
            if (name in outputs or other in outputs) and not _interleaved(everything[name], everything[other]):
                _refuse(*((name, other) if name in outputs else (other, name)))


def _check_distinct_objects(outputs: Mapping[str, Tensor], everything: Mapping[str, Tensor]) -> None:
    for name, out in outputs.items():
        for other, tensor in everything.items():
            if name != other and out is tensor:
                _refuse(name, other)


def _refuse(name: str, other: str) -> None:
    raise ValueError(f"{name} must not overlap {other}: got views of the same memory")


def _has_memory(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and (type(tensor) is FakeTensor or tensor.data_ptr() != 0)


def _span(tensor: Tensor) -> tuple[int, int]:
    """First byte and the byte past the last one that `tensor` covers; fake tensors count from an address of their
    storage's own."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    begin = tensor.data_ptr() if type(tensor) is not FakeTensor else _fake_address(tensor)
    return begin, begin + extent * tensor.element_size()


def _fake_address(tensor: Tensor) -> int:
    return (tensor.untyped_storage()._cdata << 64) + tensor.storage_offset() * tensor.element_size()


def _interleaved(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share memory's range but no byte: slices of the columns of one wider table."""
    (a_width, a_pitch), (b_width, b_pitch) = _rows_of(a), _rows_of(b)
    pitch = a_pitch or b_pitch
    if a.element_size() != b.element_size() or {a_pitch or pitch, b_pitch or pitch} != {pitch} or pitch <= 0:
        return False
    apart = (_span(b)[0] - _span(a)[0]) // a.element_size() % pitch
    return 0 < a_width <= apart and 0 < b_width <= pitch - apart


def _rows_of(tensor: Tensor) -> tuple[int, int]:
    """Width of a table's rows and the distance between them: 0 for a single row, and a width of 0 where its columns do
    not lie side by side. A strided vector is a table of one column, and tables of several groups are one where their
    rows follow one another at that distance."""
    if tensor.ndim == 1 and tensor.stride(0) != 1:
        tensor = tensor[:, None]
    groups, rows, width = (1, 1, 1, *tensor.shape)[-3:]
    group_pitch, pitch, unit = (0, 0, 1, *tensor.stride())[-3:]
    if groups > 1 and rows > 1 and group_pitch != rows * pitch:
        width = 0
    if rows == 1:
        pitch = group_pitch
    return width if width == 1 or unit == 1 else 0, pitch if groups * rows > 1 else 0
