"""The settings of a fine-tuning run (`FinetuneConfig`) and its plan (`RunPlan`).

The plan holds everything that decides the outcome of a run, and is written to the run's folder
before the run starts. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.common.arguments import typed
from data_prep.common.files import write_json
from data_prep.common.records import decode
from finetune.collapse import LEAST_RETRIED, USUAL_RETRIES
from pretrain.config.sections import BatchConfig
from pretrain.config.settings import apply_override, check
from pretrain.model.classification import POOLINGS

PLAN = "run.json"
RESULT = "result.json"
MODEL = "model"
"""The subfolder for the fine-tuned model, if it is kept."""
LOG = "log.txt"

WEIGHTS = ("pretrained", "random")
"""Weights to start from; random ones show what pretraining is worth."""

BEST_EPOCH_BY = ("benchmark", "published")


@dataclasses.dataclass(frozen=True)
class FinetuneConfig:
    """Settings of a run: those of `glue.Task.config`, changed by key=value arguments."""

    epochs: int = 10
    batch_size: int = 16
    learning_rate: float = 1e-5
    warmup_fraction: float = 0.06
    """Share of the steps in which the learning rate rises to its peak; afterwards it falls to 0."""
    warmup_steps: int = 0
    """Warm-up as a number of steps; 0: use `warmup_fraction`."""
    schedule_steps: int = 0
    """Step at which the learning rate reaches 0; 0: at the end of the run."""
    weight_decay: float = 0.1
    gradient_clipping: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    dropout: float = 0.1
    """Dropout of the encoder, instead of that of pretraining."""
    attention_dropout: float = 0.1
    head_dropout: float = 0.0
    pooling: str = "first"
    """Input of the head: "first", the feature of `<s>`, or "mean", the mean over all tokens."""
    max_tokens: int = 512
    """Longer inputs are left out of training and truncated in scoring; result.json counts them."""
    max_train_examples: int = 0
    """Train on the first N examples only; 0: on all."""
    best_epoch_by: str = "published"
    """Score that chooses the best epoch, whose model is kept: "benchmark", GLUE's own (the mean of
    `glue.Task.official`), or "published", the study's (accuracy, for STS-B the loss)."""
    length_window: int = 50
    """Number of batches within which examples are grouped by length; 1: no grouping."""
    deepspeed: str = ""
    """A file of ds_configs/ without .json; empty: zero1_bf16 on a GPU, zero1_fp32 on a CPU."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: a value out of range.
        """
        for name in ("epochs", "batch_size", "learning_rate", "length_window"):
            check(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        for name in ("warmup_fraction", "dropout", "attention_dropout", "head_dropout"):
            check(0 <= getattr(self, name) < 1, name, getattr(self, name), "in [0, 1)")
        for name in (
            "weight_decay",
            "gradient_clipping",
            "warmup_steps",
            "schedule_steps",
            "max_train_examples",
        ):
            check(getattr(self, name) >= 0, name, getattr(self, name), "0 or above")
        check(self.pooling in POOLINGS, "pooling", self.pooling, f"one of {', '.join(POOLINGS)}")
        known = self.best_epoch_by in BEST_EPOCH_BY
        accepted = f"one of {', '.join(BEST_EPOCH_BY)}"
        check(known, "best_epoch_by", self.best_epoch_by, accepted)
        enough = self.max_tokens >= 6
        check(enough, "max_tokens", self.max_tokens, "at least 6: <s> a </s> </s> b </s>")

    def steps(self, examples: int) -> int:
        """Return the number of updates for a number of training examples."""
        return -(-self.epochs * examples // self.batch_size)

    def batch(self, world_size: int) -> BatchConfig:
        """Return the batch sizes of a run on this many ranks.

        Raises:
            ValueError: the batch does not divide over the ranks.
        """
        if self.batch_size % world_size:
            raise ValueError(
                f"batch_size {self.batch_size}: not a multiple of --world-size {world_size}; "
                "accepted: a multiple, or another --world-size"
            )
        return BatchConfig(self.batch_size, self.batch_size // world_size)

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate of update `step` of `steps`: linear warm-up and linear decay.

        Each update of the warm-up has the rate that fairseq gives to the next one; fairseq's first
        update has rate 0 and changes nothing.
        """
        end = self.schedule_steps or steps
        warmup = self.warmup_steps or round(self.warmup_fraction * end)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        return self.learning_rate * max(0, end - step) / max(1, end - warmup)

    def steadier(self, retry: int, steps: int) -> FinetuneConfig:
        """Return the settings of a retry, counted from 1: each doubles the warm-up, up to half.

        Half of `steps`, those of the run, or of the schedule where that is shorter. A longer
        warm-up stays as it is. A low rate early in training prevents most collapses (Mosbach et
        al. 2021).
        """
        if retry == 0:
            return self
        fraction = min(0.5, max(0.06, self.warmup_fraction) * 2**retry)
        half = min(steps, self.schedule_steps or steps) // 2
        return dataclasses.replace(
            self,
            warmup_fraction=max(self.warmup_fraction, fraction),
            warmup_steps=max(self.warmup_steps, min(half, self.warmup_steps * 2**retry)),
        )


def override(config: FinetuneConfig, overrides: Sequence[str]) -> FinetuneConfig:
    """Return the config with `key=value` settings applied.

    Raises:
        ValueError: an unknown setting (the nearest is named), or a value of the wrong type.
    """
    values = dataclasses.asdict(config)
    for each in overrides:
        apply_override(values, each)
    return decode(FinetuneConfig, values)


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """Everything that decides what a run computes.

    The same plan gives the same scores on the same device, world size and number of threads.
    """

    task: str
    weights: str
    seed: int
    model: str
    """A model folder."""
    data: str
    """Where the tasks are, as examples.py describes."""
    model_sha256: str
    data_sha256: str
    config: FinetuneConfig
    """As requested; `training_config` is that of a retry."""
    retry: int = 0
    """Number of runs of this seed that collapsed before this one."""
    save_model: bool = True
    """Whether to keep the model of the best epoch."""
    work: int = 0
    """Characters to read, for estimating the remaining time."""

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        ending = f"-retry{self.retry}" if self.retry else ""
        return f"{self.task}-{self.weights}-seed{self.seed}{ending}"

    def training_config(self, examples: int) -> FinetuneConfig:
        """Return the settings to train with, on this number of examples."""
        return self.config.steadier(self.retry, self.config.steps(examples))

    @property
    def training_seed(self) -> int:
        """The seed of head, order and dropout; for a retry a hash, so that no other run has it."""
        if self.retry == 0:
            return self.seed
        text = f"{self.seed} retry {self.retry}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")

    def differences(self, other: RunPlan) -> list[str]:
        """Return what makes two runs incomparable, as "key: ours, now theirs".

        Seed, retry and weights may differ between compared runs, and folders may have moved.
        """
        old, new = self._comparable(), other._comparable()
        return [f"{key}: {old[key]}, now {new[key]}" for key in old if old[key] != new[key]]

    def _comparable(self) -> dict[str, object]:
        return {
            "model": self.model_sha256[:12],
            "data": self.data_sha256[:12],
            **dataclasses.asdict(self.config),
        }

    def write(self, folder: Path) -> None:
        """Write the plan into a run's folder, which is created if it is missing."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / PLAN, dataclasses.asdict(self))


def retry_after(plan: RunPlan, result: Mapping[str, Any], limit: int | None) -> RunPlan | None:
    """Return the plan of the retry that a result calls for, or None.

    Runs from random weights are never retried: they are the baseline, and may well collapse.

    Args:
        plan: of the run that ended.
        result: its result.
        limit: how often a run is retried; None: as often as is usual for the number of examples.
    """
    if limit is None:
        limit = USUAL_RETRIES if result["train_examples"] >= LEAST_RETRIED else 0
    due = result["collapsed"] and plan.weights == "pretrained" and plan.retry < limit
    return dataclasses.replace(plan, retry=plan.retry + 1) if due else None


def read_plan(folder: Path) -> RunPlan:
    """Read the plan of a run's folder.

    Raises:
        ValueError: there is none, or this version cannot read it.
    """
    path = folder / PLAN
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return decode(RunPlan, values)
    except FileNotFoundError:
        raise ValueError(
            f"{folder}: not the folder of a run: it has no {PLAN}, which "
            f"`{typed('finetune glue')}` writes"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a plan that this version can read: {error}") from error
