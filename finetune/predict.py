"""Prediction with a fine-tuned model: labels of new text, and files for GLUE's server."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.common.arguments import typed
from data_prep.common.files import write_atomically
from finetune import examples, glue, scores
from finetune.batches import EncodedExamples
from finetune.classifiers import longest_input
from finetune.config import MODEL, RESULT, FinetuneConfig
from finetune.evaluation import Logits, logits_of
from finetune.examples import Example
from finetune.planning import result_of
from pretrain.models import model_folder

if TYPE_CHECKING:
    import torch

SUBMISSION = "submission.zip"


def predict(model: Path, file: Path, head: str = "", device: str | None = None) -> str:
    """Label every line of a file.

    Args:
        model: a folder with a classification head, such as a run's `model/`.
        file: one example per line: a text, or two separated by a tab.
        head: name of the head; may be empty if there is only one.
        device: see `pretrain.engine.distributed.choose_device`.

    Returns:
        One line per example, with tabs between: label, probability, and the texts as they were
        read; for a regression the number, in the units of the task's files, and the texts.

    Raises:
        ValueError: no such device, folder, head or file, or a line with a wrong number of texts.
    """
    from scipy.special import softmax

    from pretrain.engine.distributed import choose_device

    chosen = choose_device(device)
    loaded = model_folder.load(model)
    name = _head_name(loaded, head)
    task = glue.TASKS.get(name)
    rows = _read_lines(file, len(task.texts) if task else None)
    config = loaded.classification_heads[name].config
    logits = _logits(loaded, name, rows, chosen)
    if config.classes == 1:
        answers = [f"{value:.4f}" for value in logits[:, 0] * (task.scale if task else 1.0)]
    else:
        labels = config.labels or tuple(map(str, range(config.classes)))
        probabilities = softmax(logits.astype(float), axis=1)
        answers = [f"{labels[row.argmax()]}\t{row.max():.4f}" for row in probabilities]
    return "".join(
        "\t".join((answer, *row.texts)) + "\n" for answer, row in zip(answers, rows, strict=True)
    )


def _head_name(loaded: model_folder.LoadedModel, name: str) -> str:
    known = list(loaded.classification_heads)
    if name in known:
        return name
    if not name and len(known) == 1:
        return known[0]
    if not known:
        raise ValueError(
            f"{loaded.folder}: has no classification head, so it predicts no labels; accepted: a "
            "fine-tuned model, such as the folder model/ in a run of "
            f"`{typed('finetune glue')}`"
        )
    what = f"has no head {name!r}" if name else f"has {len(known)} heads; choose one with --head"
    raise ValueError(f"{loaded.folder}: {what}; accepted: {', '.join(known)}")


def _read_lines(file: Path, count: int | None) -> list[Example]:
    """Read examples of `count` texts; None: as many as the first line has."""
    found = []
    for number, row in enumerate(examples.read_rows(file), start=1):
        texts = tuple(text.strip() for text in row)
        count = count or min(len(texts), 2)
        if len(texts) != count or not any(texts):
            raise ValueError(
                f"{file}: line {number}: has {len(texts)} tab-separated texts, of "
                f"{sum(map(len, texts))} characters; accepted: {count}, not empty"
            )
        found.append(Example(texts))
    return found


def _logits(
    loaded: model_folder.LoadedModel, head: str, rows: Sequence[Example], device: torch.device
) -> Logits:
    from pretrain.model.classifier import Classifier

    classifier = Classifier(loaded.model.encoder, loaded.classification_heads[head]).to(device)
    # A model from elsewhere has no record of its fine-tuning.
    max_tokens = int(loaded.recorded("max_tokens") or FinetuneConfig.max_tokens)
    config = loaded.model.config
    limit = longest_input(max_tokens, config)
    encoded = EncodedExamples(rows, loaded.tokenizer, limit, segments=config.segments)
    return logits_of(classifier.eval(), encoded, device)


def submit(runs: Path, output: Path, device: str | None = None) -> Path:
    """Predict the test sets and write what GLUE's server accepts: a zip file of eleven TSV files.

    For each task, the kept model with the best of the benchmark's score on dev predicts.

    Args:
        runs: the --output of `glue`.
        output: a folder for CoLA.tsv, MNLI-m.tsv and so on, and submission.zip, which has them all.
        device: see `pretrain.engine.distributed.choose_device`.

    Returns:
        The zip file.

    Raises:
        ValueError: no such device, or what the server requires is missing; all of it is named, and
            nothing is predicted.
    """
    from pretrain.engine.distributed import choose_device

    chosen = choose_device(device)
    work = _submission_work(runs)
    output.mkdir(parents=True, exist_ok=True)
    partial = output / f"{SUBMISSION}.partial"
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for task, folder, test_sets in work:
            loaded = model_folder.load(folder / MODEL)
            for name, rows in test_sets.items():
                content = submission(task, _logits(loaded, task.name, rows, chosen))
                write_atomically(output / f"{name}.tsv", content.encode())
                archive.writestr(f"{name}.tsv", content)
                print(
                    f"{output / name}.tsv: {len(rows):,} predictions of {folder.name}", flush=True
                )
    return partial.replace(output / SUBMISSION)


Work = tuple[glue.Task, Path, dict[str, list[Example]]]
"""A task, the run whose model predicts it, and the examples by the name of the server's file."""


def _submission_work(runs: Path) -> list[Work]:
    """Return the work of every task; raise one ValueError that names all that is missing."""
    finished = {path.parent: result_of(path.parent) for path in sorted(runs.glob(f"*/{RESULT}"))}
    work, without_run, missing = list[Work](), list[str](), list[str]()
    for task in glue.TASKS.values():
        kept = {
            folder: result
            for folder, result in finished.items()
            if (result["task"], result["weights"]) == (task.name, "pretrained")
            and (folder / MODEL).is_dir()
        }
        if not kept:
            without_run.append(task.name)
            continue
        best = scores.best([result["best"] for result in kept.values()], task.official)
        folder = next(folder for folder, result in kept.items() if result["best"] is best)
        data, test_sets = kept[folder]["plan"]["data"], dict[str, list[Example]]()
        for split, name in task.test.items():
            try:
                test_sets[name or task.name] = examples.read(task, data, split).examples
            except ValueError as error:
                missing.append(str(error))
        work.append((task, folder, test_sets))
    if without_run:
        missing.insert(0, f"no run with a kept model of {', '.join(without_run)}")
    if missing:
        raise ValueError(
            f"{runs}: nothing was predicted, because GLUE's server requires every test set: "
            f"{'; '.join(missing)}"
        )
    return work


def submission(task: glue.Task, logits: Logits) -> str:
    """Return a file for the server: a header, then an index from 0 and a label per line.

    The numbers of a regression are clipped to the range of the labels.
    """
    if task.is_regression:
        numbers = (logits[:, 0] * task.scale).clip(0, task.scale)
        answers = [f"{number:.3f}" for number in numbers]
    else:
        answers = [task.labels[index] for index in logits.argmax(axis=1)]
    rows = "".join(f"{index}\t{answer}\n" for index, answer in enumerate(answers))
    return f"index\tprediction\n{rows}"
