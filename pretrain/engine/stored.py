"""Tensors of files from outside: whether their file holds as much as they ask for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def refuse_unstored(tensors: Iterable[tuple[str, Tensor]], what: str) -> None:
    """Refuse tensors by which a small file asks for any amount of memory.

    Args:
        tensors: each with its name, on the CPU.
        what: what messages call the file.

    Raises:
        ValueError: a tensor has no bytes of its own for each element; or so many share their bytes
            that copies take more than twice as many (tied embeddings are stored once).
    """
    asked, stored = 0, {}
    for name, tensor in tensors:
        is_plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not is_plain or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise ValueError(
                f"{what} has {name} {list(tensor.shape)}, whose elements are not all in the file"
            )
        asked += tensor.nbytes
        stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    if asked > (accepted := 2 * sum(stored.values())):
        raise ValueError(
            f"{what} has weights that share memory: copies would take {asked:,} bytes; accepted: "
            f"up to {accepted:,}, twice what is stored"
        )


def tensors_in(content: object) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a loaded file, at any depth, with its key."""
    waiting, seen = [("", content)], set()
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, Tensor):
            yield name, value
        elif id(value) not in seen:
            seen.add(id(value))
            inner = value if isinstance(value, dict) else getattr(value, "__dict__", {})
            waiting.extend((str(key), each) for key, each in inner.items())
            if isinstance(value, list | tuple | set):
                waiting.extend((name, each) for each in value)
