import os
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import pytest

from data_prep.documents import Document, read
from data_prep.manifest import Count
from data_prep.sample import write_sample

Summary = dict[tuple[str, str], Count]

ROOT = Path(__file__).parents[2]


def documents(files: list[Path]) -> list[Document]:
    found = [record for file in files for record in read(file)]
    assert all(isinstance(record, Document) for record in found)
    return [record for record in found if isinstance(record, Document)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sample")


@pytest.fixture(scope="module")
def summary(folder: Path) -> Summary:
    return write_sample(folder)


@pytest.fixture(scope="module")
def corpus(folder: Path, summary: Summary) -> list[Document]:
    return documents(sorted(folder.glob("*.jsonl.zst")))


@pytest.fixture(scope="module")
def held_out(folder: Path, summary: Summary) -> list[Document]:
    return documents([folder / "held-out" / "held-out.jsonl.zst"])


def test_summary_matches_the_files(
    summary: Summary, corpus: list[Document], held_out: list[Document]
) -> None:
    found = Counter(("corpus", document.subset) for document in corpus)
    found.update(("held-out", document.subset) for document in held_out)
    assert {key: count.documents for key, count in summary.items()} == dict(found)
    size = sum(len(document.text.encode()) for document in corpus)
    assert sum(n.text_bytes for (group, _), n in summary.items() if group == "corpus") == size


def test_corpus_is_mostly_english_and_large_enough(summary: Summary) -> None:
    source = summary["corpus", "PythonSource"].text_bytes
    english = sum(summary["corpus", name].text_bytes for name in ("Docstrings", "PythonDocs"))
    assert english > 1_000_000
    assert english / (english + source) >= 0.7


def test_held_out_documents_are_english_and_not_in_the_corpus(
    corpus: list[Document], held_out: list[Document]
) -> None:
    assert {document.subset for document in held_out} == {"Docstrings", "PythonDocs"}
    texts = [document.text for document in corpus + held_out]
    assert len(set(texts)) == len(texts)
    english = [document for document in corpus if document.subset != "PythonSource"]
    assert 0.08 < len(held_out) / (len(held_out) + len(english)) < 0.18


def test_files_have_the_same_mixture_and_texts_are_clean(folder: Path, summary: Summary) -> None:
    files = sorted(folder.glob("*.jsonl.zst"))
    assert [file.name for file in files] == [f"sample-{n:05d}.jsonl.zst" for n in range(4)]
    for file in files:
        found = documents([file])
        assert {document.subset for document in found} == {
            "Docstrings",
            "PythonDocs",
            "PythonSource",
        }
        assert all(document.text == document.text.strip("\n") for document in found)
        assert all("\r" not in document.text for document in found)
        assert sum("\n\n" in document.text for document in found) > len(found) / 2


def test_same_library_gives_the_same_files_in_every_process(tmp_path: Path) -> None:
    program = (
        "import pathlib, sysconfig; library = sysconfig.get_path('stdlib')\n"
        "sysconfig.get_path = lambda _: library + '/asyncio'  # all of it takes seconds\n"
        "from data_prep.sample import write_sample; write_sample(pathlib.Path({!r}))"
    )
    written = []
    for seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-c", program.format(str(tmp_path / seed))],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
        )
        files = sorted((tmp_path / seed).rglob("*.zst"))
        written.append([(file.name, file.read_bytes()) for file in files])
    assert written[0] == written[1]
    assert len(written[0]) == 5


def test_fewer_files_leave_none_of_an_earlier_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Path(sysconfig.get_path("stdlib"), "asyncio")  # all of it takes seconds
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(library))
    theirs = [tmp_path / name for name in ("sample-2.jsonl.zst", "sample-00002.txt", "a-00002")]
    for file in theirs:
        file.write_bytes(b"theirs")
    write_sample(tmp_path, num_files=3)
    (tmp_path / "sample-100000.jsonl.zst").write_bytes(b"of a call for many files")
    write_sample(tmp_path, num_files=2)
    ours = [tmp_path / f"sample-{number:05d}.jsonl.zst" for number in range(2)]
    assert sorted(path for path in tmp_path.iterdir() if path.is_file()) == sorted(theirs + ours)
    write_sample(tmp_path / "fresh", num_files=2)
    for file in ours:
        assert file.read_bytes() == (tmp_path / "fresh" / file.name).read_bytes()


def test_invalid_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--files 0"):
        write_sample(tmp_path, num_files=0)
    with pytest.raises(ValueError, match=r"--held-out-fraction 1\.0"):
        write_sample(tmp_path, held_out_fraction=1.0)
