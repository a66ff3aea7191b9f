"""Fine-tuning of the task, in one process."""

from __future__ import annotations

import argparse
import dataclasses
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.birthplaces import models
from finetune.birthplaces.rows import AnswerBatches, AnswerObjective, encode, read_rows
from pretrain.config.settings import is_within

if TYPE_CHECKING:
    from pretrain.config.run import RunConfig
    from pretrain.models.model_folder import ModelContents

FRESH_EPOCHS, PRETRAINED_EPOCHS = 75, 10
"""Default epochs, from fresh and from pretrained weights."""
BATCH_SIZE = 256
"""Most rows of an update."""


def finetune(options: argparse.Namespace) -> None:
    """Train a model to answer the questions of a TSV file, and write its model folder.

    The learning rate is constant: of the assignment's cosine, fine-tuning sees the first sixth.
    Unlike the assignment's, the rows have another order in each epoch.

    Raises:
        ValueError: a file or a setting is not accepted, the output exists, or a launcher started
            several processes.
    """
    from pretrain.models import model_folder

    data, reading = options.finetune_corpus_path, options.reading_params_path
    models.refuse_existing(options.writing_params_path)
    used = ["optimizer", "training.deepspeed", *([] if reading else ["model"])]
    for each in options.overrides:
        if not any(is_within(each.partition("=")[0], section) for section in used):
            raise ValueError(f"{each!r}: has no effect here; only settings of {used} have")
    rows, usual = read_rows(data), PRETRAINED_EPOCHS if reading else FRESH_EPOCHS
    epochs = usual if options.epochs is None else options.epochs
    batch_size = min(BATCH_SIZE, len(rows))
    steps = math.ceil(epochs * len(rows) / batch_size)
    settings = [f"optimizer.learning_rate={options.finetune_lr}", f"training.steps={steps}"]
    settings += ["schedule.minimum_learning_rate=0", f"training.seed={options.seed}"]
    recipe = models.recipe(options, *settings)
    start = models.load(options).contents() if reading else models.fresh(options, recipe)
    assert start.vocabulary is not None
    encoded = encode(rows, start.vocabulary, start.config.max_positions, data)
    objective = AnswerObjective(start.vocabulary.mask_id)
    batches = AnswerBatches(encoded, batch_size, options.seed, objective)
    print(f"{data}: {len(rows):,} rows, {steps:,} steps", flush=True)
    folder = models.run_folder(options, f"ft_lr_{options.finetune_lr:f}")
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted run
    provenance = {
        **{"task": "birthplaces", "rows": len(rows), "steps": steps, "seed": options.seed},
        "optimizer": dataclasses.asdict(recipe.optimizer),
        "pretrained": start.provenance,  # other commands read the recipe in it
    }
    weights = _train(start, recipe, batches, folder)
    trained = dataclasses.replace(start, weights=weights, provenance=provenance)
    model_folder.save_model(options.writing_params_path, trained)
    print(f"{options.writing_params_path}: the model after {steps:,} steps")


def _train(
    start: ModelContents, recipe: RunConfig, batches: AnswerBatches, folder: Path
) -> dict[str, Any]:
    """Return the weights at the end, in fp32 on the CPU."""
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
    if process.world_size > 1:
        raise ValueError(f"{process.world_size} ranks: this command uses one, without a launcher")
    model: LanguageModel = LanguageModel(start.config)
    model.load_state_dict(start.weights)
    optimizer, size, steps = recipe.optimizer, batches.batch_size, recipe.training.steps
    settings = engines.deepspeed_json(
        recipe.training.deepspeed, BatchConfig(size, size), optimizer.gradient_clipping, 1
    )
    engine = engines.Engine(model, optimizer, settings, process)
    metrics = MetricsWriter(folder, attempt=1)
    board = TensorBoard(Shown(folder, {}, attempt=1, first_step=0, say=print))
    run(
        engine,
        batches,
        batches.objective,
        learning_rate=lambda step: optimizer.learning_rate,
        steps=range(steps),
        rank_0=Rank0Callbacks(
            [
                metrics,
                lambda record: board.scalars(record.step, curves(record)),
                ProgressPrinter(steps),
            ]
        ),
    )
    metrics.sync()
    board.close()
    # The engine has the fp32 weights in its own parts; DeepSpeed writes a script beside the folder.
    parts = folder / ".parts" / "weights"
    engine.save(parts)
    weights = consolidated_weights(parts)
    shutil.rmtree(parts.parent)
    return weights
