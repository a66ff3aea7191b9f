"""Build the classifier of a run, compute its logits, and save that of the best epoch."""

import dataclasses
import itertools
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from data_prep.common.files import remove_partial_folders
from finetune.batches import EncodedExamples
from finetune.config import FinetuneConfig
from finetune.result import RunPlan
from finetune.runs import MODEL
from finetune.tasks import Logits, Task
from pretrain.convert.contents import CLASSIFIER, ModelContents
from pretrain.convert.model_folder import LoadedModel
from pretrain.convert.writing import save_model
from pretrain.engine.distributed import gather
from pretrain.loop.protocols import Model
from pretrain.model.classification import ClassificationConfig, ClassificationHead, Classifier
from pretrain.model.language_model import LanguageModel

_BATCH_SIZE = 64
"""Of scoring."""


def head_config(config: FinetuneConfig, task: Task) -> ClassificationConfig:
    """Return the config of a task's head."""
    return ClassificationConfig(task.classes, task.labels, config.pooling, config.head_dropout)


def build(loaded: LoadedModel, plan: RunPlan) -> Classifier:
    """Build the classifier that a run starts from, which depends on model folder and plan only.

    Where the model has segments, the dense layer of the new head starts as that of its pair head,
    or of its classifier, or as its pooler, which has read `<s>` too, as in BERT and ALBERT.
    """
    architecture = dataclasses.replace(
        loaded.model.config,
        dropout=plan.config.dropout,
        attention_dropout=plan.config.attention_dropout,
    )
    torch.manual_seed(plan.seed)
    model = LanguageModel(architecture)
    if plan.weights == "pretrained":
        model.load_state_dict(loaded.model.state_dict())
    config = head_config(plan.config, plan.definition)
    head = ClassificationHead(architecture.hidden_size, config)
    trained = (
        model.pair_head.dense.state_dict() if architecture.pair_head else loaded.contents.pooler
    )
    reads_first = plan.config.pooling == "first" and plan.weights == "pretrained"
    if reads_first and (architecture.pair_head or architecture.segments) and trained:
        head.dense.load_state_dict(trained)
    return Classifier(model.encoder, head)


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
    order = np.argsort(encoded.lengths, kind="stable").tolist()  # similar ones need little padding
    batches = [order[start : start + _BATCH_SIZE] for start in range(0, len(order), _BATCH_SIZE)]
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


def save(
    folder: Path, trained: Mapping[str, torch.Tensor], loaded: LoadedModel, plan: RunPlan
) -> None:
    """Write the fine-tuned model into the run's folder.

    The last layer of a regression is multiplied by the task's scale: the model's outputs are in the
    units of the task's files.

    Args:
        folder: the run's folder.
        trained: the weights, as `Engine.weights` gave them.
        loaded: the model that the run started from.
        plan: the run's plan.
    """
    task = plan.definition
    weights = {re.sub(r"^head\.", CLASSIFIER, name): each for name, each in trained.items()}
    for name in (f"{CLASSIFIER}projection.weight", f"{CLASSIFIER}projection.bias"):
        weights[name] = weights[name] * task.scale  # of a classification 1
    remove_partial_folders(folder / MODEL)  # left by an interrupted run
    contents = ModelContents(
        dataclasses.replace(loaded.model.config, pair_head=False),
        weights,
        loaded.contents.vocabulary,
        {
            "task": plan.task,
            "weights": plan.weights,
            "seed": plan.seed,
            "model": plan.model_sha256,
            "max_tokens": plan.config.max_tokens,
            "custom_task": dataclasses.asdict(plan.own) if plan.own else None,
            "pretrained": loaded.contents.provenance,
        },
        head_config(plan.config, task),
    )
    save_model(folder / MODEL, contents)
