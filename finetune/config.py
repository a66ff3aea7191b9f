"""How a model is fine-tuned, and the record of one run. Imports no torch.

Read `FinetuneConfig`, then `RunPlan`: everything that decides the outcome of a run, written to its
folder before it starts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.records import decode
from pretrain.config.settings import apply_override, check
from pretrain.model.config import POOLINGS
from pretrain.run.checkpoints import write_json

PLAN = "run.json"
RESULT = "result.json"
MODEL = "model"
"""A run's folder for the fine-tuned model, where it is kept."""
LOG = "log.txt"

WEIGHTS = ("pretrained", "random")
"""The model folder's weights, or fresh ones of the same architecture: what pretraining is worth."""


@dataclasses.dataclass(frozen=True)
class FinetuneConfig:
    """Settings of a run, as `glue.Task.config` begins with and key=value words change them."""

    epochs: int = 10
    batch_size: int = 16
    learning_rate: float = 1e-5
    warmup_fraction: float = 0.06
    """Share of the steps in which the learning rate rises to its peak; it then falls to 0."""
    warmup_steps: int = 0
    """As a number of steps, as the original has it; 0: `warmup_fraction` says."""
    schedule_steps: int = 0
    """Steps at which the learning rate has fallen to 0; 0: those of the run."""
    weight_decay: float = 0.1
    gradient_clipping: float = 1.0
    """Largest global gradient norm; 0 does not clip."""
    dropout: float = 0.1
    """Of the encoder, in place of what it was pretrained with."""
    attention_dropout: float = 0.1
    head_dropout: float = 0.0
    pooling: str = "first"
    """What the head reads: the feature of `<s>`, or the mean over all tokens."""
    max_tokens: int = 512
    """Longer inputs are left out of training and cut in scoring, and counted in the result."""
    max_train_examples: int = 0
    """Train on the first so many, to try things out; 0: on all."""
    length_window: int = 50
    """Batches among which examples of like length are put together; 1: as they come."""
    deepspeed: str = ""
    """A file of ds_configs/ (without .json); empty: zero1_bf16 on a GPU, zero1_fp32 elsewhere."""

    def __post_init__(self) -> None:
        """Refuse values that no run can have."""
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
        enough = self.max_tokens >= 6
        check(enough, "max_tokens", self.max_tokens, "at least 6: <s> a </s> </s> b </s>")

    def steps(self, examples: int) -> int:
        """Updates of a run over so many training examples."""
        return -(-self.epochs * examples // self.batch_size)

    def rate(self, step: int, steps: int) -> float:
        """Learning rate of update `step` of `steps`: a linear rise, then a linear fall to 0.

        Update `step` of the warm-up has the rate that the original gives the next one; its first
        has none, and changes nothing.
        """
        end = self.schedule_steps or steps
        warmup = self.warmup_steps or round(self.warmup_fraction * end)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        return self.learning_rate * max(0, end - step) / max(1, end - warmup)

    def steadier(self, retry: int) -> FinetuneConfig:
        """The settings of a retry, the first of which is 1: warm-up doubles with each, up to half.

        Low rates early on are the known cure for most collapses (Mosbach et al. 2021).
        """
        if retry == 0:
            return self
        fraction = min(0.5, max(0.06, self.warmup_fraction) * 2**retry)
        return dataclasses.replace(
            self, warmup_fraction=fraction, warmup_steps=self.warmup_steps * 2**retry
        )


def override(config: FinetuneConfig, words: Sequence[str]) -> FinetuneConfig:
    """A config with some `key=value` settings changed.

    Raises:
        ValueError: a word that is no setting (the nearest is named), or a value of another kind.
    """
    values = dataclasses.asdict(config)
    for word in words:
        apply_override(values, word)
    return decode(FinetuneConfig, values)


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """All that decides what a run computes.

    The same plan gives the same scores, on the same device with as many threads and ranks.
    """

    task: str
    weights: str
    seed: int
    model: str
    """A model folder."""
    data: str
    """Where the tasks are; see examples.py."""
    model_sha256: str
    data_sha256: str
    config: FinetuneConfig
    """As asked for; a retry is steadier."""
    retry: int = 0
    """How many runs of this seed collapsed before it."""
    save_model: bool = True
    """Whether the model of the best epoch is kept."""
    work: int = 0
    """Characters to read, by which the time left is told."""

    @property
    def name(self) -> str:
        """The run's folder."""
        ending = f"-retry{self.retry}" if self.retry else ""
        return f"{self.task}-{self.weights}-seed{self.seed}{ending}"

    @property
    def training_config(self) -> FinetuneConfig:
        """The settings that the run is trained with."""
        return self.config.steadier(self.retry)

    @property
    def training_seed(self) -> int:
        """The seed of head, order and dropout: a retry's is drawn, so that no other run has it."""
        if self.retry == 0:
            return self.seed
        text = f"{self.seed} retry {self.retry}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")

    def differences(self, other: RunPlan) -> list[str]:
        """In what two runs are not comparable, as "key: ours, now theirs".

        Seed, retry and weights are what runs are compared over, and folders may have moved.
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
        """Write the plan into a run's folder, made where missing."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / PLAN, dataclasses.asdict(self))


def retry_after(plan: RunPlan, result: Mapping[str, Any], limit: int) -> RunPlan | None:
    """The run to do after one that collapsed; None where none is due.

    Runs from random weights are what others are compared with: that they collapse is a finding.
    """
    due = result["collapsed"] and plan.weights == "pretrained" and plan.retry < limit
    return dataclasses.replace(plan, retry=plan.retry + 1) if due else None


def read_plan(folder: Path) -> RunPlan:
    """The plan of a run's folder.

    Raises:
        ValueError: there is none, or it is not of this version.
    """
    path = folder / PLAN
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return decode(RunPlan, values)
    except FileNotFoundError:
        raise ValueError(
            f"{folder}: is no run's folder, it has no {PLAN} (`python -m finetune glue` makes it)"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path}: is not a plan that this version reads: {error}") from error
