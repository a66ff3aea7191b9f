"""The command `sample`: write real text from the Python installation, without any download.

    PythonDocs     help topics of `pydoc_data`, and the .txt files of the library (licence, news)
    Docstrings     docstrings of the standard library, one document per module and class
    PythonSource   some source files, at most 30 % of the text

Long English texts are cut between paragraphs, so that most pass a length filter; source files are
not cut. Nothing else is imported, and the same Python version gives the same files.
"""

import argparse
import ast
import inspect
import itertools
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from data_prep.common.files import json_lines, write_atomically
from data_prep.documents import content_share
from data_prep.manifest import Count, add_counts

_FILES = 4  # of the corpus
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages"}
_SOURCE_TO_ENGLISH_BYTES = 3 / 7
_LONGEST_ENGLISH_CHARACTERS = 6_000  # about 1,500 tokens
_LONGEST_SOURCE_CHARACTERS = 20_000
_SHORTEST_CHARACTERS = 80  # shorter docstrings say little more than "Return the name."
_COMPRESSION_LEVEL = 10


Text = tuple[str, str]
"""A text and its subset."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--output", type=Path, required=True, help="folder")


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    summary = write_sample(options.output)
    print(f"{options.output}: {_FILES} files")
    for subset, count in sorted(summary.items()):
        print(f"  {subset:16}{count.documents:8,} documents{count.text_bytes / 1e6:8.2f} MB")


def write_sample(output: Path) -> dict[str, Count]:
    """Write `sample-NNNNN.jsonl.zst` files in the Pile's format.

    Documents are distributed over the files by a hash of their content.

    Args:
        output: A folder, which is created if missing. The files of an earlier call are replaced.

    Returns:
        Documents and UTF-8 bytes of text by subset.

    Raises:
        ValueError: The Python installation has no source files.
    """
    library = Path(sysconfig.get_path("stdlib"))
    found = dict([*_topics(library), *_docstrings(library)])
    if not found:
        raise ValueError(
            f"{library}: has no Python source; use a Python that has its standard library"
        )
    english = [(part, subset) for text, subset in found.items() for part in _parts(text)]
    allowance = int(_SOURCE_TO_ENGLISH_BYTES * sum(len(text.encode()) for text, _ in english))
    corpus = [*english, *dict(_sources(library, allowance)).items()]
    # By a hash of the content, so that every file has a mixture of everything.
    corpus.sort(key=lambda text: content_share(text[0].encode(), "order"))
    for number in range(_FILES):
        _write(output / f"sample-{number:05d}.jsonl.zst", corpus[number::_FILES])
    summary: dict[str, Count] = {}
    for text, subset in corpus:
        add_counts(summary, {subset: Count(1, text_bytes=len(text.encode()))})
    return summary


def _topics(library: Path) -> Iterator[Text]:
    """Yield the help topics and the library's text files."""
    with suppress(ImportError):  # not in every installation
        from pydoc_data.topics import topics

        for text in topics.values():
            yield inspect.cleandoc(text), "PythonDocs"
    for file in _files(library, "*.txt"):
        if not file.stem.endswith("Grammar"):
            yield file.read_text(encoding="utf-8", errors="replace").strip(), "PythonDocs"


def _docstrings(library: Path) -> Iterator[Text]:
    for found in itertools.chain.from_iterable(map(docstrings, _files(library, "*.py"))):
        text = "\n\n".join(found)
        if len(text) >= _SHORTEST_CHARACTERS:
            yield text, "Docstrings"


def docstrings(file: Path) -> Iterator[list[str]]:
    """Yield the docstrings of a module and its functions, then those of each class and its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escape sequences in old code
        module = ast.parse(file.read_bytes())
    yield [*_docstrings_within(module)]
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            yield [*_docstrings_within(node)]


def _docstrings_within(node: ast.AST) -> Iterator[str]:
    """Yield the docstrings of a node and of the functions in it, without those of inner classes."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    if isinstance(node, documented) and (docstring := ast.get_docstring(node)):
        yield docstring.strip()
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.ClassDef | ast.expr):  # an expression holds no function
            yield from _docstrings_within(child)


def _sources(library: Path, allowance_bytes: int) -> Iterator[Text]:
    """Yield source files up to a total size, in an order given by a hash of their names."""
    files = _files(library, "*.py")
    files.sort(key=lambda file: content_share(bytes(file.relative_to(library)), "source"))
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace").strip()
        size_bytes = len(text.encode())
        if 0 < len(text) <= _LONGEST_SOURCE_CHARACTERS and size_bytes <= allowance_bytes:
            allowance_bytes -= size_bytes
            yield text, "PythonSource"


def _files(library: Path, pattern: str) -> list[Path]:
    return sorted(
        file
        for file in library.rglob(pattern)
        if not _SKIPPED_FOLDERS.intersection(file.relative_to(library).parts)
    )


def _parts(text: str) -> Iterator[str]:
    """Cut a long text between paragraphs; paragraphs are never cut."""
    part = ""
    for paragraph in text.split("\n\n"):
        if part and len(part) + len(paragraph) > _LONGEST_ENGLISH_CHARACTERS:
            yield part
            part = paragraph.lstrip("\n")
        else:
            part = f"{part}\n\n{paragraph}" if part else paragraph
    if part.strip():
        yield part


def _write(file: Path, texts: Iterable[Text]) -> None:
    import zstandard

    records = ({"text": text, "meta": {"pile_set_name": subset}} for text, subset in texts)
    content = json_lines(records, ensure_ascii=False)
    write_atomically(file, zstandard.ZstdCompressor(_COMPRESSION_LEVEL).compress(content))
