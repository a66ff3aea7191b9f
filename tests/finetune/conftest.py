"""A small model folder and small tasks in the benchmark's layout, shared by the tests."""

import dataclasses
import random
from pathlib import Path

import pytest

WORDS = ["the", "a", "red", "old", "small", "dog", "cat", "bird", "house", "runs", "sees", "near"]

QUICK = ["learning_rate=1e-2", "pooling=mean", "dropout=0", "attention_dropout=0"]
"""Settings with which a tiny model learns in seconds."""


def plans(model, data, *overrides, seeds=(1,), weights=("pretrained",), names=("CoLA",), **more):
    """Plan runs on tasks of GLUE."""
    from finetune import runs, tasks

    found = tasks.find(names)
    return runs.plan_runs(model, lambda: str(data), found, weights, seeds, overrides, **more)[0]


def train_on(run_ranks, count, plan, folder):
    """Do a planned run in a folder; return the results of all ranks."""
    from finetune import train

    plan.write(folder)
    return run_ranks(count, lambda: train.train(plan, folder))


def result_like(task, seed=1, collapsed=False, value=0.5, weights="pretrained", **settings):
    """What result.json holds of a run of a task; every score is `value`."""
    from finetune.config import FinetuneConfig
    from finetune.result import RunPlan
    from finetune.tasks import TASKS

    scores = {"epoch": 1, **dict.fromkeys(TASKS[task].score_names, value), "collapsed": collapsed}
    plan = RunPlan(task, weights, seed, "model", "data", "1", "2", FinetuneConfig(**settings))
    result = {"plan": dataclasses.asdict(plan), "device": "cpu"}
    result |= {"best": scores, "last": scores, "epochs": [scores], "constant": scores}
    result |= {"train_examples": 1000, "dev_examples": 200, "seconds": 10.0}
    result |= {"skipped_rows": 0, "too_long": {"train": 0, "dev": 0}}
    return {**result, "tokens_per_second": 5000.0}


def losses_of(folder):
    """The loss of each step of a run."""
    from pretrain.records.metrics import METRICS, read_metrics

    return [line["loss"] for line in read_metrics(folder / METRICS)]


def sentence(draw: random.Random, wugs: int) -> str:
    """Draw a sentence that has so many times "wug"."""
    words = [draw.choice(WORDS) for _ in range(draw.randrange(4, 9))] + ["wug"] * wugs
    draw.shuffle(words)
    return " ".join(words)


@pytest.fixture(scope="session")
def real_glue(shared: Path) -> Path:
    """Return the folder of real GLUE tasks."""
    return shared / "data" / "glue"


def write_tsv(folder: Path, task: str, split: str, rows: list[tuple[str, ...]]) -> Path:
    """Write a split; the rows include the header line, if the task has one."""
    path = folder / task / f"{split}.tsv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_cola(folder: Path, split: str, rows: list[tuple[str, str]]) -> Path:
    """Write (label, sentence) rows in CoLA's layout below `folder`."""
    mark = {"0": "*"}
    lines = [("xx", label, mark.get(label, ""), sentence) for label, sentence in rows]
    return write_tsv(folder, "CoLA", split, lines)


def make_model(folder: Path, variant: str, **overrides: object) -> Path:
    """Write a model folder with random weights."""
    from data_prep.tokenizer import train
    from pretrain.convert.writing import save_model
    from tests.pretrain.convert.contents import random_contents

    tokenizer = train(iter([f"{word} wug" for word in WORDS] * 20), 320)
    save_model(folder, random_contents(variant, tokenizer, scale=0.0, **overrides))
    return folder


@pytest.fixture(scope="session")
def segment_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder of a model with segments and a pair head, with random weights."""
    settings = {"segments": 2, "pair_head": True, "sharing": "all"}
    return make_model(tmp_path_factory.mktemp("model") / "segments", "zero-clap", **settings)
