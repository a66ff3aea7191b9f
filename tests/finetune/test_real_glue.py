"""On real sentences, a model pretrained for a minute or two beats the majority class."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def command(*arguments: object) -> None:
    """Run one of the project's commands."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


@pytest.fixture(scope="module")
def pretrained(real_glue, tmp_path_factory):
    """Pretrain a small zero-clap for 1,000 steps on Wikipedia."""
    folder = tmp_path_factory.mktemp("pretrained")
    text = real_glue.parent / "corpora" / "wikipedia-en.jsonl.zst"
    command(
        "data_prep",
        "train-tokenizer",
        "--input",
        text,
        "--vocab-size",
        4096,
        "--output",
        folder / "vocabulary",
    )
    command(
        "data_prep",
        "prepare",
        "--input",
        text,
        "--output",
        folder / "corpus",
        "--tokenizer",
        folder / "vocabulary",
        "--max-tokens",
        128,
        "--long",
        "split",
        "--workers",
        2,
    )
    command(
        "pretrain",
        "supervise",
        "demo",
        f"folder={folder}/run",
        f"data.corpus={folder}/corpus",
        "supervision.processes_per_node=1",
        "training.steps=1000",
        "fault.kind=none",
    )
    command("pretrain", "export", folder / "run", "--output", folder / "model")
    return folder / "model"


@pytest.fixture
def tasks(real_glue, tmp_path):
    """Make a folder of SST-2 and a part of QQP."""
    folder = tmp_path / "glue"
    shutil.copytree(real_glue / "SST-2", folder / "SST-2")
    (folder / "QQP").mkdir()
    for split, name in (("train", "train_subset"), ("dev", "heldout_subset")):
        shutil.copy(real_glue / "QQP" / f"{name}.tsv", folder / "QQP" / f"{split}.tsv")
    return folder


@pytest.mark.long
def test_sentences_and_pairs_are_classified_better_than_by_the_majority_class(
    pretrained, tasks, tmp_path
):
    output = tmp_path / "scores"
    settings = [
        "epochs=3",
        "learning_rate=5e-4",
        "batch_size=32",
        "pooling=mean",
        "dropout=0",
        "attention_dropout=0",
        "max_train_examples=9000",
    ]
    command(
        "finetune",
        "glue",
        pretrained,
        "--data",
        tasks,
        "--tasks",
        "SST-2,QQP",
        "--output",
        output,
        *settings,
    )
    for line in (output / "results.jsonl").read_text().splitlines():
        result = json.loads(line)
        assert result["collapsed"] == ""
        assert result["last"]["accuracy"] > result["majority"]["accuracy"] + 0.04, result["task"]
