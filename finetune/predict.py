"""Prediction with a fine-tuned model: labels of new text, and files for GLUE's server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.files import write_atomically
from finetune import examples, glue, scores
from finetune.batches import EncodedExamples
from finetune.classifiers import longest_input
from finetune.config import MODEL, RESULT, FinetuneConfig
from finetune.evaluation import Logits, logits_of
from finetune.examples import Example
from finetune.planning import result_of
from pretrain.inference import model_folder

if TYPE_CHECKING:
    import torch


def predict(model: Path, file: Path, head: str = "", device: str | None = None) -> str:
    """Label every line of a file.

    Args:
        model: a folder with a classification head, such as a run's `model/`.
        file: one example per line: a text, or two separated by a tab.
        head: name of the head; may be empty if there is only one.
        device: see `pretrain.engine.distributed.choose_device`.

    Returns:
        One line per example: label, tab, probability; for a regression the number, in the units of
        the task's files.

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
        lines = [f"{value:.4f}" for value in logits[:, 0] * (task.scale if task else 1.0)]
    else:
        labels = config.labels or tuple(map(str, range(config.classes)))
        probabilities = softmax(logits.astype(float), axis=1)
        lines = [f"{labels[row.argmax()]}\t{row.max():.4f}" for row in probabilities]
    return "".join(f"{line}\n" for line in lines)


def _head_name(loaded: model_folder.LoadedModel, name: str) -> str:
    known = list(loaded.classification_heads)
    if name in known:
        return name
    if not name and len(known) == 1:
        return known[0]
    raise ValueError(
        f"{loaded.folder}: {f'has no head {name!r}' if name else 'has no single head'}; accepted: "
        f"{', '.join(known) or 'a fine-tuned model, this one has no head'}"
    )


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
    # A converted model has no record of its fine-tuning.
    max_tokens = int(loaded.provenance.get("max_tokens", FinetuneConfig.max_tokens))
    limit = longest_input(max_tokens, loaded.model.config)
    return logits_of(classifier.eval(), EncodedExamples(rows, loaded.tokenizer, limit), device)


def submit(runs: Path, output: Path, device: str | None = None) -> list[Path]:
    """Predict the test sets and write files in the format of GLUE's server.

    For each task, the kept model with the best score on dev predicts. Test sets that are missing
    are named on stdout.

    Args:
        runs: the --output of `glue`.
        output: a folder for CoLA.tsv, MNLI-m.tsv and so on.
        device: see `pretrain.engine.distributed.choose_device`.

    Returns:
        The files; the server requires one for every test set.

    Raises:
        ValueError: no such device, or no kept model in the folder.
    """
    from pretrain.engine.distributed import choose_device

    chosen = choose_device(device)
    kept = [path.parent for path in sorted(runs.glob(f"*/{RESULT}"))]
    results = {folder: result_of(folder) for folder in kept if (folder / MODEL).is_dir()}
    results = {f: result for f, result in results.items() if result["weights"] == "pretrained"}
    if not results:
        raise ValueError(f"{runs}: has no run with a kept model; accepted: the --output of `glue`")
    written = []
    for task in glue.TASKS.values():
        runs_of_task = {f: result for f, result in results.items() if result["task"] == task.name}
        if not runs_of_task:
            print(f"{task.name}: has no run")
            continue
        folder, result = _best(runs_of_task, task.metrics[0])
        loaded = model_folder.load(folder / MODEL)
        for split, name in task.test.items():
            try:
                rows = examples.read(task, result["plan"]["data"], split).examples
            except ValueError as error:
                print(f"{name or task.name}: left out: {error}")
                continue
            path = output / f"{name or task.name}.tsv"
            content = submission(task, _logits(loaded, task.name, rows, chosen))
            write_atomically(path, content.encode())
            print(f"{path}: {len(rows):,} predictions of {folder.name}")
            written.append(path)
    return written


def _best(runs: dict[Path, dict[str, Any]], metric: str) -> tuple[Path, dict[str, Any]]:
    best = scores.best([result["best"] for result in runs.values()], metric)
    return next((folder, result) for folder, result in runs.items() if result["best"] is best)


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
