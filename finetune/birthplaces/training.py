"""Pretraining, fine-tuning and evaluation of the birthplace task.

Pretraining is a supervised run; fine-tuning and greedy answers run in one process. The docstrings
of the task's functions are the help of their commands; all raise ValueError for files and settings
that are not accepted.
"""

import argparse
import dataclasses
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

from data_prep.common import console
from data_prep.common.exit_codes import EXIT_DONE
from data_prep.common.files import check_absent, check_new, write_atomically
from finetune.batches import ShuffledBatches
from finetune.birthplaces.rows import (
    AnswerObjective,
    answer_batches,
    documents,
    encode,
    prepare,
    read_rows,
    score,
    vocabulary,
)
from pretrain.config.load import load as load_recipe
from pretrain.config.load import public
from pretrain.config.run import RunConfig
from pretrain.config.sections import BatchConfig
from pretrain.config.settings import is_within, override
from pretrain.convert.contents import ModelContents
from pretrain.model.config import ModelConfig
from pretrain.objectives.base import Block, Ids, Vocabulary
from pretrain.objectives.tokens import FIRST_WORD_ID, IGNORED, PAD_ID
from pretrain.processes import gpus

if TYPE_CHECKING:
    from pretrain.model.language_model import LanguageModel

EXPERIMENTS = Path("expt")
"""Folder of runs and corpora, for `tensorboard --logdir expt`."""


def recipe(options: argparse.Namespace, *settings: str) -> RunConfig:
    """Load the recipe of the model, with settings and what the command line overrides."""
    size = [f"model.overrides.latents={options.bottleneck_dim}"] * (options.variant == "perceiver")
    return load_recipe(f"birthplaces-{options.variant}", [*size, *settings, *options.overrides])


def run_folder(options: argparse.Namespace, rate: str) -> Path:
    """Return the folder of a run's metrics, named after the settings and the output.

    Args:
        options: of `pretrain` or `finetune`.
        rate: name and value of the learning rate, as the assignment writes them.
    """
    size = [str(options.bottleneck_dim)] * (options.variant == "perceiver")
    words = [options.tb_expt_name, options.variant, *size, rate, f"seed_{options.seed}"]
    output = quote(str(options.writing_params_path), safe="")  # another one for each path
    return EXPERIMENTS / str(options.function) / "_".join(words) / output


def fresh(options: argparse.Namespace, recipe: RunConfig) -> ModelContents:
    """Draw the weights of a fresh model from the recipe's seed.

    Raises:
        ValueError: the text or a setting is not accepted.
    """
    import torch

    from pretrain.model.language_model import LanguageModel

    tokenizer = vocabulary(documents(options.corpus))
    architecture = recipe.architecture(tokenizer.vocab_size)
    _check_variant(architecture, options, "the recipe")
    torch.manual_seed(recipe.training.seed)
    weights = LanguageModel(architecture).state_dict()
    return ModelContents(architecture, weights, tokenizer, {"recipe": public(recipe)})


def read(options: argparse.Namespace) -> ModelContents:
    """Read the model folder that a command line names.

    Raises:
        ValueError: it is not a model folder, or it has another model or another vocabulary than
            the command line names.
    """
    from pretrain.convert.reading import read_folder

    folder: Path = options.reading_params_path
    contents = read_folder(folder)
    _check_variant(contents.config, options, f"the model in {folder}")
    ours, theirs = vocabulary(documents(options.corpus)), contents.vocabulary
    if theirs is None or ours.digest() != theirs.digest():
        raise ValueError(
            f"{options.corpus}: its characters, {ours.vocab_size} ids, are not the vocabulary of "
            f"{folder}, {theirs.vocab_size if theirs else 0} ids; give the text of the pretraining"
        )
    return contents


def _check_variant(model: ModelConfig, options: argparse.Namespace, name: str) -> None:
    """Raise ValueError if the model has another variant than the options, or sees the answers."""
    latents = options.bottleneck_dim if options.variant == "perceiver" else 0
    if not model.causal or model.latents != latents:
        raise ValueError(
            f"{name} has causal {model.causal} and {model.latents} latents; accepted with "
            f"{options.variant}: causal True and {latents} latents (--bottleneck_dim)"
        )


EPOCHS = 650


