"""Further corpora of real text, made once for all tests of pretraining."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from data_prep import tokenizer as tokenizers
from data_prep.tokenizer import Tokenizer
from tests.fixtures import data_prep, prepared


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """`now[0]` is the time of `time.monotonic`; it passes only when a test says so."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def slow_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed trains in fp16 on any CPU, though slowly."""
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)


@pytest.fixture(scope="session")
def tokenizer(corpus: Path) -> Tokenizer:
    """The vocabulary of `corpus`."""
    return tokenizers.load(corpus)


@pytest.fixture(scope="session")
def other_corpus(corpus: Path) -> Path:
    """Paragraphs of other help topics in the vocabulary of `corpus`: a second corpus."""
    texts = [text for _, text in sorted(topics.items())[6:20]]
    paragraphs = [" ".join(p.split()) for text in texts for p in text.split("\n\n")]
    long, settings = (p for p in paragraphs if len(p) > 20), "--max-tokens 64 --valid-fraction 0.1"
    return prepared(corpus.parent / "other", long, corpus, *settings.split())


@pytest.fixture(scope="session")
def sentence_corpus(corpus: Path) -> Path:
    """Documents of many sentences, and some of one, prepared with --sentences."""
    texts = [text[:1500] for _, text in sorted(topics.items())[:60]]
    texts += [f"A document of one sentence, which is number {n}." for n in range(5)]
    settings = ["--sentences", "--valid-fraction", "0.2"]
    return prepared(corpus.parent / "sentences", texts, corpus, *settings)


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
