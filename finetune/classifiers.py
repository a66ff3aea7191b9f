"""Build the classifier of a run, and save that of the best epoch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from data_prep.common.files import remove_partial_folders
from finetune.config import FinetuneConfig
from finetune.runs import MODEL, RunPlan
from finetune.tasks import Task
from pretrain.convert.contents import CLASSIFIER, ModelContents
from pretrain.convert.model_folder import LoadedModel
from pretrain.convert.writing import save_model
from pretrain.model.classification import ClassificationConfig
from pretrain.model.classifier import Classifier
from pretrain.model.config import ModelConfig
from pretrain.model.heads import ClassificationHead
from pretrain.model.language_model import LanguageModel


def head_config(config: FinetuneConfig, task: Task) -> ClassificationConfig:
    """Return the config of a task's head."""
    return ClassificationConfig(task.classes, task.labels, config.pooling, config.head_dropout)


def longest_input(max_tokens: int, architecture: ModelConfig) -> int:
    """Return how many tokens an input may have: `max_tokens`, or less where positions end."""
    return min(max_tokens, architecture.longest_input or max_tokens)


def about_length(max_tokens: int, trained: int, architecture: ModelConfig) -> str:
    """Describe how long inputs may be, compared with pretraining."""
    longest = longest_input(max_tokens, architecture)
    if longest > trained:
        words = f"inputs may be longer ({longest:,} tokens) than in pretraining ({trained:,})"
        return f"{words}; {architecture.method.beyond}"
    words = f"inputs have at most {longest:,} tokens"
    return f"{words}; {architecture.method.beyond}" if longest < max_tokens else words


def build(loaded: LoadedModel, plan: RunPlan, task: Task) -> Classifier:
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
    head = ClassificationHead(architecture.hidden_size, head_config(plan.config, task))
    trained = (
        model.pair_head.dense.state_dict() if architecture.pair_head else loaded.contents.pooler
    )
    reads_first = plan.config.pooling == "first" and plan.weights == "pretrained"
    if reads_first and (architecture.pair_head or architecture.segments) and trained:
        head.dense.load_state_dict(trained)
    return Classifier(model.encoder, head)


def save(
    folder: Path,
    trained: Mapping[str, torch.Tensor],
    loaded: LoadedModel,
    plan: RunPlan,
    task: Task,
) -> None:
    """Write the fine-tuned model into the run's folder.

    The last layer of a regression is multiplied by the task's scale: the model's outputs are in the
    units of the task's files.

    Args:
        folder: the run's folder.
        trained: the weights, as `Engine.weights` gave them.
        loaded: the model that the run started from.
        plan: the run's plan.
        task: the run's task.
    """
    weights = {re.sub(r"^head\.", CLASSIFIER, name): each for name, each in trained.items()}
    for name in weights:
        if task.is_regression and name.startswith(f"{CLASSIFIER}projection."):
            weights[name] = weights[name] * task.scale
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
