"""Muon for the matrices of the layers, and AdamW for everything else.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon) with the learning rate of Liu et al. 2025
(arXiv 2502.16982, section 2.2), as `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`. For each
matrix of n x m, with Nesterov's momentum and five Newton-Schulz iterations:

    b = momentum b + (1 - momentum) g
    O = nearest orthogonal matrix of (1 - momentum) g + momentum b
    w = w - rate decay w - 0.2 sqrt(max(n, m)) rate O

The factor gives an update the size of AdamW's, so that both take one learning rate and one weight
decay. Query, key and value, which are one parameter here, are three matrices (Jordan et al.), and a
gated expansion is two.

torch's own takes whole matrices only, and DeepSpeed's (0.19.8) replaces the gradients, so that the
norm of the gradient that is reported, clipped and watched for spikes is that of the update; it also
has no such learning rate. Here a rank adds to its pieces of matrices those of the other ranks, in
the precision in which the iterations compute: the result has the same bits as without partitions.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from pretrain.engine.by_parameter import ByParameter, Piece, pieces_within, with_gradient

_BUCKET = 2**25
"""Elements of matrices that ranks exchange at once, except for a larger matrix: 64 MB in bf16."""
_ITERATIONS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Coefficients of the iteration (Jordan et al.)."""
_LEAST_NORM = 1e-7


class Muon(ByParameter, torch.optim.AdamW):
    """Muon for groups whose parameters are `matrices` each, above each other; AdamW where 0.

    Every rank computes the matrices of which it has a piece. At ZeRO 3 these are all.
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a loaded state; Adam's own method asks for a count of updates of matrices too."""
        torch.optim.Optimizer.__setstate__(self, state)
        for tensor, own in self.state.items():
            if "step" in own:
                own["step"] = own["step"].to(tensor.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the tensors that have a gradient.

        All ranks must call it equally often, with the same groups.
        """
        groups = self.param_groups
        for group in groups:
            if group["matrices"]:
                for weight, gradient in zip(*with_gradient(group), strict=True):
                    self._move(weight, gradient, group)
        self.param_groups = [group for group in groups if not group["matrices"]]
        super().step()
        self.param_groups = groups

    def _move(self, weight: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        if not self.state[weight]:
            self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        momentum = self.state[weight]["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]).view(-1)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        flat = weight.view(-1)
        for bucket in _buckets(_matrices(self.pieces(weight), group["matrices"])):
            for piece, whole in zip(bucket, self._wholes(bucket, update), strict=True):
                if piece.length:
                    moved = _orthogonal(whole).reshape(-1)[piece.begin :][: piece.length]
                    rate = group["lr"] * 0.2 * math.sqrt(max(piece.shape))
                    piece.of(flat).add_(moved.to(flat.device), alpha=-rate)

    def _wholes(self, bucket: Sequence[Piece], update: Tensor) -> list[Tensor]:
        """Return the matrices of which the ranks have the pieces."""
        if not self._pieces:
            return [piece.of(update).view(piece.shape) for piece in bucket]
        sizes = [math.prod(piece.shape) for piece in bucket]
        joined = torch.zeros(sum(sizes), dtype=_precision(self._device), device=self._device)
        parts = joined.split_with_sizes(sizes)
        for part, piece in zip(parts, bucket, strict=True):
            part[piece.begin :][: piece.length] = piece.of(update)
        torch.distributed.all_reduce(joined)
        return [part.view(piece.shape) for part, piece in zip(parts, bucket, strict=True)]


def _precision(device: torch.device) -> torch.dtype:
    """Return the precision of the iterations: bf16, but fp32 on a CPU, where bf16 is slower."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _orthogonal(matrix: Tensor) -> Tensor:
    """Return the nearest orthogonal matrix, roughly: its singular values lie around 1."""
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.to(_precision(matrix.device))
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=_LEAST_NORM)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if is_tall else x


def _matrices(pieces: Sequence[Piece], count: int) -> list[Piece]:
    """Divide pieces of parameters that are `count` matrices above each other."""
    found = []
    for piece in pieces:
        shape = (piece.shape[0] // count, *piece.shape[1:])
        end = piece.begin + piece.length
        found += pieces_within([shape] * count, piece.begin, end, piece.place)
    return found


def _buckets(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Group consecutive matrices of at most `_BUCKET` elements together, or of one."""
    bucket: list[Piece] = []
    filled = 0
    for piece in pieces:
        size = math.prod(piece.shape)
        if bucket and filled + size > _BUCKET:
            yield bucket
            bucket, filled = [], 0
        bucket.append(piece)
        filled += size
    if bucket:
        yield bucket
