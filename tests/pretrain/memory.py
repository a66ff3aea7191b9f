"""How much memory tensors take, counted operation by operation."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made within the block: those alive now, and the most at any time.

    Tensors saved for the backward pass count. What a kernel takes for itself does not.
    """

    def __init__(self):
        super().__init__()
        self._known = {}  # storages that were seen; those made before the block count 0 bytes
        self.peak = 0
        self.made = []
        """Of each tensor made, its bytes."""

    @property
    def live(self):
        self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
        return sum(size for _, size in self._known.values())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self._note((args, kwargs), made=False)
        result = function(*args, **(kwargs or {}))
        self._note(result, made=True)
        self.peak = max(self.peak, self.live)
        return result

    def _note(self, values, made):
        for tensor in tree_leaves(values):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            known = self._known.get(storage._cdata)
            if known is None or known[0].expired():
                size = storage.nbytes() if made else 0
                self._known[storage._cdata] = StorageWeakRef(storage), size
                self.made += [size] if made else []
