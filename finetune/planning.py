"""The runs of a call of `glue`: which there are, in which order, and which are still to do.

`plan_runs` lists them; `prepare` refuses incompatible ones, skips finished ones and replaces a run
that collapsed by its retry.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.common.files import sha256_of
from data_prep.common.records import decode
from finetune import benchmarks, examples, protocols
from finetune.config import FinetuneConfig
from finetune.glue import BenchmarkTask
from finetune.plan import MODEL, RESULT, RunPlan, read_plan, retry_after
from finetune.task import Task
from pretrain.config import deepspeed
from pretrain.model.classification import check_pooling
from pretrain.models import model_folder

_TRIAL_BATCHES = 20


def plan_runs(
    model: Path,
    data: str,
    tasks: Sequence[Task],
    weights: Sequence[str],
    seeds: Sequence[int],
    overrides: Sequence[str],
    *,
    protocol: str = protocols.DEFAULT,
    save_models: bool = True,
    world_size: int = 1,
) -> list[RunPlan]:
    """Return the plans of every run, in the order in which they start.

    Without seeds there are as many as the protocol has. Seed by seed, so that one whole comparison
    is finished first; within a seed the longest runs first, so that no device is left with a long
    one at the end. Everything is read here, so that an error is found before anything starts.

    Raises:
        ValueError: a bad setting, no such model folder or one that does not fit
            together, or missing data and bad lines, of all tasks at once.
    """
    study = protocols.PROTOCOLS[protocol]
    configs = check_settings(tasks, overrides, protocol, world_size)
    model_sha256 = model_digest(model, [configs[task.name][0].pooling for task in tasks])
    digests_and_sizes = _read_all(data, tasks, configs)
    plans = []
    for task in tasks:
        data_sha256, characters = digests_and_sizes[task.name]
        of_task = seeds or range(1, study.seeds(task) + 1)
        for seed, kind, config in itertools.product(of_task, weights, configs[task.name]):
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
                    protocol=protocol,
                    searched=protocols.searched(configs[task.name]),
                    own=None if isinstance(task, BenchmarkTask) else task,
                    save_model=save_models,
                    work=config.epochs * characters,
                )
            )
    order = list(seeds) or sorted({plan.seed for plan in plans})
    return sorted(plans, key=lambda plan: (order.index(plan.seed), -plan.work))


def check_settings(
    tasks: Sequence[Task],
    overrides: Sequence[str],
    protocol: str = protocols.DEFAULT,
    world_size: int = 1,
) -> dict[str, list[FinetuneConfig]]:
    """Return the settings of the runs of a seed, by task.

    Raises:
        ValueError: a bad setting.
    """
    study = protocols.PROTOCOLS[protocol]
    configs = {
        task.name: [_with_known_start(config) for config in study.configs(task, overrides)]
        for task in tasks
    }
    for config in itertools.chain.from_iterable(configs.values()):
        batch = config.batch(world_size)
        if config.deepspeed:
            deepspeed.read_settings(config.deepspeed, batch, config.gradient_clipping, world_size)
    return configs


def check_tasks(
    data: str,
    tasks: Sequence[Task],
    overrides: Sequence[str],
    protocol: str = protocols.DEFAULT,
    world_size: int = 1,
) -> None:
    """Refuse settings and data before there is a model.

    Raises:
        ValueError: as `plan_runs`.
    """
    _read_all(data, tasks, check_settings(tasks, overrides, protocol, world_size))


def _with_known_start(config: FinetuneConfig) -> FinetuneConfig:
    source = config.start_from and benchmarks.find(config.start_from).name
    return dataclasses.replace(config, start_from=source)


def model_digest(model: Path, poolings: Iterable[str] = ()) -> str:
    """Return a hash of a model folder, which must have what fine-tuning needs.

    Raises:
        ValueError: no such folder, or it does not fit together.
    """
    loaded = model_folder.load_model(model)
    _ = loaded.tokenizer  # raises where it cannot be fine-tuned
    for pooling in poolings:
        check_pooling(loaded.model.config, pooling)
    names = ("model.json", "model.safetensors")
    return "".join(sha256_of(model / name)[:32] for name in names)


def _read_all(
    data: str, tasks: Sequence[Task], configs: Mapping[str, Sequence[FinetuneConfig]]
) -> dict[str, tuple[str, int]]:
    """Read every task and return, by task, the data's digest and the characters of an epoch.

    Raises:
        ValueError: the errors of all tasks.
    """
    found, errors = dict[str, tuple[str, int]](), list[str]()
    for task in tasks:
        config = configs[task.name][0]
        try:
            train, *dev = (examples.read_split(task, data, split) for split in ("train", *task.dev))
        except ValueError as error:
            errors.append(str(error))
            continue
        used = [train.examples[: config.max_train_examples or None], *(s.examples for s in dev)]
        characters = sum(len(text) for split in used for example in split for text in example.texts)
        found[task.name] = examples.digest([train, *dev]), characters
    if errors:
        raise ValueError("; ".join(errors))
    return found


def trial(plan: RunPlan) -> RunPlan:
    """Return a short run of a plan's task, which measures the pace of a search."""
    config = dataclasses.replace(
        plan.config, epochs=1, max_train_examples=_TRIAL_BATCHES * plan.config.batch_size
    )
    task = benchmarks.of_plan(plan)
    ((_, characters),) = _read_all(plan.data, [task], {task.name: [config]}).values()
    return dataclasses.replace(plan, config=config, searched=(), save_model=False, work=characters)