def pretrain(options: argparse.Namespace) -> int:
    """Pretrain a model on a text by span corruption.

    The run is supervised: called again, the same command continues it.

    example: zeroclap birthplaces pretrain vanilla wiki.txt --writing_params_path before
    """
    from pretrain.convert.export import export_checkpoint
    from pretrain.supervision.run import run_supervised

    text, output, rate = options.corpus, options.writing_params_path, options.pretrain_lr
    check_new(output)
    texts = documents(text)
    folder = run_folder(options, f"pt_lr_{rate:f}")
    settings = [
        override("folder", str(folder)),
        f"optimizer.learning_rate={rate}",
        f"schedule.minimum_learning_rate={rate / 10}",
        f"training.seed={options.seed}",
        # The model is small: more processes would wait for each other.
        f"supervision.processes_per_node={min(2, len(gpus.visible_gpus()) or 2)}",
    ]
    batch = recipe(options, *settings).batch.global_batch_size
    epochs = EPOCHS if options.epochs is None else options.epochs
    steps = math.ceil(epochs * len(texts) / batch)
    prepared = prepare(text.stem, texts, EXPERIMENTS / "corpora")
    settings += [f"training.steps={steps}", override("data.corpus", str(prepared))]
    print(f"{text}: {len(texts):,} documents, {steps:,} steps", flush=True)
    with console.survive_broken_pipe(is_result=False):
        code = run_supervised(recipe(options, *settings))
    if code:
        return code
    step, _ = export_checkpoint(folder, output)
    print(f"{output}: the model of {folder} after {step:,} steps", flush=True)
    return EXIT_DONE


FRESH_EPOCHS, PRETRAINED_EPOCHS = 75, 10
"""Default epochs, from fresh and from pretrained weights."""
BATCH_SIZE = 256
"""Most rows of an update, and those that are answered together."""


def finetune(options: argparse.Namespace) -> None:
    r"""Train a model to answer questions.

    It runs in one process. Interrupted, it starts again.

    example: zeroclap birthplaces finetune vanilla wiki.txt \
        --reading_params_path before --finetune_corpus_path train.tsv --writing_params_path after
    """
    from pretrain.convert.writing import save_model

    # The learning rate is constant: of the assignment's cosine, fine-tuning sees the first sixth.
    # Unlike the assignment's, the rows have another order in each epoch.
    data, reading = options.finetune_corpus_path, options.reading_params_path
    check_new(options.writing_params_path)
    gpus.select(options.device)
    used = ["optimizer", "training.deepspeed", *([] if reading else ["model"])]
    for each in options.overrides:
        if not any(is_within(each.partition("=")[0], section) for section in used):
            raise ValueError(f"{each!r}: has no effect here; only settings of {used} have")
    rows, usual = read_rows(data), PRETRAINED_EPOCHS if reading else FRESH_EPOCHS
    epochs = usual if options.epochs is None else options.epochs
    batch_size = min(BATCH_SIZE, len(rows))
    steps = math.ceil(epochs * len(rows) / batch_size)
    settings = [f"optimizer.learning_rate={options.finetune_lr}", f"training.steps={steps}"]
    settings += ["schedule.warmup_steps=0"]  # the rate is constant
    settings += ["schedule.minimum_learning_rate=0", f"training.seed={options.seed}"]
    config = recipe(options, *settings)
    start = read(options) if reading else fresh(options, config)
    assert start.vocabulary is not None
    encoded = encode(rows, start.vocabulary, start.config.max_positions, data)
    objective = AnswerObjective(start.vocabulary.mask_id)
    batches = answer_batches(encoded, batch_size, options.seed, objective)
    print(f"{data}: {len(rows):,} rows, {steps:,} steps", flush=True)
    folder = run_folder(options, f"ft_lr_{options.finetune_lr:f}")
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted run
    provenance = {
        **{"task": "birthplaces", "rows": len(rows), "steps": steps, "seed": options.seed},
        "optimizer": dataclasses.asdict(config.optimizer),
        "pretrained": start.provenance,  # other commands read the recipe in it
    }
    weights = _train(start, config, batches, objective, folder)
    trained = dataclasses.replace(start, weights=weights, provenance=provenance)
    save_model(options.writing_params_path, trained)
    print(f"{options.writing_params_path}: the model after {steps:,} steps")


def _train(
    start: ModelContents,
    recipe: RunConfig,
    batches: ShuffledBatches,
    objective: AnswerObjective,
    folder: Path,
) -> dict[str, Any]:
    """Return the weights at the end, in fp32 on the CPU."""
    from pretrain.engine import engine as engines
    from pretrain.loop.loop import run
    from pretrain.model.language_model import LanguageModel
    from pretrain.records.figures import curves
    from pretrain.records.progress import ProgressPrinter
    from pretrain.train.trackers import TensorBoard

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
    progress = ProgressPrinter(steps)
    board = TensorBoard(folder, 0, progress.say)
    run(
        engine,
        batches.micro_batches,
        objective,
        learning_rate=lambda step: optimizer.learning_rate,
        steps=range(steps),
        observers=[lambda record: board.scalars(record.step, curves(record)), progress],
    )
    board.close()
    return engine.weights()


