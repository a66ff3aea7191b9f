"""A small vocabulary and small inputs, shared by the tests of data_prep."""

import json
import os
import resource
import shutil

import numpy as np
import pytest
import zstandard

from data_prep.corpus import Corpus
from data_prep.engines import ENGINES, run_locally
from data_prep.indexed import IndexedWriter
from data_prep.manifest import Settings, load_manifest
from data_prep.run import prepare
from data_prep.tokenizer import train

SETTINGS = Settings(max_tokens=64, valid_fraction=0.2)
SENTENCE = (
    "the model reads a document and keeps what the filter lets through while every other line is "
    "counted with its reason so that nothing is lost in silence and all of it can be found again"
)


def make_texts(count, words, seed=0):
    """Different texts of 1 to `words` words."""
    generator = np.random.default_rng(seed)
    vocabulary = SENTENCE.split()
    return [
        f"{seed}-{number}: "
        + " ".join(generator.choice(vocabulary, generator.integers(1, words + 1)))
        for number in range(count)
    ]


def write_pile(path, texts, subset="Pile-CC"):
    """Write texts in the Pile's format, one zstd frame."""
    lines = [json.dumps({"text": text, "meta": {"pile_set_name": subset}}) for text in texts]
    content = "".join(f"{line}\n" for line in lines).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zstandard.compress(content))
    return path


@pytest.fixture(scope="session")
def tokenizer():
    return train(iter(make_texts(300, 40)), 320)


@pytest.fixture(scope="session")
def tokenizer_folder(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """Three files of two subsets, some documents longer than 64 tokens."""
    folder = tmp_path_factory.mktemp("inputs")
    return [
        write_pile(
            folder / f"{number:02d}.jsonl.zst",
            make_texts(120, 60, seed=number),
            "Pile-CC" if number else "Books3",
        )
        for number in range(3)
    ]


def content(folder):
    """Return the content of every file of a corpus except the locks."""
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not file.name.startswith(".lock")
    }


def documents(folder, split):
    corpus = Corpus(folder, split)
    return [corpus.document(index).tolist() for index in range(len(corpus))]


def run_here(work, tasks, *_):
    """An engine that makes shards in the process of the test, without workers."""
    for task in tasks:
        try:
            yield task, work(task)
        except (ValueError, OSError) as error:
            yield task, error


@pytest.fixture(scope="module", autouse=True)
def in_process():
    """Make shards in the process of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENGINES, "local", run_here)
        yield


@pytest.fixture
def in_workers(monkeypatch):
    """Make shards in processes of their own, as a user's command does."""
    monkeypatch.setitem(ENGINES, "local", run_locally)


@pytest.fixture(scope="session")
def corpus_folder(inputs, tokenizer_folder, tmp_path_factory):
    """A corpus of all inputs, without their longest documents; tests do not change it."""
    folder = tmp_path_factory.mktemp("session") / "corpus"
    with pytest.MonkeyPatch.context() as patch:  # before the patch of a module
        patch.setitem(ENGINES, "local", run_here)
        prepare(inputs, folder, tokenizer_folder, SETTINGS)
    return folder


@pytest.fixture(scope="session")
def manifest(corpus_folder):
    return load_manifest(corpus_folder)


@pytest.fixture
def copy(corpus_folder, tmp_path):
    """A copy of that corpus, which a test may change."""
    return shutil.copytree(corpus_folder, tmp_path / "copy")


@pytest.fixture
def few_files():
    """Let this process open about 100 more files than earlier tests have left open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def write_indexed(prefix, documents, vocab_size=65_000):
    """Write a dataset with a sequence per document; 65,000 ids are stored as uint16."""
    writer = IndexedWriter(prefix, vocab_size)
    try:
        for ids in documents:
            writer.append([np.asarray(ids, dtype=np.int64)], [len(ids)])
        writer.close()
    finally:
        writer.discard()
    return prefix
