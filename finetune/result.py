"""Read what a finished run of `glue` or `finetune` leaves in its folder: result.json."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, cast

from typing_extensions import TypedDict

from data_prep.common.records import OneOf, check_value, decode
from finetune import tasks
from finetune.protocols import PROTOCOLS
from finetune.tasks import Task

RESULT = "result.json"


class _Settings(TypedDict):
    """What is read of the settings in a result."""

    best_epoch_by: Literal["benchmark", "published"]


class _Plan(TypedDict):
    """What is read of the plan in a result."""

    task: str
    protocol: Annotated[str, OneOf(PROTOCOLS)]
    config: _Settings
    own: NotRequired[dict[str, Any] | None]
    data: NotRequired[str]


class _Result(TypedDict):
    """What is read of result.json."""

    plan: _Plan
    task: str
    weights: str
    seed: int
    best: dict[str, Any]
    last: dict[str, Any]
    epochs: list[dict[str, Any]]
    constant: dict[str, Any]
    device: str
    dev_examples: int
    train_examples: int
    seconds: float
    tokens_per_second: float


def read_result(folder: Path) -> dict[str, Any]:
    """Read the result of a finished run.

    JSON has null for a number that is not finite. Among the scores only the loss of a diverged run
    can be null; it becomes infinity, so that it compares as the worst.

    Raises:
        ValueError: it is damaged, or an older version wrote it, which did not judge each epoch.
    """
    path = folder / RESULT
    try:
        result = cast(dict[str, Any], decode(_Result, path.read_bytes()))
        names = task_of(result["plan"]).score_names
        found = [result["best"], result["last"], *result["epochs"]]
        for scores in (*found, {**result["constant"], "collapsed": True}):
            for name in ("collapsed", *names):
                value = scores.get(name, "")
                check_value(name, value, isinstance(value, float | int | None), "a number")
    except (LookupError, ValueError) as error:
        reason = f"not a result of this version, {error}"
        raise ValueError(f"{path}: {reason}; delete it to repeat the run") from None
    for scores in found:
        scores |= {key: math.inf for key, value in scores.items() if value is None}
    return result


def task_of(plan: Mapping[str, Any]) -> Task:
    """Return the task of a run, from the plan in its result."""
    own = plan.get("own")
    return decode(Task, own) if own else tasks.TASKS[plan["task"]]
