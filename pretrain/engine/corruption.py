"""Silent corruption: a processor or a memory that yields other bits, and no error.

At ZeRO stages 0 to 2 all ranks hold the same weights, and ranks with processors of one kind compute
the same bits from the same micro-batch. `find` hashes both on every rank and compares. The weights
and moments of the optimizer, of which each rank has a part, must not change between two updates:
`Kept` hashes them after each and before the next. What is found, what is not, and what it costs is
in the guide on what goes wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from pretrain.engine.distributed import gather
from pretrain.loop.protocols import Objective

Hashes = tuple[int, ...]
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element."""
_MOST_NAMES = 3
_STEP = "step"
"""Of an optimizer's state: the number of updates, which may be on another device."""


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What one rank holds and computes."""

    host: str
    processor: str
    """Ranks are compared with those of the same kind: others may round differently."""
    weights: Hashes
    """One of each parameter; none where the ranks do not share them."""
    results: tuple[Hashes, ...]
    """What each computation of the micro-batch gave: one hash of the loss, then one of each
    parameter's gradient."""
    has_changed: bool = False
    """See `Kept`."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """Ranks whose bits are wrong, or among which one's are."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    """Of the ranks, in their order."""
    reason: str


class Kept:
    """What a rank's optimizer keeps from one update to the next."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Look after an optimizer, of whose tensors nothing is known yet."""
        self._optimizer = optimizer
        self._left: Tensor | None = None
        self._changes: list[Tensor] = []

    def forget(self) -> None:
        """Expect other numbers: a checkpoint was loaded."""
        self._left, self._changes = None, []

    def note(self) -> None:
        """Note what an update has left; there is nothing before the first that was not skipped."""
        self._left = self._hashes() if self._optimizer.state else None

    def check(self) -> None:
        """Compare with what the last update left. Does not wait for the device."""
        if self._left is not None:
            self._changes.append((self._hashes() != self._left).any())

    def has_changed(self) -> bool:
        """Whether anything was found since the last call."""
        changes, self._changes = self._changes, []
        return bool(torch.stack(changes).any()) if changes else False

    def _hashes(self) -> Tensor:
        states = self._optimizer.state  # at ZeRO 3 no group has its tensors between updates
        moments = (
            value
            for state in states.values()
            for name, value in state.items()
            if name != _STEP and isinstance(value, Tensor)
        )
        return _hashed([*states, *moments])


def find(
    model: nn.Module,
    objective: Objective,
    batch: Mapping[str, Tensor],
    seed: int,
    device: torch.device,
    *,
    is_shared: bool,
    has_changed: bool = False,
) -> Finding | None:
    """Compare what the ranks hold, and what they compute from one micro-batch.

    Where ranks disagree, or one has no other of its kind, all compute once more: a rank that
    disagrees with itself is wrong. Every rank must call this, with the same batch and seed. Each
    needs memory for the whole gradient. Weights and gradients stay as they are; torch's random
    state does not.

    Args:
        model: whose parameters are trained.
        objective: gives the loss.
        batch: of the objective.
        seed: of the dropout.
        device: the rank's.
        is_shared: whether each rank holds all weights.
        has_changed: what `Kept` found on this rank.

    Returns:
        The same on every rank; None where nothing differs.
    """
    parameters = dict(model.named_parameters())

    def result() -> Hashes:
        torch.manual_seed(seed)
        model.train()
        loss = objective.loss(model, batch)
        trained = [each for each in parameters.values() if each.requires_grad]
        # Not `backward`: DeepSpeed must not see these gradients.
        gradients = torch.autograd.grad(loss.sum(), trained, allow_unused=True)
        return hashes([loss, *(each for each in gradients if each is not None)])

    weights = hashes(parameters.values()) if is_shared else ()
    own = Fingerprint(socket.gethostname(), processor(device), weights, (result(),), has_changed)
    prints = gather(own)
    alone = 1 in Counter(each.processor for each in prints).values()
    if alone or compare(prints, list(parameters)):
        prints = gather(dataclasses.replace(own, results=(*own.results, result())))
    return compare(prints, list(parameters))


def hashes(tensors: Iterable[Tensor]) -> Hashes:
    """Hash the bits of each tensor; another bit in one place always gives another hash."""
    return tuple(_hashed(list(tensors)).tolist())


def _hashed(tensors: Sequence[Tensor]) -> Tensor:
    found = [torch.hash_tensor(_whole_numbers(each.detach())) for each in tensors]
    return torch.stack([each.view(torch.int64) for each in found]) if found else torch.empty(0)


def _whole_numbers(tensor: Tensor) -> Tensor:
    """The bits of a tensor as integers: as long ones as fit, which takes a fifth of the time."""
    flat, size = tensor.contiguous().view(-1), tensor.element_size()
    fits = all(number * size % 8 == 0 for number in (len(flat), flat.storage_offset()))
    return flat.view(_INTEGERS[8 if fits else size])


def processor(device: torch.device) -> str:
    """What decides how a rank rounds: its GPU, or its CPU and the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = torch.backends.cpu.get_cpu_capability()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line for line in lines if line.startswith("model name")), name)
    return f"{name}, {torch.get_num_threads()} threads"


def compare(prints: Sequence[Fingerprint], names: Sequence[str] = ()) -> Finding | None:
    """Find the ranks that differ from themselves, or from most others of their kind.

    A rank that is found in one way is left out of the next comparison.

    Args:
        prints: of each rank.
        names: of the weights, for the reason.
    """
    reasons: dict[int, str] = {}
    for rank, each in enumerate(prints):
        if each.has_changed:
            reasons[rank] = "weights or moments changed between two updates"
        elif len({*each.results}) > 1:
            reasons[rank] = "computed different bits from the same micro-batch"
    for kind in {each.processor for each in prints}:
        ranks = {rank: each for rank, each in enumerate(prints) if each.processor == kind}
        held = {rank: each.weights for rank, each in ranks.items() if rank not in reasons}
        text = f"weights differ from the majority ({_differing(held.values(), names)})"
        reasons |= dict.fromkeys(outliers(held), text)
        computed = {rank: each.results[0] for rank, each in ranks.items() if rank not in reasons}
        text = "computed other results than the others from the same micro-batch"
        reasons |= dict.fromkeys(outliers(computed), text)
    if not reasons:
        return None
    wrong = tuple(sorted(reasons))
    hosts = tuple(prints[rank].host for rank in wrong)
    said = (
        f"rank {rank} on {host}: {reasons[rank]}" for rank, host in zip(wrong, hosts, strict=True)
    )
    return Finding(wrong, hosts, "; ".join(said))


def outliers(values: Mapping[int, Hashes]) -> list[int]:
    """Return the ranks whose value is not that of most ranks; all where no value is that of most.

    None where all are alike.
    """
    ((usual, count), *others) = Counter(values.values()).most_common() or [((), 0)]
    if not others:
        return []
    is_known = 2 * count > len(values)
    return [rank for rank, value in values.items() if not (is_known and value == usual)]


def _differing(values: Collection[Hashes], names: Sequence[str]) -> str:
    """Name the first weights that are not the same on all ranks."""
    columns = zip(names, *values, strict=False)
    found = [name for name, *column in columns if len({*column}) > 1]
    return ", ".join(found[:_MOST_NAMES]) + (", ..." if len(found) > _MOST_NAMES else "")