MOST_CHARACTERS = 32
"""Of an answer, as in the assignment."""


def answers(model: "LanguageModel", rows: Sequence[Ids], mask_id: int) -> list[list[int]]:
    """Continue rows with the likeliest ids, up to `<mask>`; other special ids are never chosen.

    Every row is read as a whole for each id, so that it works for every model; rows that have ended
    are not read again. An answer also ends where the model's positions do.

    Args:
        model: causal, in evaluation mode, on any device.
        rows: `<s> question <mask>`, [n] each.
        mask_id: of `<mask>`.

    Returns:
        The ids of each answer, without the closing `<mask>`.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    device, block = next(model.parameters()).device, model.config.max_positions
    texts = [row.tolist() for row in rows]
    for start in range(0, len(texts), BATCH_SIZE):
        batch = texts[start : start + BATCH_SIZE]
        for _ in range(MOST_CHARACTERS):
            tensors = [torch.tensor(text, device=device) for text in batch]
            ids = pad_sequence(tensors, batch_first=True, padding_value=PAD_ID)
            ends = [row * ids.shape[1] + len(text) - 1 for row, text in enumerate(batch)]
            with torch.no_grad():
                logits = model(ids, ids != PAD_ID, torch.tensor(ends, device=device))
            logits[:, :FIRST_WORD_ID] = -torch.inf
            for text, id in zip(batch, logits.argmax(dim=-1).tolist(), strict=True):
                text.append(id)
            batch = [text for text in batch if text[-1] != mask_id and len(text) <= block]
            if not batch:
                break
    found = [text[len(row) :] for text, row in zip(texts, rows, strict=True)]
    return [[id for id in ids if id != mask_id] for ids in found]


def evaluate(options: argparse.Namespace) -> None:
    r"""Answer questions, and count the right answers.

    example: zeroclap birthplaces evaluate vanilla wiki.txt \
        --reading_params_path after --eval_corpus_path dev.tsv --outputs_path dev.predictions
    """
    from pretrain.convert.model_folder import build
    from pretrain.engine.distributed import choose_device

    output, data = options.outputs_path, options.eval_corpus_path
    check_absent(output)
    rows = read_rows(data, with_answers=False)
    loaded = build(options.reading_params_path, read(options))
    tokenizer, model = loaded.tokenizer, loaded.model.to(choose_device(options.device))
    questions = encode([row[:1] for row in rows], tokenizer, model.config.max_positions, data)
    predictions = [tokenizer.decode(ids) for ids in answers(model, questions, tokenizer.mask_id)]
    write_atomically(output, "".join(f"{line}\n" for line in predictions).encode())
    print(f"{output}: {len(predictions):,} predictions\n{score(rows, predictions)}")


def london(options: argparse.Namespace) -> None:
    """Count the questions that the answer "London" is right for.

    example: zeroclap birthplaces london --eval_corpus_path dev.tsv
    """
    rows = read_rows(options.eval_corpus_path)
    print(score(rows, ["London"] * len(rows)))


COUNT = 4
"""Rows that are shown."""


def dataset(options: argparse.Namespace) -> None:
    """Show what the model reads (x) and predicts (y), with <pad> as U+25A1, <mask> as U+2047.

    example: zeroclap birthplaces dataset charcorruption wiki.txt
    """
    texts, recipe = documents(options.corpus), load_recipe("birthplaces-vanilla")
    tokenizer, length = vocabulary(texts), recipe.data.sequence_length
    if options.kind == "charcorruption":
        size = tokenizer.vocab_size
        objective = recipe.objective.build(Vocabulary(size, size, options.corpus.parent))
        rows = [
            np.array([tokenizer.bos_id, *ids[: length - 1]], dtype=np.int64)
            for ids in tokenizer.encode_batch(texts[:COUNT])
        ]
    elif (data := options.finetune_corpus_path) is None:
        raise ValueError("--finetune_corpus_path: is needed with namedata")
    else:
        objective = AnswerObjective(tokenizer.mask_id)
        rows = encode(read_rows(data)[:COUNT], tokenizer, length, data)
    special = {tokenizer.pad_id: "\u25a1", tokenizer.mask_id: "\u2047"}
    for number, row in enumerate(rows):
        arrays = objective.collate([Block(row)], [(1, 0, number)], length)
        inputs = arrays["input_ids"][0]
        labels = np.full_like(inputs, tokenizer.pad_id)
        used = arrays["labels"] != IGNORED
        labels[arrays["target_positions"][used]] = arrays["labels"][used]
        for name, ids in (("x", inputs[1:]), ("y", labels[1:])):
            words = [special.get(int(id)) or tokenizer.token_text(int(id)) for id in ids]
            print(f"{name}: {''.join(words)}")
