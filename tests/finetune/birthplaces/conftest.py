"""A small task about made-up people, and settings of a model that learns it in seconds."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from finetune.birthplaces import demo

TINY = ["model.size=tiny", "model.overrides.dropout=0", "model.overrides.attention_dropout=0"]


@pytest.fixture
def tiny():
    """Settings of a model that learns in seconds."""
    return TINY


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    """Paths of text, train and dev, of 60 people."""
    folder = tmp_path_factory.mktemp("task") / "task"
    demo.make(folder, 60, seed=1, dev_fraction=0.3)
    names = {"text": demo.TEXT, "train": demo.TRAIN, "dev": demo.DEV}
    return SimpleNamespace(folder=folder, **{name: folder / file for name, file in names.items()})


@pytest.fixture
def make_model(task):
    """Write a model folder of a tiny fresh model for the task's text."""

    def make(choice, path: Path) -> Path:
        import torch

        from finetune.birthplaces import corpus
        from pretrain.model.language_model import LanguageModel
        from pretrain.models import model_folder

        tokenizer = corpus.vocabulary(corpus.documents(task.text))
        config = choice.config(TINY).architecture(tokenizer.vocab_size)
        torch.manual_seed(0)
        weights = LanguageModel(config).state_dict()
        model_folder.save_model(path, model_folder.ModelContents(config, weights, tokenizer, {}))
        return path

    return make
