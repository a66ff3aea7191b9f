"""New text through a fine-tuned model: labels with probabilities, and files for GLUE's server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

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

    from pretrain.model.config import ClassificationConfig


def predict(model: Path, file: Path, head: str = "", device: str | None = None) -> str:
    """Labels of a file's lines, a line each: the label, a tab, its probability.

    Of a regression: its value, as the task's files have it.

    Args:
        model: a folder with a classification head, such as a run's `model/`.
        file: a line an example: a text, or two with a tab between them.
        head: its name; empty: the only one.
        device: as `pretrain.engine.distributed.choose_device` takes it.

    Raises:
        ValueError: no such device, folder, head or file, or a line with another number of texts.
    """
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
        lines = _labelled(config, logits)
    return "".join(f"{line}\n" for line in lines)


def _labelled(config: ClassificationConfig, logits: Logits) -> list[str]:
    from scipy.special import softmax

    labels = config.labels or tuple(map(str, range(config.classes)))
    probabilities = softmax(logits.astype(float), axis=1)
    return [f"{labels[row.argmax()]}\t{row.max():.4f}" for row in probabilities]


def _head_name(loaded: model_folder.LoadedModel, name: str) -> str:
    known = list(loaded.classification_heads)
    if name in known:
        return name
    if not name and len(known) == 1:
        return known[0]
    raise ValueError(
        f"{loaded.folder}: {f'has no head {name!r}' if name else 'name its head'}; accepted: "
        f"{', '.join(known) or 'a fine-tuned model, this one has no head'}"
    )


def _read_lines(file: Path, count: int | None) -> list[Example]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: is not UTF-8: {error}") from error
    if not text:
        raise ValueError(f"{file}: is empty; accepted: a line an example")
    rows = []
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        texts = tuple(part.strip() for part in line.removesuffix("\r").split("\t"))
        count = count or min(len(texts), 2)
        if len(texts) != count or not any(texts):
            raise ValueError(
                f"{file}: line {number}: has {len(texts)} tab-separated texts, of "
                f"{sum(map(len, texts))} characters; accepted: {count}, not empty"
            )
        rows.append(Example(texts))
    return rows


def _logits(
    loaded: model_folder.LoadedModel, head: str, rows: Sequence[Example], device: torch.device
) -> Logits:
    from pretrain.model.classifier import Classifier

    classifier = Classifier(loaded.model.encoder, loaded.classification_heads[head]).to(device)
    # A converted model says nothing of its fine-tuning.
    max_tokens = int(loaded.provenance.get("max_tokens", FinetuneConfig.max_tokens))
    limit = longest_input(max_tokens, loaded.model.config)
    return logits_of(classifier.eval(), EncodedExamples(rows, loaded.tokenizer, limit), device)


def submit(
    runs: Path, output: Path, say: Callable[[str], object], device: str | None = None
) -> list[Path]:
    """Write predictions of the test sets in the format of GLUE's server.

    Each task's are those of the kept model with the best score on dev.

    Args:
        runs: the --output of `glue`.
        output: a folder for CoLA.tsv, MNLI-m.tsv and so on.
        say: takes a line for the user.
        device: as `pretrain.engine.distributed.choose_device` takes it.

    Returns:
        The files written; the server wants one of every test set.

    Raises:
        ValueError: no such device, or no kept model in the folder.
    """
    from pretrain.engine.distributed import choose_device

    chosen = choose_device(device)
    kept = [path for path in sorted(runs.glob(f"*/{RESULT}")) if (path.parent / MODEL).is_dir()]
    results = [(path.parent, result_of(path.parent)) for path in kept]
    results = [each for each in results if each[1]["weights"] == "pretrained"]
    if not results:
        raise ValueError(f"{runs}: has no run that kept its model; accepted: what `glue` writes")
    written = []
    for task in glue.TASKS.values():
        mine = [each for each in results if each[1]["task"] == task.name]
        if not mine:
            say(f"{task.name}: has no run")
            continue
        folder, result = _best(mine, task.metrics[0])
        loaded = model_folder.load(folder / MODEL)
        for split, name in task.test.items():
            try:
                rows = examples.read(task, result["plan"]["data"], split).examples
            except ValueError as error:
                say(f"{name or task.name}: left out: {error}")
                continue
            path = output / f"{name or task.name}.tsv"
            content = submission(task, _logits(loaded, task.name, rows, chosen))
            write_atomically(path, content.encode())
            say(f"{path}: {len(rows):,} predictions of {folder.name}")
            written.append(path)
    return written


def _best(
    results: Sequence[tuple[Path, dict[str, Any]]], metric: str
) -> tuple[Path, dict[str, Any]]:
    best = scores.best([result["best"] for _, result in results], metric)
    return next(each for each in results if each[1]["best"] == best)


def submission(task: glue.Task, logits: Logits) -> str:
    """A file for the server: a header, then an index from 0 and a label a line.

    A regression's numbers are kept within the labels' range.
    """
    if task.is_regression:
        numbers = np.clip(logits[:, 0] * task.scale, 0, task.scale)
        answers = [f"{number:.3f}" for number in numbers]
    else:
        answers = [task.labels[index] for index in logits.argmax(axis=1)]
    rows = "".join(f"{index}\t{answer}\n" for index, answer in enumerate(answers))
    return f"index\tprediction\n{rows}"
