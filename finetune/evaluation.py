"""Scoring a model on whole splits, in one process or on all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from finetune import scores
from finetune.batches import EncodedExamples, ShuffledBatches
from finetune.glue import Task, suffix_of

if TYPE_CHECKING:
    import torch

    from pretrain.engine.engine import Engine
    from pretrain.loop.protocols import Model

_BATCH_SIZE = 64
Logits = npt.NDArray[np.float32]
Part = tuple[list[int], Logits]


def logits_of(
    model: Model,
    examples: EncodedExamples,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
    gather: Callable[[list[Part]], Sequence[list[Part]]] = lambda parts: [parts],
) -> Logits:
    """Compute the logits of every example, [N, C] in fp32, in the split's order, on every rank.

    Args:
        model: a classifier in evaluation mode.
        examples: the split.
        device: the model's device.
        rank: rank of this process.
        world_size: number of processes; each reads every `world_size`-th batch.
        gather: returns every rank's value on every rank.
    """
    import torch

    batches = examples.by_length(_BATCH_SIZE)
    mine = batches[rank::world_size]
    # Under ZeRO 3 all ranks must call the model equally often: some repeat a batch.
    mine += batches[:1] * (-(-len(batches) // world_size) - len(mine))
    parts: list[Part] = []
    with torch.no_grad():
        for chosen in mine:
            batch = examples.collate(chosen).to(device)
            output = model(batch["input_ids"], batch["document_ids"], batch.get("segment_ids"))
            parts.append((chosen, output.float().cpu().numpy()))
    result = np.empty((len(examples), parts[0][1].shape[1]), dtype=np.float32)
    for chosen, logits in (part for from_rank in gather(parts) for part in from_rank):
        result[chosen] = logits
    return result


def _predictions(task: Task, logits: Logits) -> scores.Values:
    """Return the likeliest class of each example, or the number of a regression."""
    return logits[:, 0] if task.is_regression else logits.argmax(axis=1)


def _mean_loss(task: Task, logits: Logits, labels: scores.Values) -> float:
    """Return the mean cross-entropy in nats, or the mean squared error of a regression."""
    if task.is_regression:
        return float(np.mean((logits[:, 0] - labels) ** 2))
    from scipy.special import log_softmax

    return float(-log_softmax(logits.astype(float), axis=1)[np.arange(len(labels)), labels].mean())


class Evaluation:
    """Hook that scores the dev splits at the end of each epoch, and keeps the best model."""

    def __init__(
        self,
        engine: Engine,
        batches: ShuffledBatches,
        task: Task,
        dev_sets: Mapping[str, EncodedExamples],
        best_epoch_by: str,
        best_folder: Path | None,
    ) -> None:
        """Score each split of `dev_sets`; save the best weights to `best_folder`, if given."""
        self.epochs: list[dict[str, float]] = []
        """One record per epoch: its number from 1, the loss on the first split and every score."""
        self.answers = 0
        """Number of different answers that the best epoch's model gave on the first split."""
        self._engine, self._batches, self._task = engine, batches, task
        self._dev_sets, self._best_folder = dev_sets, best_folder
        self._scores_of_best = task.scores_of_best(best_epoch_by)

    @property
    def best(self) -> dict[str, float]:
        """The best epoch, as `FinetuneConfig.best_epoch_by` chooses it; the first of equals."""
        return dict(scores.best(self.epochs, self._scores_of_best))

    def __call__(self, step: int) -> None:
        """Score the model after `step` updates if the last one ended an epoch."""
        if not self._batches.ends_epoch(step):
            return
        record: dict[str, float] = {"epoch": int(self._batches.epoch(step))}
        predictions = []
        for split, dev_set in self._dev_sets.items():
            logits = self._logits(dev_set)
            predictions.append(_predictions(self._task, logits))
            record.setdefault("loss", _mean_loss(self._task, logits, dev_set.labels))
            values = scores.score(self._task.metrics, dev_set.labels, predictions[-1])
            record |= {f"{name}{suffix_of(split)}": value for name, value in values.items()}
        self.epochs.append(record)
        if self.best == record:
            self.answers = len(np.unique(predictions[0]))
            if self._best_folder:
                self._engine.save(self._best_folder)
        if self._engine.rank == 0:
            line = "  ".join(f"{name} {record[name]:.4f}" for name in self._task.score_names)
            print(f"epoch {record['epoch']}: dev loss {record['loss']:.4f}  {line}", flush=True)

    def _logits(self, dev_set: EncodedExamples) -> Logits:
        from pretrain.engine.distributed import gather

        engine = self._engine
        engine.module.eval()
        return logits_of(
            engine.module, dev_set, engine.device, engine.rank, engine.world_size, gather
        )
