"""Filters of installed packages: `prepare --filter NAME`."""

import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.__main__ import main
from data_prep.manifest import load_manifest
from tests.data_prep.conftest import content, make_texts, write_pile

MODULE = "zeroclap_example.filters"
pytestmark = pytest.mark.usefixtures("example_package")


@pytest.fixture
def words(tmp_path, tokenizer_folder):
    """The command line without filters, of two inputs."""
    files = [
        write_pile(tmp_path / f"{number}.jsonl.zst", make_texts(60, 40, seed=number), subset)
        for number, subset in enumerate(("Books3", "Pile-CC"))
    ]
    inputs = ["--input", *map(str, files), "--valid-fraction", "0.1"]
    folders = ["--tokenizer", str(tokenizer_folder), "--output", str(tmp_path / "corpus")]
    return ["prepare", *inputs, *folders, "--allow-broken"]


def test_documents_are_dropped_and_counted_by_reason_in_workers(words, tmp_path, capsys):
    books = f"{MODULE}:only_books"
    assert main([*words, "--workers", "2", "--filter", "no-short", books]) == 0
    found = load_manifest(tmp_path / "corpus")
    version = "zeroclap-example 1.0"
    assert found.settings.filters["no-short"] == version
    assert [*found.settings.filters] == ["no-short", books]
    long = [[len(t.split()) > 19 for t in make_texts(60, 40, seed=n)].count(True) for n in (0, 1)]
    reasons = {"filtered: no-short: few-words": 120 - sum(long)}
    reasons[f"filtered: {books}: no-book"] = long[1]
    assert {name: each.count for name, each in found.rejects.items()} == reasons
    assert sum(total.documents for total in found.totals.values()) == long[0]
    output = capsys.readouterr()
    assert "filtered: no-short: few-words" in output.out
    assert "broken" not in output.err


@pytest.mark.usefixtures("in_process")
def test_a_corpus_is_continued_with_the_same_filters_alone(words, tmp_path, capsys):
    assert main([*words, "--filter", "no-short"]) == 0
    before = content(tmp_path / "corpus")
    assert main([*words, "--filter", "no-short"]) == 0
    for others in ([], ["--filter", f"{MODULE}:only_books"]):
        capsys.readouterr()
        assert main([*words, *others]) == 2
        assert "filters was {'no-short': 'zeroclap-example 1.0'} and is {" in (
            capsys.readouterr().err
        )
    assert content(tmp_path / "corpus") == before


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("divides", "0.jsonl.zst:1: ZeroDivisionError: "),
        ("answers_false", "0.jsonl.zst:1: returned False; accepted: None to keep the document"),
    ],
)
def test_a_filter_that_fails_names_itself_and_the_document_and_leaves_no_shard(
    function, message, words, tmp_path, capsys
):
    assert main([*words, "--filter", f"{MODULE}:{function}"]) == 2
    error = capsys.readouterr().err
    assert f"filter {MODULE}:{function}: " in error
    assert message in error
    assert not [*(tmp_path / "corpus").rglob("shard-*")]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", "filter 'short': accepted: gone, no-short; or package.module:function"),
        ("gone", "No module named 'zeroclap_example.gone'"),
        (f"{MODULE}:none", "has no attribute 'none'"),
        (f"{MODULE}:", f"filter '{MODULE}:': accepted: gone"),
        (f"{MODULE}:__doc__", "is neither a class nor a function"),
    ],
)
def test_a_filter_that_is_none_is_refused_before_anything_is_written(
    name, message, words, tmp_path, capsys
):
    assert main([*words, "--filter", name]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "corpus").exists()


def test_a_filter_is_not_imported_from_the_working_directory(words, tmp_path):
    program = Path(sys.executable).with_name("zeroclap")
    if not program.exists():
        pytest.skip("not installed")
    (tmp_path / "mine.py").write_text("print('imported')\ndef keep(text, subset): return None\n")
    command = [program, *words, "--filter", "mine:keep"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "No module named 'mine'; only installed packages and PYTHONPATH" in done.stderr
