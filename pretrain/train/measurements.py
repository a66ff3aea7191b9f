"""What a rank tells the others of itself before each step."""

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.checks import needs
from pretrain.engine import workarounds
from pretrain.engine.distributed import most_bytes
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
            MEMORY: float(most_bytes(self._device)),
        }
        if self._beta is not None:
            found[BETA] = workarounds.held_by_rank_0(self._beta).item()
        return found


class ForwardTimer:
    """Times the forward passes of a model in training.

    On a GPU two events are recorded around each pass, and read when the step is over. Under ZeRO
    stage 3 a pass includes waiting for the weights, so that slow ranks cannot be told apart.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Begin to time `model`, which runs on `device`."""
        self._on_gpu = device.type == "cuda"
        self._seconds, self._started = 0.0, 0.0
        self._events: list[tuple[Any, Any]] = []
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)

    def _begin(self, model: nn.Module, arguments: Any) -> None:  # noqa: ANN401 - the model's
        if model.training and self._on_gpu:
            begin, end = _new_event(), _new_event()
            begin.record()
            self._events.append((begin, end))
        self._started = time.perf_counter()

    def _end(self, model: nn.Module, arguments: Any, result: Any) -> None:  # noqa: ANN401
        if model.training and self._on_gpu:
            self._events[-1][1].record()
        elif model.training:
            self._seconds += time.perf_counter() - self._started

    def take(self) -> float:
        """Return the seconds of the passes since the last call; call it at the end of a step."""
        done = [pair for pair in self._events if pair[1].query()]
        self._events = [pair for pair in self._events if pair not in done]
        milliseconds = sum(float(begin.elapsed_time(end)) for begin, end in done)
        seconds, self._seconds = self._seconds + milliseconds / 1e3, 0.0
        return seconds


def _new_event() -> Any:  # noqa: ANN401 - torch's events have no annotations
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
