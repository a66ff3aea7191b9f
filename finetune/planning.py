"""The runs of a call of `glue`: which there are, in which order, and which are still to do.

`plan_runs` lists them; `prepare` refuses incompatible ones, skips finished ones and replaces a run
that collapsed by its retry.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.common.files import sha256_of
from finetune import config as settings
from finetune import examples
from finetune.config import FinetuneConfig
from finetune.glue import BenchmarkTask
from finetune.kinds import KINDS
from finetune.plan import MODEL, RESULT, RunPlan, read_plan, retry_after
from finetune.task import Task
from pretrain.config import deepspeed
from pretrain.model.classification import check_pooling
from pretrain.models import model_folder


def plan_runs(
    model: Path,
    data: str,
    tasks: Sequence[Task],
    weights: Sequence[str],
    seeds: Sequence[int],
    overrides: Sequence[str],
    *,
    recipe: str = "default",
    save_models: bool = True,
    world_size: int = 1,
) -> list[RunPlan]:
    """Return the plans of every run, in the order in which they start.

    Seed by seed, so that one whole comparison is finished first; within a seed the longest runs
    first, so that no device is left with a long one at the end. Everything is read here, so that an
    error is found before anything starts.

    Raises:
        ValueError: a bad setting, no such model folder or one that does not fit
            together, or missing data and bad lines, of all tasks at once.
    """
    configs = {task.name: settings.override(task.config(recipe), overrides) for task in tasks}
    for config in configs.values():
        batch = config.batch(world_size)
        if config.deepspeed:
            deepspeed.read(config.deepspeed, batch, config.gradient_clipping, world_size)
    pooled = [configs[t.name].pooling for t in tasks if not KINDS[t.kind].labels_tokens]
    model_sha256 = _model_digest(model, pooled)
    digests_and_sizes = _read_all(data, tasks, configs)
    plans = []
    for task in tasks:
        config = configs[task.name]
        data_sha256, characters = digests_and_sizes[task.name]
        for seed, kind in itertools.product(seeds, weights):
            plans.append(
                RunPlan(
                    task=task.name,
                    weights=kind,
                    seed=seed,
                    model=str(model.resolve()),
                    data=data if data == examples.HUB else str(Path(data).resolve()),
                    model_sha256=model_sha256,
                    data_sha256=data_sha256,
                    config=config,
                    own=None if isinstance(task, BenchmarkTask) else task,
                    save_model=save_models,
                    work=config.epochs * characters,
                )
            )
    return sorted(plans, key=lambda plan: (seeds.index(plan.seed), -plan.work))


def _model_digest(model: Path, poolings: Iterable[str]) -> str:
    loaded = model_folder.load_model(model)
    _ = loaded.tokenizer  # raises where it cannot be fine-tuned
    for pooling in poolings:
        check_pooling(loaded.model.config, pooling)
    names = ("model.json", "model.safetensors")
    return "".join(sha256_of(model / name)[:32] for name in names)


def _read_all(
    data: str, tasks: Sequence[Task], configs: Mapping[str, FinetuneConfig]
) -> dict[str, tuple[str, int]]:
    """Read every task and return, by task, the data's digest and the characters of an epoch.

    Raises:
        ValueError: the errors of all tasks.
    """
    found, errors = dict[str, tuple[str, int]](), list[str]()
    for task in tasks:
        config = configs[task.name]
        try:
            train, *dev = (examples.read(task, data, split) for split in ("train", *task.dev))
        except ValueError as error:
            errors.append(str(error))
            continue
        used = [train.examples[: config.max_train_examples or None], *(s.examples for s in dev)]
        characters = sum(len(text) for split in used for example in split for text in example.texts)
        found[task.name] = examples.digest([train, *dev]), characters
    if errors:
        raise ValueError("; ".join(errors))
    return found


def prepare(output: Path, plans: Sequence[RunPlan], retries: int | None = 0) -> list[RunPlan]:
    """Write the plans of the runs that are still to do, and return them.

    A finished run that collapsed is replaced by its retry, up to `retries` times (None: see
    `retry_after`).

    Raises:
        ValueError: the folder has results of the same task that are not comparable.
    """
    present = [read_plan(path.parent) for path in sorted(output.glob(f"*/{RESULT}"))]
    for old, new in itertools.product(present, plans):
        changed = old.differences(new) if old.task == new.task else []
        if changed:
            raise ValueError(
                f"{output / old.name}: not comparable with the requested runs; accepted: the same "
                f"settings, or a new --output ({'; '.join(changed)})"
            )
    waiting = [plan for first in plans if (plan := next_run(output, first, retries))]
    for plan in waiting:
        plan.write(output / plan.name)
    return waiting


def next_run(output: Path, first: RunPlan, retries: int | None) -> RunPlan | None:
    """Return the plan itself if it is not finished, else the retry that is due, else None."""
    plan: RunPlan | None = first
    while plan and is_finished(output / plan.name, plan.save_model):
        plan = retry_after(plan, result_of(output / plan.name), retries)
    return plan


def is_finished(folder: Path, with_model: bool) -> bool:
    """Return whether a run's folder has its result, and its model if that is wanted."""
    return (folder / RESULT).is_file() and ((folder / MODEL).is_dir() or not with_model)


def result_of(folder: Path) -> dict[str, Any]:
    """Read the result of a finished run.

    JSON has null for a number that is not finite. Among the scores only the loss of a diverged run
    can be null; it becomes infinity, so that it compares as the worst.
    """
    result: dict[str, Any] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    for scores in (result["best"], result["last"], *result["epochs"]):
        scores |= {key: math.inf for key, value in scores.items() if value is None}
    return result
