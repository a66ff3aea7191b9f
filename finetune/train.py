"""One fine-tuning run, on one or several ranks.

usage: python -m finetune.train RUN_FOLDER
       torchrun --nproc-per-node=N -m finetune.train RUN_FOLDER

The folder has run.json, the plan that `zeroclap glue` wrote. The run adds metrics.jsonl
(one line per step) and at the end result.json, and model/ if the plan asks for it.
"""

import dataclasses
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from data_prep.common import console
from data_prep.common.exit_codes import EXIT_DONE, EXIT_USAGE
from data_prep.common.files import lock, write_json
from finetune import classifiers, examples, scores, tasks
from finetune.batches import EncodedExamples, ShuffledBatches
from finetune.config import FinetuneConfig
from finetune.graphs import can_replay, replay_passes
from finetune.result import RESULT, RunPlan, read_plan
from finetune.runs import MODEL, model_digest
from pretrain.config.deepspeed import stage_of
from pretrain.config.sections import OptimizerConfig
from pretrain.convert.model_folder import LoadedModel, load_model
from pretrain.engine.distributed import Process, leave
from pretrain.engine.engine import Engine, deepspeed_json, start
from pretrain.loop.loop import Hook
from pretrain.loop.loop import run as run_loop
from pretrain.loop.protocols import StepRecord
from pretrain.model.classification import Classifier
from pretrain.records.metrics import METRICS, JsonLines, line_of
from pretrain.records.progress import ProgressPrinter


