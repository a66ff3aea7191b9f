"""One fine-tuning run: what `python -m finetune.train RUN_FOLDER` does.

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
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.files import lock
from finetune import glue, scores
from finetune.batches import EncodedExamples, ShuffledBatches
from finetune.config import MODEL, RESULT, FinetuneConfig, RunPlan, read_plan
from pretrain import model_folder
from pretrain.checkpoints import write_json
from pretrain.config import BatchConfig, OptimizerConfig
from pretrain.loop import Hook, StepRecord
from pretrain.loop import run as run_loop
from pretrain.metrics import METRICS, MetricsWriter, ProgressPrinter
from pretrain.model.config import ClassificationConfig

if TYPE_CHECKING:
    from pretrain.engine import Engine
    from pretrain.model.classifier import Classifier

EXIT_DONE = 0
EXIT_USAGE = 2
_LOCK = "lock"
_EVALUATION_BATCH_SIZE = 64


def main(arguments: Sequence[str]) -> int:
    """Do the run that a folder plans; returns the exit code."""
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        sys.stdout.write(
            "usage: python -m finetune.train RUN_FOLDER\n\n"
            "Does, from the start, the one run that `python -m finetune glue` planned there.\n"
        )
        return EXIT_DONE if arguments in (["-h"], ["--help"]) else EXIT_USAGE
    folder = Path(arguments[0])
    try:
        plan = read_plan(folder)
        # A run may have outlived the command that started it.
        with lock(folder / _LOCK, "another process is at work on this run"):
            (folder / METRICS).unlink(missing_ok=True)  # of a run that did not end
            write_json(folder / RESULT, train(plan, folder))
    except ValueError as error:
        sys.stderr.write(f"finetune.train: error: {error}\n")
        return EXIT_USAGE
    return EXIT_DONE


def train(plan: RunPlan, folder: Path) -> dict[str, Any]:
    """Train to the end, evaluating after each epoch.

    Args:
        plan: the run.
        folder: its folder, for the metrics.

    Returns:
        What result.json holds.

    Raises:
        ValueError: the model or the data cannot be read.
    """
    from finetune.heads import Classification
    from pretrain.engine import start

    started = time.perf_counter()
    task, config = glue.find(plan.task), plan.config
    loaded = model_folder.load(Path(plan.model))
    limit = longest_input(config, loaded.model.config.position, loaded.model.config.max_positions)
    train_set, dev_set = (
        EncodedExamples(task.read(Path(plan.data), split), loaded.tokenizer, limit)
        for split in glue.SPLITS
    )
    ranks = start()
    engine = _engine(plan, build(loaded, plan, head_config(plan, task)))
    batches = ShuffledBatches(train_set, config.batch_size, plan.seed)
    evaluation = Evaluation(engine, batches, dev_set, task.metrics)
    steps = config.steps(len(train_set))
    tokens = _Sum()
    training_started = time.perf_counter()
    run_loop(
        engine,
        batches,
        Classification(),
        learning_rate=lambda step: config.rate(step, steps),
        first_step=0,
        last_step=steps,
        hooks=[Hook(1, evaluation)],
        observers=[MetricsWriter(folder, attempt=1), ProgressPrinter(steps), tokens],
    )
    ended = time.perf_counter()
    if plan.save_model:
        save_model(engine, loaded, plan, task, folder)
    return {
        "plan": dataclasses.asdict(plan),
        "task": plan.task,
        "weights": plan.weights,
        "seed": plan.seed,
        "best": max(evaluation.epochs, key=lambda epoch: epoch[task.metrics[0]]),
        "last": evaluation.epochs[-1],
        "epochs": evaluation.epochs,
        "majority": scores.majority(task.metrics, dev_set.labels),
        "train_examples": len(train_set),
        "dev_examples": len(dev_set),
        "cut_examples": train_set.cut + dev_set.cut,
        "steps": steps,
        "seconds": ended - started,
        "training_seconds": ended - training_started,
        "tokens_per_second": tokens.tokens / tokens.seconds,
        "device": str(ranks.device),
    }


def longest_input(config: FinetuneConfig, position: str, max_positions: int) -> int:
    """Tokens that an input may have: learned positions end, all others go on."""
    return min(config.max_tokens, max_positions) if position == "learned" else config.max_tokens


def build(
    loaded: model_folder.LoadedModel, plan: RunPlan, head: ClassificationConfig
) -> Classifier:
    """The classifier that a run begins with: a function of the model folder and the plan alone."""
    import torch

    from pretrain.model.classifier import Classifier
    from pretrain.model.heads import ClassificationHead
    from pretrain.model.language_model import LanguageModel

    architecture = dataclasses.replace(
        loaded.model.config,
        dropout=plan.config.dropout,
        attention_dropout=plan.config.attention_dropout,
    )
    torch.manual_seed(plan.seed)
    model = LanguageModel(architecture)
    if plan.weights == "pretrained":
        model.load_state_dict(loaded.model.state_dict())
    return Classifier(model.encoder, ClassificationHead(architecture.hidden_size, head))


def save_model(
    engine: Engine,
    loaded: model_folder.LoadedModel,
    plan: RunPlan,
    task: glue.Task,
    folder: Path,
) -> None:
    """Write the fine-tuned model, its head under the task's name, into `folder`.

    The language model's head is the pretrained one, which fine-tuning leaves alone.
    """
    from pretrain.engine import consolidated_weights

    with TemporaryDirectory(dir=folder, prefix=".weights-") as partial:
        parts = Path(partial) / "parts"
        engine.save(parts)
        trained = consolidated_weights(parts)
    weights = dict(loaded.model.state_dict())
    for name, tensor in trained.items():
        part, _, rest = name.partition(".")
        weights[f"{model_folder.HEADS}{task.name}.{rest}" if part == "head" else name] = tensor
    shutil.rmtree(folder / MODEL, ignore_errors=True)  # of a run that did not end
    contents = model_folder.ModelContents(
        loaded.model.config,
        weights,
        loaded.vocabulary,
        {
            "task": plan.task,
            "weights": plan.weights,
            "seed": plan.seed,
            "model": plan.model_sha256,
            "pretrained": loaded.provenance,
        },
        {task.name: head_config(plan, task)},
    )
    model_folder.save(folder / MODEL, contents)


def head_config(plan: RunPlan, task: glue.Task) -> ClassificationConfig:
    """The head that a task needs."""
    return ClassificationConfig(
        len(task.labels), task.labels, plan.config.pooling, plan.config.head_dropout
    )


def _engine(plan: RunPlan, classifier: Classifier) -> Engine:
    import torch

    from pretrain.distributed import Ranks
    from pretrain.engine import Engine, deepspeed_json

    config = plan.config
    name = config.deepspeed or ("zero1_bf16" if torch.cuda.is_available() else "zero1_fp32")
    batch = BatchConfig(config.batch_size, config.batch_size)
    optimizer = OptimizerConfig(
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        gradient_clipping=config.gradient_clipping,
    )
    settings = deepspeed_json(name, batch, config.gradient_clipping, ranks=1)
    return Engine(classifier, optimizer, settings, Ranks.from_environment())


class Evaluation:
    """Hook that scores the dev split whenever an epoch has ended."""

    def __init__(
        self,
        engine: Engine,
        batches: ShuffledBatches,
        dev_set: EncodedExamples,
        metrics: Sequence[str],
    ) -> None:
        """Score `dev_set` by `metrics`."""
        self.epochs: list[dict[str, float]] = []
        """A record an epoch: its number, from 1, the loss (nats a sentence) and every score."""
        self._engine, self._batches, self._metrics = engine, batches, metrics
        self._dev_set = dev_set
        self._chosen = dev_set.by_length(_EVALUATION_BATCH_SIZE)

    def __call__(self, step: int) -> None:
        """Score the model after `step` updates if the last one ended an epoch."""
        if not self._batches.ends_epoch(step):
            return
        loss, predictions = self._predict()
        values = scores.score(self._metrics, self._dev_set.labels, predictions)
        epoch = int(self._batches.epoch(step))
        self.epochs.append({"epoch": epoch, "loss": loss, **values})
        words = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        sys.stdout.write(f"epoch {epoch}: dev loss {loss:.4f}  {words}\n")
        sys.stdout.flush()

    def _predict(self) -> tuple[float, scores.Labels]:
        """Mean loss in nats, and the most likely class of each example, in the split's order."""
        import torch
        import torch.nn.functional as F  # noqa: N812

        model = self._engine.module
        model.eval()
        predictions, loss = np.empty_like(self._dev_set.labels), 0.0
        with torch.no_grad():
            for chosen in self._chosen:
                batch = self._engine.to_device(self._dev_set.collate(chosen))
                logits = model(batch["input_ids"], batch["attention_mask"]).float()
                loss += float(F.cross_entropy(logits, batch["labels"], reduction="sum"))
                predictions[chosen] = logits.argmax(dim=-1).cpu().numpy()
        return loss / len(self._dev_set), predictions


class _Sum:
    """Observer that adds up tokens read and seconds spent in steps."""

    def __init__(self) -> None:
        self.tokens, self.seconds = 0, 0.0

    def __call__(self, record: StepRecord) -> None:
        self.tokens += record.tokens
        self.seconds += record.seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
