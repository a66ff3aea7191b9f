"""Optimizers whose update of an element depends on the whole parameter that it belongs to.

ZeRO gives an optimizer one flat tensor for a group of parameters, or for a part of a group: this
rank's pieces of them. The subclasses read norms or matrices of whole parameters; `ByParameter`
knows where the pieces lie, and adds up what the ranks have.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pretrain.engine.distributed import all_sum


class Piece(NamedTuple):
    """Part of a parameter."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    begin: int
    """First element of the piece in the flattened parameter."""
    length: int
    """Elements."""
    place: int
    """First element of the piece in the optimizer's tensor."""

    def of(self, tensor: Tensor) -> Tensor:
        """Return the piece as a view of a flat tensor that has the layout of the optimizer's."""
        return tensor[self.place :][: self.length]


def pieces_within(
    shapes: Iterable[tuple[int, ...]], begin: int, end: int, place: int = 0
) -> list[Piece]:
    """Return the piece of each of several tensors that a range of their concatenation holds.

    They lie one after the other in the optimizer's tensor, from `place` on.
    """
    found = []
    for shape in shapes:
        size, first = math.prod(shape), max(begin, 0)
        found.append(Piece(shape, first, max(min(end, size) - first, 0), place))
        begin, end, place = begin - size, end - size, place + found[-1].length
    return found


class ByParameter(torch.optim.Optimizer):
    """An optimizer whose tensors are whole parameters, or pieces of concatenated parameters."""

    _pieces: Mapping[Tensor, Sequence[Piece]] = {}
    _device: torch.device
    """What the ranks exchange tensors on, where there are pieces."""

    def set_pieces(self, pieces: Mapping[Tensor, Sequence[Piece]], device: torch.device) -> None:
        """Say of which pieces of parameters the tensors consist.

        Args:
            pieces: for each tensor, its pieces, empty ones included: of the same parameters, in the
                same order, on all ranks. The tensor may be longer. Empty: the tensors are whole
                parameters.
            device: what the ranks exchange tensors on.
        """
        self._pieces, self._device = pieces, device

    def pieces(self, tensor: Tensor) -> Sequence[Piece]:
        """Return the pieces of a tensor; of a whole parameter it is one."""
        return self._pieces.get(tensor) or [Piece(tuple(tensor.shape), 0, tensor.numel(), 0)]

    def parts(self, tensors: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """Split tensors by parameter, as those of the optimizer that have the same layout."""
        if not self._pieces:
            return list(tensors)
        pairs = zip(tensors, map(self.pieces, like), strict=True)
        return [piece.of(tensor) for tensor, pieces in pairs for piece in pieces]

    def square_sums(self, parts: Sequence[Tensor]) -> list[float]:
        """Compute the sums of squares of whole parameters from their parts, all ranks at once.

        The error is 1e-6 at most. On a CPU, torch's fp32 norm of 40 million elements has one of
        2e-3, and the fp64 norm takes ten times as long. The norms of chunks are computed in fp32,
        and their squares added in fp64.
        """
        chunks = [torch.split(part.reshape(-1), 2**16) for part in parts]
        norms = torch.stack(torch._foreach_norm([chunk for part in chunks for chunk in part]))
        squares = norms.cpu().double().square().split_with_sizes([len(part) for part in chunks])
        sums = [float(part.sum()) for part in squares]
        return all_sum(sums, self._device) if self._pieces else sums


def with_gradient(group: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors of a group that have a gradient, and their gradients."""
    pairs = [(tensor, tensor.grad) for tensor in group["params"] if tensor.grad is not None]
    return [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]
