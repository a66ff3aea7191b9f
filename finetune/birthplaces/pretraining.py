"""Pretraining of the task: a supervised run, and its model folder."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.common.exit_codes import EXIT_DONE
from finetune.birthplaces import corpus
from finetune.birthplaces.models import (
    OPTIONS,
    Choice,
    refuse_existing,
    refuse_numbers,
    refuse_overrides,
    variant_of,
)
from pretrain.config.settings import override

if TYPE_CHECKING:
    from pretrain.config.run import RunConfig
    from pretrain.model.config import ModelConfig

EXPERIMENTS = Path("expt")
"""Folder of runs and corpora, for `tensorboard --logdir expt`."""
PRETRAIN_RATE, FINETUNE_RATE = 6e-3, 6e-4
"""Default learning rates."""
EPOCHS = 650
"""Default epochs of pretraining."""
_OF_WHOLE_EPOCHS = ("data.packing", "phases")
"""Settings that are refused: with others, `--epochs` would not count how often a line is read."""


def run_folder(
    function: str,
    name: str,
    architecture: ModelConfig,
    output: Path,
    seed: int,
    *,
    pretrain_rate: float | None = None,
    finetune_rate: float | None = None,
) -> Path:
    """Return the folder of a run's metrics: what was trained, and below it the output's name.

    The beginning is named as in the assignment. The output's name is followed by a hash of its
    whole path, so that outputs of the same name in different folders have different runs.

    Args:
        function: pretrain or finetune.
        name: --tb_expt_name.
        architecture: of the model.
        output: the model folder.
        seed: random seed.
        pretrain_rate: learning rate of pretraining; None: unknown, or not pretrained.
        finetune_rate: learning rate of fine-tuning; None: not fine-tuned.
    """
    words = [name, variant_of(architecture)]
    if architecture.latents:
        words.append(str(architecture.latents))
    if architecture.position != "learned":
        words.append(architecture.position)
    for title, rate in (("pt_lr", pretrain_rate), ("ft_lr", finetune_rate)):
        if rate is not None:
            words.append(f"{title}_{rate:f}")
    path_hash = hashlib.sha256(str(output.resolve()).encode()).hexdigest()[:8]
    return (
        EXPERIMENTS / function / "_".join([*words, f"seed_{seed}"]) / f"{output.name}-{path_hash}"
    )


def refuse_name(name: str) -> None:
    """Refuse a --tb_expt_name that cannot be part of a folder's name.

    Raises:
        ValueError: the name is empty, hidden, or has a slash.
    """
    if not name or name.startswith(".") or "/" in name:
        raise ValueError(f"--tb_expt_name {name!r}: must be a name without slash or leading dot")


def pretrain(
    choice: Choice,
    text: Path,
    output: Path,
    *,
    learning_rate: float = PRETRAIN_RATE,
    epochs: int = EPOCHS,
    seed: int = 1,
    name: str = "run",
    overrides: Sequence[str] = (),
) -> int:
    """Pretrain a model through the supervisor, and write its model folder.

    Called again with the same arguments it continues where it was interrupted.

    Args:
        choice: the model.
        text: one document per line.
        output: the model folder.
        learning_rate: peak of the schedule, which ends at a tenth of it.
        epochs: how often every document is read.
        seed: random seed of initial weights, order, spans and dropout.
        name: --tb_expt_name.
        overrides: further settings of the recipe.

    Returns:
        The exit code.

    Raises:
        ValueError: the text or a setting is not accepted, the output exists, or an earlier run of
            the same folder (see `run_folder`) had another text or other settings.
    """
    from pretrain.models.export import export_checkpoint
    from pretrain.processes.gpus import visible_gpus
    from pretrain.supervision.run import run_supervised

    refuse_existing(output)
    refuse_name(name)
    refuse_numbers("--pretrain_lr", learning_rate, epochs, seed)
    refuse_overrides(overrides, refused=_OF_WHOLE_EPOCHS)
    settings = [
        *choice.overrides,
        f"optimizer.learning_rate={learning_rate}",
        f"schedule.minimum_learning_rate={learning_rate / 10}",
        f"training.seed={seed}",
        # The model is small: more processes would wait for each other.
        f"supervision.processes_per_node={min(2, len(visible_gpus()) or 2)}",
        *overrides,
    ]
    recipe = choice.config(settings)
    documents = corpus.documents(text)
    tokenizer = corpus.vocabulary(documents)
    architecture = recipe.architecture(tokenizer.vocab_size)
    folder = run_folder("pretrain", name, architecture, output, seed, pretrain_rate=learning_rate)
    steps = math.ceil(epochs * len(documents) / recipe.batch.global_batch_size)
    settings += [override("folder", str(folder)), f"training.steps={steps}"]
    corpus_folder = corpus.folder_of(text.stem, documents, EXPERIMENTS / "corpora")
    _refuse_other_run(folder, choice.config(settings), text, corpus_folder)
    prepared = corpus.prepare(documents, corpus_folder)
    counts = f"documents: {len(documents):,}, epochs: {epochs:,}, steps: {steps:,}"
    print(f"{text}: {counts}", flush=True)
    if code := run_supervised(choice.config([*settings, override("data.corpus", str(prepared))])):
        return code
    step = export_checkpoint(folder, output)
    print(f"{output}: the model of {folder} after {step:,} steps", flush=True)
    return EXIT_DONE


def _refuse_other_run(folder: Path, config: RunConfig, text: Path, corpus_folder: Path) -> None:
    """Refuse to continue a run with another text or other settings."""
    from pretrain.config.load import RUN_FILE, differences, load

    if not (folder / RUN_FILE).is_file():
        return
    earlier = load(str(folder / RUN_FILE))
    remedy = "another --tb_expt_name, or delete that folder"
    if (known := Path(earlier.data.corpus).parent) != corpus_folder:
        raise ValueError(
            f"{folder}: an earlier run for the same output read {known}; {text} is "
            f"{corpus_folder}; give the text as it was, {remedy}"
        )
    if changed := differences(earlier, config):
        named = [f"{OPTIONS.get(each.partition(': ')[0], '')} {each}".strip() for each in changed]
        raise ValueError(
            f"{folder}: an earlier run for the same output had other settings: {'; '.join(named)}; "
            f"give the earlier ones, {remedy}"
        )
