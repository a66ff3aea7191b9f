"""Plan the runs of `glue` or `finetune`.

`plan_runs` lists them, and `prepare` refuses incompatible ones and skips finished ones; starting.py
executes the others.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from data_prep.common.files import check_new, sha256_of
from finetune import examples, tasks
from finetune.config import FinetuneConfig
from finetune.protocols import DEFAULT, PROTOCOLS
from finetune.result import PLAN, RESULT, RunPlan, read_plan, read_result
from finetune.tasks import BenchmarkTask, Task
from pretrain.checks.recipe import check_precision
from pretrain.config import deepspeed
from pretrain.convert.model_folder import LoadedModel, load_model
from pretrain.convert.reading import located, weight_files
from pretrain.processes.gpus import device_type

MODEL = "model"
"""The subfolder for the fine-tuned model, if it is kept."""
DATA = "data"
"""The subfolder for the examples of custom tasks, in folders named after their hashes."""
WEIGHTS = ("pretrained", "random")
"""Initial weights; random ones show the gain of pretraining."""


def is_finished(folder: Path, plan: RunPlan) -> bool:
    """Return whether a run's folder has its result, and its model if that is wanted."""
    return (folder / RESULT).is_file() and ((folder / MODEL).is_dir() or not plan.save_model)


def plan_runs(
    model: Path,
    data: Callable[[], str],
    chosen: Sequence[Task],
    weights: Sequence[str],
    seeds: Sequence[int],
    overrides: Sequence[str],
    *,
    protocol: str = DEFAULT,
    save_models: bool = True,
    world_size: int = 1,
) -> tuple[list[RunPlan], LoadedModel]:
    """Return the plans of every run, in the order in which they start, and the model.

    Without `seeds`, use as many as the protocol has. Runs are ordered by seed, so that one whole
    comparison finishes first, and within a seed by length, so that no device is left with a long
    run at the end. All data is read here, so that errors are found before anything starts; `data`,
    which may write it, is called once the settings and the model are accepted.

    Raises:
        ValueError: a bad setting, no such model folder or one that does not fit
            together, or missing data and bad lines, of all tasks at once.
    """
    configs = check_settings(chosen, overrides, protocol, world_size, device_type())
    model = located(model)  # may download
    loaded = load_model(model)
    for config in configs.values():
        loaded.model.config.check_pooling(config.pooling)
    model_sha256 = model_digest(loaded)
    place = data()
    read = read_tasks(place, chosen, configs)
    order = list(seeds) or list(range(1, PROTOCOLS[protocol].seeds + 1))
    plans = [
        RunPlan(
            task=task.name,
            weights=kind,
            seed=seed,
            model=str(model.resolve()),
            data=place if place == examples.HUB else str(Path(place).resolve()),
            model_sha256=model_sha256,
            data_sha256=read[task.name][0],
            config=configs[task.name],
            protocol=protocol,
            own=None if isinstance(task, BenchmarkTask) else task,
            save_model=save_models,
            work=configs[task.name].epochs * read[task.name][1],
        )
        for task, seed, kind in itertools.product(chosen, order, weights)
    ]
    return sorted(plans, key=lambda plan: (order.index(plan.seed), -plan.work)), loaded


def check_settings(
    chosen: Sequence[Task],
    overrides: Sequence[str],
    protocol: str = DEFAULT,
    world_size: int = 1,
    device: str = "",
) -> dict[str, FinetuneConfig]:
    """Return the settings of each task, for a device, "cpu" or "cuda", or any.

    Raises:
        ValueError: a bad setting.
    """
    configs = {}
    for task in chosen:
        config = PROTOCOLS[protocol].config(task, overrides)
        if config.start_from:
            source, *others = tasks.find([config.start_from])
            if others:
                raise ValueError(f"start_from {config.start_from!r}: name one task")
            config = dataclasses.replace(config, start_from=source.name)
        engine = config.engine(world_size, device == "cuda")
        half = deepspeed.half_precisions(deepspeed.read_settings(*engine))
        check_precision(f"deepspeed: {engine[0]}", half, device)
        configs[task.name] = config
    return configs


