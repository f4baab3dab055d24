"""A callable and its arguments, copied with every tensor on a real device, to be run there."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from compiled_kv.tracing.fakes import Fakes


class Reals(Fakes):
    """Moves what `Fakes` would fake, by the same rules; a tensor that is there already stays the caller's own.

    Args:
        device: where tensors go.
    """

    def __init__(self, device: torch.device):
        super().__init__(FakeTensorMode(), device)

    def tensor(self, tensor: Tensor, device: torch.device | None) -> Tensor:
        """The same tensor on `device`; views of one storage stay that.

        Raises:
            ValueError: it has no data to move.
        """
        if tensor.device.type == "meta":
            raise ValueError("tensor arguments must hold data to be run, got one on the meta device")
        if device is None or tensor.device.type == device.type:
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            held = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._storages[storage._cdata] = held.to(device).untyped_storage()
        moved = torch.empty(0, dtype=tensor.dtype, device=device)
        moved.set_(self._storages[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
        made = nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
        for name, value in vars(tensor).items():
            if name.startswith("_dynamo_"):  # what mark_dynamic and mark_static_address said of it
                setattr(made, name, value)
        return made
