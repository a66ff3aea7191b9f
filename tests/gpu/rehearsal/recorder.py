"""What a program of fake tensors does on the device: memory, waits, copies, collectives."""

import weakref
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.gpu.rehearsal.device import SYNCHRONISATIONS, place

_ASKING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2"}
"""Operations whose result the host has to know."""
_ALLOCATION = 512
"""Bytes that torch's allocator rounds sizes to."""
_NO_KERNEL = {"detach", "alias", "_unsafe_view", "lift_fresh", "resize_", "set_"}


class Recorder(TorchDispatchMode):
    """Follows all operations while it is entered; `begin` forgets what was before."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, int] = {}
        self.now = 0
        """Bytes of all tensors on the device."""
        self.begin()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """torch.compile works below it."""
        return True

    def begin(self) -> None:
        self.peak = self.now
        self.kernels = 0
        """Operations that are no views, each one launch at least."""
        self.waits: Counter[str] = Counter()
        self.blocking: Counter[str] = Counter()
        """Copies to the device that the host waits for, by the place that asked."""
        self.collectives: list[str] = []
        SYNCHRONISATIONS.clear()

    def _note(self, tree: object) -> None:
        for tensor in tree_iter(tree):
            if not (isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda"):
                continue
            storage = tensor.untyped_storage()
            if (key := storage._cdata) not in self._live:
                self._live[key] = size = -(-storage.nbytes() // _ALLOCATION) * _ALLOCATION
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self._live.pop(key)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(function, torch._ops.HigherOrderOperator):
            result = function(*args, **kwargs)
            self._note(result)
            return result
        space, name = function._schema.name.split("::")
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        if space == "c10d":
            tensors = " ".join(f"{str(t.dtype)[6:]}{list(t.shape)}" for t in given)
            self.collectives.append(f"{name} {tensors}")
        on_device = any(tensor.device.type == "cuda" for tensor in given)
        if name in _ASKING and on_device:
            self.waits[place()] += 1
        if name == "_local_scalar_dense":
            return _value(given[0])
        result = function(*args, **kwargs)
        self._note((args, kwargs))
        self._note(result)
        made = [t for t in tree_iter(result) if isinstance(t, torch.Tensor)]
        if name in ("_to_copy", "copy_"):
            self._note_copy(given[-1], made[0], kwargs.get("non_blocking") or True in args[2:3])
        if (on_device or any(t.device.type == "cuda" for t in made)) and not (
            function.is_view or space == "prim" or name in _NO_KERNEL or "empty" in name
        ):
            self.kernels += 1
        return result

    def _note_copy(self, source: torch.Tensor, target: torch.Tensor, is_free: bool) -> None:
        way = source.device.type, target.device.type
        if is_free or way[0] == way[1]:
            return
        if way[0] == "cuda":
            self.waits[place()] += 1
        else:
            self.blocking[place()] += 1


def _value(tensor: torch.Tensor) -> bool | int | float:
    """What the host is told: no overflow was found, and every number is 1."""
    if tensor.dtype in (torch.bool, torch.uint8):
        return False if tensor.dtype == torch.bool else 0
    return 1.0 if tensor.is_floating_point() else 1
