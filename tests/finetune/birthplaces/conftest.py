"""A small task about made-up people, its commands, and a model folder."""

import itertools
import os
import shlex
from types import SimpleNamespace

import pytest

from tests.data_prep.conftest import in_process  # noqa: F401 - shards, for these tests too

FIRST = ["Ada", "Bela", "Carl", "Dora", "Emil", "Frida", "Hans", "Ida", "Jan", "Leo"]
LAST = ["Anderberg", "Dahlsen", "Eben", "Goldman", "Jansenrup", "Kron"]
PLACES = ["Alton", "Barford", "Corburgh", "Dunmouth", "Elbrook", "Farton", "Garford"]
TINY = "model.size=tiny model.overrides.max_positions=128"


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    """Paths of text, train and dev, of 60 people; the text says where each was born."""
    folder = tmp_path_factory.mktemp("task")
    born = dict(zip(map(" ".join, itertools.product(FIRST, LAST)), PLACES * 9, strict=False))
    rows = [f"Where was {name} born?\t{place}\n" for name, place in born.items()]
    contents = {
        "text": [f"{name}. {name} was born in {place}.\n" for name, place in born.items()],
        "train": rows[:42],
        "dev": rows[42:],
    }
    for name, lines in contents.items():
        (folder / name).write_text("".join(lines))
    return SimpleNamespace(**{name: folder / name for name in contents})


@pytest.fixture
def birthplaces(run_ranks, tmp_path, monkeypatch):
    """Run a command of the task in an empty folder; an engine needs processes of its own."""
    from finetune.zeroclap import main

    monkeypatch.chdir(tmp_path)

    def run(words, ranks=1):
        def work():
            os.chdir(tmp_path)
            return main(["birthplaces", *shlex.split(words)])

        is_trained = words.startswith("finetune")
        (code,) = {*run_ranks(ranks, work)} if is_trained else {work()}
        return code

    return run


@pytest.fixture
def fresh(task, tmp_path):
    """Write a model folder of a tiny fresh model; returns options that name it."""

    def make(variant, latents=8):
        from finetune.birthplaces import training
        from pretrain.convert.writing import save_model

        options = SimpleNamespace(variant=variant, bottleneck_dim=latents, corpus=task.text)
        options.overrides, options.reading_params_path = TINY.split(), tmp_path / variant
        contents = training.fresh(options, training.recipe(options))
        save_model(options.reading_params_path, contents)
        return options

    return make
