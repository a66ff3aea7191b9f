"""ALBERT's two comparisons: what layers share, and what is asked of pairs of segments.

    python -m tests.benchmarks.albert --input TEXT --output DIR [--seeds 1,2,3] [KEY=VALUE ...]

Trains the recipe `albert-demo`, changed by `BASE` so that it learns more in as many steps, on a
text through the supervisor and the deepspeed launcher, with every seed

- sharing all, attention, feed-forward or nothing, each with sentence order (Lan et al. 2020,
  table 4);
- with sentence order, with next sentence, and with neither (table 5);

and prints two tables, as mean and standard deviation over the seeds, and for comparison how many
pairs the words tell that their segments share, without a model. Models and measurements that
are finished are not repeated. Settings such as supervision.processes_per_node=1 change the recipe
of all. Several of these commands may work on the same folder at once, each on other seeds; the
speeds then say nothing. All 18 models take about an hour on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_prep import tokenizer as tokenizers
from data_prep.corpus import Corpus
from pretrain.data.batches import spread, validation_key
from pretrain.data.sentence_pairs import SentencePairs
from pretrain.models import model_folder
from pretrain.objectives.base import Ids, Vocabulary
from pretrain.objectives.sentence_pairs import SentencePairsConfig
from pretrain.records import checkpoints, ledger, metrics
from tests.benchmarks.trainings import arguments, mean_and_deviation, run

SHARING = ("all", "attention", "feed-forward", "none")
TASKS = ("none", "nsp", "sop")
ARMS = {f"sharing {name}": (f"model.overrides.sharing={name}",) for name in SHARING} | {
    f"task {name}": (f"objective.pair_task={name}",) for name in TASKS if name != "sop"
}
"""What differs from the recipe, by name."""
BASE = (
    "objective.longest_ngram=1",
    "model.overrides.embedding_size=128",
    "model.overrides.layer_norm=pre",
    "model.overrides.final_norm=true",
    "model.overrides.embedding_norm=false",
    "model.overrides.embedding_scale=sqrt-hidden",
)
"""Single words hidden, token vectors as wide as the layers, and pre-norm layers."""
SOP = "sharing all"
"""The arm that is the recipe itself."""


def begin(options: argparse.Namespace) -> None:
    """Refuse to continue what was begun with other arguments, but for the seeds."""
    path = options.output / "arguments.json"
    names = ("input", "steps", "vocab_size", "overrides")
    given = {name: getattr(options, name) for name in names}
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(given))
    elif given != (begun := json.loads(path.read_text())):
        sys.exit(f"{options.output} was begun with {begun}, now {given}; name another folder")


def corpus(text: list[str], folder: Path, vocab_size: int) -> Path:
    """Train a vocabulary and prepare the text in sentences; returns the corpus."""
    result = folder / "corpus"
    if not (result / "manifest.json").is_file():
        inputs = [word for each in text for word in ("--input", each)]
        vocabulary = str(folder / "vocabulary")
        size = ("--vocab-size", str(vocab_size), "--unigram", "--lowercase")
        run("data_prep", "train-tokenizer", *inputs, *size, "--output", vocabulary)
        words = ("--tokenizer", vocabulary, "--sentences", "--valid-fraction", "0.03")
        run("data_prep", "prepare", *inputs, *words, "--output", str(result))
    return result


def train(arm: str, seed: int, options: argparse.Namespace, data: Path) -> Path:
    """Train one model and measure it on both tasks; returns its folder without a suffix."""
    name = options.output / f"{arm.replace(' ', '-')}-{seed}"
    words = (*BASE, *ARMS[arm], f"training.seed={seed}", f"training.steps={options.steps}")
    words += tuple(options.overrides)
    places = (f"folder={name}", f"data.corpus={data}")
    run("pretrain", "supervise", "albert-demo", *places, *words)
    model, found = f"{name}-model", f"{name}.json"
    if not Path(model).exists():
        run("pretrain", "export", str(name), "--output", model)
    if not Path(found).exists():
        run("pretrain", "evaluate", model, "--data", str(data), "--blocks", "0", "--json", found)
    return name


def figures(name: Path) -> dict[str, float]:
    """What is in the tables, of one model."""
    (found,) = json.loads(Path(f"{name}.json").read_text())
    model = model_folder.load_model(Path(f"{name}-model")).model
    lines = metrics.surviving(metrics.read_metrics(name / metrics.METRICS))
    records = ledger.read_ledger(name / ledger.FILE_NAME)
    saved = checkpoints.folder_of(name, ledger.run_state(records, 1).resume_step())
    size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    tasks = {task: 100 * score["accuracy"] for task, score in found["pairs"].items()}
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "checkpoint": size / 1e6,
        "speed": statistics.median(line["tokens"] / line["seconds"] for line in lines),
        "loss": found["pairs"]["masked"]["loss"],
        **tasks,
    }


def segments(
    data: Path, split: str, task: Literal["nsp", "sop"], limit: int = 12_000
) -> list[tuple[Ids, Ids, int]]:
    """First segment, second segment and label of pairs spread over a split, nothing hidden."""
    size = tokenizers.load(data).vocab_size
    shown = SentencePairsConfig(pair_task=task, keep_probability=1.0, random_probability=0.0)
    objective = shown.build(Vocabulary(size, size, data))
    source, found = SentencePairs(Corpus(data, split), 128), []
    for index in spread(len(source), limit):
        arrays = objective.collate([source[index]], [validation_key(index)], 128)
        ids, second = arrays["input_ids"][0], arrays["segment_ids"][0] == 1
        first = arrays["document_ids"][0].astype(bool) & ~second
        found.append((ids[first][1:-1], ids[second][:-1], arrays["pair_labels"][0].item()))
    return found


def by_shared_words(data: Path, task: Literal["nsp", "sop"]) -> float:
    """Accuracy (%) on the validation pairs of the TF-IDF cosine of their segments, without a model.

    It says whether a pair is one of those that follow by a threshold, chosen on training pairs.
    """
    read = {split: segments(data, split, task) for split in ("train", "valid")}
    size = tokenizers.load(data).vocab_size
    counts = [np.bincount(np.unique(a), minlength=size) for a, _, _ in read["train"]]
    weights = np.log((1 + len(counts)) / (1 + np.sum(counts, axis=0)))

    def cosine(first: Ids, second: Ids) -> float:
        a, b = (np.bincount(ids, minlength=size) * weights for ids in (first, second))
        return float(a @ b / max(1e-9, np.linalg.norm(a) * np.linalg.norm(b)))

    (x, y), (x_valid, y_valid) = (
        (np.array([cosine(a, b) for a, b, _ in pairs]), np.array([label for *_, label in pairs]))
        for pairs in read.values()
    )
    best = max(np.quantile(x, np.arange(0, 1, 0.01)), key=lambda limit: ((x < limit) == y).mean())
    return 100 * float(((x_valid < best) == y_valid).mean())


def table(columns: dict[str, tuple[str, int]], rows: dict[str, list[dict[str, float]]]) -> str:
    """Markdown: a column for each figure with its title and digits, a row for each arm."""
    lines = ["| | " + " | ".join(title for title, _ in columns.values()) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for name, found in rows.items():
        cells = [
            mean_and_deviation((each[key] for each in found), n) for key, (_, n) in columns.items()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Train and measure every arm, and print the tables."""
    parser = arguments(__doc__.splitlines()[0], steps=1500, vocab_size=4096)
    parser.add_argument("--input", action="append", required=True, help="as for data_prep prepare")
    options = parser.parse_intermixed_args()
    begin(options)
    data = corpus(options.input, options.output, options.vocab_size)
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for seed in map(int, options.seeds.split(",")):
        for arm in ARMS:
            found[arm].append(figures(train(arm, seed, options, data)))
    sharing = {
        "parameters": ("parameters", 0),
        "checkpoint": ("weights and optimizer (MB)", 1),
        "speed": ("tokens/s in training", 0),
        "loss": ("masked loss", 3),
        "sop": ("SOP accuracy", 1),
    }
    print(table(sharing, {name: found[f"sharing {name}"] for name in SHARING}))
    tasks = {"masked": ("MLM accuracy", 1), "nsp": ("NSP accuracy", 1), "sop": ("SOP accuracy", 1)}
    of_task = {"none": "task none", "nsp": "task nsp", "sop": SOP}
    print(table(tasks, {name.upper(): found[of_task[name]] for name in TASKS}))
    for task in ("nsp", "sop"):
        print(f"{task.upper()} accuracy by shared words alone: {by_shared_words(data, task):.1f}")


if __name__ == "__main__":
    main()
