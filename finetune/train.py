"""One fine-tuning run: what `python -m finetune.train RUN_FOLDER` does, on one rank or on several.

The folder holds run.json, the plan that `python -m finetune glue` wrote; the run adds metrics.jsonl
(a line a step) and, when it is done, result.json, with model/ beside it where the plan asks for it.
Read `main`, then `train`.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep import console
from data_prep.files import lock
from finetune import classifiers, collapse, examples, glue, scores
from finetune.batches import EncodedExamples, ShuffledBatches
from finetune.config import RESULT, FinetuneConfig, RunPlan, read_plan
from finetune.evaluation import Evaluation
from pretrain.config.run import BatchConfig, OptimizerConfig
from pretrain.inference import model_folder
from pretrain.loop import Hook, StepRecord
from pretrain.loop import run as run_loop
from pretrain.run.checkpoints import write_json
from pretrain.run.metrics import METRICS, MetricsWriter, ProgressPrinter

if TYPE_CHECKING:
    from pretrain.engine.distributed import Process
    from pretrain.engine.engine import Engine
    from pretrain.model.classifier import Classifier

EXIT_DONE = 0
EXIT_USAGE = 2
_LOCK = "lock"
_BEST = ".best"
"""Process' parts of the best epoch's weights, for as long as the run lasts."""


@console.lasting()
def main(arguments: Sequence[str]) -> int:
    """Do the run that a folder plans; returns the exit code."""
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        sys.stdout.write(
            "usage: python -m finetune.train RUN_FOLDER\n\n"
            "Does, from the start, the one run that `python -m finetune glue` planned there.\n"
            "torchrun starts it on several ranks.\n"
        )
        return EXIT_DONE if arguments in (["-h"], ["--help"]) else EXIT_USAGE
    from pretrain.engine.distributed import Process

    folder = Path(arguments[0])
    try:
        plan = read_plan(folder)
        if Process.from_environment().rank > 0:
            train(plan, folder)
            return EXIT_DONE
        # A run may have outlived the command that started it.
        with lock(folder / _LOCK, "another process is at work on this run"):
            (folder / METRICS).unlink(missing_ok=True)  # of a run that did not end
            shutil.rmtree(folder / _BEST, ignore_errors=True)
            write_json(folder / RESULT, train(plan, folder))
    except ValueError as error:
        sys.stderr.write(f"finetune.train: error: {error}\n")
        return EXIT_USAGE
    return EXIT_DONE


def train(plan: RunPlan, folder: Path) -> dict[str, Any]:
    """Train to the end, evaluating after each epoch; all ranks call it.

    Args:
        plan: the run.
        folder: its folder, for the metrics and the best model.

    Returns:
        What result.json holds.

    Raises:
        ValueError: the model or the data cannot be read, or the ranks do not divide the batch.
    """
    from finetune.heads import Classification, Regression
    from pretrain.engine.distributed import gather
    from pretrain.engine.engine import start

    started = time.perf_counter()
    task, config = glue.find(plan.task), plan.training_config
    loaded = model_folder.load(Path(plan.model))
    data = _Data.read(plan, task, loaded)
    process = start()
    engine = _engine(config, classifiers.build(loaded, plan, task), process)
    batches = ShuffledBatches(
        data.train, config.batch_size, plan.training_seed, config.length_window
    )
    parts = folder / _BEST if plan.save_model else None
    evaluation = Evaluation(engine, batches, task, data.dev, parts)
    steps = config.steps(len(data.train))
    written = MetricsWriter(folder, attempt=1)
    spent = _Sum()
    training_started = time.perf_counter()
    run_loop(
        engine,
        batches,
        Regression() if task.is_regression else Classification(),
        learning_rate=lambda step: config.rate(step, steps),
        first_step=0,
        last_step=steps,
        hooks=[Hook(1, evaluation)],
        observers=[written, ProgressPrinter(steps), spent],
    )
    ended = time.perf_counter()
    gather(None)  # until every rank has written its part
    if engine.rank > 0:
        return {}
    written.sync()
    if parts:
        classifiers.save(folder, parts, loaded, plan, task)
    return {
        "plan": dataclasses.asdict(plan),
        "task": plan.task,
        "weights": plan.weights,
        "seed": plan.seed,
        "retry": plan.retry,
        **_scores(task, evaluation, data),
        "train_examples": len(data.train),
        "skipped_rows": data.skipped,
        "too_long": {name: each.too_long for name, each in data.splits.items()},
        "steps": steps,
        "ranks": process.world_size,
        "seconds": ended - started,
        "training_seconds": ended - training_started,
        "tokens_per_second": spent.tokens / spent.seconds,
        "device": str(process.device),
    }


def _scores(task: glue.Task, evaluation: Evaluation, data: _Data) -> dict[str, Any]:
    constant = {
        f"{name}{glue.ending_of(split)}": value
        for split, dev_set in data.dev.items()
        for name, value in scores.constant(task.metrics, dev_set.labels).items()
    }
    best = evaluation.best
    return {
        "best": best,
        "last": evaluation.epochs[-1],
        "collapsed": collapse.reason(task.metrics[0], best, constant, evaluation.answers),
        "majority": constant,
        "epochs": evaluation.epochs,
        "dev_examples": sum(map(len, data.dev.values())),
    }


@dataclasses.dataclass(frozen=True)
class _Data:
    train: EncodedExamples
    dev: dict[str, EncodedExamples]
    skipped: int
    """Ragged rows of the training file."""

    @classmethod
    def read(cls, plan: RunPlan, task: glue.Task, loaded: model_folder.LoadedModel) -> _Data:
        limit = classifiers.longest_input(plan.config.max_tokens, loaded.model.config)
        train = examples.read(task, plan.data, "train")
        first = train.examples[: plan.config.max_train_examples or None]
        return cls(
            EncodedExamples(
                first, loaded.tokenizer, limit, drop_long=True, is_regression=task.is_regression
            ),
            {
                split: EncodedExamples(
                    examples.read(task, plan.data, split).examples,
                    loaded.tokenizer,
                    limit,
                    is_regression=task.is_regression,
                )
                for split in task.dev
            },
            train.skipped,
        )

    @property
    def splits(self) -> dict[str, EncodedExamples]:
        return {"train": self.train, **self.dev}


def _engine(config: FinetuneConfig, classifier: Classifier, process: Process) -> Engine:
    from pretrain.engine.engine import Engine, deepspeed_json

    name = config.deepspeed or ("zero1_bf16" if process.device.type == "cuda" else "zero1_fp32")
    if config.batch_size % process.world_size:
        raise ValueError(
            f"batch_size {config.batch_size}: not a multiple of {process.world_size} ranks; "
            "accepted: a multiple, or another --world-size"
        )
    batch = BatchConfig(config.batch_size, config.batch_size // process.world_size)
    optimizer = OptimizerConfig(
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        gradient_clipping=config.gradient_clipping,
    )
    settings = deepspeed_json(name, batch, config.gradient_clipping, world_size=process.world_size)
    return Engine(classifier, optimizer, settings, process)


class _Sum:
    """Observer that adds up tokens read and seconds spent in steps."""

    def __init__(self) -> None:
        self.tokens, self.seconds = 0, 0.0

    def __call__(self, record: StepRecord) -> None:
        self.tokens += record.tokens
        self.seconds += record.seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
