"""The embedded corpus: real text made from the Python installation, nothing downloaded or executed.

    PythonDocs     the help topics of `pydoc_data`, and the library's .txt files (licence, news)
    Docstrings     those of the standard library, a document for each module and each class
    PythonSource   some of its source files, at most 30 % of the text

Long English texts are cut between paragraphs, so that most survive a length filter; source files
stay whole.

The same Python gives the same files. A share of the English documents is held out in a folder of
its own, so that a fine-tuning task can be made from text that pretraining never saw.
"""

import ast
import inspect
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.documents import content_share
from data_prep.files import strict_json, write_atomically

HELD_OUT_FOLDER = "held-out"
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages"}
_SOURCE_TO_ENGLISH_BYTES = 3 / 7
_LONGEST_ENGLISH_CHARACTERS = 6_000  # about 1,500 tokens
_LONGEST_SOURCE_CHARACTERS = 20_000
_SHORTEST_CHARACTERS = 80  # shorter docstrings say little but "Return the name."
_COMPRESSION_LEVEL = 10


@dataclass(frozen=True)
class SampleSummary:
    """Documents and UTF-8 bytes of text by group ("corpus" or "held-out") and subset."""

    documents: dict[tuple[str, str], int]
    text_bytes: dict[tuple[str, str], int]


@dataclass(frozen=True)
class _Text:
    text: str
    subset: str


def write_sample(
    output: Path, num_files: int = 4, held_out_fraction: float = 0.12
) -> SampleSummary:
    """Write `sample-NNNNN.jsonl.zst` files and `held-out/held-out.jsonl.zst`, in the Pile's format.

    Args:
        output: A folder, made where missing.
        num_files: Files of the corpus; documents are dealt out to them in an order drawn from their
        content.
        held_out_fraction: Share of the English documents that goes to held-out/ alone.

    Raises:
        ValueError: A number makes no sense, or the Python installation has no source to read.
    """
    if num_files < 1:
        raise ValueError(f"--files {num_files}: accepted: 1 or more")
    if not 0 <= held_out_fraction < 1:
        raise ValueError(f"--held-out-fraction {held_out_fraction}: accepted: 0 to less than 1")
    library = Path(sysconfig.get_path("stdlib"))
    english = _unique([*_topics(library), *_docstrings(library)])
    if not english:
        raise ValueError(
            f"{library}: no Python source; accepted: a Python with its standard library"
        )
    kept: list[_Text] = []
    held_out: list[_Text] = []
    for text in english:
        is_held_out = content_share(text.text.encode(), "held-out") < held_out_fraction
        (held_out if is_held_out else kept).extend(_parts(text))
    allowance = int(_SOURCE_TO_ENGLISH_BYTES * sum(len(text.text.encode()) for text in kept))
    corpus = _mixed([*kept, *_unique(_sources(library, allowance))])
    for number in range(num_files):
        _write(output / f"sample-{number:05d}.jsonl.zst", corpus[number::num_files])
    _write(output / HELD_OUT_FOLDER / f"{HELD_OUT_FOLDER}.jsonl.zst", _mixed(held_out))
    return _summary({"corpus": corpus, HELD_OUT_FOLDER: held_out})


def _topics(library: Path) -> Iterator[_Text]:
    """Help topics, whose file is one dictionary literal, and the text files of the library."""
    file = library / "pydoc_data" / "topics.py"
    if file.is_file():
        for node in ast.parse(file.read_bytes()).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
                for text in ast.literal_eval(node.value).values():
                    yield _Text(inspect.cleandoc(text), "PythonDocs")
    for file in _files(library, "*.txt"):
        if not file.stem.endswith("Grammar"):
            yield _Text(file.read_text(encoding="utf-8", errors="replace").strip(), "PythonDocs")


def _docstrings(library: Path) -> Iterator[_Text]:
    for file in _files(library, "*.py"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in old code, none of our business
            module = ast.parse(file.read_bytes())
        classes = [node for node in ast.walk(module) if isinstance(node, ast.ClassDef)]
        for owner in (module, *classes):
            text = "\n\n".join(_docstrings_within(owner))
            if len(text) >= _SHORTEST_CHARACTERS:
                yield _Text(text, "Docstrings")


def _docstrings_within(node: ast.AST) -> Iterator[str]:
    """The docstrings of a node and of the functions in it; classes within have their own."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        docstring = ast.get_docstring(node)
        if docstring:
            yield docstring.strip()
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.ClassDef):
            yield from _docstrings_within(child)


def _sources(library: Path, allowance_bytes: int) -> Iterator[_Text]:
    """Source files up to an allowance, in an order drawn from their names to have all kinds."""
    files = _files(library, "*.py")
    files.sort(key=lambda file: content_share(bytes(file.relative_to(library)), "source"))
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace").strip()
        size_bytes = len(text.encode())
        if 0 < len(text) <= _LONGEST_SOURCE_CHARACTERS and size_bytes <= allowance_bytes:
            allowance_bytes -= size_bytes
            yield _Text(text, "PythonSource")


def _files(library: Path, pattern: str) -> list[Path]:
    return sorted(
        file
        for file in library.rglob(pattern)
        if not _SKIPPED_FOLDERS.intersection(file.relative_to(library).parts)
    )


def _parts(text: _Text) -> Iterator[_Text]:
    """Cut a long text between paragraphs; a paragraph stays whole, however long."""
    part = ""
    for paragraph in text.text.split("\n\n"):
        if part and len(part) + len(paragraph) > _LONGEST_ENGLISH_CHARACTERS:
            yield _Text(part, text.subset)
            part = paragraph.lstrip("\n")
        else:
            part = f"{part}\n\n{paragraph}" if part else paragraph
    if part.strip():
        yield _Text(part, text.subset)


def _unique(texts: Iterable[_Text]) -> list[_Text]:
    return list({text.text: text for text in texts}.values())


def _mixed(texts: Sequence[_Text]) -> list[_Text]:
    """In an order drawn from the content, so that every file holds some of everything."""
    return sorted(texts, key=lambda text: content_share(text.text.encode(), "order"))


def _write(file: Path, texts: Iterable[_Text]) -> None:
    import zstandard

    lines = (
        strict_json({"text": text.text, "meta": {"pile_set_name": text.subset}}, ensure_ascii=False)
        for text in texts
    )
    content = "".join(f"{line}\n" for line in lines).encode()
    write_atomically(file, zstandard.ZstdCompressor(_COMPRESSION_LEVEL).compress(content))


def _summary(groups: dict[str, list[_Text]]) -> SampleSummary:
    summary = SampleSummary({}, {})
    for group, texts in groups.items():
        for text in texts:
            key = (group, text.subset)
            summary.documents[key] = summary.documents.get(key, 0) + 1
            summary.text_bytes[key] = summary.text_bytes.get(key, 0) + len(text.text.encode())
    return summary
