"""Copies of micro-batches on the device, each started before the one in front of it is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pretrain.loop.protocols import MicroBatch


class Copies:
    """Keeps the copy of one micro-batch ahead.

    On a GPU the arrays go to pinned memory and from there, on a stream of their own, to the device.
    torch reuses pinned memory once its copy is done, so two micro-batches share it by turns. On a
    CPU nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        """Copy to `device`."""
        self._device = device
        self._stream = _new_stream() if device.type == "cuda" else None
        self._ahead: tuple[MicroBatch, dict[str, Tensor]] | None = None

    def start(self, batch: MicroBatch) -> None:
        """Start to copy the micro-batch that is asked for next."""
        if self._stream is None:
            return
        with _on_stream(self._stream):
            tensors = {
                name: torch.from_numpy(array).pin_memory().to(self._device, non_blocking=True)
                for name, array in batch.inputs().items()
            }
        self._ahead = batch, tensors

    def each(self, micro_batches: Sequence[MicroBatch]) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors of each micro-batch; the copy of the next one has begun by then."""
        for batch, following in zip(micro_batches, [*micro_batches[1:], None], strict=True):
            tensors = self._take(batch)
            if following is not None:
                self.start(following)
            yield tensors

    def _take(self, batch: MicroBatch) -> dict[str, Tensor]:
        if self._stream is None:
            return batch.to(self._device)
        if self._ahead is None or self._ahead[0] is not batch:
            self.start(batch)
        assert self._ahead is not None
        (_, tensors), self._ahead = self._ahead, None
        computing = _current_stream()
        computing.wait_stream(self._stream)
        for tensor in tensors.values():
            tensor.record_stream(computing)  # its memory is not reused before it was computed with
        return tensors


def _new_stream() -> Any:  # noqa: ANN401 - torch's streams have no annotations
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _on_stream(stream: Any) -> Any:  # noqa: ANN401
    return torch.cuda.stream(stream)


def _current_stream() -> Any:  # noqa: ANN401
    return torch.cuda.current_stream()
