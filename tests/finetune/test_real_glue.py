"""Real sentences and pairs of GLUE are learned, even without pretraining."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.tokenizer import train
from pretrain.convert.writing import save_model
from tests.pretrain.convert.contents import random_contents

ROOT = Path(__file__).parents[2]


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
def test_sentences_and_pairs_are_classified_better_than_by_the_majority_class(tasks, tmp_path):
    lines = (tasks / "SST-2" / "train.tsv").read_text().splitlines()[1:20_000]
    words = train((line.rpartition("\t")[0] for line in lines), 4096)
    save_model(tmp_path / "model", random_contents("zero-clap", words, hidden_size=128, scale=0.0))
    output = tmp_path / "scores"
    command = (
        f"finetune glue {tmp_path / 'model'} --data {tasks} --tasks SST-2,QQP --output {output} "
        "epochs=2 learning_rate=1e-3 batch_size=32 pooling=mean dropout=0 attention_dropout=0 "
        "max_train_examples=3000"
    )
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for line in (output / "results.jsonl").read_text().splitlines():
        result = json.loads(line)
        assert result["collapsed"] == ""
        assert result["last"]["accuracy"] > result["constant"]["accuracy"] + 0.04, result["task"]
