"""Scoring a model on whole splits, in one process or on all ranks together."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from finetune import scores, tasks
from finetune.batches import EncodedExamples, ShuffledBatches
from finetune.tasks import Logits, Task
from pretrain.engine.distributed import gather
from pretrain.loop.protocols import Model

if TYPE_CHECKING:
    from pretrain.engine.engine import Engine

_BATCH_SIZE = 64


def logits_of(
    model: Model, encoded: EncodedExamples, device: torch.device, rank: int = 0, world_size: int = 1
) -> Logits:
    """Compute the logits of every example in fp32, in the split's order, on every rank.

    Args:
        model: a classifier in evaluation mode.
        encoded: the split.
        device: the model's device.
        rank: rank of this process.
        world_size: number of processes; each reads every `world_size`-th batch.
    """
    batches = encoded.by_length(_BATCH_SIZE)
    mine = batches[rank::world_size]
    # Under ZeRO 3 all ranks must call the model equally often: some repeat a batch.
    mine += batches[:1] * (-(-len(batches) // world_size) - len(mine))
    parts = list[tuple[list[int], Logits]]()
    with torch.no_grad():
        for chosen in mine:
            batch = encoded.collate(chosen).to(device)
            output = model(batch["input_ids"], batch.get("document_ids"), batch.get("segment_ids"))
            parts.append((chosen, output.float().cpu().numpy()))
    numbers, found = zip(*itertools.chain(*gather(parts)), strict=True)
    logits = np.empty((len(encoded), found[0].shape[1]), dtype=np.float32)
    logits[np.concatenate(numbers)] = np.concatenate(found)
    return logits


@dataclasses.dataclass
class DevEvaluator:
    """Hook that scores the dev splits at the end of each epoch, and keeps the best model."""

    engine: Engine
    batches: ShuffledBatches
    task: Task
    dev_sets: Mapping[str, EncodedExamples]
    """By the name of the split."""
    best_epoch_by: str
    keeps_model: bool
    """Whether the weights of the best epoch are kept."""
    weights: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Of the best epoch, as `Engine.weights` gives them."""
    epochs: list[dict[str, float]] = dataclasses.field(default_factory=list)
    """One record per epoch: its number from 1, every score, and of the first split the loss and
    whether the run has collapsed."""

    @property
    def best(self) -> dict[str, float]:
        """The best epoch, as `FinetuneConfig.best_epoch_by` chooses it; the first of equals."""
        return dict(scores.best(self.epochs, self.task.scores_of_best(self.best_epoch_by)))

    def __call__(self, step: int) -> None:
        """Score the model after `step` updates if the last one ended an epoch."""
        if not self.batches.ends_epoch(step):
            return
        record: dict[str, float] = {"epoch": int(self.batches.epoch(step))}
        engine, task = self.engine, self.task
        engine.module.eval()
        for split, dev_set in self.dev_sets.items():
            logits = logits_of(
                engine.module, dev_set, engine.device, engine.rank, engine.world_size
            )
            answers = tasks.answers(task, logits)
            both = torch.from_numpy(logits), torch.from_numpy(dev_set.labels)
            record.setdefault("loss", float(tasks.loss(task, *both)) / len(dev_set))
            record.setdefault("collapsed", tasks.has_collapsed(task, dev_set.labels, answers))
            record |= tasks.score(task, split, dev_set.labels, answers)
        self.epochs.append(record)
        if self.keeps_model and self.best == record:
            self.weights = engine.weights()
        if engine.rank == 0:
            line = "  ".join(f"{name} {record[name]:.4f}" for name in task.score_names)
            print(f"epoch {record['epoch']}: dev loss {record['loss']:.4f}  {line}", flush=True)
