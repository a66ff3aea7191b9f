"""Fine-tuning of the task, in one process."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.common.files import lock
from finetune.birthplaces import questions
from finetune.birthplaces.models import (
    Choice,
    fresh,
    load,
    refuse_existing,
    refuse_numbers,
    refuse_overrides,
)
from finetune.birthplaces.pretraining import FINETUNE_RATE, refuse_name, run_folder
from finetune.birthplaces.rows import AnswerBatches, AnswerObjective, encode
from pretrain.records.metrics import METRICS

if TYPE_CHECKING:
    from pretrain.config.run import RunConfig
    from pretrain.loop.protocols import StepRecord
    from pretrain.model.language_model import LanguageModel
    from pretrain.models.model_folder import ModelContents

FRESH_EPOCHS, PRETRAINED_EPOCHS = 75, 10
"""Default epochs, from fresh and from pretrained weights."""
BATCH_SIZE = 256
"""Most rows of an update."""
_CURVES = "tensorboard"
_PARTS = ".parts"
"""Folder of the engine's own weights at the end of a run."""


def finetune(
    choice: Choice,
    text: Path,
    reading: Path | None,
    output: Path,
    data: Path,
    *,
    learning_rate: float = FINETUNE_RATE,
    epochs: int | None = None,
    seed: int = 1,
    name: str = "run",
    overrides: Sequence[str] = (),
) -> None:
    """Train a model to answer the questions of a TSV file, and write its model folder.

    The learning rate is constant: of the assignment's cosine, fine-tuning sees the first sixth.
    Unlike the assignment's, the rows have another order in each epoch.

    Args:
        choice: the model.
        text: the corpus, whose characters are the vocabulary.
        reading: model folder of the pretrained model; None: fresh weights.
        output: the model folder to write.
        data: TSV file of questions and answers.
        learning_rate: of every update.
        epochs: how often every row is read; None: 75 from fresh weights, else 10.
        seed: random seed of fresh weights, order and dropout.
        name: --tb_expt_name.
        overrides: of the recipe: optimizer, DeepSpeed settings, and the model where it is fresh.

    Raises:
        ValueError: a file or a setting is not accepted, the output exists, or a launcher started
            several processes.
    """
    from pretrain.config.load import public
    from pretrain.models import model_folder

    epochs = (PRETRAINED_EPOCHS if reading else FRESH_EPOCHS) if epochs is None else epochs
    refuse_existing(output)
    refuse_name(name)
    refuse_numbers("--finetune_lr", learning_rate, epochs, seed)
    used = ["optimizer", "training.deepspeed"]
    model = ["model.size", "model.overrides"]
    refuse_overrides(overrides, used if reading else [*used, *model])
    _refuse_ranks()
    recipe = choice.config(
        [
            f"optimizer.learning_rate={learning_rate}",
            "schedule.minimum_learning_rate=0",
            f"training.seed={seed}",
            *overrides,
        ]
    )
    read = questions.read_questions(data, with_answers=True)
    start = load(reading, choice, text).contents() if reading else fresh(text, recipe)
    assert start.vocabulary is not None
    encoded = encode(read, start.vocabulary, start.config.max_positions, with_answers=True)
    for note in encoded.notes:
        print(f"{data}: {note}", flush=True)
    rows = len(encoded.rows)
    objective = AnswerObjective(start.vocabulary.mask_id)
    batches = AnswerBatches(encoded.rows, min(BATCH_SIZE, rows), seed, objective)
    steps = math.ceil(epochs * rows / batches.batch_size)
    print(f"{data}: rows: {rows:,}, epochs: {epochs:,}, steps: {steps:,}", flush=True)
    trained: dict[str, Any] = start.provenance.get("recipe") or public(recipe)
    is_pretrained = bool("run" in start.provenance or start.provenance.get("pretrained"))
    folder = run_folder(
        "finetune",
        name,
        start.config,
        output,
        seed,
        pretrain_rate=trained["optimizer"]["learning_rate"] if is_pretrained else None,
        finetune_rate=learning_rate,
    )
    started = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder / "lock", "another process trains this model"):
        (folder / METRICS).unlink(missing_ok=True)  # left by an interrupted run
        for left in (_CURVES, _PARTS):
            shutil.rmtree(folder / left, ignore_errors=True)
        weights, loss = _train(start, recipe, batches, steps, folder)
    of_pretraining = {key: value for key, value in start.provenance.items() if key != "recipe"}
    provenance = {
        "task": "birthplaces",
        "rows": rows,
        "epochs": epochs,
        "steps": steps,
        "batch_size": batches.batch_size,
        "learning_rate": learning_rate,
        "seed": seed,
        "optimizer": dataclasses.asdict(recipe.optimizer),
        "deepspeed": Path(recipe.training.deepspeed).name,
        "pretrained": of_pretraining if reading else None,
        # Of the pretraining: other commands read the objective in it.
        "recipe": trained,
    }
    contents = dataclasses.replace(start, weights=weights, provenance=provenance)
    model_folder.save_model(output, contents)
    print(f"{output}: steps: {steps:,}, {time.perf_counter() - started:.0f} s, loss {loss:.4f}")


def _refuse_ranks() -> None:
    from pretrain.engine.distributed import launcher_variables

    if (ranks := launcher_variables(os.environ)["WORLD_SIZE"]) != "1":
        raise ValueError(f"{ranks} ranks: this command uses one; start it without a launcher")


def _train(
    start: ModelContents, recipe: RunConfig, batches: AnswerBatches, steps: int, folder: Path
) -> tuple[dict[str, Any], float]:
    """Return the weights at the end, in fp32 on the CPU, and the last loss."""
    from pretrain.config.sections import BatchConfig
    from pretrain.engine import engine as engines
    from pretrain.engine.consolidated import consolidated_weights
    from pretrain.loop.loop import Rank0Callbacks, run
    from pretrain.model.language_model import LanguageModel
    from pretrain.records.figures import curves
    from pretrain.records.metrics import MetricsWriter, ProgressPrinter
    from pretrain.train.trackers.tensorboard_run import TensorBoard
    from pretrain.train.trackers.tracker import Shown

    process = engines.start()
    model: LanguageModel = LanguageModel(start.config)
    model.load_state_dict(start.weights)
    optimizer, size = recipe.optimizer, batches.batch_size
    settings = engines.deepspeed_json(
        recipe.training.deepspeed, BatchConfig(size, size), optimizer.gradient_clipping, 1
    )
    engine = engines.Engine(model, optimizer, settings, process)
    board = TensorBoard(Shown(folder, {}, attempt=1, first_step=0, say=print))
    metrics, last_loss = MetricsWriter(folder, attempt=1), math.nan

    def keep_loss(record: StepRecord) -> None:
        nonlocal last_loss
        last_loss = record.result.loss

    observers: list[Callable[[StepRecord], None]] = [
        metrics,
        lambda record: board.scalars(record.step, curves(record)),
        ProgressPrinter(steps),
        keep_loss,
    ]
    run(
        engine,
        batches,
        batches.objective,
        learning_rate=lambda step: optimizer.learning_rate,
        steps=range(steps),
        rank_0=Rank0Callbacks(observers),
    )
    metrics.sync()
    # The engine has the fp32 weights in its own parts; DeepSpeed writes a script beside the folder.
    parts = folder / _PARTS / "weights"
    engine.save(parts)
    weights = consolidated_weights(parts)
    shutil.rmtree(parts.parent)
    return weights, last_loss
