"""Real sentences and pairs of GLUE are learned, even without pretraining."""

import shutil

import pytest

from data_prep.tokenizer import train
from finetune.report import collect
from finetune.zeroclap import main
from pretrain.convert.writing import save_model
from tests.pretrain.convert.contents import random_contents


@pytest.mark.slow
def test_sentences_and_pairs_are_classified_better_than_by_the_majority_class(real_glue, tmp_path):
    """SST-2 and a part of QQP."""
    shutil.copytree(real_glue / "SST-2", tmp_path / "glue" / "SST-2")
    (tmp_path / "glue" / "QQP").mkdir()
    for split, name in (("train", "train_subset"), ("dev", "heldout_subset")):
        shutil.copy(real_glue / "QQP" / f"{name}.tsv", tmp_path / "glue" / "QQP" / f"{split}.tsv")
    lines = (real_glue / "SST-2" / "train.tsv").read_text().splitlines()[1:20_000]
    words = train((line.rpartition("\t")[0] for line in lines), 4096)
    save_model(tmp_path / "model", random_contents("zero-clap", words, hidden_size=128, scale=0.0))
    command = (
        f"glue {tmp_path}/model --data {tmp_path}/glue --output {tmp_path}/scores "
        "--tasks SST-2,QQP epochs=2 learning_rate=1e-3 batch_size=32 max_train_examples=1500 "
        "pooling=mean dropout=0 attention_dropout=0"
    )
    assert main(command.split()) == 0
    for result in collect(tmp_path / "scores"):
        assert not result["last"]["collapsed"]
        assert result["last"]["accuracy"] > result["constant"]["accuracy"] + 0.04, result["plan"]
