import shutil
import sysconfig
from collections import Counter
from pathlib import Path

import pytest

from data_prep.documents import Document, read_documents
from data_prep.sample import write_sample
from tests.running import python


def documents(files):
    found = [record for file in files for record in read_documents(file)]
    assert all(isinstance(record, Document) for record in found)
    return [record for record in found if isinstance(record, Document)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sample")


@pytest.fixture(scope="module")
def summary(folder, tmp_path_factory):
    """Of a part of the library: all of it takes seconds."""
    whole, library = Path(sysconfig.get_path("stdlib")), tmp_path_factory.mktemp("library")
    for name in ("asyncio", "email", "json", "logging", "pydoc_data"):
        shutil.copytree(whole / name, library / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sysconfig, "get_path", lambda _: str(library))
        return write_sample(folder)


@pytest.fixture(scope="module")
def corpus(folder, summary):
    return documents(sorted(folder.glob("*.jsonl.zst")))


def test_summary_matches_the_files_and_most_is_english(summary, corpus):
    found = Counter(document.subset for document in corpus)
    assert {subset: count.documents for subset, count in summary.items()} == dict(found)
    size = sum(len(document.text.encode()) for document in corpus)
    assert sum(count.text_bytes for count in summary.values()) == size
    assert summary["PythonSource"].text_bytes <= 0.3 * size
    assert len({document.text for document in corpus}) == len(corpus)


def test_files_have_the_same_mixture_and_texts_are_clean(folder, summary):
    files = sorted(folder.glob("*.jsonl.zst"))
    assert [file.name for file in files] == [f"sample-{n:05d}.jsonl.zst" for n in range(4)]
    subsets = {"Docstrings", "PythonDocs", "PythonSource"}
    for file in files:
        found = documents([file])
        assert {document.subset for document in found} == subsets
        assert all(document.text == document.text.strip("\n") for document in found)
        assert all("\r" not in document.text for document in found)
        assert sum("\n\n" in document.text for document in found) > len(found) / 2


def test_same_library_gives_the_same_files_in_every_process(tmp_path):
    program = (
        "import pathlib, sysconfig; library = sysconfig.get_path('stdlib')\n"
        "sysconfig.get_path = lambda _: library + '/asyncio'  # all of it takes seconds\n"
        "from data_prep.sample import write_sample; write_sample(pathlib.Path({!r}))"
    )
    written = []
    for seed in ("1", "2"):
        python("-c", program.format(str(tmp_path / seed)), PYTHONHASHSEED=seed)
        files = sorted((tmp_path / seed).rglob("*.zst"))
        written.append([(file.name, file.read_bytes()) for file in files])
    assert written[0] == written[1]
    assert len(written[0]) == 4