def model_digest(loaded: LoadedModel) -> str:
    """Return a hash of a model folder's settings, weights and vocabulary.

    Raises:
        ValueError: it has no vocabulary.
    """
    folder = loaded.folder
    digests = [sha256_of(path) for path in (folder / "config.json", *weight_files(folder))]
    digests.append(loaded.tokenizer.digest())
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def read_tasks(
    data: str, chosen: Sequence[Task], configs: Mapping[str, FinetuneConfig]
) -> dict[str, tuple[str, int]]:
    """Read every task and return, by task, the data's digest and the characters of an epoch.

    Raises:
        ValueError: the errors of all tasks.
    """
    if data != examples.HUB and not Path(data).is_dir():
        raise ValueError(f"--data {data}: no such folder; {examples.HUB} is accepted as well")
    found, errors = dict[str, tuple[str, int]](), list[str]()
    for task in chosen:
        try:
            train, *dev = (examples.read_split(task, data, split) for split in ("train", *task.dev))
        except ValueError as error:
            errors.append(str(error))
            continue
        limit = configs[task.name].max_train_examples or None
        used = [train.examples[:limit], *(split.examples for split in dev)]
        characters = sum(len(text) for split in used for example in split for text in example.texts)
        found[task.name] = examples.digest([train, *dev]), characters
    if errors:
        raise ValueError("; ".join(errors))
    return found


def check_output(output: Path) -> None:
    """Refuse a folder that something other than runs has filled.

    Raises:
        ValueError: it has entries, but no runs.
    """
    # A process may have been killed while it wrote the first plan.
    if not any(output.glob(f"*/*{PLAN}*")) and not any(output.glob(f"{DATA}/{'[0-9a-f]' * 12}")):
        check_new(output)


def prepare(output: Path, plans: Sequence[RunPlan]) -> list[RunPlan]:
    """Write the plans of the runs that are still to do, and return them.

    Raises:
        ValueError: a run has no other run's model to start from, or the folder has results that
            `check_comparable` refuses.
    """
    plans = [_with_start(output, plan) for plan in plans]
    for path in sorted(output.glob(f"*/{RESULT}")):
        check_comparable(path.parent, read_plan(path.parent), plans, "the requested runs")
    waiting = [plan for plan in plans if not is_finished(output / plan.name, plan)]
    for plan in waiting:
        plan.write(output / plan.name)
    return waiting


def check_comparable(folder: Path, plan: RunPlan, plans: Iterable[RunPlan], others: str) -> None:
    """Refuse to report the run of a folder beside others, "the requested runs" for example.

    Raises:
        ValueError: one is of the same task and not comparable, or of another model or protocol.
    """
    for other in plans:
        changed = plan.differences(other)
        if plan.task != other.task:  # they share a report
            changed = [each for each in changed if each.startswith(("protocol: ", "model: "))]
        if changed:
            raise ValueError(
                f"{folder}: not comparable with {others} ({'; '.join(changed)}); use the same "
                "settings, or a folder of its own"
            )


def _with_start(output: Path, plan: RunPlan) -> RunPlan:
    """Return the plan with the run that it starts from, if that is not the model itself.

    It is that of the first seed, if possible one that did not collapse.

    Raises:
        ValueError: no such run is finished, or none kept its model.
    """
    source = plan.config.start_from
    if plan.weights == "random" or source in ("", plan.task):
        return plan
    runs = [
        (result["best"]["collapsed"], result["plan"].seed, path.parent)
        for path in output.glob(f"{source}-pretrained-*/{RESULT}")
        if (path.parent / MODEL).is_dir() and (result := read_result(path.parent))
    ]
    if not runs:
        raise ValueError(
            f"{plan.task} starts from the model of {source} (start_from), and {output} has none; "
            f"run {source} first, without --no-models"
        )
    *_, folder = min(runs)
    return dataclasses.replace(plan, start=folder.name, start_sha256=_digest_of(folder / MODEL))


@functools.cache
def _digest_of(folder: Path) -> str:
    """Return the hash of a model that several runs may start from; it is loaded once."""
    return model_digest(load_model(folder))
