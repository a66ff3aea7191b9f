"""Benchmark of batches of similar lengths in fine-tuning: the padding and time that they save.

    python -m tests.benchmarks.finetune_batches MODEL GLUE [--tasks SST-2,MRPC] [--steps 40]

Runs forward and backward passes of one model over the same examples, in unsorted batches and in
sorted windows, alternating five times. The result is the median ratio of times, so that other work
on the machine slows down both. Padding is measured over a whole epoch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from finetune import classifiers, examples, glue
from finetune.batches import EncodedExamples, ShuffledBatches
from finetune.config import FinetuneConfig
from finetune.heads import Classification, Regression

REPEATS = 5


def main() -> None:
    """Print one line per task."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("data")
    parser.add_argument("--tasks", default="CoLA,SST-2,MRPC,STS-B,RTE")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    from pretrain.inference import model_folder
    from pretrain.model.classifier import Classifier
    from pretrain.model.heads import ClassificationHead

    loaded = model_folder.load(options.model)
    print("| task | batch | padding, unsorted | padding, in windows | time |")
    for task in map(glue.find, options.tasks.split(",")):
        config = task.config("default")
        found = examples.read(task, options.data, "train").examples
        limit = classifiers.longest_input(config.max_tokens, loaded.model.config)
        encoded = EncodedExamples(
            found, loaded.tokenizer, limit, drop_long=True, is_regression=task.is_regression
        )
        head = ClassificationHead(
            loaded.model.config.hidden_size, classifiers.head_config(config, task)
        )
        model = Classifier(loaded.model.encoder, head)
        kinds = [
            ShuffledBatches(encoded, config.batch_size, 1, window)
            for window in (1, FinetuneConfig.length_window)
        ]
        ratios = []
        for repeat in range(REPEATS):
            first = repeat * options.steps
            plain, windows = (_seconds(model, task, kind, first, options.steps) for kind in kinds)
            ratios.append(windows / plain)
        shares = " | ".join(f"{_padding(kind):.1%}" for kind in kinds)
        times = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {task.name} | {config.batch_size} | {shares} | {times} |", flush=True)


def _padding(batches: ShuffledBatches) -> float:
    """Return the share of padding in an epoch."""
    lengths, padded, tokens = batches.examples.lengths, 0, 0
    for step in range(len(batches.examples) // batches.batch_size):
        chosen = lengths[batches.chosen(step)]
        padded += len(chosen) * int(chosen.max())
        tokens += int(chosen.sum())
    return 1 - tokens / padded


def _seconds(
    model: object, task: glue.Task, batches: ShuffledBatches, first: int, steps: int
) -> float:
    """Return the seconds of the forward and backward passes, collation included."""
    import torch

    objective = Regression() if task.is_regression else Classification()
    started = time.perf_counter()
    for step in range(first, first + steps):
        (batch,) = batches.micro_batches(step, 0, 1)
        tensors = {name: torch.from_numpy(array) for name, array in batch.arrays.items()}
        objective.loss(model, tensors).backward()  # type: ignore[arg-type]
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
