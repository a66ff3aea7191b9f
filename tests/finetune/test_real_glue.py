"""On real sentences, a model pretrained for a minute or two beats the majority class."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def command(words: str) -> None:
    """Run one of the project's commands."""
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(words)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


@pytest.fixture(scope="module")
def pretrained(real_glue, tmp_path_factory):
    """Pretrain a small zero-clap for 250 steps on Wikipedia."""
    folder = tmp_path_factory.mktemp("pretrained")
    text = real_glue.parent / "corpora" / "wikipedia-en.jsonl.zst"
    vocabulary, corpus = f"{folder}/vocabulary", f"{folder}/corpus"
    command(f"data_prep train-tokenizer --input {text} --vocab-size 4096 --output {vocabulary}")
    command(
        f"data_prep prepare --input {text} --output {corpus} --tokenizer {vocabulary} "
        "--max-tokens 128 --long split --workers 2"
    )
    command(
        f"pretrain supervise demo folder={folder}/run data.corpus={corpus} fault.random_labels=[] "
        "supervision.processes_per_node=1 training.steps=250"
    )
    command(f"pretrain export {folder}/run --output {folder}/model")
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


@pytest.mark.slow
def test_sentences_and_pairs_are_classified_better_than_by_the_majority_class(
    pretrained, tasks, tmp_path
):
    output = tmp_path / "scores"
    command(
        f"finetune glue {pretrained} --data {tasks} --tasks SST-2,QQP --output {output} epochs=2 "
        "learning_rate=5e-4 batch_size=32 pooling=mean dropout=0 attention_dropout=0 "
        "max_train_examples=3000"
    )
    for line in (output / "results.jsonl").read_text().splitlines():
        result = json.loads(line)
        assert result["collapsed"] == ""
        assert result["last"]["accuracy"] > result["constant"]["accuracy"] + 0.04, result["task"]
