"""The time of a rank's own forward passes, measured without waiting for the GPU."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn


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