def rounds(plans: Sequence[RunPlan]) -> list[list[RunPlan]]:
    """Return the runs that start from the model itself, and if there are any those that cannot yet.

    These start from the model of another task's run.
    """
    later = [plan for plan in plans if plan.starts_from_run]
    first = [plan for plan in plans if not plan.starts_from_run]
    return [round_ for round_ in (first, later) if round_]


def check(output: Path, plans: Sequence[RunPlan]) -> None:
    """Refuse runs that will have nothing to start from, or whose folder has others.

    Raises:
        ValueError: the folder has results of the same task that are not comparable, or of another
            protocol, or no run has or will have the model that one starts from.
    """
    will_be = {(plan.task, plan.save_model) for plan in plans if plan.weights == "pretrained"}
    known = list[RunPlan]()
    for plan in plans:
        source = plan.config.start_from
        if not plan.starts_from_run or _first_of(output, source):
            known.append(start(output, plan))
        elif (source, True) not in will_be:
            raise ValueError(
                f"{plan.task} starts from the model of {source} (start_from), of which {output} "
                f"has none; add {source} to --tasks and leave out --no-models, or set start_from= "
                "to start from the model itself"
            )
    _refuse_incomparable(output, known)


def start(output: Path, plan: RunPlan) -> RunPlan:
    """Return the plan with the run that it starts from, if that is not the model itself.

    Raises:
        ValueError: that run is not finished, or kept no model.
    """
    if not plan.starts_from_run:
        return plan
    source = _first_of(output, plan.config.start_from)
    if not source:
        raise ValueError(f"{output}: has no finished run of {plan.config.start_from} with a model")
    digest = model_digest(output / source.name / MODEL)
    return dataclasses.replace(plan, start=source.name, start_sha256=digest)


def _first_of(output: Path, task: str) -> RunPlan | None:
    """Return the first seed's run of a task with a model, of the best settings of a search.

    A run that did not collapse is preferred.
    """
    results = [
        result
        for path in output.glob(f"*/{RESULT}")
        if (result := result_of(path.parent))["task"] == task
        and result["weights"] == "pretrained"
        and (path.parent / MODEL).is_dir()
    ]
    if not results:
        return None
    kept, _ = protocols.choose(results, {task: benchmarks.of_result(results[0])})
    first = min(kept, key=lambda run: (bool(run["collapsed"]), run["seed"], run["retry"]))
    return decode(RunPlan, first["plan"])


def _refuse_incomparable(output: Path, plans: Sequence[RunPlan]) -> None:
    present = [read_plan(path.parent) for path in sorted(output.glob(f"*/{RESULT}"))]
    for old, new in itertools.product(present, plans):
        changed = [f"protocol: {old.protocol}, now {new.protocol}"]
        if old.protocol == new.protocol:
            changed = old.differences(new) if old.task == new.task else []
        if changed:
            raise ValueError(
                f"{output / old.name}: not comparable with the requested runs "
                f"({'; '.join(changed)}); use the same settings, or a new --output"
            )


def prepare(output: Path, plans: Sequence[RunPlan], retries: int | None = 0) -> list[RunPlan]:
    """Write the plans of the runs that are still to do, and return them.

    A finished run that collapsed is replaced by its retry, up to `retries` times (None: see
    `retry_after`).

    Raises:
        ValueError: see `check` and `start`.
    """
    plans = [start(output, plan) for plan in plans]
    _refuse_incomparable(output, plans)
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
