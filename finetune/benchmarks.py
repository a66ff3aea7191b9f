"""Every task that has a name: GLUE's and SuperGLUE's; and the task of a run."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from data_prep.common.records import decode
from finetune import glue, superglue
from finetune.glue import BenchmarkTask
from finetune.plan import RunPlan
from finetune.task import Task

TASKS: Mapping[str, BenchmarkTask] = MappingProxyType({**glue.TASKS, **superglue.TASKS})


def _simplified(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


_NAMES = {_simplified(name): name for name in TASKS}


def find(name: str) -> BenchmarkTask:
    """Return the task of a name, in any case and with or without its hyphen.

    Raises:
        ValueError: there is none; as `find_all`.
    """
    return _known([name])[0]


def find_all(names: Sequence[str]) -> list[BenchmarkTask]:
    """Return the tasks of the names, in any case; ["all"] is every task of GLUE.

    Raises:
        ValueError: an unknown name (all are listed, each with the nearest task), or "all" or a task
            beside others a second time.
    """
    if [name.lower() for name in names] == ["all"]:
        return list(glue.TASKS.values())
    tasks = _known(names)
    if len({task.name for task in tasks}) < len(tasks):
        raise ValueError(f"tasks {', '.join(names)}: name each task once, as in CoLA,RTE")
    return tasks


def of_plan(plan: RunPlan) -> Task:
    """Return the task of a run."""
    return plan.own or find(plan.task)


def of_result(result: Mapping[str, Any]) -> Task:
    """Return the task of a run's result.json."""
    own = result["plan"].get("own")
    return decode(Task, own) if own else find(result["task"])


def _known(names: Sequence[str]) -> list[BenchmarkTask]:
    unknown = [name for name in names if _simplified(name) not in _NAMES]
    if unknown:
        what = "task" if len(unknown) == 1 else "tasks"
        raise ValueError(
            f"unknown {what} {', '.join(map(_with_nearest, unknown))}; accepted: "
            f"{', '.join(TASKS)}, or all alone"
        )
    return [TASKS[_NAMES[_simplified(name)]] for name in names]


def _with_nearest(name: str) -> str:
    near = difflib.get_close_matches(_simplified(name), _NAMES, n=1)
    return f"{name!r}" + (f" (did you mean {_NAMES[near[0]]}?)" if near else "")
