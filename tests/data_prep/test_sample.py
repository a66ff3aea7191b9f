import itertools
import shutil
import sysconfig
from collections import Counter
from pathlib import Path

import pytest

from data_prep.documents import read_documents
from data_prep.sample import write_sample
from tests.running import python


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """The summary of a sample of a part of the library (all takes seconds), and its documents."""
    whole, library = Path(sysconfig.get_path("stdlib")), tmp_path_factory.mktemp("library")
    for name in ("asyncio", "email", "json", "logging", "pydoc_data"):
        shutil.copytree(whole / name, library / name)
    folder = tmp_path_factory.mktemp("sample")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sysconfig, "get_path", lambda _: str(library))
        summary = write_sample(folder)
    return summary, {file.name: [*read_documents(file)] for file in sorted(folder.iterdir())}


def test_summary_matches_the_files_and_most_is_english(sample):
    summary, files = sample
    corpus = [*itertools.chain(*files.values())]
    found = Counter(document.subset for document in corpus)
    assert {subset: count.documents for subset, count in summary.items()} == dict(found)
    size = sum(len(document.text.encode()) for document in corpus)
    assert sum(count.text_bytes for count in summary.values()) == size
    assert summary["PythonSource"].text_bytes <= 0.3 * size
    assert len({document.text for document in corpus}) == len(corpus)


def test_files_have_the_same_mixture_and_texts_are_clean(sample):
    _, files = sample
    assert [*files] == [f"sample-{n:05d}.jsonl.zst" for n in range(4)]
    subsets = {"Docstrings", "PythonDocs", "PythonSource"}
    for found in files.values():
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
