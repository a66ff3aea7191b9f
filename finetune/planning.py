"""Which runs a call of `glue` asks for, in which order, and which of them are left to do.

`plan_runs` lists them; `prepare` refuses what does not fit, skips what is done, and puts a retry in
the place of a run that collapsed. Imports no torch.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.files import sha256_of
from finetune import config as settings
from finetune import examples, glue
from finetune.config import MODEL, RESULT, RunPlan, read_plan, retry_after


def plan_runs(
    model: Path,
    data: str,
    tasks: Sequence[str],
    weights: Sequence[str],
    seeds: Sequence[int],
    overrides: Sequence[str],
    *,
    recipe: str = "default",
    save_models: bool = True,
) -> list[RunPlan]:
    """Every run of a call, in the order in which they start.

    Seed by seed, so that a whole comparison is done first; of a seed the longest runs first, so
    that no device is left with a long one at the end.

    Reads the data once, so that a bad line is found before anything starts.

    Raises:
        ValueError: no such model folder, task or data, a bad line, or a bad setting.
    """
    model_sha256 = _model_digest(model)
    plans = []
    for task in glue.find_all(tasks):
        config = settings.override(task.config(recipe), overrides)
        train, *dev = (examples.read(task, data, split) for split in ("train", *task.dev))
        data_sha256 = examples.digest([train, *dev])
        first = examples.Split(train.examples[: config.max_train_examples or None])
        work = config.epochs * sum(map(_characters, (first, *dev)))
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
                    save_model=save_models,
                    work=work,
                )
            )
    return sorted(plans, key=lambda plan: (seeds.index(plan.seed), -plan.work))


def _characters(split: examples.Split) -> int:
    return sum(len(text) for example in split.examples for text in example.texts)


def _model_digest(model: Path) -> str:
    names = ("model.json", "model.safetensors")
    for name in names:
        if not (model / name).is_file():
            raise ValueError(
                f"{model}: is no model folder, it has no {name} "
                "(`python -m pretrain export RUN --output FOLDER` makes one)"
            )
    return "".join(sha256_of(model / name)[:32] for name in names)


def prepare(output: Path, plans: Sequence[RunPlan], retries: int = 0) -> list[RunPlan]:
    """Write the plans of the runs that are to be done, and return those.

    In the place of a run that is done and collapsed stands its retry, as long as `retries` allows.

    Raises:
        ValueError: the folder has results of the same task that could not be compared with these.
    """
    present = [read_plan(path.parent) for path in sorted(output.glob(f"*/{RESULT}"))]
    for old, new in itertools.product(present, plans):
        changed = old.differences(new) if old.task == new.task else []
        if changed:
            raise ValueError(
                f"{output / old.name}: is of another kind than the runs asked for; accepted: the "
                f"same settings, or a new --output ({'; '.join(changed)})"
            )
    waiting = [plan for first in plans if (plan := next_run(output, first, retries))]
    for plan in waiting:
        plan.write(output / plan.name)
    return waiting


def next_run(output: Path, first: RunPlan, retries: int) -> RunPlan | None:
    """A plan, or the retry that is due after it; None where nothing is left to do."""
    plan: RunPlan | None = first
    while plan and _is_done(output / plan.name, plan.save_model):
        plan = retry_after(plan, result_of(output / plan.name), retries)
    return plan


def _is_done(folder: Path, with_model: bool) -> bool:
    return (folder / RESULT).is_file() and ((folder / MODEL).is_dir() or not with_model)


def result_of(folder: Path) -> dict[str, Any]:
    """Read the result of a finished run.

    JSON has null where a number was not finite; of the scores only a diverged loss can be, and it
    is infinite here, so that it compares as the worst.
    """
    result: dict[str, Any] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    for name in ("best", "last"):
        values = result[name].items()
        result[name] = {key: math.inf if value is None else value for key, value in values}
    return result
