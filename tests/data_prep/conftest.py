"""A small vocabulary and small inputs, shared by the tests of data_prep."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import zstandard

from data_prep.tokenizer import Tokenizer, train

SENTENCE = (
    "the model reads a document and keeps what the filter lets through while every other line is "
    "counted with its reason so that nothing is lost in silence and all of it can be found again"
)


def make_texts(count: int, words: int, seed: int = 0) -> list[str]:
    """Different texts of 1 to `words` words."""
    generator = np.random.default_rng(seed)
    vocabulary = SENTENCE.split()
    return [
        f"{seed}-{number}: "
        + " ".join(generator.choice(vocabulary, generator.integers(1, words + 1)))
        for number in range(count)
    ]


def write_pile(path: Path, texts: Iterable[str], subset: str = "Pile-CC") -> Path:
    """Write texts in the Pile's format, one zstd frame."""
    lines = [json.dumps({"text": text, "meta": {"pile_set_name": subset}}) for text in texts]
    content = "".join(f"{line}\n" for line in lines).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zstandard.compress(content))
    return path


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train(iter(make_texts(300, 40)), 320)


@pytest.fixture(scope="session")
def tokenizer_folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
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