# Read `main`, then `train`.
@console.survive_broken_pipe()
def main(folder: Path) -> int:
    """Execute the run of a folder and return the exit code."""
    try:
        plan = read_plan(folder)
        if Process.from_environment().rank > 0:
            train(plan, folder)
            return EXIT_DONE
        # A run may outlive the command that started it.
        with lock(folder / "lock", "another process is working on this run"):
            # Left by an interrupted run, which may have had other settings.
            (folder / METRICS).unlink(missing_ok=True)
            shutil.rmtree(folder / MODEL, ignore_errors=True)
            result = train(plan, folder)
            plan.write(folder)  # a later command may have replaced it
            write_json(folder / RESULT, result)
    except ValueError as error:
        print(f"finetune.train: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    return EXIT_DONE


def train(plan: RunPlan, folder: Path) -> dict[str, Any]:
    """Train to the end and evaluate after each epoch; all ranks call it.

    Args:
        plan: the run's plan.
        folder: the run's folder, for the metrics and the best model.

    Returns:
        The content of result.json; empty on all ranks but the first.

    Raises:
        ValueError: the model or the data cannot be read or are not those of the plan.
    """
    started = time.perf_counter()
    task = plan.definition
    start_from = folder.parent / plan.start / MODEL if plan.start else Path(plan.model)
    loaded = load_model(start_from)
    if model_digest(loaded) != (plan.start_sha256 or plan.model_sha256):
        raise ValueError(f"{start_from}: is not the model that the run was planned with")
    splits, skipped = _read_data(plan, loaded)
    config, read = plan.config, splits["train"]
    dev_sets = {name: splits[name] for name in task.dev}
    of_constant = dict[str, float]()  # the best answer that is the same for every example
    for split, dev_set in dev_sets.items():
        answer = tasks.constant(task, dev_set.labels)
        of_constant |= tasks.score(task, split, dev_set.labels, answer)
    process = start()
    engine = _engine(config, classifiers.build(loaded, plan), process)
    order = config.batch_size, plan.seed, config.length_window
    batches = ShuffledBatches(read.lengths, read.collate, *order)
    steps = config.steps(len(read))
    progress = ProgressPrinter(steps)
    evaluator = DevEvaluator(engine, batches, plan, dev_sets, progress.say)
    metrics, records = JsonLines(folder / METRICS), list[StepRecord]()
    run_loop(
        engine,
        batches.micro_batches,
        tasks.Objective(task),
        learning_rate=lambda step: config.rate(step, steps),
        steps=range(steps),
        observers=[lambda record: metrics.write(line_of(record)), progress, records.append],
        hooks=[Hook(1, evaluator)],
    )
    seconds = time.perf_counter() - started
    tokens = sum(record.result.tokens for record in records)
    leave()
    if engine.rank > 0:
        return {}
    metrics.sync()
    if plan.save_model:
        classifiers.save(folder, evaluator.weights, loaded, plan)
    return {
        "plan": dataclasses.asdict(plan),
        "best": evaluator.best,
        "last": evaluator.epochs[-1],
        "constant": of_constant,
        "epochs": evaluator.epochs,
        "dev_examples": sum(len(each) for name, each in dev_sets.items() if name != "test"),
        "train_examples": len(read),
        "skipped_rows": skipped,
        "too_long": {name: each.too_long for name, each in splits.items()},
        "steps": steps,
        "ranks": process.world_size,
        "seconds": seconds,
        "tokens_per_second": tokens / sum(record.seconds for record in records),
        "device": str(process.device),
    }


@dataclasses.dataclass
class DevEvaluator:
    """Hook that scores the dev splits at the end of each epoch, and keeps the best model."""

    engine: Engine
    batches: ShuffledBatches
    plan: RunPlan
    dev_sets: Mapping[str, EncodedExamples]
    """By the name of the split."""
    say: Callable[[str], object]
    """Prints a line."""
    weights: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Of the best epoch, as `Engine.weights` gives them; empty if the plan keeps no model."""
    epochs: list[dict[str, float]] = dataclasses.field(default_factory=list)
    """One record per epoch: its number from 1, every score, and of the first split the loss and
    whether the run has collapsed."""

    @property
    def best(self) -> dict[str, float]:
        """The best epoch, as `FinetuneConfig.best_epoch_by` chooses it; the first of equals."""
        names = self.plan.definition.scores_of_best(self.plan.config.best_epoch_by)
        return dict(scores.best(self.epochs, names))

    def __call__(self, step: int) -> None:
        """Score the model after `step` updates if the last one ended an epoch."""
        if not self.batches.ends_epoch(step):
            return
        record: dict[str, float] = {"epoch": int(self.batches.epoch(step))}
        engine, task = self.engine, self.plan.definition
        engine.module.eval()
        for split, dev_set in self.dev_sets.items():
            place = engine.device, engine.rank, engine.world_size
            logits = classifiers.logits_of(engine.module, dev_set, *place)
            answers = tasks.answers(task, logits)
            both = torch.from_numpy(logits), torch.from_numpy(dev_set.labels)
            record.setdefault("loss", float(tasks.loss(task, *both)) / len(dev_set))
            record.setdefault("collapsed", tasks.has_collapsed(task, dev_set.labels, answers))
            record |= tasks.score(task, split, dev_set.labels, answers)
        self.epochs.append(record)
        if self.plan.save_model and self.best == record:
            self.weights = engine.weights()
        if engine.rank == 0:
            line = "  ".join(f"{name} {record[name]:.4f}" for name in task.score_names)
            self.say(f"epoch {record['epoch']}: dev loss {record['loss']:.4f}  {line}")


def _read_data(plan: RunPlan, loaded: LoadedModel) -> tuple[dict[str, EncodedExamples], int]:
    """Return the encoded splits by name, and the number of skipped training rows."""
    task = plan.definition
    read = {name: examples.read_split(task, plan.data, name) for name in ("train", *task.dev)}
    if examples.digest([*read.values()]) != plan.data_sha256:
        raise ValueError(f"{plan.data}: is not the data that the run was planned with")
    splits = {}
    for name, split in read.items():
        is_train = name == "train"
        used = split.examples[: (is_train and plan.config.max_train_examples) or None]
        limit = plan.config.max_tokens
        splits[name] = EncodedExamples(task, used, loaded, limit, drop_long=is_train)
    return splits, sum(split.skipped for split in read.values())


def _engine(config: FinetuneConfig, classifier: Classifier, process: Process) -> Engine:
    on_gpu = process.device.type == "cuda"
    settings = deepspeed_json(*config.engine(process.world_size, on_gpu))
    optimizer = OptimizerConfig(
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        gradient_clipping=config.gradient_clipping,
    )
    engine = Engine(classifier, optimizer, settings, process)
    if on_gpu and can_replay(classifier.encoder.config, stage_of(settings)):
        replay_passes(classifier)
    return engine


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
