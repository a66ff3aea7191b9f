"""Build the classifier of a run, and save that of the best epoch."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import torch

from data_prep.common.files import remove_partial_folders
from finetune.config import FinetuneConfig
from finetune.runs import MODEL, RunPlan
from finetune.tasks import Task
from pretrain.inference import model_folder
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


def build(loaded: model_folder.LoadedModel, plan: RunPlan, task: Task) -> Classifier:
    """Build the classifier that a run starts from, which depends on model folder and plan only.

    Where the model has a pretrained head for pairs of segments, the dense layer of the new head
    starts as its dense layer, which has read `<s>` too: the pooler of BERT and ALBERT.
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
    if architecture.pair_head and plan.weights == "pretrained" and plan.config.pooling == "first":
        head.dense.load_state_dict(model.pair_head.dense.state_dict())
    return Classifier(model.encoder, head)


def save(
    folder: Path, parts: Path, loaded: model_folder.LoadedModel, plan: RunPlan, task: Task
) -> None:
    """Write the fine-tuned model into the run's folder, with its head under the task's name.

    The language model's head is the pretrained one, which fine-tuning does not change.

    Args:
        folder: the run's folder.
        parts: the weights as `Engine.save` wrote them.
        loaded: the model that the run started from.
        plan: the run's plan.
        task: the run's task.
    """
    from pretrain.engine.consolidated import consolidated_weights

    weights = dict(loaded.model.state_dict())
    for name, tensor in consolidated_weights(parts).items():
        part, _, rest = name.partition(".")
        weights[f"{model_folder.HEADS}{task.name}.{rest}" if part == "head" else name] = tensor
    shutil.rmtree(folder / MODEL, ignore_errors=True)  # left by an interrupted run
    remove_partial_folders(folder / MODEL)
    contents = model_folder.ModelContents(
        loaded.model.config,
        weights,
        loaded.vocabulary,
        {
            "task": plan.task,
            "weights": plan.weights,
            "seed": plan.seed,
            "model": plan.model_sha256,
            "max_tokens": plan.config.max_tokens,
            "custom_task": dataclasses.asdict(plan.own) if plan.own else None,
            "pretrained": loaded.provenance,
        },
        {task.name: head_config(plan.config, task)},
    )
    model_folder.save_model(folder / MODEL, contents)
