"""A small corpus of real text, made once for all tests of pretraining."""

import contextlib
import io
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace

import pytest

from data_prep import tokenizer as tokenizers
from data_prep.__main__ import main
from data_prep.engines import ENGINES
from data_prep.tokenizer import Tokenizer
from tests.data_prep.conftest import run_here


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """`now[0]` is the time of `time.monotonic`; it passes only when a test says so."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Paragraphs of Python's help topics: a corpus folder of documents of at most 64 tokens."""
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def make_corpus(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    paragraphs = [
        " ".join(paragraph.split())
        for _, text in sorted(topics.items())[:6]
        for paragraph in text.split("\n\n")
    ]
    raw = folder / "topics.jsonl"
    raw.write_text("".join(json.dumps({"text": p}) + "\n" for p in paragraphs if len(p) > 20))
    vocabulary = ["--output", str(folder / "vocabulary")]
    data_prep(["train-tokenizer", "--input", str(raw), "--vocab-size", "400", *vocabulary])
    settings = ["--max-tokens", "64", "--valid-fraction", "0.1"]
    output = ["--output", str(folder / "made"), "--tokenizer", str(folder / "vocabulary")]
    data_prep(["prepare", "--input", str(raw), *output, *settings])
    return folder / "made"


@pytest.fixture(scope="session")
def tokenizer(corpus: Path) -> Tokenizer:
    """The vocabulary of `corpus`."""
    return tokenizers.load(corpus)


@pytest.fixture(scope="session")
def other_corpus(corpus: Path) -> Path:
    """Paragraphs of other help topics in the vocabulary of `corpus`: a second corpus."""
    raw, output = corpus.parent / "other-topics.jsonl", corpus.parent / "other"
    texts = [text for _, text in sorted(topics.items())[6:20]]
    paragraphs = [" ".join(p.split()) for text in texts for p in text.split("\n\n")]
    raw.write_text("".join(json.dumps({"text": p}) + "\n" for p in paragraphs if len(p) > 20))
    settings = ["--max-tokens", "64", "--valid-fraction", "0.1", "--tokenizer", str(corpus)]
    data_prep(["prepare", "--input", str(raw), "--output", str(output), *settings])
    return output


@pytest.fixture(scope="session")
def sentence_corpus(corpus: Path) -> Path:
    """Documents of many sentences, and some of one, prepared with --sentences."""
    raw, output = corpus.parent / "whole-topics.jsonl", corpus.parent / "sentences"
    texts = [text[:1500] for _, text in sorted(topics.items())[:60]]
    texts += [f"A document of one sentence, which is number {n}." for n in range(5)]
    raw.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = ["--sentences", "--tokenizer", str(corpus), "--valid-fraction", "0.2"]
    data_prep(["prepare", "--input", str(raw), "--output", str(output), *settings])
    return output


@pytest.fixture(scope="session")
def corpus_for(corpus: Path, sentence_corpus: Path) -> Callable[[str], Path]:
    """The corpus that a packing can cut."""
    from pretrain.data.sources import SOURCES

    return lambda packing: sentence_corpus if SOURCES[packing].pairs else corpus


@pytest.fixture(scope="session")
def other_vocabulary(corpus: Path) -> Path:
    """The same text, encoded with another vocabulary."""
    folder = corpus.parent
    raw, vocabulary = str(folder / "topics.jsonl"), str(folder / "vocabulary-2")
    data_prep(["train-tokenizer", "--input", raw, "--vocab-size", "380", "--output", vocabulary])
    output = ["--output", str(folder / "made-2"), "--tokenizer", vocabulary]
    data_prep(["prepare", "--input", raw, *output, "--max-tokens", "64", "--valid-fraction", "0.1"])
    return folder / "made-2"


@pytest.fixture(scope="session")
def unpredictable(corpus: Path) -> Path:
    """The same text with a validation split of one word, none of whose tokens is masked."""
    word, raw = corpus.parent / "word.jsonl", str(corpus.parent / "topics.jsonl")
    word.write_text(json.dumps({"text": "a"}) + "\n")
    output = ["--output", str(corpus.parent / "unpredictable"), "--tokenizer", str(corpus)]
    settings = ["--valid-input", str(word), "--max-tokens", "64"]
    data_prep(["prepare", "--input", raw, *output, *settings])
    return corpus.parent / "unpredictable"


def data_prep(arguments: list[str]) -> None:
    """Run a command of data_prep, without workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENGINES, "local", run_here)
        assert main(arguments) == 0


@pytest.fixture(scope="session")
def recipe(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """`recipe.load(folder, *overrides)`: a tiny run of 40 steps on the corpus."""
    from pretrain.config import load as recipe
    from pretrain.config.run import RunConfig

    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(RECIPE.format(corpus=corpus))

    def load(folder: Path, *overrides: str) -> RunConfig:
        return recipe.load(str(path), [f"folder={folder}", *overrides])

    return SimpleNamespace(load=load, path=path)


@pytest.fixture(scope="session")
def train_ranks(run_ranks, recipe):
    """`train_ranks(folder, *overrides)`: exit code, output and errors of each rank, rank 0 first.

    `sabotage(rank)` is called in each rank before it starts.
    """
    from pretrain.train import __main__ as train

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # What each rank would otherwise import by itself.
        import torch.utils.tensorboard.writer  # noqa: F401

        from pretrain.convert import initial_weights  # noqa: F401

    def run(folder, *overrides, ranks=2, sabotage=lambda rank: None):
        def work():
            train._SECONDS_TO_BE_ENDED = 0.0  # no launcher ends them
            sabotage(int(os.environ["RANK"]))
            output, errors = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
                code = train.main([str(recipe.path), f"folder={folder}", *overrides])
            return code, output.getvalue(), errors.getvalue()

        return run_ranks(ranks, work)

    return run


@pytest.fixture
def mixed(recipe, corpus, other_corpus, other_vocabulary, tmp_path):
    """`mixed("a: WEIGHTS", "b: WEIGHTS", ...)`: a recipe of corpora of these names."""
    folders = {"a": corpus, "b": other_corpus, "c": other_vocabulary, "again": corpus}

    def load(*corpora, words=()):
        parts = (part.partition(": ") for part in corpora)
        text = ", ".join(f"{name}: {{path: {folders[name]}, {rest}}}" for name, _, rest in parts)
        settings = ['data.corpus=""', f"data.corpora={{{text}}}", *words]
        return recipe.load(tmp_path / "run", *settings)

    return load


RECIPE = """
data: {{corpus: "{corpus}", sequence_length: 64}}
model: {{size: tiny, variant: zero-clap, overrides: {{dropout: 0.1}}}}
batch: {{global_batch_size: 8, micro_batch_size: 2}}
optimizer: {{learning_rate: 3e-3, gradient_clipping: 1.0}}
schedule: {{warmup_steps: 4, minimum_learning_rate: 3e-4}}
training: {{steps: 40, deepspeed: zero1_fp32, evaluation_interval: 20,
  evaluation_blocks: 6, checkpoint_interval: 5, checkpoints_kept: 4}}
spike: {{window: 40, deviations: 2.5, patience: 2, confirm_steps: 4,
  gross_nats: 20.0, margin_steps: 4}}
supervision: {{processes_per_node: 2, max_retries: 1}}
"""
