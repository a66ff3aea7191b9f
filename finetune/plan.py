"""The plan of a fine-tuning run: everything that decides its outcome.

It is written to the run's folder before the run starts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_prep.common.arguments import typed
from data_prep.common.files import write_json
from data_prep.common.records import decode
from finetune.collapse import LEAST_RETRIED, USUAL_RETRIES
from finetune.config import FinetuneConfig
from finetune.task import Task

PLAN = "run.json"
RESULT = "result.json"
MODEL = "model"
"""The subfolder for the fine-tuned model, if it is kept."""
LOG = "log.txt"

WEIGHTS = ("pretrained", "random")
"""Weights to start from; random ones show what pretraining is worth."""


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
    protocol: str = "default"
    searched: tuple[str, ...] = ()
    """The settings that differ between the runs of a seed, where the protocol is a search."""
    start: str = ""
    """The run whose kept model it starts from, in the same folder of runs; empty: from `model`."""
    start_sha256: str = ""
    own: Task | None = None
    """The task, if it is the user's own; else it is the benchmark's of its name."""
    retry: int = 0
    """Number of runs of this seed that collapsed before this one."""
    save_model: bool = True
    """Whether to keep the model of the best epoch."""
    work: int = 0
    """Characters to read, for estimating the remaining time."""

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        values = "".join(f"-{name}{getattr(self.config, name)}" for name in self.searched)
        ending = f"-retry{self.retry}" if self.retry else ""
        return f"{self.task}-{self.weights}-seed{self.seed}{values}{ending}"

    @property
    def starts_from_run(self) -> bool:
        """Whether it starts from the model of another task's run."""
        return self.weights == "pretrained" and self.config.start_from not in ("", self.task)

    def model_folder(self, runs: Path) -> Path:
        """Return the model that it starts from; `runs` has the folders of all runs."""
        return runs / self.start / MODEL if self.start else Path(self.model)

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

        Seed, retry, weights and the values that a search varies may differ between compared runs,
        and folders may have moved.
        """
        old, new = self._comparable(), other._comparable()
        return [
            f"{key}: {old[key]}, now {new[key]}"
            for key in old
            if key in new and old[key] != new[key]
        ]

    def _comparable(self) -> dict[str, object]:
        return {
            "model": self.model_sha256[:12],
            "data": self.data_sha256[:12],
            "task": self.own,
            "protocol": self.protocol,
            "searched": self.searched,
            **({"start": self.start_sha256[:12]} if self.weights == "pretrained" else {}),
            **{k: v for k, v in dataclasses.asdict(self.config).items() if k not in self.searched},
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
        limit: how often a run is retried; None: as often as is usual for the number of examples,
            and never in a search, which has other settings.
    """
    if limit is None:
        is_usual = result["train_examples"] >= LEAST_RETRIED and not plan.searched
        limit = USUAL_RETRIES if is_usual else 0
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
            f"`{typed('finetune glue')}` or `{typed('finetune finetune')}` writes"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a plan that this version can read: {error}") from error
