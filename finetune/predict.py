"""Prediction with a fine-tuned model: labels of new text, and files for GLUE's server."""

import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from scipy.special import softmax

from data_prep.common.files import new_folder
from data_prep.common.records import decode
from finetune import examples, scores, tables
from finetune.batches import EncodedExamples
from finetune.classifiers import logits_of
from finetune.config import FinetuneConfig
from finetune.examples import Example
from finetune.report import collect
from finetune.runs import MODEL
from finetune.tasks import TASKS, Kind, Logits, Task, answers
from pretrain.convert.model_folder import LoadedModel, load_model
from pretrain.engine.distributed import choose_device
from pretrain.model.classification import Classifier

SUBMISSION = "submission.zip"


def predict(model: Path, file: Path, device: str | None = None) -> str:
    """Label every line of a file.

    Args:
        model: a folder with a classification head, such as a run's `model/`.
        file: one example per line: a text, or two separated by a tab.
        device: see `pretrain.engine.distributed.choose_device`.

    Returns:
        One line per example, with tabs between: label, probability, and the texts as they were
        read; of a regression a number in the units of the task's files, and the texts.

    Raises:
        ValueError: no such device, folder or file, no classification head, or a line with a wrong
            number of texts.
    """
    chosen = choose_device(device)
    loaded = load_model(model)
    task = _task_of(loaded)
    if file.suffix.lower() in (".csv", ".jsonl", ".ndjson", ".json", ".parquet"):
        raise ValueError(
            f"{file}: is a table; `predict` reads one text per line, or two separated by a tab. "
            "Write the texts into a .txt file"
        )
    rows = _read_lines(file, task)
    found = _logits(loaded, task, rows, chosen)
    return "".join(
        "\t".join((*_as_text(task, logits), *row.texts)) + "\n"
        for logits, row in zip(found, rows, strict=True)
    )


def _task_of(loaded: LoadedModel) -> Task:
    """Return the task that a classifier was trained on, as far as the model's folder tells.

    Raises:
        ValueError: the model has no classification head.
    """
    if loaded.classifier is None:
        raise ValueError(
            f"{loaded.folder}: has no classification head, so it predicts no labels; choose a "
            "fine-tuned model, such as the folder model/ in a run of `zeroclap finetune`"
        )
    if own := loaded.contents.provenance.get("custom_task"):
        return decode(Task, own)
    config, name = loaded.classifier.config, str(loaded.recorded("task") or "")
    if name in TASKS and TASKS[name].classes == config.classes:
        return TASKS[name]
    labels = config.labels or tuple(map(str, range(config.classes)))
    kind: Kind = "regression" if config.classes == 1 else "classification"
    return Task(name, kind, texts=(), labels=labels)


def _as_text(task: Task, logits: Logits) -> tuple[str, ...]:
    """Return the columns of an answer, whose logits are [C]."""
    if task.is_regression:
        return (f"{float(logits[0]):.4f}",)
    label = " ".join(task.labels[logits.argmax()].split())  # a tab or line end would be a column's
    return label, f"{softmax(logits.astype(float)).max():.4f}"


def _read_lines(file: Path, task: Task) -> list[Example]:
    """Read examples; of a task that does not say, each has as many texts as the first line."""
    found = []
    count = len(task.texts)
    for number, row in enumerate(tables.tab_separated(file), start=1):
        texts = tuple(text.strip() for text in row)
        count = count or min(len(texts), 2)
        if len(texts) != count or not any(texts):
            raise ValueError(
                f"{file}: line {number}: has {len(texts)} tab-separated texts, of "
                f"{sum(map(len, texts))} characters; it must have {count}, not all empty"
            )
        if number == 1 and texts == task.texts and file.suffix.lower() == ".tsv":
            raise ValueError(f"{file}: line 1: is a header, not a text; leave it out")
        found.append(Example(texts))
    return found


def _logits(
    loaded: LoadedModel, task: Task, rows: Sequence[Example], device: torch.device
) -> Logits:
    assert loaded.classifier
    classifier = Classifier(loaded.model.encoder, loaded.classifier).to(device)
    # A model from elsewhere has no record of its fine-tuning.
    max_tokens = int(loaded.recorded("max_tokens") or FinetuneConfig.max_tokens)
    encoded = EncodedExamples(task, rows, loaded, max_tokens)
    if encoded.too_long:
        which = f"{encoded.too_long:,} of {len(rows):,} inputs of {task.name}"
        print(f"warning: {which} are above max_tokens, and were cut", file=sys.stderr)
    return logits_of(classifier.eval(), encoded, device)


def submit(runs: Path, output: Path, device: str | None = None) -> Path:
    """Predict the test sets and write what GLUE's server accepts: a zip file of TSV files.

    For each task, the kept model with the best of the benchmark's score on dev predicts.

    Args:
        runs: the --output of `glue`.
        output: a new folder for CoLA.tsv, MNLI-m.tsv and so on, and submission.zip, which has them
            all.
        device: see `pretrain.engine.distributed.choose_device`.

    Returns:
        The zip file.

    Raises:
        ValueError: no such device, `output` is not empty, or a task or test set is missing; all of
            them are named, and nothing is predicted.
    """
    chosen, work = choose_device(device), _submission_work(runs)
    with (
        new_folder(output) as folder,
        zipfile.ZipFile(folder / SUBMISSION, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for task, run, name, rows in work:
            content = submission(task, _logits(load_model(run / MODEL), task, rows, chosen))
            (folder / f"{name}.tsv").write_text(content, encoding="utf-8")
            archive.writestr(f"{name}.tsv", content)
            print(f"{output / name}.tsv: {len(rows):,} predictions of {run.name}", flush=True)
    return output / SUBMISSION


def _submission_work(runs: Path) -> list[tuple[Task, Path, str, list[Example]]]:
    """Return each test set: its task, the run that predicts it, its file's name, its examples."""
    pretrained = [result for result in collect(runs) if result["plan"].weights == "pretrained"]
    kept = [result for result in pretrained if (runs / result["folder"] / MODEL).is_dir()]
    best = {
        task: max(own, key=lambda result: scores.mean(result["best"], TASKS[task].official))
        for task in TASKS
        if (own := [result for result in kept if result["plan"].task == task])
    }
    without = ", ".join(task for task in TASKS if task not in best)
    missing = [f"no run with a kept model of {without}"] if without else []
    work = list[tuple[Task, Path, str, list[Example]]]()
    for task, result in best.items():
        for split, name in TASKS[task].test.items():
            try:
                rows = examples.read_split(TASKS[task], result["plan"].data, split).examples
                work.append((TASKS[task], runs / result["folder"], name or task, rows))
            except ValueError as error:
                missing.append(str(error))
    if missing:
        raise ValueError(
            f"{runs}: nothing was predicted, because GLUE's server requires every test set: "
            f"{'; '.join(missing)}"
        )
    return work


def submission(task: Task, logits: Logits) -> str:
    """Return a file for the server: a header, then an index from 0 and a label per line.

    The numbers of a regression are clipped to the range of the labels.
    """
    found = answers(task, logits)
    if task.is_regression:
        words = [f"{number:.3f}" for number in found.clip(0, task.scale)]
    else:
        words = [task.labels[number] for number in found]
    rows = "".join(f"{index}\t{word}\n" for index, word in enumerate(words))
    return f"index\tprediction\n{rows}"
