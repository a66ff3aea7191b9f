"""What a rank tells the others of itself before each step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from pretrain.checks import needs
from pretrain.engine import memory, workarounds
from pretrain.engine.forward_timer import ForwardTimer
from pretrain.loop.protocols import MicroBatch
from pretrain.records import pace
from pretrain.records.figures import BETA, MEMORY, PAIRS, SECONDS
from pretrain.train.setup import Setup


class Measurements:
    """What one rank measures."""

    def __init__(self, setup: Setup) -> None:
        """Begin to time the model's forward passes."""
        self._architecture, self._device = setup.architecture, setup.process.device
        self._backend = setup.environment["attention_backend"]
        self._timer = ForwardTimer(setup.model, self._device)
        self._beta: Tensor | None = getattr(setup.model.head, "beta", None)

    def take(self, data_seconds: float, batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Return the figures by name (records/figures.py).

        Args:
            data_seconds: how long the rank waited for its batch.
            batches: that it reads in the next step; none after the last one.
        """
        forward_seconds = self._timer.take()  # none before the first step
        found = {
            PAIRS: sum(
                needs.computed_pairs(self._architecture, self._backend, each.arrays["document_ids"])
                for each in batches
                if each.tokens  # an empty one is no part of the global batch
            ),
            SECONDS: pace.own_seconds(data_seconds, forward_seconds or math.nan),
            MEMORY: float(memory.most_bytes(self._device)),
        }
        if self._beta is not None:
            found[BETA] = workarounds.held_by_rank_0(self._beta).item()
        return found
