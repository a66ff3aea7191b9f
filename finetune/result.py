"""What the folder of a run of `glue` or `finetune` has: its plan and, at the end, its result.

A plan is everything that decides a run's outcome; it is written to the folder before the run
starts, and is part of the result.
"""

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any, cast

from typing_extensions import TypedDict

from data_prep.common.files import named_errors, read_json, write_json
from data_prep.common.records import OneOf, check_value, decode
from data_prep.common.wording import changes
from finetune.config import FinetuneConfig
from finetune.protocols import DEFAULT, PROTOCOLS
from finetune.tasks import TASKS, Task

PLAN = "run.json"
RESULT = "result.json"


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """Everything that decides what a run computes.

    The same plan gives the same scores on the same device, world size and number of threads.
    """

    task: str
    weights: str
    seed: int
    """Seed of the head, the order and dropout."""
    model: str
    """A model folder."""
    data: str
    """Where the tasks are, as examples.py describes."""
    model_sha256: str
    data_sha256: str
    config: FinetuneConfig
    protocol: Annotated[str, OneOf(PROTOCOLS)] = DEFAULT
    start: str = ""
    """The run whose kept model it starts from, in the same folder of runs; empty: from `model`."""
    start_sha256: str = ""
    own: Task | None = None
    """The custom task; None: GLUE's task of this name."""
    save_model: bool = True
    """Whether to keep the model of the best epoch."""
    work: int = 0
    """Characters to read, for estimating the remaining time."""

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return f"{self.task}-{self.weights}-seed{self.seed}"

    @property
    def definition(self) -> Task:
        """The task itself."""
        return self.own or TASKS[self.task]

    def differences(self, other: "RunPlan") -> list[str]:
        """Return the values that make two runs incomparable, as "key: ours, now theirs".

        Seed and weights may differ between compared runs, and folders may have moved.
        """
        both_start = self.weights == other.weights == "pretrained"
        comparable = (
            {
                "model": plan.model_sha256[:12],
                "data": plan.data_sha256[:12],
                "task": plan.own,
                "protocol": plan.protocol,
                "start": plan.start_sha256[:12] if both_start else "",
                **dataclasses.asdict(plan.config),
            }
            for plan in (self, other)
        )
        return [f"{key}: {was}, now {now}" for key, was, now in changes(*comparable)]

    def write(self, folder: Path) -> None:
        """Write the plan into a run's folder, which is created if it is missing."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / PLAN, dataclasses.asdict(self))


def read_plan(folder: Path) -> RunPlan:
    """Read the plan of a run's folder.

    Raises:
        ValueError: there is none, or this version cannot read it.
    """
    path = folder / PLAN
    if not path.is_file():
        raise ValueError(
            f"{folder}: not the folder of a run: it has no {PLAN}, which `zeroclap "
            "glue` or `zeroclap finetune` writes"
        )
    values = read_json(path)
    with named_errors(f"{path}: not a plan that this version can read"):
        return decode(RunPlan, values)


class _Result(TypedDict):
    """What is read of result.json."""

    plan: RunPlan
    best: dict[str, Any]
    last: dict[str, Any]
    epochs: list[dict[str, Any]]
    constant: dict[str, Any]
    device: str
    dev_examples: int
    train_examples: int
    skipped_rows: int
    """Ragged rows of the training file (`BenchmarkTask.skips_ragged`)."""
    too_long: dict[str, int]
    """Inputs above max_tokens, by split."""
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
        names = result["plan"].definition.score_names
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
