"""What a program of fake tensors does on the device: launches of kernels, and waits of the host."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_ASKING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2"}
"""Operations whose result the host has to know."""
_NO_KERNEL = {"detach", "alias", "_unsafe_view", "lift_fresh", "resize_", "set_"}


class Recorder(TorchDispatchMode):
    """Counts operations while it is entered; `begin` forgets what was before."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """torch.compile works below it."""
        return True

    def begin(self) -> None:
        self.kernels = 0
        """Operations that are no views, each one launch at least."""
        self.waits: Counter[str] = Counter()
        """Of the host for the device, by operation."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(function, torch._ops.HigherOrderOperator):
            return function(*args, **kwargs)
        space, name = function._schema.name.split("::")
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        on_device = any(tensor.device.type == "cuda" for tensor in given)
        if name in _ASKING and on_device:
            self.waits[name] += 1
        if name == "_local_scalar_dense":
            return _value(given[0])
        result = function(*args, **kwargs)
        made = [t for t in tree_iter(result) if isinstance(t, torch.Tensor)]
        if name in ("_to_copy", "copy_"):
            is_free = kwargs.get("non_blocking") or True in args[2:3]
            if not is_free and given[-1].device.type != made[0].device.type:
                self.waits[name] += 1
        if (on_device or any(t.device.type == "cuda" for t in made)) and not (
            function.is_view or space == "prim" or name in _NO_KERNEL or "empty" in name
        ):
            self.kernels += 1
        return result


def _value(tensor: torch.Tensor) -> bool | int | float:
    """What the host is told: no overflow was found, and every number is 1."""
    if tensor.dtype in (torch.bool, torch.uint8):
        return False if tensor.dtype == torch.bool else 0
    return 1.0 if tensor.is_floating_point() else 1
