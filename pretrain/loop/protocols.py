"""What the loop, batches, objectives and engines know of each other.

Steps count from 0; step `s` reads global batch `s`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import Tensor

Model = Callable[..., "Tensor"]
Arrays = dict[str, "npt.NDArray[np.generic]"]


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """What one rank sees in one forward pass."""

    index: int
    """Number among the micro-batches of the global batch: keys the dropout of this pass."""
    arrays: Arrays
    tokens: int
    """Input tokens without padding."""
    targets: tuple[int, ...]
    """Number of targets of each term of the objective."""
    seed: int = 0
    """Of the randomness (dropout) of the step."""
    epoch: float = 0.0
    """Epochs read before the step."""
    batch_digest: str = ""
    """Hash of the names of all blocks of the global batch (`lineage.digest`), for audits."""
    gradient_scale: float = 1.0
    """Factor on the gradient of the step, but not on its loss: that of a rehearsed fault."""

    def emptied(self) -> "MicroBatch":
        """The batch as one that does not count: it is computed, as ZeRO 3 needs, and ignored."""
        return dataclasses.replace(self, tokens=0, targets=(0,) * len(self.targets))

    def to(self, device: "torch.device") -> dict[str, "Tensor"]:
        """The arrays as tensors on a device; the host does not wait for a GPU.

        Where every row is one document without padding, `document_ids` is left out: kernels without
        a mask are faster, and only the host can tell without waiting.
        """
        import torch

        arrays = {**self.arrays}
        ids = arrays.get("document_ids")
        if ids is not None and ids.dtype == bool and ids.all():
            del arrays["document_ids"]
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if device.type == "cuda":
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}


Batches = Callable[[int, int, int], Sequence[MicroBatch]]
"""What one rank reads: a function of the step, the rank and the number of ranks."""


class Objective(Protocol):
    """A loss made of named terms.

    loss = sum over terms of weight x (sum of the term over the global batch / number of the term's
    targets in the global batch). A term without targets in a global batch contributes nothing.
    """

    @property
    def terms(self) -> Mapping[str, float]:
        """Weight of each term, by name."""

    def loss(self, model: Model, batch: Mapping[str, "Tensor"]) -> "Tensor":
        """Each term summed over its targets in the batch, in nats: [terms], in fp32.

        Differentiable. A term without targets in the batch is 0, but computed from the model too:
        the backward passes of all ranks have to reach the same parameters.
        """


@dataclasses.dataclass(frozen=True)
class StepInput:
    """What one rank computes an update from."""

    step: int
    """Number of updates before this one, skipped ones included."""
    micro_batches: Sequence[MicroBatch]
    """This rank's, as many as every other rank's. Those without targets do not count, whatever
    their arrays hold."""
    objective: Objective
    counts: tuple[int, ...]
    """Tokens, and targets of each term, in the global batch."""


@dataclasses.dataclass(frozen=True)
class TermLoss:
    """One term of the loss over a global batch."""

    loss: float | None
    """Nats per target; None where there is no target."""
    targets: int


def weighted_loss(weights: Mapping[str, float], terms: Mapping[str, TermLoss]) -> float:
    """The loss of a global batch (see `Objective`)."""
    return sum(weights[name] * t.loss for name, t in terms.items() if t.loss is not None)


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Result of a finished update, over all ranks."""

    loss: float
    """The weighted sum over the terms, in nats per target."""
    targets: int
    """Of all terms."""
    tokens: int
    gradient_norm: float | None
    """Before clipping; None where it was not finite."""
    terms: Mapping[str, TermLoss] = dataclasses.field(default_factory=dict)
    """Each term by name, where the objective has several."""
    loss_scale: float = 1.0
    """fp16 loss scale of this update; 1 in any other precision."""
    skipped: bool = False
    """The engine skipped the update because its gradient was not finite."""
    scale_exhausted: bool = False
    """fp16 skipped this update at its smallest loss scale, which cannot be lowered further."""


class StepEngine(Protocol):
    """An engine as the loop needs it; engine/engine.py has the one."""

    rank: int
    world_size: int

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Equally many numbers of every rank, in rank order, on every rank."""

    def backward(self, given: StepInput) -> "Tensor":
        """Compute the gradient; the host does not wait for the device."""

    def update(self, given: StepInput, losses: "Tensor", learning_rate: float) -> StepResult:
        """Update the weights with the gradient, and wait for the result."""


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """A finished step, as observers see it."""

    step: int
    result: StepResult
    learning_rate: float
    seed: int
    epoch: float
    seconds: float
    data_seconds: float
    """Part of `seconds`: waiting for the batch of the next step."""
    batch_digest: str = ""
    """As in MicroBatch."""
    measured: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    """What each rank measured before the step, by name, in the order of ranks."""
    figures: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What observers are shown beside, by name (records/figures.py)."""


GO_ON = 0
"""The verdict to continue, as None is; any other number stops the loop on all ranks."""
