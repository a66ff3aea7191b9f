"""Pretraining of the task: a supervised run, and its model folder."""

from __future__ import annotations

import argparse
import math

from data_prep.common.exit_codes import EXIT_DONE
from finetune.birthplaces import corpus, models

EPOCHS = 650


def pretrain(options: argparse.Namespace) -> int:
    """Pretrain a model through the supervisor, and write its model folder.

    Called again with the same options it continues where it was interrupted.

    Returns:
        The exit code.

    Raises:
        ValueError: the text or a setting is not accepted, the output exists, or an earlier run of
            the same folder had another text or other settings.
    """
    from pretrain.config.settings import override
    from pretrain.models.export import export_checkpoint
    from pretrain.processes.gpus import visible_gpus
    from pretrain.supervision.run import run_supervised

    text, output, rate = options.corpus, options.writing_params_path, options.pretrain_lr
    models.refuse_existing(output)
    documents = corpus.documents(text)
    folder = models.run_folder(options, f"pt_lr_{rate:f}")
    settings = [
        override("folder", str(folder)),
        f"optimizer.learning_rate={rate}",
        f"schedule.minimum_learning_rate={rate / 10}",
        f"training.seed={options.seed}",
        # The model is small: more processes would wait for each other.
        f"supervision.processes_per_node={min(2, len(visible_gpus()) or 2)}",
    ]
    batch = models.recipe(options, *settings).batch.global_batch_size
    epochs = EPOCHS if options.epochs is None else options.epochs
    steps = math.ceil(epochs * len(documents) / batch)
    prepared = corpus.prepare(text.stem, documents, models.EXPERIMENTS / "corpora")
    settings += [f"training.steps={steps}", override("data.corpus", str(prepared))]
    print(f"{text}: {len(documents):,} documents, {steps:,} steps", flush=True)
    if code := run_supervised(models.recipe(options, *settings)):
        return code
    step = export_checkpoint(folder, output)
    print(f"{output}: the model of {folder} after {step:,} steps", flush=True)
    return EXIT_DONE
